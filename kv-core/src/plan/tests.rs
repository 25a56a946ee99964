//! Guarantees of plans, and refusals.
use kv_format::{DType, KvFormat};

use super::*;
use crate::block::BlockTables;
use crate::error::PlanError;
use crate::geometry::{Axes, BlockOrder, PlaneLayout, PlaneShape};
use crate::ids::{BlockId, Slot};
use crate::storage::PlaneView;
use crate::tensor::{TensorView, TensorViewMut};

fn layout() -> PlaneLayout {
    PlaneLayout::new(PlaneShape {
        num_blocks: 6,
        block_size: 4,
        num_kv_heads: 1,
        head_dim: 2,
        order: BlockOrder::Nhd,
        format: KvFormat::F32,
    })
    .unwrap()
}

fn tables(rows: &[&[u32]]) -> BlockTables {
    let mut tables = BlockTables::new(6, 1);
    tables.ensure_rows(rows.len());
    for (blocks, row) in rows.iter().zip(0..) {
        for &block in *blocks {
            tables.push(row, BlockId(block)).unwrap();
        }
    }
    tables
}

fn entry(row: u32, cached: u32, new_tokens: u32) -> BatchEntry {
    BatchEntry { row, cached, new_tokens, queries: new_tokens }
}

fn plan(rows: &[&[u32]], batch: &[BatchEntry]) -> Result<Vec<Slot>, PlanError> {
    let mut buffers = PlanBuffers::default();
    let (layout, tables) = (layout(), tables(rows));
    let (write, _) = buffers.plan(&layout, &tables, batch, 1, Determinism::Fast)?;
    Ok(write.slots().to_vec())
}

#[test]
fn slots_follow_the_table() {
    let slots = plan(&[&[5, 2], &[0]], &[entry(1, 0, 2), entry(0, 3, 3)]).unwrap();
    assert_eq!(slots, [0, 1, 23, 8, 9].map(Slot));
}

#[test]
fn entries_keep_the_order_they_were_given() {
    let mut buffers = PlanBuffers::default();
    let (layout, tables) = (layout(), tables(&[&[5, 2], &[0]]));
    let batch = [entry(1, 0, 2), BatchEntry { queries: 4, ..entry(0, 6, 0) }];
    let (write, attend) = buffers.plan(&layout, &tables, &batch, 1, Determinism::Fast).unwrap();
    let [a, b] = attend.sequences() else { panic!("two entries") };
    assert_eq!((a.q_start, a.q_len, a.new_start, a.new_len, a.kv_len), (0, 2, 0, 2, 2));
    assert_eq!((b.q_start, b.q_len, b.new_start, b.new_len, b.kv_len), (2, 4, 2, 0, 6));
    assert_eq!((write.total_new(), write.new_len_max()), (2, 2));
    assert_eq!((attend.total_q(), attend.q_len_max()), (6, 4));
}

#[test]
fn a_table_that_is_too_short_is_refused() {
    let refused = plan(&[&[5, 2]], &[entry(0, 7, 2)]);
    let expected = PlanError::TableTooShort { index: 0, tokens: 9, blocks: 2, block_size: 4 };
    assert_eq!(refused, Err(expected));
    let unknown = plan(&[&[5, 2]], &[entry(0, 0, 1), entry(3, 0, 1)]);
    assert!(matches!(unknown, Err(PlanError::TableTooShort { index: 1, blocks: 0, .. })));
}

#[test]
fn two_writers_of_one_block_are_refused() {
    let rows: &[&[u32]] = &[&[1, 2], &[1, 3]];
    let refused = plan(rows, &[entry(0, 2, 1), entry(1, 3, 1)]);
    assert_eq!(refused, Err(PlanError::BlockShared { block: 1 }));
    let repeated = plan(&[&[1, 1]], &[entry(0, 0, 8)]);
    assert_eq!(repeated, Err(PlanError::BlockShared { block: 1 }));
    assert!(plan(rows, &[entry(0, 4, 1), entry(1, 4, 1)]).is_ok(), "the shared block is only read");
}

