//! From the device to a session file.
use std::fs::File;
use std::io::Write;
use std::path::Path;

use kv_core::backend::{Backend, HostPool, PendingChunk, Queue};
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_u64, to_usize};
use kv_core::reuse::PrefixProbe;
use kv_core::{BlockId, KvCache, SequenceId, StartOptions};

use super::blocks::SessionBlocks;
use super::file::{failed, save};
use super::of_cache::{CHUNKS, GROUP, TAKEN, header_of, host_pool, probe};
use super::{SessionError, SessionInfo};
use crate::chunk::{ChunkSpec, encode_header, zero_unused};
use crate::identity::Identity;

/// Writes a sequence to a file from which [`load`](super::load) brings it back, in this process or
/// another: its tokens that are certain, their blocks, and a note, such as the state of a sampler
/// or a token that no step has written yet. The sequence goes on.
///
/// The file appears whole or not at all, and survives a loss of power once the call has returned.
/// The call waits for the device and for the disk. It takes host memory of four blocks.
///
/// The last block may be partial: the rows after its tokens are zeroed. A sequence that starts on
/// the text reuses every token of it but the last. Where only full blocks are reused
/// ([`PrefixReuse::FullBlocks`](kv_core::spec::PrefixReuse::FullBlocks), or a
/// [tail](kv_core::spec::GroupBuilder::tail)), the sequence computes the tokens after the last full
/// block again. With groups of different block sizes, it computes the tokens after the last
/// position that ends a block in every group, and one block more.
///
/// In a cache with recurrent states the file has the longest kept state of the text, and the rows
/// up to there. The state behind its last token is kept first
/// ([`KvCache::keep_state`]), if there is room and its length is on the grid.
///
/// ```
/// use kv::backend::NullBackend;
/// use kv::{CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
/// use kv::tier::{Identity, ModelDigest, session};
///
/// let spec = || CacheSpec::builder().layers(1).kv_heads(1).head_dim(8).paged(4, 16).build();
/// let identity = Identity::new(ModelDigest::of_bytes(b"weights"));
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("chat.kvs");
///
/// let mut cache = KvCache::new(NullBackend::new(), spec()?)?;
/// let (seq, text) = (SequenceId(0), [1, 2, 3, 4, 5, 6]);
/// cache.start(seq, &text, StartOptions::default())?;
/// let mut step = cache.begin_step(&[StepInput::tokens(seq, &text)])?;
/// # let zeros = [0.0_f32; 48];
/// # let rows = || kv::TensorView::host(&zeros, &[6, 1, 8]);
/// // Write and attend.
/// # step.write(0, rows(), rows(), kv::Axes::Thd)?;
/// step.commit()?;
/// session::dump(&mut cache, &identity, seq, b"temperature 0.7", &path)?;
///
/// // Later, in another process:
/// let mut cache = KvCache::new(NullBackend::new(), spec()?)?;
/// let session = session::load(&mut cache, &identity, &path, &StartOptions::default())?;
/// assert_eq!((&session.tokens[..], &session.note[..]), (&text[..], &b"temperature 0.7"[..]));
/// let mut prompt = session.tokens.clone();
/// prompt.push(7);
/// let options = StartOptions::default().with_contents(&session.contents);
/// assert_eq!(cache.start(seq, &prompt, options)?, 6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`SessionError::UnknownSequence`], [`SessionError::NotReusable`],
/// [`SessionError::UnknownAdapter`], [`SessionError::TooMany`], [`SessionError::Encode`];
/// [`SessionError::Io`]; [`SessionError::StepOpen`]; [`SessionError::Chunk`] for blocks that cannot
/// be chunked; [`SessionError::Cache`] if the device failed. A file that was there before stays
/// then.
pub fn dump<B: Backend>(
    cache: &mut KvCache<B>,
    identity: &Identity,
    sequence: SequenceId,
    note: &[u8],
    to: &Path,
) -> Result<SessionInfo, SessionError> {
    if cache.state().is_step_open() {
        return Err(SessionError::StepOpen);
    }
    if !cache.state().contains(sequence) {
        return Err(SessionError::UnknownSequence { sequence });
    }
    cache.keep_state(sequence)?;
    let text = cache.state().sequence_text(sequence);
    let text = text.ok_or(SessionError::NotReusable { sequence })?;
    let options = StartOptions::default().with_salt(text.salt).with_contents(&text.contents);
    let options = text.adapter.map_or(options, |adapter| options.with_adapter(adapter));
    let (probe, len) = probe(cache, &text.tokens, &options);
    let mut header = header_of(cache, identity, &options)?;
    (header.tokens, header.contents) = (text.tokens, text.contents.into_owned());
    header.note = note.to_vec();

    let kept = cache.state().find_snapshots(&probe, len);
    let has_states = !cache.state().spec().states().is_empty();
    // Rows behind the last state are no use.
    let end = kept.as_ref().map_or(if has_states { 0 } else { len }, |(at, _)| *at);
    let (mut all, mut is_whole) = (Vec::new(), end == len);
    for group in ChunkSpec::groups_of(cache.state().spec()) {
        let blocks = SessionBlocks::new(cache, group, identity, (&probe, len))?;
        if blocks.spec().is_of_states() {
            let (at, found) = kept.as_ref().map_or((0, &[][..]), |(at, found)| (*at, found));
            let found: Vec<_> = found
                .iter()
                .filter(|(of, _)| *of == group)
                .map(|(_, block)| (at, *block))
                .collect();
            header.groups.push(blocks.group_of(&found));
            all.push((blocks, found));
            continue;
        }
        let mut asked = blocks.needed(&probe, end);
        let at = |index: u32| Some((index, blocks.on_device(cache, sequence, index)?));
        is_whole &= asked.iter().all(|index| at(*index).is_some());
        // For a sequence that computes the last token of the text again.
        if !has_states {
            asked.extend(blocks.needed(&probe, len.saturating_sub(1)));
        }
        let found: Vec<_> = asked.into_iter().filter_map(at).collect();
        header.groups.push(blocks.group_of(&found));
        all.push((blocks, found));
    }
    let bytes = header.to_bytes()?;
    save(to, |file| {
        file.write_all(&bytes).map_err(|source| failed("write", to, source))?;
        all.iter().try_for_each(|(blocks, found)| {
            write_blocks(cache, (&mut *file, to), (blocks, &probe), (found, header.written_at))
        })
    })?;
    let blocks = all.iter().map(|(_, found)| to_u32(found.len()));
    let chunks = header.chunk_bytes().invariant("a header that was written counts its chunks");
    Ok(SessionInfo {
        tokens: len,
        blocks: blocks.sum(),
        bytes: to_u64(bytes.len()) + chunks,
        is_whole,
    })
}

