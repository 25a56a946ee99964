//! Sequences with 16-bit rows, which take several slots.
use proptest::prelude::*;

use super::stateful::{operation, run_operations};
use super::*;
use crate::backend::Slot;
use crate::error::SpecError;
use crate::spec::KeyMean;
use crate::{KvFormat, ScaleGroup, Scaling};

const INT8: KvFormat = KvFormat::Int8(Scaling::Row);
const L4: KvFormat = KvFormat::L4(ScaleGroup::Row);

/// Creates groups with 16-bit rows of 2 slots in blocks of 2 and of 3, where the second wastes one.
fn wide(wipe: bool, full_precision_prefix: u32, tail: bool) -> KvCache<NullBackend> {
    let (first, second) = if tail { (24, 20) } else { (12, 8) };
    let spec = CacheSpec::builder()
        .layers(3)
        .kv_heads(1)
        .head_dim(32)
        .format(INT8)
        .full_precision_prefix(full_precision_prefix)
        .tail(tail)
        .paged(2, first)
        .group([1], |group| group.paged(3, second))
        .wipe_on_release(wipe);
    KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn random_operations_with_a_prefix_keep_the_state_consistent(
        operations in prop::collection::vec(operation(), 1..60),
        wipe in any::<bool>(),
    ) {
        run_operations(&mut wide(wipe, 3, false), &operations);
    }

    #[test]
    fn random_operations_with_tails_keep_the_state_consistent(
        operations in prop::collection::vec(operation(), 1..60),
        wipe in any::<bool>(),
        full_precision_prefix in 0..4_u32,
    ) {
        run_operations(&mut wide(wipe, full_precision_prefix, true), &operations);
    }
}

#[test]
fn wide_rows_take_their_slots_and_no_more() {
    let mut cache = wide(false, 3, false);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 5)]).unwrap();
    // 3 rows of the prefix with 2 slots and 2 tokens: 8 slots; in blocks of 3, one row per block,
    // then 2 tokens.
    assert_eq!(cache.state().block_table(SEQ[0], GroupId(0)).unwrap().len(), 4);
    assert_eq!(cache.state().block_table(SEQ[0], GroupId(1)).unwrap().len(), 4);
    let step = cache.begin_step(&[StepInput::count(SEQ[0], 2)]).unwrap();
    let slots = step.write_plan(GroupId(1)).unwrap().slots().to_vec();
    let table = step.cache().state().block_table(SEQ[0], GroupId(1)).unwrap();
    assert_eq!(slots, [Slot(table[3].0 * 3 + 1), Slot(table[3].0 * 3 + 2)]);
}

#[test]
fn a_fork_inside_the_prefix_copies_its_slots() {
    let mut cache = wide(false, 3, false);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 4)]).unwrap();
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    cache.truncate(SEQ[1], 1).unwrap();
    let used = cache.state().usage().blocks_used;
    // The next row of the prefix begins a new block, so no shared block is written.
    append(&mut cache, &[(SEQ[1], 1)]).unwrap();
    assert_eq!(cache.state().usage().blocks_used, used + 2);
    assert_eq!(cache.state().seq_len(SEQ[0]), Some(4));
}

#[test]
fn the_spec_accounts_for_wide_rows() {
    let spec = |full_precision_prefix| {
        let builder = CacheSpec::builder().layers(2).kv_heads(2).head_dim(128).formats(L4, L4);
        builder.full_precision_prefix(full_precision_prefix).paged(16, 100).build().unwrap()
    };
    // 256 bytes in 16 bits, 66 quantised: 4 slots per row, so 4 rows of the prefix fill a block.
    let with = spec(4);
    assert_eq!(with.groups()[0].slot_map().wide_slots(), 4);
    assert_eq!((with.sequences_that_fit(20), spec(0).sequences_that_fit(20)), (50, 50));
    assert_eq!((with.sequences_that_fit(21), spec(0).sequences_that_fit(21)), (33, 50));
    assert_eq!((with.max_seq_len(), spec(0).max_seq_len()), (1588, 1600));
    assert_eq!(with.memory().bytes_total, spec(0).memory().bytes_total);
    // 2 layers, K and V: 2 heads of 2 scales and 3 lists of 128, in f32.
    assert_eq!(with.memory().bytes_constants, 2 * 2 * 2 * (2 + 3 * 128) * 4);
    let contiguous = CacheSpec::builder().layers(1).kv_heads(1).head_dim(128).format(L4);
    let contiguous = contiguous.full_precision_prefix(4).contiguous(3, 50).build().unwrap();
    assert_eq!((contiguous.max_seq_len(), contiguous.sequences_that_fit(50)), (50, 3));
    assert_eq!(contiguous.groups()[0].block_size(), 62);
    let refused = CacheSpec::builder()
        .layers(1)
        .kv_heads(1)
        .head_dim(128)
        .format(L4)
        .full_precision_prefix(4);
    let refused = refused.paged(3, 9).build().unwrap_err();
    assert!(
        matches!(refused, SpecError::Conflict { what: "full_precision_prefix", .. }),
        "{refused}"
    );
    // Unquantised rows do not need them.
    let plain = CacheSpec::builder()
        .layers(1)
        .kv_heads(1)
        .head_dim(128)
        .full_precision_prefix(4)
        .paged(1, 9);
    assert_eq!(plain.build().unwrap().groups()[0].slot_map().full_precision_prefix(), 0);
}

