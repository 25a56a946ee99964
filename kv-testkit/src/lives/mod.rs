//! Lives of a cache that share prefixes, read from bytes: the same operations for random tests and
//! for a fuzzer.
//!
//! Bytes choose a small geometry, then one operation after another until none are left. After each
//! operation everything that can be seen from outside is held to a model that knows no blocks: a
//! list of names for every sequence, a name standing for all tokens up to it. What a device returns
//! must be what the names say, so a row of another's tokens cannot go unseen.
//!
//! After every operation:
//!
//! - every row that a sequence can read is of its own name;
//! - every block is held as often as tables and pins list it, and is empty, idle or held;
//! - what a running sequence has offered is found (groups without a window);
//! - a consumer of the events, a snapshot and the index agree, also where events are lost;
//! - the eviction policy knows exactly what is cached and what of it is idle, evicted no block of
//!   a higher level while one of a lower level was idle, and the oldest where that is its rule;
//! - a refusal has changed nothing; a step that was dropped or leaked, or in which the device
//!   failed, has changed nothing but what is cached;
//! - `probe`, `check_admission` and `blocks_for_step` predict what happens, to the block.
//!
//! Half of the lives store f32, whose rows come back to the bit. The others have 16 bits or codes,
//! with a full-precision prefix, a tail or means of blocks, and windows beside them. Their K and V
//! are 1 and -1, so that the signs of 32 values are the name. `l3` and `l3-g32`, whose errors may
//! turn a sign, are left out, and so are formats whose scale is given. Constants are exchanged up
//! to twice and compared by bytes. The device fails in one operation of six, before or after its
//! work is done. At the end nothing is held, nothing is cached after a reset, and wiped blocks are
//! zero.
mod admit;
mod check;
mod choose;
mod exchange;
mod geometry;
mod happened;
mod join;
mod layers;
mod leak;
mod play;
mod repeat;
mod step;
mod watch;

use std::sync::{Arc, Mutex};

use kv_core::eviction::ManualClock;
use kv_core::{CacheSpec, GroupId, KvCache, Pin, SequenceId};

use crate::case::{At, CaseError};
use crate::consumer::Consumer;
use crate::device::Device;
use crate::erratic::Erratic;
use crate::named::Name;
use choose::{Bytes, Options};
pub use happened::{Happened, Lived};
use watch::{Watch, Watched, lock};

/// Set, each operation is written to standard error before it runs: for panics and hangs.
const TRACE: &str = "KV_CONFORMANCE_TRACE";

/// A sequence as the model has it.
#[derive(Debug, Clone)]
struct Sequence {
    id: SequenceId,
    options: Options,
    /// Of the prompt, what may still come.
    prompt: Vec<u32>,
    /// Committed tokens; `None` where nobody told them.
    tokens: Vec<Option<u32>>,
    /// One for every committed token.
    names: Vec<Name>,
    /// Leading tokens that were offered to others.
    offered: u32,
    /// Whether it offers anything at all.
    offers: bool,
    /// Of a cut into codes, the first token of its block: no block from there on is offered.
    cut: u32,
    /// Tokens to which it can always be cut back, whatever left its windows.
    floor: usize,
    /// Leading tokens that a layer lacks, because it got memory later.
    lacks: Vec<(u16, usize)>,
}

/// A cache and its model.
#[derive(Debug)]
struct Life<B: Device> {
    backend: Erratic<B>,
    cache: KvCache<Erratic<B>>,
    spec: CacheSpec,
    clock: Arc<ManualClock>,
    /// What was seen of the eviction policies, by group.
    watched: Vec<Arc<Mutex<Watched>>>,
    /// Layers that have memory.
    layers: Vec<u16>,
    sequences: Vec<Sequence>,
    pins: Vec<Pin>,
    /// Prompts that were begun, the last ones, to look up.
    prompts: Vec<(Vec<u32>, Options)>,
    consumer: Consumer,
    next_id: u64,
    lived: Lived,
    /// What happened, where it is wanted.
    trace: Option<Vec<String>>,
}

