//! Host memory of tables and plans.
use super::*;

/// Creates a cache for a million tokens and `others` short sequences.
fn large(others: u32) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2);
    let spec = spec.paged(16, 62_501 + others).build().unwrap();
    KvCache::new(NullBackend::new(), spec).unwrap()
}

fn commit(cache: &mut KvCache<NullBackend>, inputs: &[StepInput<'_>]) {
    let mut step = cache.begin_step(inputs).unwrap();
    step.mark_written();
    step.commit().unwrap();
}

const LONG: SequenceId = SequenceId(u64::MAX);
const MILLION: u32 = 1_000_000;

#[test]
fn a_long_sequence_costs_short_ones_nothing() {
    let others = 30_000;
    for tokens in [0, 1] {
        let mut cache = large(others);
        let short = |id| match tokens {
            0 => StepInput::idle(SequenceId(id)),
            n => StepInput::count(SequenceId(id), n),
        };
        let mut inputs: Vec<_> = (0..others.into()).map(short).collect();
        inputs.push(StepInput::count(LONG, MILLION - 1));
        for input in &inputs {
            start(&mut cache, input.sequence);
        }
        commit(&mut cache, &inputs);
        // Slots and positions of a million tokens are 8 MB.
        assert!(cache.plan_bytes() < 32 << 20, "{} bytes", cache.plan_bytes());
        // One token each: the memory of the long step is freed.
        inputs.truncate(1000);
        inputs.push(StepInput::count(LONG, 1));
        (0..2).for_each(|_| drop(cache.begin_step(&inputs).unwrap()));
        commit(&mut cache, &inputs);
        assert!(cache.plan_bytes() < 8 << 20, "{} bytes", cache.plan_bytes());
        let before = cache.plan_bytes();
        cache.release(LONG).unwrap();
        let freed = before - cache.plan_bytes();
        assert!(freed > 4 * 62_000, "{freed} bytes of a row of 62,500 blocks");
    }
}

#[test]
fn sequences_that_ended_keep_no_memory() {
    let mut cache = large(0);
    let prompt: Vec<u32> = (0..MILLION / 4).collect();
    start(&mut cache, SEQ[0]);
    commit(&mut cache, &[StepInput::count(SEQ[0], 1)]);
    let before = (cache.plan_bytes(), cache.state().history_bytes());
    for id in [LONG, SEQ[1], LONG] {
        cache.start(id, &prompt, StartOptions::default()).unwrap();
        commit(&mut cache, &[StepInput::prompt(id, &prompt)]);
        cache.fork(id, SEQ[2]).unwrap();
        assert!(cache.state().history_bytes() > 4 * 250_000);
        cache.release(id).unwrap();
        cache.release(SEQ[2]).unwrap();
        // Two steps, because the first does not know yet that the long one has ended.
        (0..2).for_each(|_| drop(cache.begin_step(&[StepInput::count(SEQ[0], 1)]).unwrap()));
        let after = (cache.plan_bytes(), cache.state().history_bytes());
        assert!(after.0 < before.0 + (256 << 10), "{after:?}, {before:?} before");
        assert!(after.1 < before.1 + (64 << 10), "{after:?}, {before:?} before");
    }
}

#[test]
fn a_fork_copies_few_token_ids_however_long_it_is() {
    let mut added = Vec::new();
    for len in [10_000, MILLION] {
        let mut cache = large(1);
        let prompt: Vec<u32> = (0..len).collect();
        cache.start(SEQ[0], &prompt, StartOptions::default()).unwrap();
        commit(&mut cache, &[StepInput::tokens(SEQ[0], &prompt)]);
        let before = cache.state().history_bytes();
        cache.fork(SEQ[0], SEQ[1]).unwrap();
        added.push(cache.state().history_bytes() - before);
        // Neither writes a block that both share.
        commit(&mut cache, &[StepInput::tokens(SEQ[1], &[1, 2, 3])]);
        assert_eq!(cache.state().seq_len(SEQ[0]), Some(len));
        check_invariants(cache.state());
    }
    assert!(added[1] < 64 << 10, "{added:?} bytes of ids and keys");
}
