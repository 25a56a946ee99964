//! Guarantees of a plan: every tile once, fair shares, and equal results on the device.
use super::super::{Q_LEN_MAX, Room, Rows};
use super::host::{DecodePlan, END_MIN, INVARIANT, OVERHEAD, SHARE_MIN, cost};
use super::*;
use crate::params::{Sequence, WorkItem};
use crate::step::Extent;

/// A small generator that gives the same numbers on every machine.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        u32::try_from(self.0 >> 33).unwrap() % n
    }
    pub(super) fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[usize::try_from(self.below(u32::try_from(list.len()).unwrap())).unwrap()]
    }
}

pub(super) fn work(slots: u32, kv_heads: u32, group: u32) -> Work {
    let (full, window_left, sink_tokens, invariant) = (false, u32::MAX, 0, false);
    let kind = Kind::Decode;
    Work { kind, slots, kv_heads, group, full, window_left, sink_tokens, invariant, q_len_max: 9 }
}

pub(super) fn sequences(lens: &[(u32, u32)]) -> Vec<Sequence> {
    let mut q_start = 0;
    let sequence = |(&(q_len, kv_len), table): (&(u32, u32), u32)| {
        q_start += q_len;
        Sequence {
            q_len,
            kv_len,
            q_start: q_start - q_len,
            table: table * 3,
            ..Sequence::default()
        }
    };
    lens.iter().zip(0..).map(sequence).collect()
}

/// Returns what a work item has of its entry.
pub(super) fn entry_of(sequence: &Sequence) -> [u32; 4] {
    [sequence.kv_len, sequence.q_len, sequence.q_start, sequence.table]
}

/// Returns the extent of a batch, as far as memory depends on it.
pub(super) fn extent(sequences: &[Sequence]) -> Extent {
    let q_lens = || sequences.iter().map(|s| s.q_len);
    Extent {
        sequences: u32::try_from(sequences.len()).unwrap(),
        total_q: q_lens().sum(),
        q_len_max: q_lens().max().unwrap_or(0),
        decode_q_len_max: q_lens().filter(|q_len| *q_len <= Q_LEN_MAX).max().unwrap_or(0),
        kv_len_max: sequences.iter().map(|s| s.kv_len).max().unwrap_or(0),
        ..Extent::default()
    }
}

fn planned(sequences: &[Sequence], work: &Work) -> DecodePlan {
    let mut plan = DecodePlan::default();
    plan.fill(sequences, work);
    plan
}

fn random_case(random: &mut Random) -> (Vec<Sequence>, Work) {
    let heads = random.pick(&[1, 2, 8]);
    let work = Work {
        full: random.below(4) == 0,
        window_left: random.pick(&[u32::MAX, u32::MAX, 0, 5, 100, 1000]),
        sink_tokens: random.pick(&[0, 0, 4, 64, 200]),
        invariant: random.below(3) == 0,
        ..work(random.pick(&[1, 2, 7, 64, 264]), heads, random.pick(&[1, 4, 7, 16, 20]))
    };
    let count = random.pick(&[0, 1, 2, 5, 40, 100]);
    let lens = (0..count).map(|_| {
        let longest = random.pick(&[2, 100, 5000, 40_000]);
        (random.pick(&[0, 1, 1, 1, 2, 5]), random.below(longest))
    });
    (sequences(&lens.collect::<Vec<_>>()), work)
}

/// Returns the cost of a slot.
fn load(items: &[WorkItem]) -> u64 {
    items.iter().map(|p| u64::from(p.tile_end - p.tile_begin) + OVERHEAD).sum()
}

