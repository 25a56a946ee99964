//! Random operation sequences: each operation applies whole or changes nothing, and the bookkeeping
//! is consistent after it.
use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::hooks::{Hook, Hooks, hook};
use super::*;
use crate::calibration::{Calibration, LayerCalibration};
use crate::num::to_usize;
use crate::spec::GroupSpec;

#[derive(Debug, Clone)]
pub(super) enum Operation {
    Start(SequenceId, u32),
    /// Starts a prompt: the first tokens of a text.
    Prompt(SequenceId, u32, u32),
    /// Computes a prompt and ends it, a few times.
    Ping(u32, u32),
    Fork(SequenceId, SequenceId),
    Truncate(SequenceId, u32),
    Release(SequenceId),
    /// Tokens without ids, committed or dropped.
    Step(Vec<(SequenceId, u32)>, bool),
    /// Tokens of each sequence's text.
    Tokens(Vec<(SequenceId, u32)>, bool),
    /// A step with a count at a bound, or far beyond it; rolled back if it begins.
    Extreme(SequenceId, Count, u32),
    FailNext(u64),
    Reset,
    Recalibrate(bool),
    Leak(Vec<(SequenceId, u32)>, bool),
    /// Begins a step that is held during other operations.
    Hold(Vec<(SequenceId, u32)>),
    /// Adds a sequence to the held step.
    Join(SequenceId, u32),
    Finish(Finish),
    Query(SequenceId, u32),
    Hook(Hook),
}

/// The kind of an extreme count.
#[derive(Debug, Clone, Copy)]
pub(super) enum Count {
    Tokens,
    Queries,
    Drafts,
    Lookahead,
}

/// The end of a held step.
#[derive(Debug, Clone, Copy)]
pub(super) enum Finish {
    Commit,
    /// Accepts this many tokens of each entry, at most all.
    Accept(u32),
    RollBack,
}

/// Limit for bytes of tables and plans of these small caches, whatever counts are passed.
const BYTES_MAX: usize = 1 << 20;

pub(super) fn operation() -> impl Strategy<Value = Operation> {
    let sequence = || (0..SEQ.len()).prop_map(|i| SEQ[i]);
    let inputs = || prop::collection::vec((sequence(), 1..9_u32), 1..4);
    prop_oneof![
        3 => (sequence(), 0..6_u32).prop_map(|(s, n)| Operation::Start(s, n)),
        3 => (sequence(), 0..9_u32, 0..3_u32).prop_map(|(s, n, t)| Operation::Prompt(s, n, t)),
        2 => (1..8_u32, 0..3_u32).prop_map(|(n, t)| Operation::Ping(n, t)),
        2 => (sequence(), sequence()).prop_map(|(a, b)| Operation::Fork(a, b)),
        2 => (sequence(), 0..20_u32).prop_map(|(s, n)| Operation::Truncate(s, n)),
        2 => sequence().prop_map(Operation::Release),
        4 => (inputs(), any::<bool>()).prop_map(|(i, commit)| Operation::Step(i, commit)),
        6 => (inputs(), 0..4_u32).prop_map(|(i, n)| Operation::Tokens(i, n > 0)),
        1 => (sequence(), count(), extreme()).prop_map(|(s, c, n)| Operation::Extreme(s, c, n)),
        1 => (0..4_u64).prop_map(Operation::FailNext),
        1 => Just(Operation::Reset),
        1 => any::<bool>().prop_map(Operation::Recalibrate),
        1 => (inputs(), any::<bool>()).prop_map(|(i, writes)| Operation::Leak(i, writes)),
        1 => (sequence(), 1..3_u32).prop_map(|(s, n)| Operation::Query(s, n)),
        3 => inputs().prop_map(Operation::Hold),
        1 => (sequence(), 1..9_u32).prop_map(|(s, n)| Operation::Join(s, n)),
        4 => finish().prop_map(Operation::Finish),
        12 => hook().prop_map(Operation::Hook),
    ]
}

