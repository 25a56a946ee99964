//! Every row has its place, and blocks are counted as rows need them.
use super::*;

/// Block size, slots of a wide row, full-precision prefix.
const SHAPES: [(u32, u32, u32); 9] = [
    (3, 2, 3),
    (8, 3, 2),
    (16, 4, 4),
    (16, 6, 4),
    (5, 2, 7),
    (7, 7, 1),
    (3, 1, 4),
    (64, 4, 4),
    (16, 4, 0),
];

#[test]
fn without_wide_rows_a_token_is_a_slot() {
    let map = SlotMap::plain(4);
    assert_eq!((map.slots(9), map.blocks(9), map.tokens(3)), (9, 3, 12));
    assert_eq!(map.place(6), Place { index: 1, inside: 2, is_wide: false });
    assert_eq!((map.coded_after(3, 9), map.coded_truncated(9, 3)), (9, 3));
    assert_eq!((map.blocks_in(9, 9), map.blocks_to_grow(9)), (3, 3));
    assert_eq!(SlotMap::new(4, 9, 0, false).unwrap(), map);
}

#[test]
fn places_follow_each_other_without_overlap() {
    for (block_size, wide_slots, full_precision_prefix) in SHAPES {
        let map = SlotMap::new(block_size, wide_slots, full_precision_prefix, false).unwrap();
        let mut end = 0;
        for position in 0..60 {
            let place = map.place(position);
            let slots = if position < full_precision_prefix { wide_slots } else { 1 };
            assert_eq!(place.is_wide, position < full_precision_prefix);
            assert!(place.inside + slots <= block_size, "{map:?}: a row crosses a block");
            let begin = place.index * block_size + place.inside;
            assert!(begin >= end, "{map:?}: token {position} overlaps the one before");
            end = begin + slots;
            assert_eq!(map.slots(position + 1), end);
            // Exactly as many tokens fit as the number of blocks allows.
            let blocks = map.blocks(position + 1);
            assert!(map.tokens(blocks) > position, "{map:?}: {position}");
            assert!(map.blocks(map.tokens(blocks)) <= blocks);
            assert!(map.blocks(map.tokens(blocks) + 1) > blocks);
            let full = (0..=60).take_while(|n| map.tokens(n + 1) <= position).count();
            assert_eq!(usize::try_from(map.full_blocks(position)), Ok(full), "{map:?}: {position}");
        }
    }
}

/// Every row of a sequence, which must not overlap, inside the blocks that are counted.
fn check_rows(map: &SlotMap, len: u32, coded: u32) {
    let mut used = std::collections::BTreeSet::new();
    for position in 0..len {
        let place = map.place_in(position, coded);
        assert_eq!(place.is_wide, position < map.full_precision_prefix || position >= coded);
        assert!(place.index < map.blocks_in(len, coded), "{map:?}: {position} of {len}");
        let slots = if place.is_wide { map.wide_slots } else { 1 };
        assert!(place.inside + slots <= map.block_size);
        for slot in place.inside..place.inside + slots {
            assert!(used.insert((place.index, slot)), "{map:?}: {position} of {len}, {coded}");
        }
    }
    let filled: u32 = (0..map.blocks_in(len, coded)).map(|i| map.filled(i, len, coded)).sum();
    // Slots that a straddling wide row leaves free count as filled.
    assert!(filled >= u32::try_from(used.len()).unwrap(), "{map:?}: {len}, {coded}");
    assert!(map.blocks_in(len, coded) <= map.blocks_to_grow(len));
}

#[test]
fn a_tail_is_less_than_a_block_and_becomes_codes() {
    for (block_size, wide_slots, full_precision_prefix) in SHAPES {
        let map = SlotMap::new(block_size, wide_slots, full_precision_prefix, true).unwrap();
        let mut coded = 0;
        for len in 1..100 {
            coded = map.coded_after(coded, len);
            check_rows(&map, len, coded);
            assert_eq!(coded, map.coded_after(0, len), "one by one or at once");
            assert!(len - map.tail_begin(len, coded) < block_size);
            assert!(map.tail_blocks(len, coded) <= map.tail_blocks_max());
        }
    }
}

#[test]
fn a_cut_block_is_filled_with_codes() {
    for (block_size, wide_slots, full_precision_prefix) in SHAPES {
        let map = SlotMap::new(block_size, wide_slots, full_precision_prefix, true).unwrap();
        for len in (1..70).step_by(7) {
            for cut in 0..=len {
                let mut coded = map.coded_truncated(map.coded_after(0, len), cut);
                assert!(coded <= cut);
                check_rows(&map, cut, coded);
                // No row of a block that is left was a code and is now taken for a wide one.
                let were = map.coded_after(0, len).min(cut);
                assert!(
                    coded == were || map.place(coded).inside == 0 || were <= full_precision_prefix
                );
                for longer in cut + 1..cut + 2 * block_size {
                    let after = map.coded_after(coded, longer);
                    assert!(after >= coded && after <= longer);
                    check_rows(&map, longer, after);
                    coded = after;
                }
                assert_eq!(coded, map.coded_after(0, cut + 2 * block_size - 1));
            }
        }
    }
}

#[test]
fn a_block_must_hold_a_wide_row() {
    let refused = SlotMap::new(3, 4, 4, false).unwrap_err();
    assert!(refused.to_string().contains("takes 4 slots, a block has 3"), "{refused}");
    assert!(SlotMap::new(3, 4, 0, true).is_err());
}