/// Checks that every query tile occurs once, in order, and that its splits have each of its tiles
/// once.
fn check(sequences: &[Sequence], work: &Work, plan: &DecodePlan) {
    let mut items = plan.items.iter();
    let (mut partials, mut total) = (0, 0);
    for (index, sequence) in sequences.iter().enumerate() {
        let query_tiles = (sequence.q_len * work.group).div_ceil(16);
        for (head, query_tile) in
            (0..work.kv_heads).flat_map(|h| (0..query_tiles).map(move |r| (h, r)))
        {
            let tiles = work.tiles(sequence, query_tile);
            let mut at = 0;
            let mut num_splits = 1;
            let mut split = 0;
            while split < num_splits {
                let item = items.next().expect("a split is missing");
                num_splits = item.num_splits;
                let place = (item.sequence, item.head, item.row, item.split, item.tile_begin);
                let index = u32::try_from(index).unwrap();
                assert_eq!(place, (index, head, query_tile * 16, split, at), "{item:?}");
                let entry = [item.kv_len, item.q_len, item.q_start, item.table];
                assert_eq!(entry, entry_of(sequence), "{item:?}");
                assert!(item.tile_end > at || (tiles == 0 && num_splits == 1), "{item:?}");
                assert_eq!(item.partial, if num_splits > 1 { partials } else { 0 });
                at = item.tile_end;
                split += 1;
            }
            assert_eq!(at, tiles, "tiles are left");
            partials += if num_splits > 1 { num_splits } else { 0 };
            total += cost(tiles, work.invariant);
        }
    }
    assert!(items.next().is_none(), "more work items than work");
    assert_eq!(plan.num_partials, partials);
    let slots = usize::try_from(work.slots).unwrap();
    let bounds: Vec<_> = plan.starts.iter().map(|s| usize::try_from(*s).unwrap()).collect();
    assert_eq!((bounds.len(), bounds[0], bounds[slots]), (slots + 1, 0, plan.items.len()));
    let share = total.div_ceil(work.slots.into()).max(SHARE_MIN);
    let longest = u64::from(INVARIANT) + OVERHEAD;
    let beyond = if work.invariant { longest } else { OVERHEAD + 2 * (END_MIN - 1) + OVERHEAD };
    for bound in bounds.windows(2) {
        let load = load(&plan.items[bound[0]..bound[1]]);
        assert!(load <= share + beyond, "a slot has {load} of {share}");
    }
}

#[test]
fn random_batches_are_covered_and_balanced() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for _ in 0..400 {
        let (sequences, work) = random_case(&mut random);
        let plan = planned(&sequences, &work);
        check(&sequences, &work, &plan);
        assert_eq!(planned(&sequences, &work), plan);
    }
}

#[test]
fn workspaces_fit_every_plan() {
    let mut random = Random(77);
    for _ in 0..400 {
        let (sequences, work) = random_case(&mut random);
        let plan = planned(&sequences, &work);
        let room = Room::of(&work, &extent(&sequences));
        assert!(room.items >= u64::try_from(plan.items.len()).unwrap(), "{work:?}");
        assert!(room.partials >= plan.num_partials.into(), "{work:?}");
        // Rows of a split query tile fit the space between partial results.
        let rows = Rows::of(&work, &extent(&sequences));
        for item in plan.items.iter().filter(|item| item.num_splits > 1) {
            let index = usize::try_from(item.sequence).unwrap();
            let left = sequences[index].q_len * work.group - item.row;
            assert!(rows.of_partial >= left.min(16).into(), "{item:?}, {rows:?}");
        }
    }
}

/// Partial results of contexts of 128k tokens whose splits may not depend on the batch: rows that
/// no query has, and prompts of the batch, take no memory.
#[test]
fn invariant_workspaces_have_the_rows_that_are_used() {
    let mib = |group, lens: &[(u32, u32)]| {
        let work = Work { invariant: true, q_len_max: 8, ..work(264, 8, group) };
        let extent = extent(&sequences(lens));
        let partials = Room::of(&work, &extent).partials;
        // With their statistics, at a `head_dim` of 128.
        (partials * Rows::of(&work, &extent).of_partial * (128 + 1) * 4) >> 20
    };
    let batch = |count, q_len| vec![(q_len, 131_072); count];
    assert_eq!(mib(8, &batch(64, 1)), 258);
    assert_eq!(mib(4, &batch(64, 1)), 129);
    assert_eq!(mib(1, &batch(64, 1)), 32);
    assert_eq!(mib(8, &batch(256, 1)), 1032);
    assert_eq!(mib(16, &batch(64, 1)), 516);
    assert_eq!(mib(8, &batch(64, 2)), 516);
    assert_eq!(mib(8, &batch(64, 4)), 1032);
    assert_eq!(mib(8, &[batch(63, 1), batch(1, 2048)].concat()), 258, "beside a prompt");
    assert_eq!(mib(8, &[(1, 1024); 64]), 0, "nothing is split");
}

