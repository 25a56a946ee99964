//! Sequences on a device that computes nothing: who holds which block, and no trace of a refusal.
#![expect(clippy::arithmetic_side_effects, reason = "a test that overflows fails, as it should")]
mod admission;
mod backoff;
mod constants;
mod counts;
mod history;
mod late;
mod leaked;
mod lives;
mod repeated;
mod reuse;
mod size;
mod slack;
mod wide;

use std::collections::BTreeMap;

use super::*;
use crate::backend::NullBackend;
use crate::error::DeviceErrorKind;
use crate::{AttentionOptions, QkvFormat, TensorView, TensorViewMut};

const SEQ: [SequenceId; 4] = [SequenceId(0), SequenceId(1), SequenceId(2), SequenceId(3)];

fn cache(block_size: u32, num_blocks: u32) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(2).paged(block_size, num_blocks);
    KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap()
}

/// Two groups; the second is the tighter one.
fn two_groups(wipe: bool) -> KvCache<NullBackend> {
    two_groups_with(wipe, crate::PublishAt::Commit)
}

fn two_groups_with(wipe: bool, publish_at: crate::PublishAt) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder()
        .layers(3)
        .kv_heads(1)
        .head_dim(2)
        .paged(2, 12)
        .group([1], |group| group.head_dims(4, 2).paged(3, 7))
        .publish_at(publish_at)
        .wipe_on_release(wipe);
    KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap()
}

#[test]
fn head_dims_that_a_device_does_not_take_are_refused_before_anything_is_allocated() {
    let device = |multiple, max| {
        let capabilities = NullBackend::new().capabilities().clone();
        NullBackend::new().with_capabilities(capabilities.with_head_dims(multiple, max))
    };
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dims(8, 64).paged(4, 8);
    // The second group is the one that does not fit.
    for (dims, words) in [
        ((6, 8), "head_dim 6 of K, multiples of 4 up to 64 are taken"),
        ((8, 30), "head_dim 30 of V, multiples of 4 up to 64 are taken"),
        ((68, 8), "head_dim 68 of K, multiples of 4 up to 64 are taken"),
    ] {
        let spec = spec.clone().group([1], |group| group.head_dims(dims.0, dims.1));
        let backend = device(4, 64);
        let control = backend.control();
        let refused = KvCache::new(backend, spec.clone().build().unwrap()).expect_err(words);
        let CacheError::Device(refused) = refused else { panic!("{refused}") };
        assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
        assert!(refused.to_string().contains(words), "{refused}");
        assert_eq!(control.recorded(), 0, "{dims:?}");
        KvCache::new(device(1, 68), spec.clone().build().unwrap()).unwrap();
        let erased = AnyBackend::new(device(4, 64));
        let layouts = *spec.build().unwrap().groups()[1].layouts();
        assert!(KvStorage::new(&erased, layouts).is_err());
    }
    KvCache::new(device(4, 64), spec.build().unwrap()).unwrap();
}

fn start(cache: &mut KvCache<NullBackend>, sequence: SequenceId) {
    cache.start(sequence, &[], StartOptions::default()).unwrap();
}

fn append(
    cache: &mut KvCache<NullBackend>,
    inputs: &[(SequenceId, u32)],
) -> Result<(), CacheError> {
    let inputs: Vec<_> = inputs.iter().map(|&(s, n)| StepInput::count(s, n)).collect();
    let mut step = cache.begin_step(&inputs)?;
    write_all(&mut step)?;
    step.commit()
}

fn write_all(step: &mut Step<'_, NullBackend>) -> Result<(), CacheError> {
    let total = step.sequences().iter().map(|s| s.new_len).sum::<u32>();
    let zeros = vec![0.0_f32; usize::try_from(total).unwrap() * 32];
    for layer in 0..step.num_layers() {
        let [k, v] = step.head_dims(LayerId(layer));
        let (k, v) = ([total, 1, k], [total, 1, v]);
        let k = TensorView::host(&zeros[..k.iter().product::<u32>().try_into().unwrap()], &k);
        let v = TensorView::host(&zeros[..v.iter().product::<u32>().try_into().unwrap()], &v);
        step.write(layer, k, v, QkvFormat::Thd)?;
    }
    Ok(())
}

impl Step<'_, NullBackend> {
    fn num_layers(&self) -> u16 {
        self.cache().spec.num_layers()
    }
    fn head_dims(&self, layer: LayerId) -> [u32; 2] {
        let (group, _) = self.cache().spec.locate(layer).unwrap();
        self.cache().spec.groups()[usize::from(group.0)].layouts().map(|l| l.head_dim())
    }
}