/// Copies blocks of one group to host memory, a few at a time, and writes them. The call waits for
/// each copy, so that no block needs a hold.
fn write_blocks<B: Backend>(
    cache: &mut KvCache<B>,
    (file, to): (&mut File, &Path),
    (blocks, probe): (&SessionBlocks, &PrefixProbe),
    (found, written_at): (&[(u32, BlockId)], u64),
) -> Result<(), SessionError> {
    let mut pool = host_pool(cache, blocks.spec())?;
    let after = cache.queue_mut().submit()?;
    let storage = cache.storage(blocks.group()).invariant(GROUP);
    for batch in found.chunks(to_usize(CHUNKS)) {
        let mut copies = Vec::with_capacity(batch.len());
        for (index, block) in batch {
            let chunk = pool.take().invariant(TAKEN);
            copies.push((*index, pool.copy_out(&after, storage.view(), &[*block], chunk, 0)?));
        }
        for (index, copy) in copies {
            let mut chunk = copy.wait()?;
            let record = blocks.record(probe, index);
            zero_unused(blocks.spec(), chunk.as_mut(), 0, record.end);
            encode_header(chunk.as_mut(), &record.expectation(), written_at)?;
            let written = file.write_all(chunk.as_ref());
            written.map_err(|source| failed("write", to, source))?;
        }
    }
    Ok(())
}