fn count() -> impl Strategy<Value = Count> {
    prop_oneof![
        Just(Count::Tokens),
        Just(Count::Queries),
        Just(Count::Drafts),
        Just(Count::Lookahead),
    ]
}

fn finish() -> impl Strategy<Value = Finish> {
    prop_oneof![Just(Finish::Commit), (0..9_u32).prop_map(Finish::Accept), Just(Finish::RollBack),]
}

fn extreme() -> impl Strategy<Value = u32> {
    let around = |n: u32| n.saturating_sub(2)..=n.saturating_add(2);
    prop_oneof![around(2), around(16), around(24), around(1 << 16), around(u32::MAX)]
}

/// Returns the first `len` tokens of a text; texts have common beginnings.
fn text(number: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| if at < 3 { at } else { at + 100 * number }).collect()
}

/// The texts of sequences, and the blocks that may be cached because of them.
#[derive(Debug, Default)]
struct Model {
    /// Text of each sequence.
    texts: BTreeMap<SequenceId, u32>,
    /// Contents of all blocks so far, by group: the tokens up to a block's end.
    contents: BTreeSet<(u8, Vec<u32>)>,
    /// The held step.
    held: Option<Held>,
    hooks: Hooks,
}

/// A held step: new tokens of each sequence, and the bookkeeping before it.
#[derive(Debug)]
struct Held {
    entries: Vec<(SequenceId, u32)>,
    before: Books,
}

impl Model {
    fn apply(
        &mut self,
        cache: &mut KvCache<NullBackend>,
        operation: &Operation,
    ) -> Result<(), CacheError> {
        match operation {
            Operation::Start(s, n) => {
                cache.start(*s, &[], StartOptions::default().with_reserve(*n))?;
                self.texts.insert(*s, 0);
            }
            Operation::Prompt(s, n, number) => {
                cache.start(*s, &text(*number, *n), StartOptions::default())?;
                self.texts.insert(*s, *number);
            }
            Operation::Ping(n, number) => {
                for _ in 0..3 {
                    self.ping(cache, &text(*number, *n))?;
                }
            }
            Operation::Fork(a, b) => {
                cache.fork(*a, *b)?;
                self.texts.insert(*b, self.texts[a]);
            }
            Operation::Truncate(s, n) => {
                cache.truncate(*s, *n)?;
                self.note(cache, *s);
            }
            Operation::Release(s) => cache.release(*s)?,
            Operation::Step(inputs, is_committed) => {
                let inputs: Vec<_> = inputs.iter().map(|&(s, n)| StepInput::count(s, n)).collect();
                self.step(cache, &inputs, *is_committed)?;
            }
            Operation::Tokens(inputs, is_committed) => {
                let tokens = self.tokens(cache, inputs);
                let inputs: Vec<_> = tokens.iter().map(|(s, t)| StepInput::tokens(*s, t)).collect();
                self.step(cache, &inputs, *is_committed)?;
            }
            Operation::Extreme(sequence, count, n) => {
                let input = match count {
                    Count::Tokens => StepInput::count(*sequence, *n),
                    Count::Queries => StepInput::query(*sequence, *n),
                    Count::Drafts => StepInput::count(*sequence, 2).with_drafts(*n),
                    Count::Lookahead => StepInput::count(*sequence, 1).with_lookahead(*n),
                };
                self.step(cache, &[input], false)?;
            }
            Operation::FailNext(more) => cache.backend().control().fail_after(*more),
            Operation::Reset => cache.reset()?,
            Operation::Recalibrate(other) => {
                let key = cache.state().encoding_key();
                let done = cache.recalibrate(calibration(cache.state().spec(), *other));
                assert!(
                    done.is_ok() || cache.state().encoding_key() == key,
                    "half exchanged: {done:?}"
                );
                done?;
            }
            Operation::Leak(inputs, writes) => leak(cache, inputs, *writes)?,
            Operation::Hold(inputs) => self.hold(cache, inputs)?,
            Operation::Join(s, n) => self.join(cache, (*s, *n))?,
            Operation::Finish(finish) => self.finish(cache, *finish),
            Operation::Query(s, n) => {
                let before = books(cache.state());
                cache.begin_step(&[StepInput::query(*s, *n)])?.commit()?;
                assert_same(cache, &before, "queries alone");
            }
            Operation::Hook(call) => self.hook(cache, call)?,
        }
        Ok(())
    }