/// Everything a caller can see, and who holds what.
type Snapshot = (BTreeMap<SequenceId, (u32, Vec<Vec<BlockId>>)>, Vec<Vec<u32>>);

fn snapshot(cache: &KvCache<NullBackend>) -> Snapshot {
    let groups = 0..u8::try_from(cache.groups.len()).unwrap();
    let tables =
        |s| groups.clone().map(|g| cache.block_table(s, GroupId(g)).unwrap().to_vec()).collect();
    let sequences =
        cache.sequences().map(|s| (s, (cache.seq_len(s).unwrap(), tables(s)))).collect();
    let holders = |group: &Group<_>| {
        (0..group.pool.num_blocks()).map(|b| group.pool.holders(BlockId(b))).collect()
    };
    (sequences, cache.groups.iter().map(holders).collect())
}

/// A block's holders are the table entries that name it; the free list is the rest.
fn check_invariants(cache: &KvCache<NullBackend>) {
    let (sequences, holders) = snapshot(cache);
    for (index, group) in cache.groups.iter().enumerate() {
        let mut counted = vec![0; holders[index].len()];
        for (_, block) in cache.pins.blocks().filter(|(group, _)| *group == index) {
            counted[usize::try_from(block.0).unwrap()] += 1;
        }
        for (sequence, (len, tables)) in &sequences {
            let vacant = group.vacant(cache.sequences.row(*sequence).unwrap());
            for (block, _) in tables[index].iter().zip(0..).filter(|(_, i)| !vacant.contains(i)) {
                counted[usize::try_from(block.0).unwrap()] += 1;
            }
            let blocks = u32::try_from(tables[index].len()).unwrap();
            let map = slot_map(group);
            let coded = group.tables.coded(cache.sequences.row(*sequence).unwrap());
            assert!(map.blocks_in(*len, coded) <= blocks, "{len} tokens, {blocks} blocks");
            if map.has_tail() {
                assert_eq!(map.coded_after(coded, *len), coded, "{len} tokens");
            }
        }
        assert_eq!(counted, holders[index]);
        let mut keys: Vec<_> = group.pool.index().iter().map(|block| block.key).collect();
        keys.sort_unstable();
        assert!(keys.is_sorted_by(|a, b| a < b), "two blocks are indexed with the same content");
        for block in group.pool.index().iter() {
            let useless = group.pool.beginning_of(block.block);
            assert_eq!(useless, None, "block {} goes on behind all of it", block.block);
        }
        let free = counted.iter().filter(|n| **n == 0).count();
        assert_eq!(group.pool.num_free(), u32::try_from(free).unwrap());
        // What a step does not look at again.
        for (row, state) in cache.sequences.iter().filter(|(_, state)| state.len < state.own_end) {
            let map = slot_map(group);
            for index in map.full_blocks(state.len)..map.blocks(state.own_end) {
                let block = group.tables.row(row)[usize::try_from(index).unwrap()];
                assert!(group.pool.is_private(block), "block {block} of row {row}");
            }
        }
    }
}

#[test]
fn a_step_advances_lengths_only_at_commit() {
    let mut cache = cache(4, 8);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 5)]).unwrap();
    let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 3)]).unwrap();
    assert_eq!(step.positions(), [5, 6, 7]);
    write_all(&mut step).unwrap();
    step.roll_back();
    assert_eq!(cache.seq_len(SEQ[0]), Some(5));
    append(&mut cache, &[(SEQ[0], 4)]).unwrap();
    assert_eq!(cache.seq_len(SEQ[0]), Some(9));
    assert_eq!(cache.block_table(SEQ[0], GroupId(0)).unwrap().len(), 3);
}

#[test]
fn commit_names_the_unwritten_layer_and_rolls_back() {
    let mut cache = cache(4, 8);
    start(&mut cache, SEQ[0]);
    let before = snapshot(&cache);
    let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 1)]).unwrap();
    let row = [0.0_f32; 2];
    let view = || TensorView::host(&row, &[1, 1, 2]);
    step.write(1, view(), view(), QkvFormat::Thd).unwrap();
    let refused = step.commit().unwrap_err();
    assert_eq!(refused.to_string(), "layer 0 was not written in this step");
    assert_eq!(snapshot(&cache), before);
}

#[test]
fn attend_needs_the_layer_written() {
    let mut cache = cache(4, 8);
    start(&mut cache, SEQ[0]);
    let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 1)]).unwrap();
    let (q, mut out) = ([0.0_f32; 2], [0.0_f32; 2]);
    let out = TensorViewMut::host(&mut out, &[1, 1, 2]);
    let options = AttentionOptions::causal(1.0);
    let refused = step.attend(0, TensorView::host(&q, &[1, 1, 2]), out, &options).unwrap_err();
    assert!(matches!(
        refused,
        CacheError::Plan(PlanError::AttendBeforeWrite { layer: LayerId(0) })
    ));
}

