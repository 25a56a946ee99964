//! The queries of `dump` and `load` on a cache.
use std::time::{SystemTime, UNIX_EPOCH};

use kv_core::backend::{Backend, ChunkShape};
use kv_core::invariant::Invariant;
use kv_core::num::to_u32;
use kv_core::reuse::PrefixProbe;
use kv_core::{KvCache, StartOptions};

use super::{SessionError, SessionHeader};
use crate::chunk::ChunkSpec;
use crate::identity::Identity;

/// Chunks in host memory while a file is written or read.
pub(super) const CHUNKS: u32 = 4;
pub(super) const GROUP: &str = "groups are those of the cache";
pub(super) const TAKEN: &str = "chunks are dropped before others are taken";

/// Describes a session of a cache, without text and blocks.
pub(super) fn header_of<B: Backend>(
    cache: &KvCache<B>,
    identity: &Identity,
    options: &StartOptions<'_>,
) -> Result<SessionHeader, SessionError> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    Ok(SessionHeader {
        model: identity.model(),
        adapter: identity.adapter_digest(options.adapter())?,
        encoding_key: cache.state().encoding_key(),
        salt: identity.salt_digest(options.salt()),
        written_at: now,
        groups: Vec::new(),
        tokens: Vec::new(),
        contents: Vec::new(),
        note: Vec::new(),
    })
}
/// Probes a text so that all of its tokens may be reused: for a prompt that goes on after it.
pub(super) fn probe<B: Backend>(
    cache: &KvCache<B>,
    tokens: &[u32],
    options: &StartOptions<'_>,
) -> (PrefixProbe, u32) {
    let mut prompt = tokens.to_vec();
    prompt.push(0);
    (cache.state().probe_keys(&prompt, options), to_u32(tokens.len()))
}

/// Makes room in host memory for a few blocks.
pub(super) fn host_pool<B: Backend>(
    cache: &KvCache<B>,
    spec: &ChunkSpec,
) -> Result<B::HostPool, SessionError> {
    let shape = ChunkShape { blocks: 1, header_bytes: to_u32(spec.header_bytes()) };
    let storage = cache.storage(spec.group()).invariant(GROUP);
    Ok(cache.backend().host_pool(storage.view(), shape, CHUNKS)?)
}
