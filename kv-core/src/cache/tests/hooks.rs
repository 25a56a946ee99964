//! Changes, holds and imports among random operations, as a lower tier makes them.
use proptest::prelude::*;

use super::*;
use crate::cache::state::tests::changes::{Replay, listed, replay};
use crate::error::{CacheError, StateProblem};
use crate::events::Tier;
use crate::num::to_usize;
use crate::reuse::{BlockHold, Import, PrefixProbe};

/// A call of a lower tier. Numbers select one of the blocks, probes or imports that there are.
#[derive(Debug, Clone)]
pub(super) enum Hook {
    Drain,
    Hold(usize),
    Release(usize),
    /// Probes the first tokens of a text.
    Probe(u32, u32),
    /// Without the last, partial block or with it.
    Reserve(usize, u32, bool),
    Publish(usize, u32),
    Finish(usize),
    /// Ends all imports and holds.
    End,
}

/// The holds, probes and imports of the tier.
#[derive(Debug, Default)]
pub(super) struct Hooks {
    stored: Replay,
    holds: Vec<BlockHold>,
    /// Number of the text, and its probe.
    probes: Vec<(u32, PrefixProbe)>,
    imports: Vec<(u32, Import)>,
}

pub(super) fn hook() -> impl Strategy<Value = Hook> {
    let any = || 0..8_usize;
    prop_oneof![
        2 => Just(Hook::Drain),
        3 => any().prop_map(Hook::Hold),
        2 => any().prop_map(Hook::Release),
        3 => (0..3_u32, 1..20_u32).prop_map(|(number, len)| Hook::Probe(number, len)),
        5 => (any(), 0..20_u32, proptest::bool::ANY)
            .prop_map(|(n, upto, with_part)| Hook::Reserve(n, upto, with_part)),
        4 => (any(), 0..20_u32).prop_map(|(n, upto)| Hook::Publish(n, upto)),
        2 => any().prop_map(Hook::Finish),
        1 => Just(Hook::End),
    ]
}

/// Returns item `n` of a list, counted round.
fn nth<T>(list: &[T], n: usize) -> Option<usize> {
    n.checked_rem(list.len())
}

impl Hooks {
    /// Applies one call. `text` returns the first tokens of a text; `import` is called with the
    /// number of a text of which the given number of tokens may be cached from now on.
    pub(super) fn apply(
        &mut self,
        cache: &mut KvCache<NullBackend>,
        hook: &Hook,
        text: fn(u32, u32) -> Vec<u32>,
        mut import: impl FnMut(u32, u32),
    ) -> Result<(), CacheError> {
        match *hook {
            Hook::Drain => self.drain(cache),
            Hook::Hold(n) => {
                let all: Vec<_> = listed(cache.state()).into_iter().collect();
                let Some(((group, block), key)) = nth(&all, n).map(|at| all[at]) else {
                    return Ok(());
                };
                let hold = cache.hold_block(group, block, key)?;
                self.holds.push(hold.expect("it is listed with this key"));
            }
            Hook::Release(n) => {
                let Some(at) = nth(&self.holds, n) else { return Ok(()) };
                if cache.state().is_step_open() {
                    cache.release_holds()?;
                }
                if n.is_multiple_of(2) {
                    // Something reads the block still.
                    let fence = cache.queue_mut().submit()?;
                    cache.release_hold_after(self.holds.swap_remove(at), &fence)?;
                } else {
                    cache.release_hold(self.holds.swap_remove(at))?;
                }
            }
            Hook::Probe(number, len) => {
                self.probes.truncate(3);
                let probe = cache.state().probe_keys(&text(number, len), &StartOptions::default());
                self.probes.insert(0, (number, probe));
            }
            Hook::Reserve(n, upto, with_part) => self.reserve(cache, n, upto, with_part)?,
            Hook::Publish(n, upto) => {
                let Some(at) = nth(&self.imports, n) else { return Ok(()) };
                let (number, open) = &mut self.imports[at];
                let upto = upto.min(open.upto());
                let done = cache.publish_import(open, upto, Tier::Disk);
                if !matches!(done, Err(CacheError::Plan(_))) {
                    import(*number, upto);
                    if open.blocks().is_empty() {
                        let prompt = text(*number, open.upto() + 1);
                        let found = cache.state().probe(&prompt, StartOptions::default());
                        assert!(found >= open.hit(), "{found} of {} tokens", open.hit());
                    }
                }
                done?;
            }
            Hook::Finish(n) => {
                let Some(at) = nth(&self.imports, n) else { return Ok(()) };
                if cache.state().is_step_open() {
                    cache.finish_imports()?;
                }
                cache.finish_import(self.imports.swap_remove(at).1)?;
            }
            Hook::End => {
                if cache.state().is_step_open() {
                    cache.finish_imports()?;
                }
                return self.end(cache);
            }
        }
        Ok(())
    }

