//! Guarantees of the prefill schedule that the kernel writes: every tile once, within the room, and
//! splits where they gain something.
#![expect(clippy::arithmetic_side_effects, reason = "sums of a test's own small numbers")]
use kv_core::num::{to_u32, to_u64, to_usize};

use super::super::Room;
use super::tests::device::{address, address_mut};
use super::tests::{Random, entry_of, extent, sequences, work};
use super::*;
use crate::emulated::{Emulator, EmulatorOptions};
use crate::gpu::Gpu;
use crate::params::{Counts, Sequence, WorkItem};

/// Slots of a card with 132 multiprocessors.
const SLOTS: u32 = 264;

fn prefill(slots: u32, kv_heads: u32, group: u32, rows: u32) -> Work {
    Work { kind: Kind::Prefill { rows }, q_len_max: 8, ..work(slots, kv_heads, group) }
}

/// Plans a batch on the device, within the room for it.
fn planned(sequences: &[Sequence], work: &Work) -> Vec<WorkItem> {
    let gpu = Emulator::open(&EmulatorOptions::default().with_seed(work.slots)).unwrap();
    let mut stream = gpu.stream().unwrap();
    let room = room_of(sequences, work);
    let mut items = vec![WorkItem { split: 99, ..WorkItem::default() }; to_usize(room) + 1];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut items);
    // Work items are aligned to 16 bytes.
    let at = gpu.alloc(to_u64(bytes.len())).unwrap();
    let counts = [Counts { sequences: to_u32(sequences.len()), ..Counts::default() }];
    let plan = Plan { counts: address(&counts), sequences: address(sequences), ..Plan::default() };
    let mut count = [77];
    // SAFETY: the memory has the length of `bytes`, and an emulated call is done when it returns.
    unsafe { stream.upload(at, bytes.as_ptr(), bytes.len()) }.unwrap();
    // SAFETY: the emulator's device is the host, and every list has the room that the kernel needs.
    unsafe { work.plan(stream.as_mut(), plan, [at, address_mut(&mut count)]) }.unwrap();
    // SAFETY: as for the upload.
    unsafe { stream.download(bytes.as_mut_ptr(), at, bytes.len()) }.unwrap();
    // SAFETY: allocated above and not used any more.
    unsafe { gpu.free(at) };
    assert_eq!(items.pop().map(|item| item.split), Some(99), "nothing is written past the end");
    assert!(count[0] <= room, "{count:?} of {room}");
    items.truncate(to_usize(count[0]));
    items
}

fn memory(sequences: &[Sequence], work: &Work) -> Room {
    Room::of(work, &extent(sequences))
}

fn room_of(sequences: &[Sequence], work: &Work) -> u32 {
    u32::try_from(memory(sequences, work).items).unwrap()
}

/// Checks that every query tile occurs once, the last of a sequence first, that its splits are all
/// tiles from the first to the last in order, and that partial results are apart.
fn check(sequences: &[Sequence], work: &Work, items: &[WorkItem]) {
    let Kind::Prefill { rows } = work.kind else { panic!("not of prefill") };
    let (mut items, mut partials) = (items.iter(), 0);
    for (index, sequence) in (0..).zip(sequences).filter(|(_, s)| s.q_len > work.q_len_max) {
        for row in (0..(sequence.q_len * work.group).div_ceil(rows)).rev().map(|tile| tile * rows) {
            let (mut begin, mut split, mut num_splits) = (0, 0, 1);
            while split < num_splits {
                let item = items.next().expect("a split is missing");
                num_splits = item.num_splits;
                let place = [item.sequence, item.head, item.row, item.split, item.tile_begin];
                assert_eq!(place, [index, 0, row, split, begin], "{item:?}");
                assert_eq!(item.partial, if num_splits > 1 { partials } else { 0 }, "{item:?}");
                let entry = [item.kv_len, item.q_len, item.q_start, item.table];
                assert_eq!(entry, entry_of(sequence), "{item:?}");
                assert!(item.tile_end > begin || num_splits == 1, "{item:?}");
                (begin, split) = (item.tile_end, split + 1);
            }
            assert_eq!(begin, sequence.kv_len.div_ceil(64), "tiles are left");
            partials += if num_splits > 1 { num_splits } else { 0 };
        }
    }
    assert!(items.next().is_none(), "more work items than work");
    let room = memory(sequences, work).partials;
    assert!(u64::from(partials * work.kv_heads) <= room, "{partials} partial results of {room}");
}