    fn hook(&mut self, cache: &mut KvCache<NullBackend>, call: &Hook) -> Result<(), CacheError> {
        let groups = cache.state().spec().groups().to_vec();
        let Self { hooks, contents, .. } = self;
        hooks.apply(cache, call, text, |number, upto| {
            for (group, id) in groups.iter().zip(0..) {
                let map = group.slot_map();
                let ends = (1..=map.full_blocks(upto)).map(|blocks| map.tokens(blocks));
                contents.extend(ends.map(|end| (id, text(number, end))));
                // The last block may be partial.
                contents.insert((id, text(number, upto)));
            }
        })
    }

    fn step(
        &mut self,
        cache: &mut KvCache<NullBackend>,
        inputs: &[StepInput<'_>],
        is_committed: bool,
    ) -> Result<(), CacheError> {
        let before = books(cache.state());
        let mut step = cache.begin_step(inputs)?;
        if !is_committed {
            step.roll_back();
            assert_rolled_back(cache, &before, "rolled back");
            return Ok(());
        }
        write_all(&mut step)?;
        step.commit()?;
        for input in inputs {
            self.note(cache, input.sequence);
        }
        Ok(())
    }

    /// Runs a step with the next tokens of each sequence's text.
    fn tokens(
        &self,
        cache: &KvCache<NullBackend>,
        inputs: &[(SequenceId, u32)],
    ) -> Vec<(SequenceId, Vec<u32>)> {
        let tokens = |&(s, n): &(SequenceId, u32)| {
            let len = cache.state().seq_len(s).unwrap_or(0);
            let all = text(self.texts.get(&s).copied().unwrap_or(0), len + n);
            (s, all[to_usize(len)..].to_vec())
        };
        inputs.iter().map(tokens).collect()
    }

    fn hold(
        &mut self,
        cache: &mut KvCache<NullBackend>,
        inputs: &[(SequenceId, u32)],
    ) -> Result<(), CacheError> {
        let before = books(cache.state());
        let tokens = self.tokens(cache, inputs);
        let list: Vec<_> = tokens.iter().map(|(s, t)| StepInput::tokens(*s, t)).collect();
        cache.begin_step(&list)?.hold();
        self.held = Some(Held { entries: Vec::new(), before });
        for entry in inputs {
            self.note_held(cache, *entry);
        }
        Ok(())
    }

    fn join(
        &mut self,
        cache: &mut KvCache<NullBackend>,
        entry: (SequenceId, u32),
    ) -> Result<(), CacheError> {
        let tokens = self.tokens(cache, &[entry]);
        let Some(mut step) = cache.held() else {
            return Ok(());
        };
        let added = step.add(StepInput::tokens(entry.0, &tokens[0].1));
        step.hold();
        added?;
        self.note_held(cache, entry);
        Ok(())
    }

    /// Records an entry of the held step, whose blocks may be published before they are written.
    fn note_held(&mut self, cache: &KvCache<NullBackend>, (sequence, n): (SequenceId, u32)) {
        self.held.as_mut().unwrap().entries.push((sequence, n));
        self.note_to(cache, sequence, cache.state().seq_len(sequence).unwrap() + n);
    }

    /// Ends the held step; after a device failure it must be rolled back.
    fn finish(&mut self, cache: &mut KvCache<NullBackend>, finish: Finish) {
        let Some(Held { entries, before }) = self.held.take() else {
            assert!(cache.held().is_none());
            return;
        };
        let lens = entries.iter().map(|(s, n)| cache.state().seq_len(*s).unwrap() + n);
        let lens: Vec<_> = lens.collect();
        let accepted: Vec<_> = entries
            .iter()
            .map(|(_, n)| match finish {
                Finish::Accept(most) => most.min(*n),
                Finish::Commit | Finish::RollBack => *n,
            })
            .collect();
        let mut step = cache.held().unwrap();
        let ended = write_all(&mut step).and_then(|()| match finish {
            Finish::Commit => step.commit(),
            Finish::Accept(_) => step.commit_accepted(&accepted),
            Finish::RollBack => {
                step.roll_back();
                Ok(())
            }
        });
        if ended.is_err() || matches!(finish, Finish::RollBack) {
            return assert_rolled_back(cache, &before, finish);
        }
        for (((s, n), kept), len) in entries.iter().zip(accepted).zip(lens) {
            assert_eq!(cache.state().seq_len(*s), Some(len - n + kept));
            self.note(cache, *s);
        }
    }

    /// Records the possible content of a sequence's blocks.
    fn note(&mut self, cache: &KvCache<NullBackend>, sequence: SequenceId) {
        self.note_to(cache, sequence, cache.state().seq_len(sequence).unwrap());
    }

    fn note_to(&mut self, cache: &KvCache<NullBackend>, sequence: SequenceId, len: u32) {
        for (group, id) in cache.state().spec().groups().iter().zip(0..) {
            for end in 1..=len {
                self.note_block((id, group), &text(self.texts[&sequence], end), end == len);
            }
        }
    }

    fn note_block(&mut self, (id, group): (u8, &GroupSpec), tokens: &[u32], is_last: bool) {
        let (map, len) = (group.slot_map(), u32::try_from(tokens.len()).unwrap());
        if is_last || map.tokens(map.full_blocks(len)) == len {
            self.contents.insert((id, tokens.to_vec()));
        }
    }

    /// Repeats a request; without free blocks it ends at once.
    fn ping(&mut self, cache: &mut KvCache<NullBackend>, prompt: &[u32]) -> Result<(), CacheError> {
        let id = SequenceId(99);
        cache.start(id, prompt, StartOptions::default())?;
        let ran = cache.begin_step(&[StepInput::prompt(id, prompt)]);
        let ran = ran.and_then(|mut step| {
            write_all(&mut step)?;
            step.commit()
        });
        if ran.is_ok() {
            for (group, id) in cache.state().spec().groups().iter().zip(0..) {
                for end in 1..=prompt.len() {
                    self.note_block((id, group), &prompt[..end], end == prompt.len());
                }
            }
        }
        cache.release(id)
    }

    fn check(&self, cache: &KvCache<NullBackend>) {
        for group in 0..u8::try_from(cache.state().spec().groups().len()).unwrap() {
            let seen = self.contents.iter().filter(|(id, _)| *id == group).count();
            let cached = cache.state().pool(GroupId(group)).unwrap().index().len();
            assert!(cached <= seen, "{cached} blocks are cached, {seen} contents were there");
        }
    }
}

/// Begins a step and leaks it; the next call rolls it back.
fn leak(
    cache: &mut KvCache<NullBackend>,
    inputs: &[(SequenceId, u32)],
    writes: bool,
) -> Result<(), CacheError> {
    let inputs: Vec<_> = inputs.iter().map(|&(s, n)| StepInput::count(s, n)).collect();
    let before = books(cache.state());
    let mut step = cache.begin_step(&inputs)?;
    let written = if writes { write_all(&mut step) } else { Ok(()) };
    std::mem::forget(step);
    cache.queue_mut();
    assert_rolled_back(cache, &before, "leaked");
    written
}

/// Checks that everything is as before.
fn assert_same(cache: &KvCache<NullBackend>, before: &Books, what: impl std::fmt::Debug) {
    assert_eq!(&books(cache.state()), before, "{what:?}");
}

/// Checks that everything is as before a step that began, except blocks that left a window when it
/// began.
fn assert_rolled_back(cache: &KvCache<NullBackend>, before: &Books, what: impl std::fmt::Debug) {
    let now = books(cache.state());
    if now.2 == before.2 {
        assert_eq!(&now, before, "{what:?}");
        return;
    }
    assert_eq!(now.0, before.0, "{what:?}: lengths and tables");
    for (now, before) in now.2.iter().flatten().zip(before.2.iter().flatten()) {
        assert!(now.end >= before.end, "{what:?}: a window is left and stays so");
    }
    let fewer = now.1.iter().flatten().zip(before.1.iter().flatten()).all(|(now, old)| now <= old);
    assert!(fewer, "{what:?}: blocks have no other holders");
}

/// Returns a calibration with one mean for all keys.
fn calibration(spec: &CacheSpec, other: bool) -> Calibration {
    let layer = |layer| {
        let (group, _) = spec.locate(LayerId(layer)).unwrap();
        let [k, _] = spec.groups()[usize::from(group.0)].layouts();
        let values = usize::try_from(k.num_kv_heads() * k.head_dim()).unwrap();
        let mean = vec![if other { 1.0 } else { 0.5 }; values];
        LayerCalibration {
            k: crate::calibration::PlaneCalibration { mean, ..Default::default() },
            ..Default::default()
        }
    };
    Calibration::new((0..spec.num_layers()).map(layer).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn random_operations_keep_the_state_consistent(
        operations in prop::collection::vec(operation(), 1..60),
        wipe in any::<bool>(),
    ) {
        run_operations(&mut two_groups(wipe), &operations);
    }

    #[test]
    fn random_operations_with_early_publication_keep_the_state_consistent(
        operations in prop::collection::vec(operation(), 1..60),
        wipe in any::<bool>(),
    ) {
        run_operations(&mut two_groups_with(wipe, crate::spec::PublishAt::Begin), &operations);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn random_operations_with_windows_keep_the_state_consistent(
        operations in prop::collection::vec(operation(), 1..60),
        (slack, prefix) in (0..6_u32, 0..3_u32),
    ) {
        let int8 = crate::KvFormat::Int8(crate::Scaling::Row);
        let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(4).format(int8);
        let spec = spec.paged(4, 12).window_left(5).window_slack(slack).sink_tokens(1);
        let spec = spec.full_precision_prefix(prefix).changes(200).group([1], |group| {
            group.paged(3, 16).window_left(3)
        });
        let mut cache = KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap();
        run_operations(&mut cache, &operations);
    }
}

/// Runs operations; each applies whole or changes nothing.
pub(super) fn run_operations(cache: &mut KvCache<NullBackend>, operations: &[Operation]) {
    use Operation::{Extreme, Hold, Hook, Join, Leak, Ping, Query, Step, Tokens};
    let mut model = Model::default();
    for operation in operations {
        let before = books(cache.state());
        let result = model.apply(cache, operation);
        // Hooks of tiers stand even if the device failed; all else applies whole or not at all.
        match (result, operation) {
            (Err(CacheError::Device(_)), Hook(_)) | (Ok(()), _) => {}
            // It began before the device failed.
            (
                Err(CacheError::Device(_)),
                Step(..) | Tokens(..) | Hold(_) | Query(..) | Leak(..) | Extreme(..) | Join(..),
            ) => assert_rolled_back(cache, &before, operation),
            (Err(_), Ping(..)) => {
                // Its sequence may have begun before the device failed.
                let _ = cache.release(SequenceId(99));
            }
            (Err(_), _) => assert_same(cache, &before, operation),
        }
        model.check(cache);
        check_invariants(cache.state());
        assert!(cache.plan_bytes() < BYTES_MAX, "{} bytes", cache.plan_bytes());
    }
    if model.held.is_some() {
        model.finish(cache, Finish::RollBack);
        check_invariants(cache.state());
    }
    model.hooks.check_no_leak(cache);
    check_invariants(cache.state());
}
