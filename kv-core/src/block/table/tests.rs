//! Rows of block tables compared with plain lists, and their memory.
use proptest::prelude::*;

use super::*;

fn tables() -> BlockTables {
    let mut tables = BlockTables::new(10, 2);
    tables.ensure_rows(2);
    for block in [3, 1, 4] {
        tables.push(0, BlockId(block)).unwrap();
    }
    tables.push(1, BlockId(5)).unwrap();
    tables
}

#[test]
fn rows_grow_beyond_their_first_room() {
    let tables = tables();
    assert_eq!(tables.row(0), [BlockId(3), BlockId(1), BlockId(4)]);
    assert_eq!(tables.row(1), [BlockId(5)]);
    let rows: Vec<_> = tables.rows().map(<[_]>::len).collect();
    assert_eq!(rows, [3, 1]);
}

#[test]
fn one_long_row_costs_the_others_nothing() {
    let mut tables = BlockTables::new(100_000, 16);
    tables.ensure_rows(30_001);
    for row in 0..30_000 {
        tables.push(row, BlockId(row)).unwrap();
    }
    let before = tables.host_bytes();
    for block in 0..62_500 {
        tables.push(30_000, BlockId(block)).unwrap();
    }
    let grown = tables.host_bytes() - before;
    assert!(grown <= 2 * 4 * 65_536, "{grown} bytes for 62,500 entries");
    assert!(tables.host_bytes() < 5 << 20, "{} bytes", tables.host_bytes());
}

#[test]
fn a_row_that_ends_frees_its_memory() {
    let mut tables = BlockTables::new(100_000, 16);
    tables.ensure_rows(2);
    tables.push(0, BlockId(7)).unwrap();
    tables.push(1, BlockId(7)).unwrap();
    let before = tables.host_bytes();
    let ends: [fn(&mut BlockTables); 2] = [
        |tables| tables.truncate(1, 1),
        |tables| while tables.row_len(1) > 1 && tables.pop(1).is_some() {},
    ];
    for end in ends {
        for block in 0..62_500 {
            tables.push(1, BlockId(block)).unwrap();
        }
        assert!(tables.host_bytes() > 4 * 62_500);
        end(&mut tables);
        assert_eq!(tables.host_bytes(), before);
        assert_eq!(tables.row(1), [BlockId(7)]);
    }
}

#[test]
fn csr_and_padded_agree_with_the_rows() {
    let tables = tables();
    let (mut offsets, mut blocks, mut padded) = (Vec::new(), Vec::new(), Vec::new());
    tables.csr(&[1, 0], &mut offsets, &mut blocks);
    assert_eq!(offsets, [0, 1, 4]);
    assert_eq!(blocks, [BlockId(5), BlockId(3), BlockId(1), BlockId(4)]);
    tables.padded(&[1, 0], 2, &mut padded);
    assert_eq!(padded, [5, 0, 3, 1]);
}

#[test]
fn refuses_a_block_the_pool_does_not_have() {
    let mut tables = tables();
    let refused = Err(PlanError::BlockOutOfRange { block: 10, num_blocks: 10 });
    assert_eq!(tables.push(0, BlockId(10)), refused);
    assert!(tables.replace(0, 0, BlockId(10)).is_err());
    assert_eq!(tables.row(0).len(), 3);
}

#[test]
fn rotations_stay_inside_the_row() {
    let mut tables = tables();
    tables.rotate(0, 1, 1);
    assert_eq!(tables.row(0), [BlockId(3), BlockId(4), BlockId(1)]);
    tables.rotate_back(0, 1, 1);
    assert_eq!(tables.row(0), [BlockId(3), BlockId(1), BlockId(4)]);
    tables.set_coded(1, 9);
    assert_eq!((tables.coded(0), tables.coded(1), tables.coded(7)), (0, 9, 0));
}

#[test]
fn a_revision_changes_except_by_appending() {
    let mut tables = tables();
    let before = tables.revision(0);
    tables.push(0, BlockId(2)).unwrap();
    assert_eq!(tables.revision(0), before);
    let mut last = before;
    let changes: [fn(&mut BlockTables); 4] = [
        |tables| {
            tables.pop(0).unwrap();
        },
        |tables| {
            tables.replace(0, 0, BlockId(7)).unwrap();
        },
        |tables| tables.rotate(0, 0, 1),
        |tables| tables.rotate_back(0, 0, 1),
    ];
    for change in changes {
        change(&mut tables);
        assert_ne!(tables.revision(0), last);
        last = tables.revision(0);
    }
    assert_eq!(tables.revision(1), 0, "of another row");
}

#[test]
fn pop_and_replace_stay_inside_the_row() {
    let mut tables = tables();
    assert_eq!(tables.replace(1, 1, BlockId(2)), Ok(None));
    assert_eq!(tables.replace(1, 0, BlockId(2)), Ok(Some(BlockId(5))));
    assert_eq!(tables.pop(1), Some(BlockId(2)));
    assert_eq!(tables.pop(1), None);
}

#[test]
#[should_panic(expected = "row 7 of block tables with 2 rows")]
fn refuses_to_mark_a_row_that_does_not_exist() {
    tables().set_coded(7, 9);
}

