//! Caches on a device that computes nothing: holders of blocks, and refusals without a trace.
#![expect(clippy::arithmetic_side_effects, reason = "a test that overflows fails, as it should")]
mod admission;
mod backoff;
mod constants;
mod counts;
mod gather;
mod held;
mod hints;
mod hooks;
mod late;
mod leaked;
mod repeated;
mod reuse;
mod size;
mod slack;
mod stateful;
mod states;
mod wide;

use std::sync::Arc;

use super::state::tests::{Books, books, check_invariants, forget_but};
use super::*;
use crate::backend::NullBackend;
use crate::error::{DeviceErrorKind, PlanError};
use crate::num::to_u64;
use crate::{AttentionOptions, Axes, BlockId, SequenceId, TensorView, TensorViewMut};

const SEQ: [SequenceId; 4] = [SequenceId(0), SequenceId(1), SequenceId(2), SequenceId(3)];

fn cache(block_size: u32, num_blocks: u32) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(2).paged(block_size, num_blocks);
    KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap()
}

/// Creates two groups; the second has fewer blocks.
fn two_groups(wipe: bool) -> KvCache<NullBackend> {
    two_groups_with(wipe, crate::spec::PublishAt::Commit)
}

fn two_groups_with(wipe: bool, publish_at: crate::spec::PublishAt) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder()
        .layers(3)
        .kv_heads(1)
        .head_dim(2)
        .paged(2, 12)
        .group([1], |group| group.head_dims(4, 2).paged(3, 7))
        .publish_at(publish_at)
        .changes(16)
        .wipe_on_release(wipe);
    KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap()
}

#[test]
fn unsupported_head_dims_are_refused_before_anything_is_allocated() {
    let device = |multiple, max| {
        let capabilities = NullBackend::new().capabilities().clone();
        NullBackend::new().with_capabilities(capabilities.with_head_dims(multiple, max))
    };
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dims(8, 64).paged(4, 8);
    // The second group is the unsupported one.
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
        step.write(layer, k, v, Axes::Thd)?;
    }
    Ok(())
}

impl Step<'_, NullBackend> {
    fn num_layers(&self) -> u16 {
        self.cache().state().spec().num_layers()
    }
    fn head_dims(&self, layer: LayerId) -> [u32; 2] {
        let (group, _) = self.cache().state().spec().locate(layer).unwrap();
        self.cache().state().spec().groups()[usize::from(group.0)].layouts().map(|l| l.head_dim())
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
    assert_eq!(cache.state().seq_len(SEQ[0]), Some(5));
    append(&mut cache, &[(SEQ[0], 4)]).unwrap();
    assert_eq!(cache.state().seq_len(SEQ[0]), Some(9));
    assert_eq!(cache.state().block_table(SEQ[0], GroupId(0)).unwrap().len(), 3);
}

#[test]
fn commit_names_the_unwritten_layer_and_rolls_back() {
    let mut cache = cache(4, 8);
    start(&mut cache, SEQ[0]);
    let before = books(cache.state());
    let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 1)]).unwrap();
    let row = [0.0_f32; 2];
    let view = || TensorView::host(&row, &[1, 1, 2]);
    step.write(1, view(), view(), Axes::Thd).unwrap();
    let refused = step.commit().unwrap_err();
    assert_eq!(refused.to_string(), "layer 0 was not written in this step");
    assert_eq!(books(cache.state()), before);
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
fn a_fork_copies_the_partial_block_once() {
    let mut cache = cache(4, 8);
    let control = cache.backend().control();
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 6)]).unwrap();
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    assert_eq!(cache.state().usage().blocks_used, 2);
    let before = control.recorded();
    append(&mut cache, &[(SEQ[0], 1), (SEQ[1], 1)]).unwrap();
    // The plans, one copy, two writes, one flush: the second writer finds itself alone.
    assert_eq!(control.recorded() - before, 5);
    let table = |cache: &KvCache<_>, s| cache.state().block_table(s, GroupId(0)).unwrap().to_vec();
    let (parent, child) = (table(&cache, SEQ[0]), table(&cache, SEQ[1]));
    assert_eq!(parent[0], child[0]);
    assert_ne!(parent[1], child[1]);
    check_invariants(cache.state());
}

