//! Stateful tests: operation sequences on a cache with prefix reuse, read from bytes, so that
//! random tests and a fuzzer share them.
//!
//! Bytes choose a small geometry, then one operation after another until none are left. After each
//! operation the visible state is compared with a model that knows no blocks: for every sequence a
//! list of prefix hashes, one per token, each standing for all tokens up to it. The rows that a
//! device returns must be those made from the hashes, so a row of another sequence's tokens is
//! always noticed.
//!
//! After every operation:
//!
//! - every row that a sequence can read was made from its own prefix;
//! - every block has as many holders as tables and pins list it, and is empty, idle or held;
//! - the text of a running sequence is all of it, without drafts that are not accepted yet;
//! - the published prefix of a running sequence is found (groups without a window);
//! - a consumer of the events, a snapshot and the index agree, also where events are lost;
//! - the eviction policy knows exactly which blocks are cached and which of them are idle, evicted
//!   no block of a higher level while one of a lower level was idle, and evicted the oldest one
//!   where that is its rule;
//! - a refused call changed nothing; a step that was dropped or leaked, or in which the device
//!   failed, changed nothing but the cached content;
//! - blocks that were copied to host memory have the same rows when an import brings them back;
//! - `probe`, `check_admission` and `blocks_for_step` predicted the outcome, to the block.
//!
//! Half of the runs store f32, whose rows are read back to the bit. The others store 16 bits or
//! codes, with a full-precision prefix, a tail or block means, and with windows. Their K and V are
//! 1 and -1, so that the signs of 32 values are the hash. `l3` and `l3-g32`, whose errors may flip
//! a sign, are left out, and so are formats with given scales. Recalibration happens up to twice
//! per run and is checked by bytes. The device fails in one operation of six, before or after its
//! work is done. At the end no block is held, nothing is cached after a reset, and wiped blocks are
//! zero.
mod admit;
mod choices;
mod coverage;
mod geometry;
mod invariants;
mod join;
mod layers;
mod leak;
mod operations;
mod policy;
mod recalibrate;
mod repeat;
mod step;
mod tier;

use std::sync::{Arc, Mutex};

use kv_core::backend::AnyBackend;
use kv_core::eviction::ManualClock;
use kv_core::reuse::Pin;
use kv_core::{CacheSpec, GroupId, KvCache, SequenceId};

use crate::case::{At, CaseError};
use crate::consumer::Consumer;
use crate::fault::FaultInjector;
use crate::provenance::PrefixHash;
use choices::{Choices, Options};
pub use coverage::{Behaviour, Coverage};
use policy::{CheckedPolicy, Observations, lock};
use tier::HostTier;

/// If set, each operation is written to standard error before it runs: for panics and hangs.
const TRACE: &str = "KV_CONFORMANCE_TRACE";

/// A sequence in the model.
#[derive(Debug, Clone)]
struct Sequence {
    id: SequenceId,
    options: Options,
    /// The part of the prompt that is not computed yet.
    prompt: Vec<u32>,
    /// Committed tokens; `None` where only a count was given.
    tokens: Vec<Option<u32>>,
    /// The prefix hash of every committed token.
    hashes: Vec<PrefixHash>,
    /// Leading tokens that were published for reuse.
    published: u32,
    /// Leading tokens that are text: drafts are from the next step on, or when they are accepted.
    certain: u32,
    /// Whether the sequence publishes anything at all.
    publishes: bool,
    /// First token of the block in which a truncation cut codes: no block from there on is
    /// published.
    cut: u32,
    /// Shortest length that a truncation is always allowed to, whatever left the windows.
    floor: usize,
    /// Leading tokens without rows in a layer, because it was allocated later.
    missing_rows: Vec<(u16, usize)>,
}

/// A cache, its model, and the coverage of the run.
#[derive(Debug)]
struct StatefulTest {
    /// The device below the cache, which fails on demand.
    faults: FaultInjector<AnyBackend>,
    backend: AnyBackend,
    cache: KvCache,
    spec: CacheSpec,
    clock: Arc<ManualClock>,
    /// Observations of the eviction policies, by group.
    observed: Vec<Arc<Mutex<Observations>>>,
    /// Layers that have memory.
    layers: Vec<u16>,
    sequences: Vec<Sequence>,
    pins: Vec<Pin>,
    /// The last prompts that were started, for probes.
    prompts: Vec<(Vec<u32>, Options)>,
    consumer: Consumer,
    /// Host memory, by group; none before the first export.
    lower: Vec<HostTier>,
    next_id: u64,
    coverage: Coverage,
    /// The operations so far, if they are recorded.
    trace: Option<Vec<String>>,
}