#[test]
#[should_panic(expected = "row 7 of block tables with 2 rows")]
fn refuses_to_pop_from_a_row_that_does_not_exist() {
    tables().pop(7);
}

#[test]
#[should_panic(expected = "row 7 of block tables with 2 rows")]
fn refuses_to_truncate_a_row_that_does_not_exist() {
    tables().truncate(7, 0);
}

#[test]
#[should_panic(expected = "a row is copied to another, and both exist")]
fn refuses_to_copy_a_row_to_itself() {
    tables().fork_row(1, 1, 0);
}

#[test]
#[should_panic(expected = "range start index 4 out of range")]
fn refuses_to_rotate_past_a_row() {
    tables().rotate(0, 4, 0);
}

#[derive(Debug, Clone)]
enum Operation {
    Push(u32),
    Pop,
    Truncate(usize),
    Replace(usize, u32),
    Rotate(usize, usize),
    RotateBack(usize, usize),
    Fork(u32),
    Rows(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        6 => (0..120_u32).prop_map(Operation::Push),
        2 => Just(Operation::Pop),
        2 => (0..200_usize).prop_map(Operation::Truncate),
        1 => (0..90_usize, 0..11_u32).prop_map(|(at, block)| Operation::Replace(at, block)),
        1 => (0..90_usize, 0..90_usize).prop_map(|(at, by)| Operation::Rotate(at, by)),
        1 => (0..90_usize, 0..90_usize).prop_map(|(at, by)| Operation::RotateBack(at, by)),
        2 => (0..4_u32).prop_map(Operation::Fork),
        1 => (0..7_usize).prop_map(Operation::Rows),
    ]
}

/// Applies an operation to a row of the tables and to a plain list.
fn apply(tables: &mut BlockTables, plain: &mut Vec<Vec<BlockId>>, row: u32, op: &Operation) {
    let index = to_usize(row);
    let len = plain[index].len();
    match *op {
        Operation::Push(count) => {
            for block in (0..count).map(|n| BlockId(n % 10)) {
                tables.push(row, block).unwrap();
                plain[index].push(block);
            }
        }
        Operation::Pop => assert_eq!(tables.pop(row), plain[index].pop()),
        Operation::Truncate(len) => {
            tables.truncate(row, len);
            plain[index].truncate(len);
        }
        Operation::Replace(at, block) if block < 10 => {
            let old = plain[index].get_mut(at).map(|e| std::mem::replace(e, BlockId(block)));
            assert_eq!(tables.replace(row, at, BlockId(block)), Ok(old));
        }
        Operation::Replace(at, block) => {
            assert!(tables.replace(row, at, BlockId(block)).is_err());
        }
        Operation::Rotate(begin, by) => {
            if begin <= len && by <= len - begin {
                tables.rotate(row, begin, by);
                plain[index][begin..].rotate_left(by);
            }
        }
        Operation::RotateBack(begin, by) => {
            if begin <= len && by <= len - begin {
                tables.rotate_back(row, begin, by);
                plain[index][begin..].rotate_right(by);
            }
        }
        Operation::Fork(to) => {
            if to != row {
                tables.truncate(to, 0);
                tables.fork_row(row, to, len / 2);
                plain[to_usize(to)] = plain[index][..len / 2].to_vec();
            }
        }
        Operation::Rows(rows) => {
            tables.ensure_rows(rows);
            let rows = rows.max(plain.len());
            plain.resize(rows, Vec::new());
        }
    }
}

proptest! {
    #[test]
    fn rows_equal_plain_lists(
        operations in prop::collection::vec((0..4_u32, operation()), 1..60),
    ) {
        let mut tables = BlockTables::new(10, 16);
        tables.ensure_rows(4);
        let mut plain = vec![Vec::new(); 4];
        let mut copies = vec![(0, Vec::new()); 4];
        for (row, op) in &operations {
            apply(&mut tables, &mut plain, *row, op);
            prop_assert!(tables.rows().eq(plain.iter().map(Vec::as_slice)));
            for (row, (revision, copy)) in (0..).zip(&mut copies) {
                if tables.revision(row) == *revision {
                    prop_assert!(tables.row(row).starts_with(copy), "row {} grew", row);
                }
                (*revision, *copy) = (tables.revision(row), tables.row(row).to_vec());
            }
            let entries = plain.iter().map(|row| LINE.max(4 * row.len())).sum::<usize>();
            let most = 4 * entries + list_bytes(&tables.rows);
            prop_assert!(tables.host_bytes() <= most, "{} bytes", tables.host_bytes());
        }
        let rows = [3, 0, 9, 1];
        let (mut offsets, mut blocks, mut padded) = (Vec::new(), Vec::new(), Vec::new());
        tables.csr(&rows, &mut offsets, &mut blocks);
        tables.padded(&rows, 5, &mut padded);
        for (at, row) in rows.iter().enumerate() {
            let list = tables.row(*row);
            let [begin, end] = [offsets[at], offsets[at + 1]].map(to_usize);
            prop_assert_eq!(&blocks[begin..end], list);
            let entry = |i: usize| list.get(i).map_or(0, |block| block.0);
            prop_assert!((0..5).map(entry).eq(padded[5 * at..5 * (at + 1)].iter().copied()));
        }
    }
}