#[test]
fn a_failed_preparation_or_copy_rolls_the_step_back() {
    let mut cache = two_groups(false);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 5)]).unwrap();
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    let before = books(cache.state());
    // The plans of two groups, then a copy in each.
    for more in 0..4 {
        cache.backend().control().fail_after(more);
        let failed = cache.begin_step(&[StepInput::count(SEQ[1], 1)]).unwrap_err();
        assert!(matches!(failed, CacheError::Device(e) if e.kind() == DeviceErrorKind::Driver));
        assert_eq!(books(cache.state()), before);
        check_invariants(cache.state());
    }
    append(&mut cache, &[(SEQ[1], 1)]).unwrap();
}

#[test]
fn a_failed_flush_rolls_the_step_back() {
    let mut cache = cache(4, 8);
    start(&mut cache, SEQ[0]);
    let before = books(cache.state());
    cache.backend().control().fail_after(3);
    assert!(append(&mut cache, &[(SEQ[0], 5)]).is_err());
    assert_eq!(books(cache.state()), before);
    append(&mut cache, &[(SEQ[0], 5)]).unwrap();
}

#[test]
fn a_block_is_wiped_before_it_is_handed_out_again() {
    let mut cache = two_groups(true);
    let control = cache.backend().control();
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 3)]).unwrap();
    cache.release(SEQ[0]).unwrap();
    control.fail_after(1);
    assert!(cache.wipe().is_err(), "the second zeroing fails");
    assert_eq!(cache.state().unwiped().len(), 3);
    let before = control.recorded();
    start(&mut cache, SEQ[1]);
    assert!(cache.state().unwiped().is_empty());
    // 2 blocks in 2 layers and 1 block in 1 layer, K and V each; the interrupted block is zeroed
    // again from its start.
    assert_eq!(control.recorded() - before, 10);
}

#[test]
fn only_calls_that_hand_out_blocks_touch_the_device() {
    let mut cache = two_groups(true);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 3)]).unwrap();
    let pin = cache.pin_prefix(&[], StartOptions::default());
    let control = cache.backend().control();
    control.fail_after(0);
    let before = control.recorded();
    cache.truncate(SEQ[0], 1).unwrap();
    assert_eq!(cache.state().unwiped().len(), 1, "a block waits to be zeroed");
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    assert!(cache.unpin(pin.id).unwrap());
    assert!(!cache.unpin(pin.id).unwrap());
    let again = cache.start(SEQ[0], &[], StartOptions::default()).unwrap_err();
    assert_eq!(again.to_string(), "sequence 0 exists already");
    cache.release(SEQ[0]).unwrap();
    cache.preempt(SEQ[1]).unwrap();
    assert!(cache.reset_prefixes().unwrap());
    assert_eq!(control.recorded(), before);
    let unwiped = cache.state().unwiped().len();
    assert!(unwiped > 1);
    let failed = cache.start(SEQ[0], &[], StartOptions::default()).unwrap_err();
    assert!(matches!(failed, CacheError::Device(_)), "{failed}");
    assert_eq!(cache.state().unwiped().len(), unwiped);
    assert!(!cache.state().contains(SEQ[0]));
}

#[test]
fn two_caches_share_a_device() {
    let backend = Arc::new(NullBackend::new());
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).paged(4, 4).build().unwrap();
    let mut first = KvCache::new(Arc::clone(&backend), spec.clone()).unwrap();
    let mut second = KvCache::new(Arc::clone(&backend), spec).unwrap();
    first.start(SEQ[0], &[], StartOptions::default().with_reserve(16)).unwrap();
    second.start(SEQ[0], &[], StartOptions::default().with_reserve(16)).unwrap();
    assert_eq!(backend.control().recorded(), 4, "K and V of one layer, twice");
}
