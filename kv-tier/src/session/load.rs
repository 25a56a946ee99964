//! From a session file to the device.
use std::path::Path;

use kv_core::backend::Backend;
use kv_core::num::{to_u32, to_u64, to_usize};
use kv_core::reuse::PrefixProbe;
use kv_core::{KvCache, StartOptions};

use super::blocks::SessionBlocks;
use super::bring::Bring;
use super::file::SessionFile;
use super::of_cache::{header_of, probe};
use super::{Session, SessionError, SessionHeader};
use crate::chunk::{ChunkSpec, verify};
use crate::identity::Identity;

/// Brings a session back that [`dump`](super::dump) has written: its blocks can be reused from now
/// on, until they are evicted. A sequence that starts on [`Session::tokens`], with
/// [`Session::contents`] and the options given here, finds them.
///
/// Of `options`, salt, adapter and retention count. The file has only a digest of the salt. All
/// of the file is verified before a block is taken; it must not change during the call. The
/// call waits for the disk.
///
/// # Errors
/// [`SessionError::Io`]; [`SessionError::NotASession`], [`SessionError::Version`],
/// [`SessionError::Length`], [`SessionError::HeaderCrc`], [`SessionError::Malformed`] and
/// [`SessionError::Block`] for a file that is none or is damaged; [`SessionError::Model`],
/// [`SessionError::Encoding`], [`SessionError::Salt`], [`SessionError::Adapter`],
/// [`SessionError::Groups`] and [`SessionError::Root`] for one of another cache;
/// [`SessionError::UnknownAdapter`]; [`SessionError::TooLong`]; [`SessionError::NoRoom`];
/// [`SessionError::StepOpen`]; [`SessionError::Chunk`] and [`SessionError::Cache`] as for `dump`.
/// The cache is as before then, except that a device that failed, or a file that changed, may have
/// cost idle blocks.
pub fn load<B: Backend>(
    cache: &mut KvCache<B>,
    identity: &Identity,
    from: &Path,
    options: &StartOptions<'_>,
) -> Result<Session, SessionError> {
    if cache.state().is_step_open() {
        return Err(SessionError::StepOpen);
    }
    let mut file = SessionFile::open(from)?;
    let (tokens, contents) = (file.header.tokens.clone(), file.header.contents.clone());
    let options = options.with_contents(&contents).with_backoff_blocks(0).with_reuse(true);
    check_identity(&header_of(cache, identity, &options)?, &file.header)?;
    let max = cache.state().spec().max_seq_len();
    if tokens.len() > to_usize(max) {
        return Err(SessionError::TooLong { tokens: to_u32(tokens.len()), max });
    }
    let (probe, len) = probe(cache, &tokens, &options);
    let blocks = ChunkSpec::groups_of(cache.state().spec())
        .into_iter()
        .map(|group| SessionBlocks::new(cache, group, identity, (&probe, len)))
        .collect::<Result<Vec<_>, _>>()?;
    verify_blocks(&mut file, &blocks, &probe)?;

    let bring = Bring { blocks: &blocks, probe: &probe };
    if !cache.state().spec().states().is_empty() {
        if let Some(import) = bring.with_state(cache, &mut file)? {
            cache.finish_import(import)?;
        }
        let cached = cache.state().probe(probe.prompt(), options);
        return Ok(Session { tokens, contents, note: file.header.note, cached });
    }
    let first = bring.whole_or_longest(cache, &mut file, len)?;
    // Blocks that a sequence needs besides to compute the last token of the text again: at the
    // beginning of windows.
    let last = bring.whole_or_longest(cache, &mut file, len.saturating_sub(1));
    let finished = first.map_or(Ok(()), |import| cache.finish_import(import));
    match last {
        Ok(Some(import)) => cache.finish_import(import)?,
        Ok(None) | Err(SessionError::NoRoom(_)) => {}
        Err(error) => return Err(error),
    }
    finished?;
    let cached = cache.state().probe(probe.prompt(), options);
    let note = file.header.note;
    Ok(Session { tokens, contents, note, cached })
}

/// Refuses a session of another model, format or tenant.
fn check_identity(own: &SessionHeader, file: &SessionHeader) -> Result<(), SessionError> {
    if own.model != file.model {
        return Err(SessionError::Model { expected: own.model, got: file.model });
    }
    if own.encoding_key != file.encoding_key {
        let (expected, got) = (own.encoding_key, file.encoding_key);
        return Err(SessionError::Encoding { expected, got });
    }
    if own.salt != file.salt {
        return Err(SessionError::Salt);
    }
    if own.adapter != file.adapter {
        return Err(SessionError::Adapter { expected: own.adapter, got: file.adapter });
    }
    Ok(())
}

/// Verifies every block of a file.
fn verify_blocks(
    file: &mut SessionFile,
    all: &[SessionBlocks],
    probe: &PrefixProbe,
) -> Result<(), SessionError> {
    let groups = file.header.groups.clone();
    if groups.len() != all.len() {
        return Err(SessionError::Groups { expected: all.len(), got: groups.len() });
    }
    for (blocks, of) in all.iter().zip(&groups) {
        let group = blocks.group();
        if of.root != blocks.root() || of.is_of_states != blocks.spec().is_of_states() {
            let (expected, got) = (blocks.root(), of.root);
            return Err(SessionError::Root { group, expected, got });
        }
        let (expected, got) = (to_u64(blocks.spec().chunk_bytes()), of.chunk_bytes);
        if expected != got {
            return Err(SessionError::ChunkBytes { group, expected, got });
        }
        let begin = u32::from(blocks.spec().is_of_states());
        let (first, last) = (of.blocks.first(), of.blocks.last());
        if first.is_some_and(|first| first.start < begin)
            || last.is_some_and(|last| last.end > blocks.end())
        {
            return Err(SessionError::Malformed { field: "ranges of blocks" });
        }
    }
    let mut chunk = Vec::new();
    for (group, (blocks, of)) in all.iter().zip(&groups).enumerate() {
        chunk.resize(blocks.spec().chunk_bytes(), 0);
        for block in of.blocks.iter().cloned().flatten() {
            file.read(group, block, &mut chunk)?;
            check_block(&chunk, (blocks, probe), block)?;
        }
    }
    Ok(())
}

/// Verifies one block of a file.
pub(super) fn check_block(
    chunk: &impl AsRef<[u8]>,
    (blocks, probe): (&SessionBlocks, &PrefixProbe),
    block: u32,
) -> Result<(), SessionError> {
    let verified = verify(chunk, &blocks.record(probe, block).expectation());
    let group = blocks.group();
    verified.map(drop).map_err(|source| SessionError::Block { group, block, source })
}