#[test]
fn one_long_context_is_shared_by_all_slots() {
    let plan = planned(&sequences(&[(1, 131_072)]), &work(264, 8, 4));
    let loads: Vec<_> = plan
        .starts
        .windows(2)
        .map(|w| load(&plan.items[usize::try_from(w[0]).unwrap()..usize::try_from(w[1]).unwrap()]))
        .collect();
    // 2050 tiles for each of 8 heads, over 264 slots: 63 each.
    assert!(loads.iter().all(|load| *load <= 63 + 6), "{loads:?}");
    assert!(loads.iter().filter(|load| **load < 50).count() <= 4, "{loads:?}");
}

#[test]
fn short_contexts_are_not_split() {
    let plan = planned(&sequences(&[(1, 200), (1, 64), (1, 0)]), &work(264, 2, 4));
    assert!(plan.items.iter().all(|item| item.num_splits == 1));
    assert_eq!((plan.items.len(), plan.num_partials), (6, 0));
    assert_eq!(planned(&[], &work(3, 2, 4)).starts, [0; 4]);
}

#[test]
fn keys_outside_a_window_have_no_tiles() {
    let windowed = Work { window_left: 100, sink_tokens: 70, ..work(1, 1, 1) };
    let tiles = |work: &Work, kv_len| planned(&sequences(&[(1, kv_len)]), work).items[0].tile_end;
    assert_eq!(tiles(&windowed, 10_000), 2 + 3, "sink tokens, then 9899..10000");
    assert_eq!(
        tiles(&windowed, 228),
        1 + 3,
        "127..228 begins in the second tile of the sink tokens"
    );
    assert_eq!(tiles(&windowed, 100), 2);
    assert_eq!(tiles(&Work { sink_tokens: 0, ..windowed }, 10_000), 3);
    assert_eq!(tiles(&Work { window_left: u32::MAX, ..windowed }, 10_000), 157);
}

#[test]
fn invariant_splits_ignore_the_batch() {
    let work = Work { invariant: true, window_left: 5000, ..work(7, 2, 4) };
    let splits = |lens: &[(u32, u32)], index: u32| -> Vec<_> {
        let plan = planned(&sequences(lens), &work);
        let own = plan.items.iter().filter(|item| item.sequence == index);
        own.map(|p| (p.head, p.row, p.tile_begin, p.tile_end, p.split, p.num_splits)).collect()
    };
    let alone = splits(&[(2, 3000)], 0);
    assert_eq!(alone.len(), 2 * 3);
    assert_eq!(splits(&[(1, 7), (2, 3000), (1, 90_000)], 1), alone);
}

/// Comparison with the kernel, byte by byte.
#[cfg(feature = "emulated")]
pub(super) mod device {
    use super::*;
    use crate::emulated::{Emulator, EmulatorOptions};
    use crate::gpu::Gpu;
    use crate::params::{Address, Counts, Plan};
    use kv_core::num::{to_u32, to_u64};

    pub(in crate::decode::plan) fn address<T>(list: &[T]) -> Address {
        to_u64(list.as_ptr().expose_provenance())
    }
    pub(in crate::decode::plan) fn address_mut<T>(list: &mut [T]) -> Address {
        to_u64(list.as_mut_ptr().expose_provenance())
    }