#[test]
fn random_batches_are_covered_and_fit_the_room() {
    let mut random = Random(0x51ed_270b_9f5a_11e3);
    let mut num_split = 0;
    for _ in 0..150 {
        let work = Work {
            full: random.below(4) == 0,
            window_left: random.pick(&[u32::MAX, u32::MAX, 0, 100, 3000]),
            sink_tokens: random.pick(&[0, 4, 64, 500]),
            invariant: random.below(3) == 0,
            ..prefill(
                random.pick(&[1, 8, 64, SLOTS]),
                random.pick(&[1, 2, 8, 200]),
                random.pick(&[1, 4, 7]),
                random.pick(&[64, 128]),
            )
        };
        let lens = (0..random.pick(&[0, 1, 2, 5, 600])).map(|_| {
            let (most, longest) =
                (random.pick(&[9, 70, 400]), random.pick(&[2, 700, 9000, 70_000]));
            (random.below(most), random.below(longest))
        });
        let sequences = sequences(&lens.collect::<Vec<_>>());
        let items = planned(&sequences, &work);
        check(&sequences, &work, &items);
        num_split += u32::from(items.iter().any(|item| item.num_splits > 1));
    }
    assert!(num_split > 10, "{num_split} batches were split");
}

#[test]
fn few_query_tiles_fill_all_slots() {
    // Queries of each sequence, contexts, sequences; splits of each query tile, all of one size.
    for (q_len, kv_len, batch, splits) in [
        (64, 32_768, 1, 16),
        (64, 131_072, 1, 16),
        (64, 8192, 1, 16),
        (16, 32_768, 1, 32),
        (512, 32_768, 1, 2),
        (64, 32_768, 4, 4),
        // Enough work items, or contexts too short to gain anything.
        (2048, 2048, 1, 1),
        (4096, 4096, 1, 1),
        (1024, 1024, 1, 1),
        (64, 512, 1, 1),
    ] {
        let sequences = sequences(&vec![(q_len, kv_len); to_usize(batch)]);
        let items = planned(&sequences, &prefill(SLOTS, 8, 4, 128));
        let found: Vec<_> = items.iter().map(|item| item.num_splits).collect();
        let tiles = (q_len * 4).div_ceil(128) * batch * splits;
        assert_eq!(found, vec![splits; to_usize(tiles)], "{q_len} {kv_len} {batch}");
    }
}

#[test]
fn one_long_context_is_split_beside_many_short_ones() {
    let mut lens = vec![(16, 1000); 100];
    lens.push((16, 131_072));
    let items = planned(&sequences(&lens), &prefill(SLOTS, 8, 4, 128));
    let splits = |index| items.iter().filter(|item| item.sequence == index).count();
    assert_eq!(splits(0), 1);
    let long = splits(100);
    assert!((8..=66).contains(&long), "{long} splits");
}

#[test]
fn invariant_splits_ignore_the_batch() {
    let work = Work { invariant: true, window_left: 20_000, ..prefill(7, 2, 4, 128) };
    let splits = |lens: &[(u32, u32)], index: u32| -> Vec<_> {
        let items = planned(&sequences(lens), &work);
        let own = items.iter().filter(|item| item.sequence == index);
        own.map(|p| (p.row, p.tile_begin, p.tile_end, p.split, p.num_splits)).collect()
    };
    let alone = splits(&[(40, 30_000)], 0);
    assert_eq!(alone.len(), 2 * 5);
    assert_eq!(splits(&[(9, 7), (40, 30_000), (3000, 90_000)], 1), alone);
    // A sequence with many query tiles has work items enough.
    assert_eq!(splits(&[(3000, 90_000)], 0).len(), 94);
}