#[test]
fn a_refused_batch_leaves_no_plan() {
    let mut buffers = PlanBuffers::default();
    let (layout, tables) = (layout(), tables(&[&[1]]));
    for _ in 0..2 {
        let refused = [entry(0, 0, 1), entry(0, 4, 1)];
        assert!(buffers.plan(&layout, &tables, &refused, 1, Determinism::Fast).is_err());
        let batch = [entry(0, 0, 1)];
        assert!(buffers.plan(&layout, &tables, &batch, 1, Determinism::Fast).is_ok());
    }
}

#[test]
fn copies_are_disjoint() {
    let copy = |from, to, slots| BlockCopy { from: BlockId(from), to: BlockId(to), slots };
    let check = |copies: &[BlockCopy]| CopyPlan::new(&layout(), copies).map(|_| ());
    assert_eq!(check(&[]), Ok(()));
    assert_eq!(check(&[copy(0, 1, 4), copy(0, 2, 1)]), Ok(()));
    assert_eq!(check(&[copy(3, 3, 1)]), Err(PlanError::BlockShared { block: 3 }));
    assert_eq!(check(&[copy(0, 1, 1), copy(2, 1, 1)]), Err(PlanError::BlockShared { block: 1 }));
    assert_eq!(check(&[copy(0, 1, 1), copy(1, 2, 1)]), Err(PlanError::BlockShared { block: 1 }));
    let beyond = Err(PlanError::BlockOutOfRange { block: 6, num_blocks: 6 });
    assert_eq!(check(&[copy(6, 0, 1)]), beyond);
    assert_eq!(check(&[copy(0, 6, 1)]), beyond);
    assert!(matches!(check(&[copy(0, 1, 5)]), Err(PlanError::TooMany { got: 5, max: 4, .. })));
}

#[test]
fn a_plane_of_another_pool_is_refused() {
    use crate::Axes;
    use crate::backend::NullBackend;
    use crate::ids::Plane;
    use crate::storage::KvStorage;
    let (layout, tables) = (layout(), tables(&[&[5]]));
    let smaller = PlaneLayout::new(PlaneShape {
        num_blocks: 5,
        block_size: 4,
        num_kv_heads: 1,
        head_dim: 2,
        order: BlockOrder::Nhd,
        format: KvFormat::F32,
    })
    .unwrap();
    let backend = NullBackend::new();
    let mut storage = KvStorage::new(&backend, [smaller; 2]).unwrap();
    storage.allocate(&backend, 0).unwrap();
    let [k, v] = [Plane::Key, Plane::Value].map(|plane| storage.plane(0, plane).unwrap());
    let refused = PlanError::LayoutMismatch { expected: (6, 4), got: (5, 4) };

    let mut buffers = PlanBuffers::default();
    let batch = [entry(0, 0, 1)];
    let (write, attend) = buffers.plan(&layout, &tables, &batch, 1, Determinism::Fast).unwrap();
    let (row, mut out) = ([0.0_f32; 2], [0.0_f32; 2]);
    let input = TensorView::host(&row, &[1, 1, 2]);
    let written = WriteArgs::new(&write, input, input, Axes::Thd, k, v);
    assert_eq!(written.unwrap_err(), refused);
    let output = TensorViewMut::host(&mut out, &[1, 1, 2]);
    let options = AttentionOptions::causal(1.0);
    let attended = AttendArgs::new(&attend, input, output, None, [k, v], options);
    assert_eq!(attended.unwrap_err(), refused);
    let ranges = [GatherRange { row: 0, begin: 0, len: 1 }];
    let gather = GatherPlan::new(&layout, &tables, &ranges).unwrap();
    let output = TensorViewMut::host(&mut out, &[1, 1, 2]);
    let gathered = GatherArgs::new(&gather, k, output, Axes::Thd);
    assert_eq!(gathered.unwrap_err(), refused);
    let copy = CopyPlan::new(&layout, &[]).unwrap();
    assert_eq!(CopyArgs::new(&copy, storage.view()).unwrap_err(), refused);
}

