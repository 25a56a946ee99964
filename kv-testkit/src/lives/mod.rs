//! Lives of a cache that share prefixes, read from bytes: the same operations for random tests and
//! for a fuzzer.
//!
//! Bytes choose a small geometry, then one operation after another until none are left. After each
//! operation everything that can be seen from outside is held to a model that knows no blocks: a
//! list of names for every sequence, a name standing for all tokens up to it. What a device returns
//! must be what the names say, so a row of another's tokens cannot go unseen.
mod check;
mod choose;
mod play;
mod step;

use kv_core::eviction::Eviction;
use kv_core::{CacheSpec, KvCache, KvFormat, Pin, PrefixReuse, PublishAt, SequenceId};

use crate::case::{At, CaseError};
use crate::consumer::Consumer;
use crate::device::Device;
use crate::named::Name;
use choose::{Bytes, Options};

/// Set, each operation is written to standard error before it runs: for panics and hangs.
const TRACE: &str = "KV_CONFORMANCE_TRACE";

/// What happened in one life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lived {
    /// Operations, the refused included.
    pub operations: u64,
    /// Operations refused for want of blocks.
    pub refused: u64,
    /// Tokens taken over by sequences that began.
    pub reused: u64,
    /// Blocks given up for others.
    pub evictions: u64,
}

impl Lived {
    /// Adds another life.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            operations: self.operations + other.operations,
            refused: self.refused + other.refused,
            reused: self.reused + other.reused,
            evictions: self.evictions + other.evictions,
        }
    }
}

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
}

/// A cache and its model.
#[derive(Debug)]
struct Life<B: Device> {
    backend: B,
    cache: KvCache<B>,
    spec: CacheSpec,
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
    let spec = geometry(&mut bytes, num_blocks)?;
    let mut life = Life {
        backend: backend.clone(),
        cache: KvCache::new(backend.clone(), spec.clone())?,
        spec,
        sequences: Vec::new(),
        pins: Vec::new(),
        prompts: Vec::new(),
        consumer: Consumer::default(),
        next_id: 0,
        lived: Lived::default(),
        trace: is_told.then(Vec::new),
    };
    while !bytes.is_empty() {
        let done = life.operate(&mut bytes).and_then(|()| life.check());
        done.map_err(|error| error.at(life.describe()))?;
        life.lived.operations += 1;
    }
    life.end().at("at the end")?;
    Ok(life.lived)
}

/// A geometry of one or two groups, small enough that blocks are always short.
fn geometry(bytes: &mut Bytes<'_>, num_blocks: Option<u32>) -> Result<CacheSpec, CaseError> {
    let block_size = 1 + bytes.below(4);
    let blocks = 1 + bytes.below(14);
    let blocks = num_blocks.unwrap_or(blocks);
    let reuse = bytes.pick(&[
        PrefixReuse::Partial,
        PrefixReuse::FullBlocks,
        PrefixReuse::Partial,
        PrefixReuse::FullBlocks,
        PrefixReuse::Off,
    ]);
    let publish_at = bytes.pick(&[PublishAt::Begin, PublishAt::Commit]);
    let (kind, window) = (bytes.below(6), bytes.below(10));
    let events = bytes.pick(&[64, 0, 1, 3, 8]) as usize;
    let rest = bytes.next();
    let eviction = bytes.pick(&Eviction::ALL);
    let layers = if kind < 3 { 1 } else { 2 };
    let spec = CacheSpec::builder().layers(layers).kv_heads(1).head_dim(2).format(KvFormat::F32);
    let spec = spec.paged(block_size, blocks);
    let spec = match kind {
        0 | 1 => spec,
        2 => spec.window_left(window).sink_tokens(u32::from(rest >> 6)),
        3 => spec.group([1], |group| group.window_left(window)),
        4 => spec.group([1], |group| group.paged(2 * block_size, blocks.div_ceil(2))),
        _ => spec.group([1], |group| {
            group
                .paged(1 + block_size, blocks)
                .window_left(window)
                .sink_tokens(u32::from(rest >> 6))
        }),
    };
    let spec = spec
        .prefix_reuse(reuse)
        .publish_at(publish_at)
        .eviction(eviction)
        .events(events)
        .max_seq_len(40);
    Ok(spec.wipe_on_release(rest.is_multiple_of(4)).max_sequences(6).build()?)
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
        let salted = named::names(&[1, 2, 3], &options.salt(b"x"));
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