#[test]
fn refused_inputs_change_nothing() {
    let mut cache = cache(4, 4);
    start(&mut cache, SEQ[0]);
    start(&mut cache, SEQ[1]);
    append(&mut cache, &[(SEQ[0], 3)]).unwrap();
    let before = snapshot(&cache);
    let one = |sequence| StepInput::count(sequence, 1);
    for (inputs, text) in [
        (vec![one(SEQ[0]), one(SEQ[0])], "sequence 0 appears twice in one step"),
        (vec![one(SEQ[0]), one(SEQ[2])], "sequence 2 is unknown"),
        (vec![StepInput::tokens(SEQ[0], &[])], "sequence 0: 0 tokens given, at least 1 is needed"),
        (vec![StepInput::query(SEQ[0], 0)], "sequence 0: 0 tokens given, at least 1 is needed"),
        (
            vec![one(SEQ[1]), StepInput::count(SEQ[0], 14)],
            "sequence 0: 3 cached + 14 new tokens exceed the maximum of 16",
        ),
        (
            vec![StepInput::count(SEQ[0], 10), StepInput::count(SEQ[1], 4)],
            "group 0 is out of blocks: 4 needed, 3 free, 0 evictable",
        ),
    ] {
        assert_eq!(cache.begin_step(&inputs).unwrap_err().to_string(), text);
        assert_eq!(snapshot(&cache), before);
        check_invariants(&cache);
    }
    append(&mut cache, &[(SEQ[0], 13)]).unwrap();
}

#[test]
fn a_second_mention_is_refused_again_and_again() {
    let mut cache = cache(4, 8);
    start(&mut cache, SEQ[0]);
    let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 1)]).unwrap();
    for _ in 0..2 {
        let refused = step.add(StepInput::count(SEQ[0], 1)).unwrap_err();
        assert_eq!(refused.to_string(), "sequence 0 appears twice in one step");
    }
    assert_eq!(step.sequences().len(), 1);
}

/// A block whose other holder took a copy in a step is shared again without that step.
#[test]
fn a_step_taken_back_shares_what_it_parted() {
    let mut cache = cache(4, 8);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 6)]).unwrap();
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    let before = snapshot(&cache);
    for _ in 0..2 {
        let inputs = [StepInput::count(SEQ[0], 1), StepInput::count(SEQ[1], 1)];
        let step = cache.begin_step(&inputs).unwrap();
        let blocks = [SEQ[0], SEQ[1]].map(|s| step.cache().block_table(s, GroupId(0)).unwrap()[1]);
        assert_ne!(blocks[0], blocks[1]);
        step.roll_back();
        assert_eq!(snapshot(&cache), before);
        check_invariants(&cache);
    }
}

#[test]
fn a_fork_copies_the_partial_block_once() {
    let mut cache = cache(4, 8);
    let control = cache.backend().control();
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 6)]).unwrap();
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    assert_eq!(cache.usage().blocks_used, 2);
    let before = control.recorded();
    append(&mut cache, &[(SEQ[0], 1), (SEQ[1], 1)]).unwrap();
    // One copy, two writes, one flush: the second writer finds itself alone.
    assert_eq!(control.recorded() - before, 4);
    let table = |cache: &KvCache<_>, s| cache.block_table(s, GroupId(0)).unwrap().to_vec();
    let (parent, child) = (table(&cache, SEQ[0]), table(&cache, SEQ[1]));
    assert_eq!(parent[0], child[0]);
    assert_ne!(parent[1], child[1]);
    check_invariants(&cache);
}

#[test]
fn a_shared_full_block_is_never_copied() {
    let mut cache = cache(4, 8);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 8)]).unwrap();
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    let shared = cache.block_table(SEQ[0], GroupId(0)).unwrap().to_vec();
    append(&mut cache, &[(SEQ[1], 1)]).unwrap();
    assert_eq!(cache.block_table(SEQ[1], GroupId(0)).unwrap()[..2], shared);
    assert_eq!(cache.usage().blocks_used, 3);
}

#[test]
fn a_truncated_fork_does_not_write_into_its_parent() {
    let mut cache = cache(4, 8);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 8)]).unwrap();
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    cache.truncate(SEQ[1], 5).unwrap();
    append(&mut cache, &[(SEQ[1], 1)]).unwrap();
    let parent = cache.block_table(SEQ[0], GroupId(0)).unwrap();
    assert_ne!(cache.block_table(SEQ[1], GroupId(0)).unwrap()[1], parent[1]);
    check_invariants(&cache);
}