/// Creates a cache with blocks of 4 in which a 16-bit row takes 2 slots: a tail of 2 blocks.
fn tailed(num_blocks: u32) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(32).format(INT8).tail(true);
    let spec = spec.key_mean(KeyMean::PerBlock).paged(4, num_blocks).build().unwrap();
    KvCache::new(NullBackend::new(), spec).unwrap()
}

fn table(cache: &KvCache<NullBackend>) -> Vec<u32> {
    cache.state().block_table(SEQ[0], GroupId(0)).unwrap().iter().map(|block| block.0).collect()
}

#[test]
fn a_full_block_releases_its_tail_at_commit() {
    let mut cache = tailed(8);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 3)]).unwrap();
    let tail = table(&cache);
    assert_eq!(tail.len(), 2);
    let mut step = cache.begin_step(&[StepInput::count(SEQ[0], 3)]).unwrap();
    let during = table(step.cache());
    assert_eq!(during.len(), 4, "a full block, the new tail, the old tail");
    assert_eq!(during[2..], tail);
    let sequence = step.sequences()[0];
    assert_eq!((sequence.coded_before, sequence.coded, sequence.sealed_index), (0, 4, 2));
    let slots = step.write_plan(GroupId(0)).unwrap().slots().to_vec();
    let slot = |block: u32, inside| Slot(block * 4 + inside);
    assert_eq!(slots, [slot(during[0], 3), slot(during[1], 0), slot(during[1], 2)]);
    write_all(&mut step).unwrap();
    step.commit().unwrap();
    assert_eq!(table(&cache), during[..2]);
    assert_eq!(cache.state().usage().blocks_used, 2);
}

#[test]
fn a_rolled_back_step_leaves_the_tail() {
    let mut cache = tailed(8);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 7)]).unwrap();
    let before = table(&cache);
    cache.begin_step(&[StepInput::count(SEQ[0], 6)]).unwrap().roll_back();
    assert_eq!(table(&cache), before);
    start(&mut cache, SEQ[1]);
    append(&mut cache, &[(SEQ[1], 8)]).unwrap();
    let out_of_blocks = cache.begin_step(&[StepInput::count(SEQ[0], 12)]).unwrap_err();
    assert!(matches!(out_of_blocks, CacheError::Exhausted(_)), "{out_of_blocks}");
    assert_eq!(table(&cache), before);
}

#[test]
fn a_truncation_inside_codes_continues_with_codes() {
    let mut cache = tailed(8);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 9)]).unwrap();
    cache.truncate(SEQ[0], 6).unwrap();
    assert_eq!(table(&cache).len(), 2);
    let step = cache.begin_step(&[StepInput::count(SEQ[0], 1)]).unwrap();
    assert_eq!((step.sequences()[0].coded_before, step.sequences()[0].coded), (6, 7));
    drop(step);
    // At a block's start there is nothing to keep.
    cache.truncate(SEQ[0], 4).unwrap();
    let step = cache.begin_step(&[StepInput::count(SEQ[0], 1)]).unwrap();
    assert_eq!((step.sequences()[0].coded_before, step.sequences()[0].coded), (4, 4));
}