/// Lives by `bytes`; with none left, ends everything and looks for leaks.
///
/// # Errors
/// The first promise that was broken, and by which operation.
pub fn live<B: Device>(backend: &B, bytes: &[u8]) -> Result<Lived, CaseError> {
    live_in(backend, bytes, None)
}

/// As [`live`], with a given number of blocks.
///
/// # Errors
/// As [`live`].
pub fn live_in<B: Device>(
    backend: &B,
    bytes: &[u8],
    num_blocks: Option<u32>,
) -> Result<Lived, CaseError> {
    let is_told = std::env::var_os(TRACE).is_some();
    live_told(backend, bytes, num_blocks, is_told).or_else(|error| {
        if error.unsupported().is_some() {
            // A format that the device has not.
            return Ok(Lived::default());
        }
        // Once more, to tell how it came to this.
        live_told(backend, bytes, num_blocks, true).and(Err(error))
    })
}

fn live_told<B: Device>(
    backend: &B,
    bytes: &[u8],
    num_blocks: Option<u32>,
    is_told: bool,
) -> Result<Lived, CaseError> {
    let mut bytes = Bytes::new(bytes);
    let Some(spec) = geometry::choose(backend, &mut bytes, num_blocks)? else {
        return Ok(Lived::default());
    };
    let mut life = Life::new(backend, spec, is_told)?;
    while !bytes.is_empty() {
        let done = life.operate(&mut bytes).and_then(|()| life.check());
        done.map_err(|error| error.at(life.describe()))?;
        life.lived.add(Happened::Operated);
    }
    life.end().at("at the end").map_err(|error| error.at(life.describe()))?;
    Ok(life.lived)
}

impl<B: Device> Life<B> {
    fn new(backend: &B, spec: CacheSpec, is_told: bool) -> Result<Self, CaseError> {
        let backend = Erratic::new(backend.clone());
        let mut cache = KvCache::new(backend.clone(), spec.clone())?;
        let (clock, mut watched) = (Arc::new(ManualClock::new()), Vec::new());
        for (group, id) in spec.groups().iter().zip(0..) {
            let (watch, seen) = Watch::new(spec.eviction(), group.num_blocks(), &clock);
            if !cache.set_policy(GroupId(id), Box::new(watch)) {
                return Err("an empty cache refused a policy".into());
            }
            watched.push(seen);
        }
        let mut lived = Lived::default();
        geometry::count(&spec, &mut lived);
        let layers = layers::first(&mut cache)?;
        Ok(Self {
            backend,
            cache,
            spec,
            clock,
            watched,
            layers,
            sequences: Vec::new(),
            pins: Vec::new(),
            prompts: Vec::new(),
            consumer: Consumer::default(),
            next_id: 0,
            lived,
            trace: is_told.then(Vec::new),
        })
    }

    /// What happened so far; operations are numbered by it.
    fn operations(&self) -> u64 {
        self.lived.count(Happened::Operated)
    }
}

#[cfg(test)]
mod tests {
    use kv_core::backend::NullBackend;

    use super::*;
    use crate::device::Shared;
    use crate::named;

    #[test]
    fn names_are_equal_where_prefixes_are() {
        let options = kv_core::StartOptions::default();
        let [a, b, c] = [[1, 2, 3], [1, 2, 4], [5, 2, 3]].map(|t| named::names(&t, &options));
        assert_eq!(a[..2], b[..2]);
        assert!(a[2] != b[2] && a.iter().zip(&c).all(|(a, c)| a != c));
        let salted = named::names(&[1, 2, 3], &options.with_salt(b"x"));
        assert!(a.iter().zip(&salted).all(|(a, b)| a != b));
    }

    /// A device that stores nothing is found out by the first row that is read.
    #[test]
    fn a_device_that_forgets_is_found_out() {
        let device = Shared::new(NullBackend::new());
        let bytes: Vec<u8> = (0..200_u32).map(|i| (i * 37 % 251) as u8).collect();
        let error = live(&device, &bytes).unwrap_err().to_string();
        assert!(error.contains("operation"), "{error}");
    }
}