#[test]
fn reserved_blocks_outlive_truncation() {
    let mut cache = cache(4, 3);
    cache.start(SEQ[0], &[], StartOptions::default().reserve(9)).unwrap();
    start(&mut cache, SEQ[1]);
    let refused = append(&mut cache, &[(SEQ[1], 1)]).unwrap_err();
    assert!(matches!(refused, CacheError::Exhausted(_)));
    append(&mut cache, &[(SEQ[0], 9)]).unwrap();
    cache.truncate(SEQ[0], 0).unwrap();
    assert_eq!(cache.free_blocks(GroupId(0)), 0);
    cache.release(SEQ[0]).unwrap();
    assert_eq!(cache.free_blocks(GroupId(0)), 3);
}

#[test]
fn a_failed_copy_rolls_the_step_back() {
    let mut cache = two_groups(false);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 5)]).unwrap();
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    let before = snapshot(&cache);
    for more in 0..2 {
        cache.backend().control().fail_after(more);
        let failed = cache.begin_step(&[StepInput::count(SEQ[1], 1)]).unwrap_err();
        assert!(matches!(failed, CacheError::Device(e) if e.kind() == DeviceErrorKind::Driver));
        assert_eq!(snapshot(&cache), before);
        check_invariants(&cache);
    }
    append(&mut cache, &[(SEQ[1], 1)]).unwrap();
}

#[test]
fn a_failed_flush_rolls_the_step_back() {
    let mut cache = cache(4, 8);
    start(&mut cache, SEQ[0]);
    let before = snapshot(&cache);
    cache.backend().control().fail_after(2);
    assert!(append(&mut cache, &[(SEQ[0], 5)]).is_err());
    assert_eq!(snapshot(&cache), before);
    append(&mut cache, &[(SEQ[0], 5)]).unwrap();
}

#[test]
fn a_block_is_wiped_before_it_is_handed_out_again() {
    let mut cache = two_groups(true);
    let control = cache.backend().control();
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 3)]).unwrap();
    control.fail_after(1);
    assert!(cache.release(SEQ[0]).is_err(), "the second zeroing fails");
    assert!(!cache.contains(SEQ[0]), "the release itself stands");
    assert_eq!(cache.unwiped.len(), 3);
    let before = control.recorded();
    start(&mut cache, SEQ[1]);
    assert!(cache.unwiped.is_empty());
    // 2 blocks in 2 layers and 1 block in 1 layer, K and V each, the interrupted block from its
    // start.
    assert_eq!(control.recorded() - before, 10);
}

#[test]
fn queries_and_idle_rows_write_nothing() {
    let mut cache = cache(4, 8);
    start(&mut cache, SEQ[0]);
    start(&mut cache, SEQ[1]);
    append(&mut cache, &[(SEQ[0], 6)]).unwrap();
    let before = snapshot(&cache);
    let step = cache.begin_step(&[StepInput::query(SEQ[0], 2), StepInput::idle(SEQ[1])]).unwrap();
    assert_eq!(step.positions(), [4, 5]);
    step.commit().unwrap();
    assert_eq!(snapshot(&cache), before);
}

#[test]
fn two_caches_share_a_device() {
    let backend = Arc::new(NullBackend::new());
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).paged(4, 4).build().unwrap();
    let mut first = KvCache::new(Arc::clone(&backend), spec.clone()).unwrap();
    let mut second = KvCache::new(Arc::clone(&backend), spec).unwrap();
    first.start(SEQ[0], &[], StartOptions::default().reserve(16)).unwrap();
    second.start(SEQ[0], &[], StartOptions::default().reserve(16)).unwrap();
    assert_eq!(backend.control().recorded(), 4, "K and V of one layer, twice");
}

#[test]
fn limits_of_the_spec_hold() {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).contiguous(2, 10);
    let mut cache = KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap();
    start(&mut cache, SEQ[0]);
    start(&mut cache, SEQ[1]);
    let third = cache.start(SEQ[2], &[], StartOptions::default()).unwrap_err();
    assert_eq!(third.to_string(), "sequences: 3 given, at most 2 are possible");
    let again = cache.start(SEQ[1], &[], StartOptions::default()).unwrap_err();
    assert_eq!(again.to_string(), "sequence 1 exists already");
    cache.release(SEQ[1]).unwrap();
    let long = cache.start(SEQ[2], &[0; 11], StartOptions::default()).unwrap_err();
    assert!(matches!(long, CacheError::Plan(PlanError::SequenceTooLong { max: 10, .. })));
    append(&mut cache, &[(SEQ[0], 10)]).unwrap();
    assert_eq!(cache.block_table(SEQ[0], GroupId(0)).unwrap().len(), 1);
}