#[test]
fn planes_of_k_and_v_with_other_segments_are_refused() {
    let (layout, tables) = (layout(), tables(&[&[5]]));
    let memory = [[0_u8; 48], [0_u8; 48], [0_u8; 48]];
    let plane = |blocks| PlaneView::new(layout.with_segments_of(blocks), &memory).unwrap();
    let mut buffers = PlanBuffers::default();
    let batch = [entry(0, 0, 1)];
    let (_, attend) = buffers.plan(&layout, &tables, &batch, 1, Determinism::Fast).unwrap();
    let row = [0.0_f32; 2];
    let attended = |planes| {
        let mut out = [0.0_f32; 2];
        let (q, out) =
            (TensorView::host(&row, &[1, 1, 2]), TensorViewMut::host(&mut out, &[1, 1, 2]));
        let args = AttendArgs::new(&attend, q, out, None, planes, AttentionOptions::causal(1.0));
        args.map(|_| ())
    };
    assert_eq!(attended([plane(2), plane(2)]), Ok(()));
    let what = "blocks per segment of V";
    let refused = Err(PlanError::LengthMismatch { what, expected: 2, got: 3 });
    assert_eq!(attended([plane(2), plane(3)]), refused);
}

#[test]
fn conversions_take_lengths_or_prefix_sums() {
    let plan = ConvertPlan::from_cu_seqlens(&[0, 2, 2, 5]).unwrap();
    assert_eq!(plan, ConvertPlan::new(&[2, 0, 3]).unwrap());
    assert_eq!(plan.entries().collect::<Vec<_>>(), [(0, 2), (2, 0), (2, 3)]);
    for sums in [&[][..], &[1, 2], &[0, 3, 2]] {
        let refused = ConvertPlan::from_cu_seqlens(sums);
        assert!(matches!(refused, Err(PlanError::Option { option: "cu_seqlens", .. })));
    }
    assert!(matches!(ConvertPlan::new(&[u32::MAX, 1]), Err(PlanError::TooMany { .. })));
}

#[test]
fn stored_rows_follow_each_other() {
    let plan = ConvertPlan::new(&[2, 0, 1]).unwrap();
    let values = [0.0_f32; 240];
    let src = || (TensorView::host(&values, &[3, 2, 40]), Axes::Thd);
    let buffer = ();
    let mut args = ConvertArgs::encode(&plan, src(), (KvFormat::Q8_0, &buffer, 10)).unwrap();
    assert!(args.outputs().iter().all(Option::is_none), "no output is in host memory");
    let ConvertEnds::Encode(_, rows) = args.ends() else { panic!("a tensor is encoded") };
    assert_eq!((rows.tokens(), rows.heads(), rows.dim(), rows.offset()), (3, 2, 40, 10));
    // Blocks of 32 values in 34 bytes: two in a row.
    assert_eq!((rows.row_bytes(), rows.bytes()), (68, 6 * 68));

    let odd = ConvertArgs::encode(&plan, src(), (KvFormat::Q8_0, &buffer, 3)).map(|_| ());
    assert_eq!(odd, Err(PlanError::Misaligned { tensor: "dst", align: 2 }));
    let listed = |dtype| KvFormat::all().filter(move |of| ConvertPlan::encodes(dtype, *of));
    assert_eq!(listed(DType::F32).collect::<Vec<_>>(), [KvFormat::Q8_0]);
    assert_eq!([DType::F16, DType::Bf16, DType::U32].map(|of| listed(of).count()), [0; 3]);
    let other = ConvertArgs::encode(&plan, src(), (KvFormat::F16, &buffer, 0)).unwrap_err();
    let words = "rows in f32 are not converted to and from stored rows in f16";
    assert_eq!(other.to_string(), words);
}

fn planned(q_len: u32, kv_len: u32) -> PlannedSequence {
    let mut buffers = PlanBuffers::default();
    let (layout, tables) = (layout(), tables(&[&[0, 1, 2]]));
    let batch = [BatchEntry { queries: q_len, ..entry(0, kv_len, 0) }];
    let (_, attend) = buffers.plan(&layout, &tables, &batch, 1, Determinism::Fast).unwrap();
    attend.sequences()[0]
}