#[test]
fn forks_share_a_tail_until_one_writes() {
    let mut cache = tailed(12);
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 7)]).unwrap();
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    assert_eq!(cache.state().usage().blocks_used, 3);
    // The child fills the block: it reads the shared tail and does not write to it.
    append(&mut cache, &[(SEQ[1], 1)]).unwrap();
    assert_eq!(cache.state().usage().blocks_used, 4);
    assert_eq!((cache.state().seq_len(SEQ[0]), cache.state().seq_len(SEQ[1])), (Some(7), Some(8)));
}

#[test]
fn a_reserve_serves_every_step_with_a_tail() {
    let mut cache = tailed(11);
    cache.start(SEQ[0], &[], StartOptions::default().with_reserve(24)).unwrap();
    assert_eq!(cache.state().usage().blocks_used, 10);
    start(&mut cache, SEQ[1]);
    append(&mut cache, &[(SEQ[1], 1)]).unwrap();
    for n in [1, 6, 4, 5, 7, 1] {
        append(&mut cache, &[(SEQ[0], n)]).unwrap();
        assert_eq!(table(&cache).len(), 10);
    }
}

#[test]
fn a_tail_being_quantised_lies_after_reserved_blocks() {
    for reserve in [0, 6, 24] {
        let mut cache = tailed(11);
        cache.start(SEQ[0], &[], StartOptions::default().with_reserve(reserve)).unwrap();
        append(&mut cache, &[(SEQ[0], 1)]).unwrap();
        let tail = table(&cache)[0];
        let step = cache.begin_step(&[StepInput::count(SEQ[0], 6)]).unwrap();
        let sealed = crate::num::to_usize(step.sequences()[0].sealed_index);
        let row = step.cache().state().block_table(SEQ[0], GroupId(0)).unwrap();
        assert_eq!(row[sealed].0, tail, "{reserve} tokens reserved: {row:?}");
    }
}

#[test]
fn a_tail_needs_blocks() {
    let spec = |builder: crate::spec::CacheSpecBuilder| builder.layers(1).kv_heads(1).head_dim(32);
    let refuse = |builder: crate::spec::CacheSpecBuilder, what: &str| {
        let refused = spec(builder).format(INT8).build().unwrap_err();
        let named = matches!(&refused, SpecError::Conflict { what: found, .. } if *found == what);
        assert!(named, "{refused}");
    };
    refuse(CacheSpec::builder().tail(true).contiguous(2, 16), "tail");
    refuse(CacheSpec::builder().tail(true).paged(4, 2), "tail");
    refuse(CacheSpec::builder().key_mean(KeyMean::PerBlock).paged(4, 9), "key_mean");
    let means = CacheSpec::builder().tail(true).key_mean(KeyMean::PerBlock).paged(4, 9);
    let means = spec(means).format(INT8).build().unwrap();
    let [k, v] = means.groups()[0].layouts();
    assert_eq!((k.block_bytes(), v.block_bytes()), (4 * 34 + 64, 4 * 34));
    assert_eq!((k.mean_begin(0), k.has_block_means(), v.has_block_means()), (136, true, false));
    // A sequence of 28 tokens has 7 blocks, and 2 of a tail while it grows.
    assert_eq!((means.max_seq_len(), means.sequences_that_fit(28)), (28, 1));
}

/// Returns the tokens of sequences of 1,024 that a pool of `bytes` holds.
fn tokens_within(bytes: u64, format: KvFormat, full_precision_prefix: u32) -> u32 {
    let within = |bytes| {
        let spec = CacheSpec::builder().layers(4).kv_heads(8).head_dim(128).format(format);
        spec.full_precision_prefix(full_precision_prefix).paged_within(16, bytes).build().unwrap()
    };
    // Constants do not depend on the pool.
    let spec = within(bytes - within(bytes).memory().bytes_constants);
    assert!(spec.memory().bytes_total + spec.memory().bytes_constants <= bytes);
    let mut cache = KvCache::new(NullBackend::new(), spec).unwrap();
    let mut fits =
        |id| cache.start(SequenceId(id), &[], StartOptions::default().with_reserve(1024));
    let full = (0..).map_while(|id| fits(id).ok()).count();
    1024 * u32::try_from(full).unwrap()
}

#[test]
fn four_bits_hold_nearly_four_times_the_tokens() {
    let bytes = 1 << 30;
    let (l4, bf16) = (tokens_within(bytes, L4, 4), tokens_within(bytes, KvFormat::Bf16, 0));
    let ratio = f64::from(l4) / f64::from(bf16);
    assert!(ratio >= 3.7, "{l4} tokens in l4, {bf16} in bf16");
}