    /// Plans on host and device; the device's thread order depends on `seed`.
    fn compare(seed: u32, cases: impl Iterator<Item = (Vec<Sequence>, Work)>) {
        let gpu = Emulator::open(&EmulatorOptions::default().with_seed(seed)).unwrap();
        let mut stream = gpu.stream().unwrap();
        for (sequences, work) in cases {
            let host = planned(&sequences, &work);
            let counts = [Counts { sequences: to_u32(sequences.len()), ..Counts::default() }];
            // Work items are aligned to 16 bytes.
            let items_bytes = to_u64((host.items.len() + 1) * size_of::<WorkItem>());
            let items = gpu.alloc(items_bytes).unwrap();
            let mut starts = vec![77; host.starts.len() + 1];
            let plan = Plan {
                counts: address(&counts),
                sequences: address(&sequences),
                ..Plan::default()
            };
            let params = work.params(plan, [items, address_mut(&mut starts)]);
            let mut read =
                vec![WorkItem { split: 99, ..WorkItem::default() }; host.items.len() + 1];
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut read);
            // SAFETY: the memory has the length of `bytes`, and an emulated call is done when it
            // returns.
            unsafe { stream.upload(items, bytes.as_ptr(), bytes.len()) }.unwrap();
            // SAFETY: the emulator's device is the host, and every list is as long as the kernel
            // reads or writes.
            unsafe { stream.launch(&work.launch(), bytemuck::bytes_of(&params)) }.unwrap();
            // SAFETY: as for the upload.
            unsafe { stream.download(bytes.as_mut_ptr(), items, bytes.len()) }.unwrap();
            // SAFETY: allocated above and not used any more.
            unsafe { gpu.free(items) };
            assert_eq!(
                read.pop().map(|item| item.split),
                Some(99),
                "nothing is written past the end"
            );
            assert_eq!(starts.pop(), Some(77), "nothing is written past the end");
            let count = sequences.len();
            assert_eq!((read, starts), (host.items, host.starts), "{count} for {work:?}");
        }
    }

    #[test]
    fn plans_as_the_host_does() {
        for seed in [0, 5] {
            let mut random = Random(4711 + u64::from(seed));
            compare(seed, (0..60).map(|_| random_case(&mut random)));
        }
    }

    /// More sequences, and more query tiles, than threads; from one slot to many.
    #[test]
    fn plans_large_batches_as_the_host_does() {
        let mut random = Random(99);
        let cases = (0..24).map(|case| {
            let group = random.pick(&[1, 4, 16, 64]);
            let work = Work {
                full: case % 5 == 0,
                window_left: random.pick(&[u32::MAX, u32::MAX, 300, 4000]),
                sink_tokens: random.pick(&[0, 4, 200]),
                invariant: case % 3 == 0,
                ..work(1 + random.below(1056), random.pick(&[1, 3, 8]), group)
            };
            let count = random.pick(&[511, 512, 513, 1024, 1300]);
            let lens = (0..count).map(|_| {
                let longest = random.pick(&[1, 100, 5000, 40_000]);
                // 0 is an idle entry, 20 one of another kernel.
                (random.pick(&[0, 1, 1, 1, 1, 3, 20]), random.below(longest))
            });
            (sequences(&lens.collect::<Vec<_>>()), work)
        });
        compare(3, cases);
    }

    /// One query tile that is split over all slots.
    #[test]
    fn plans_one_long_context_as_the_host_does() {
        let slots = [1, 2, 31, 264, 511, 512, 513, 1056];
        let works = slots.into_iter().flat_map(|slots| {
            [false, true].map(|invariant| Work { invariant, ..work(slots, 1, 4) })
        });
        compare(0, works.map(|work| (sequences(&[(0, 9), (1, 1 << 20), (1, 0)]), work)));
        let nothing = [vec![], vec![(0, 5); 600], vec![(1, 0); 600]];
        compare(0, nothing.into_iter().map(|lens| (sequences(&lens), work(7, 2, 4))));
    }
}