#[test]
fn a_query_sees_what_mask_and_window_leave() {
    let causal = AttentionOptions::causal(1.0);
    let sequence = planned(3, 10);
    let seen = |options: AttentionOptions<'_>| [0, 1, 2].map(|i| options.visible(&sequence, i));
    assert_eq!(seen(causal), [(0, 8), (0, 9), (0, 10)]);
    assert_eq!(seen(causal.with_window_left(0)), [(7, 8), (8, 9), (9, 10)]);
    assert_eq!(seen(causal.with_window_left(8)), [(0, 8), (0, 9), (1, 10)]);
    assert_eq!(seen(AttentionOptions::full(1.0)), [(0, 10); 3]);
    let more_queries = planned(4, 2);
    let seen = [0, 1, 2, 3].map(|i| causal.visible(&more_queries, i));
    assert_eq!(seen, [(0, 0), (0, 0), (0, 1), (0, 2)]);
    assert_eq!(causal.with_window_left(u32::MAX).visible(&planned(1, 12), 0), (0, 12));
}

#[test]
fn sink_tokens_are_seen_before_a_window_alone() {
    let causal = AttentionOptions::causal(1.0);
    let sequence = planned(3, 10);
    let seen = |options: AttentionOptions<'_>| {
        [0, 1, 2].map(|i| options.visible_sink_tokens(&sequence, i))
    };
    assert_eq!(seen(causal.with_window_left(2)), [0; 3], "none unless asked for");
    assert_eq!(seen(causal.with_sink_tokens(4)), [0; 3], "without a window all is seen anyway");
    assert_eq!(seen(causal.with_window_left(2).with_sink_tokens(4)), [4; 3]);
    assert_eq!(seen(causal.with_window_left(5).with_sink_tokens(4)), [2, 3, 4], "up to the window");
    assert_eq!(seen(causal.with_window_left(8).with_sink_tokens(u32::MAX)), [0, 0, 1]);
    let windowed = causal.with_window_left(2);
    let windows = [0, 1, 2].map(|i| windowed.visible(&sequence, i));
    let with_sink_tokens = [0, 1, 2].map(|i| windowed.with_sink_tokens(4).visible(&sequence, i));
    assert_eq!(with_sink_tokens, windows, "the window stays as it is");
    let full = AttentionOptions::full(1.0).with_window_left(2).with_sink_tokens(9);
    assert_eq!(seen(full), [5, 6, 7]);
    assert_eq!(full.visible(&sequence, 1), (6, 10));
}

/// Both ranges against the rule for single keys, for every length, window and number of sink
/// tokens.
#[test]
fn visible_ranges_hold_the_keys_that_the_rule_names() {
    for (q_len, kv_len) in [(1, 1), (1, 12), (3, 12), (12, 12), (5, 2), (2, 0)] {
        let sequence = planned(q_len, kv_len);
        for (left, sink_tokens) in
            (0..14).flat_map(|left| (0..14).map(move |sink_tokens| (left, sink_tokens)))
        {
            for base in [AttentionOptions::causal(1.0), AttentionOptions::full(1.0)] {
                let options = base.with_window_left(left).with_sink_tokens(sink_tokens);
                for i in 0..q_len {
                    let (begin, end) = options.visible(&sequence, i);
                    let before = options.visible_sink_tokens(&sequence, i);
                    assert!(before <= begin && begin <= end && end <= kv_len);
                    let position = i64::from(kv_len) - i64::from(q_len) + i64::from(i);
                    for j in 0..kv_len {
                        let masked = base.mask() == Mask::Causal && i64::from(j) > position;
                        let near = i64::from(j) >= position - i64::from(left);
                        let seen = !masked && (near || j < sink_tokens);
                        let got = j < before || (begin..end).contains(&j);
                        assert_eq!(got, seen, "{options:?}: query {i} of {q_len}, key {j}");
                        // A guarantee for kernels that cut their tiles at the last sink token.
                        let cut = if j < sink_tokens { j < end } else { (begin..end).contains(&j) };
                        assert_eq!(cut, seen, "{options:?}: query {i} of {q_len}, key {j}");
                    }
                }
            }
        }
    }
}