/// Runs the operations that `bytes` choose; then releases everything and checks for leaks.
///
/// # Errors
/// The first broken guarantee, with the operation that broke it.
pub fn run(backend: &AnyBackend, bytes: &[u8]) -> Result<Coverage, CaseError> {
    run_with_blocks(backend, bytes, None)
}

/// Runs like [`run`], with a given number of blocks.
///
/// # Errors
/// Those of [`run`].
pub fn run_with_blocks(
    backend: &AnyBackend,
    bytes: &[u8],
    num_blocks: Option<u32>,
) -> Result<Coverage, CaseError> {
    let is_traced = std::env::var_os(TRACE).is_some();
    run_traced(backend, bytes, num_blocks, is_traced).or_else(|error| {
        if error.unsupported().is_some() {
            // A format that the device does not support.
            return Ok(Coverage::default());
        }
        // Run again with a trace, for the message.
        run_traced(backend, bytes, num_blocks, true).and(Err(error))
    })
}

fn run_traced(
    backend: &AnyBackend,
    bytes: &[u8],
    num_blocks: Option<u32>,
    is_traced: bool,
) -> Result<Coverage, CaseError> {
    let mut choices = Choices::new(bytes);
    let Some(spec) = geometry::choose(backend, &mut choices, num_blocks)? else {
        return Ok(Coverage::default());
    };
    let mut test = StatefulTest::new(backend, spec, is_traced)?;
    while !choices.is_empty() {
        let done = test.operate(&mut choices).and_then(|()| test.check());
        done.map_err(|error| error.at(test.describe()))?;
        test.coverage.add(Behaviour::Operation);
    }
    test.finish().at("at the end").map_err(|error| error.at(test.describe()))?;
    Ok(test.coverage)
}

impl StatefulTest {
    fn new(backend: &AnyBackend, spec: CacheSpec, is_traced: bool) -> Result<Self, CaseError> {
        let faults = FaultInjector::new(backend.clone());
        let backend = AnyBackend::new(faults.clone());
        let mut cache = KvCache::new(backend.clone(), spec.clone())?;
        let (clock, mut observed) = (Arc::new(ManualClock::new()), Vec::new());
        for (group, id) in spec.groups().iter().zip(0..) {
            let (watch, seen) = CheckedPolicy::new(spec.eviction(), group.num_blocks(), &clock);
            if !cache.set_policy(GroupId(id), Box::new(watch)) {
                return Err("an empty cache refused a policy".into());
            }
            observed.push(seen);
        }
        let mut coverage = Coverage::default();
        geometry::count(&spec, &mut coverage);
        let layers = layers::first(&mut cache)?;
        Ok(Self {
            faults,
            backend,
            cache,
            spec,
            clock,
            observed,
            layers,
            sequences: Vec::new(),
            pins: Vec::new(),
            prompts: Vec::new(),
            consumer: Consumer::default(),
            lower: Vec::new(),
            next_id: 0,
            coverage,
            trace: is_traced.then(Vec::new),
        })
    }

    /// Returns the number of operations so far.
    fn operations(&self) -> u64 {
        self.coverage.count(Behaviour::Operation)
    }
}

#[cfg(test)]
mod tests {
    use crate::provenance;

    #[test]
    fn hashes_are_equal_if_prefixes_are() {
        let options = kv_core::StartOptions::default();
        let [a, b, c] =
            [[1, 2, 3], [1, 2, 4], [5, 2, 3]].map(|t| provenance::prefix_hashes(&t, &options));
        assert_eq!(a[..2], b[..2]);
        assert!(a[2] != b[2] && a.iter().zip(&c).all(|(a, c)| a != c));
        let salted = provenance::prefix_hashes(&[1, 2, 3], &options.with_salt(b"x"));
        assert!(a.iter().zip(&salted).all(|(a, b)| a != b));
    }
}