    fn reserve(
        &mut self,
        cache: &mut KvCache<NullBackend>,
        n: usize,
        upto: u32,
        with_part: bool,
    ) -> Result<(), CacheError> {
        let Some(at) = nth(&self.probes, n) else { return Ok(()) };
        let (number, probe) = &self.probes[at];
        let (before, upto) = (books(cache.state()), upto.min(probe.limit()));
        let reserve =
            if with_part { KvCache::reserve_import_with_part } else { KvCache::reserve_import };
        match reserve(cache, probe, upto) {
            Ok(import) => {
                check_reserved(cache, &import);
                self.imports.push((*number, import));
                Ok(())
            }
            Err(failed) => {
                assert_eq!(books(cache.state()), before, "{failed}");
                Err(failed)
            }
        }
    }

    fn drain(&mut self, cache: &mut KvCache<NullBackend>) {
        if cache.state().spec().changes() == 0 {
            return;
        }
        let mut changes = Vec::new();
        if cache.drain_changes(&mut changes) {
            replay(&mut self.stored, &changes);
        } else {
            assert!(changes.is_empty());
            self.stored = listed(cache.state());
        }
        assert_eq!(self.stored, listed(cache.state()), "changes tell what is stored");
    }

    /// Ends all imports and holds, also those that were dropped.
    fn end(&mut self, cache: &mut KvCache<NullBackend>) -> Result<(), CacheError> {
        let released = cache.release_holds();
        let finished = cache.finish_imports();
        for (_, import) in self.imports.drain(..) {
            let ended = cache.finish_import(import).unwrap_err();
            let CacheError::Plan(PlanError::State { problem, .. }) = ended else {
                panic!("{ended}")
            };
            assert_eq!(problem, StateProblem::Ended);
        }
        self.holds.clear();
        assert_eq!((cache.state().num_holds(), cache.state().num_imports()), (0, 0));
        released.and(finished).map(|_| ())
    }

    /// Checks that every block is free once nothing is held and no sequence is live.
    pub(super) fn check_no_leak(&mut self, cache: &mut KvCache<NullBackend>) {
        // The device may fail to zero blocks, after they were released.
        let _ = self.end(cache);
        let _ = cache.reset();
        assert_eq!(cache.state().num_sequences(), 0);
        for group in 0..u8::try_from(cache.state().spec().groups().len()).unwrap() {
            let pool = cache.state().pool(GroupId(group)).unwrap();
            assert_eq!(pool.num_free(), pool.num_blocks(), "group {group}");
        }
        self.drain(cache);
    }
}

/// Checks that the blocks of an import are in no other hand and hold no content.
fn check_reserved(cache: &KvCache<NullBackend>, import: &Import) {
    let mut seen = std::collections::BTreeSet::new();
    for of in import.blocks() {
        let pool = cache.state().pool(of.group).unwrap();
        assert_eq!(pool.holders(of.block), 1, "{of:?}");
        assert!(!pool.is_stored(of.block) && seen.insert((of.group, of.block)), "{of:?}");
        assert!(to_usize(of.block.0) < to_usize(pool.num_blocks()));
        let tables =
            cache.state().sequences().map(|s| cache.state().block_table(s, of.group).unwrap());
        let is_written = |(s, table): (SequenceId, &[BlockId])| {
            let vacant = cache.state().vacant_entries(s, of.group).unwrap();
            let held = table.iter().zip(0..).filter(|(_, at)| !vacant.contains(at));
            held.into_iter().any(|(block, _)| *block == of.block)
        };
        assert!(!cache.state().sequences().zip(tables).any(is_written), "{of:?} is a sequence's");
    }
}
