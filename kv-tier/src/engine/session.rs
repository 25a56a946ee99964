//! Sessions: one sequence to a file, and back to the device.
mod blocks;
mod bring;
mod file;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use kv_core::backend::{Backend, ChunkShape, HostPool, PendingChunk, Queue};
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_u64, to_usize};
use kv_core::reuse::PrefixProbe;
use kv_core::{BlockId, GroupId, KvCache, SequenceId, StartOptions};

use super::{TierError, Tiers};
use crate::chunk::{ChunkSpec, encode_header, verify};
use crate::session::{
    Session, SessionError, SessionGroup, SessionHeader, SessionInfo, zero_unused,
};
use blocks::{SessionBlocks, ranges};
use bring::Bring;
use file::{SessionFile, failed, save};

/// Chunks in host memory while a file is written or read.
const CHUNKS: u32 = 4;
const GROUP: &str = "groups are those of the cache";
const TAKEN: &str = "chunks are dropped before others are taken";

impl<B: Backend> Tiers<B> {
    /// Writes a sequence to a file from which [`Self::load`] brings it back, in this process or
    /// another: its tokens that are certain, their blocks, and a note, such as the state of a
    /// sampler or a token that no step has written yet. The sequence goes on.
    ///
    /// The file appears whole or not at all, and survives a loss of power once the call has
    /// returned. The call waits for the device and for the disk. It takes host memory of four
    /// blocks.
    ///
    /// The last block may be partial: what lies after its tokens is zeroed. A sequence that starts
    /// on the text reuses every token of it but the last. Where full blocks only are reused
    /// ([`PrefixReuse::FullBlocks`](kv_core::spec::PrefixReuse::FullBlocks), or a
    /// [tail](kv_core::spec::GroupBuilder::tail)), it computes the tokens after the last full block
    /// again; with groups of different block sizes, those after the last position that ends a block
    /// in every group and one block more.
    ///
    /// ```
    /// use kv_core::backend::NullBackend;
    /// use kv_core::{CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
    /// use kv_tier::{Identity, ModelDigest, TierOptions, Tiers};
    ///
    /// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(8).paged(4, 16);
    /// let spec = || spec.clone().changes(64);
    /// let identity = || Identity::new(ModelDigest::of_bytes(b"weights"));
    /// let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("chat.kvs");
    ///
    /// let mut cache = KvCache::new(NullBackend::new(), spec().build()?)?;
    /// let mut tiers = Tiers::new(&cache, identity(), TierOptions::new())?;
    /// let (seq, text) = (SequenceId(0), [1, 2, 3, 4, 5, 6]);
    /// cache.start(seq, &text, StartOptions::default())?;
    /// let mut step = cache.begin_step(&[StepInput::tokens(seq, &text)])?;
    /// # let zeros = [0.0_f32; 48];
    /// # let rows = || kv_core::TensorView::host(&zeros, &[6, 1, 8]);
    /// // Write and attend.
    /// # step.write(0, rows(), rows(), kv_core::QkvFormat::Thd)?;
    /// step.commit()?;
    /// tiers.dump(&mut cache, seq, b"temperature 0.7", &path)?;
    ///
    /// // Later, in another process:
    /// let mut cache = KvCache::new(NullBackend::new(), spec().build()?)?;
    /// let mut tiers = Tiers::new(&cache, identity(), TierOptions::new())?;
    /// let session = tiers.load(&mut cache, &path, &StartOptions::default())?;
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
    /// [`SessionError::Io`]; [`SessionError::Tier`] while a step is open, for blocks that cannot be
    /// chunked, or if the device failed. A file that was there before stays then.
    pub fn dump(
        &mut self,
        cache: &mut KvCache<B>,
        sequence: SequenceId,
        note: &[u8],
        to: &Path,
    ) -> Result<SessionInfo, SessionError> {
        if cache.is_step_open() {
            return Err(TierError::StepOpen.into());
        }
        if !cache.contains(sequence) {
            return Err(SessionError::UnknownSequence { sequence });
        }
        let text = cache.sequence_text(sequence);
        let text = text.ok_or(SessionError::NotReusable { sequence })?;
        let options = StartOptions::default().with_salt(text.salt).with_contents(text.contents);
        let options = text.adapter.map_or(options, |adapter| options.with_adapter(adapter));
        let (probe, len) = probe(cache, &text.tokens, &options);
        let mut header = self.session_header(cache, &options)?;
        (header.tokens, header.contents) = (text.tokens, text.contents.to_vec());
        header.note = note.to_vec();

        let (mut all, mut is_whole) = (Vec::new(), true);
        for group in group_ids(cache) {
            let blocks = SessionBlocks::new(cache, group, &self.identity, (&probe, len))?;
            let mut asked = blocks.needed(&probe, len);
            let at = |index: u32| Some((index, blocks.on_device(cache, sequence, index)?));
            is_whole &= asked.iter().all(|index| at(*index).is_some());
            // For a sequence that computes the last token of the text again.
            asked.extend(blocks.needed(&probe, len.saturating_sub(1)));
            let found: Vec<_> = asked.into_iter().filter_map(at).collect();
            header.groups.push(SessionGroup {
                root: blocks.root(),
                chunk_bytes: to_u64(blocks.spec().chunk_bytes()),
                blocks: ranges(found.iter().map(|(index, _)| *index)),
            });
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
        let chunks = header.chunk_bytes().unwrap_or(u64::MAX);
        Ok(SessionInfo {
            tokens: len,
            blocks: blocks.fold(0, u32::saturating_add),
            bytes: to_u64(bytes.len()).saturating_add(chunks),
            is_whole,
        })
    }

    /// Brings a session back that [`Self::dump`] has written: its blocks can be reused from now on,
    /// until they are evicted. A sequence that starts on [`Session::tokens`], with
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
    /// [`SessionError::Tier`] while a step is open or if the device failed. The cache is as before
    /// then, except that a device that failed, or a file that changed, may have cost idle blocks.
    pub fn load(
        &mut self,
        cache: &mut KvCache<B>,
        from: &Path,
        options: &StartOptions<'_>,
    ) -> Result<Session, SessionError> {
        if cache.is_step_open() {
            return Err(TierError::StepOpen.into());
        }
        let mut file = SessionFile::open(from)?;
        let (tokens, contents) = (file.header.tokens.clone(), file.header.contents.clone());
        let options = options.with_contents(&contents).with_backoff_blocks(0).with_reuse(true);
        check_identity(&self.session_header(cache, &options)?, &file.header)?;
        let max = cache.spec().max_seq_len();
        if tokens.len() > to_usize(max) {
            return Err(SessionError::TooLong { tokens: to_u32(tokens.len()), max });
        }
        let (probe, len) = probe(cache, &tokens, &options);
        let blocks = group_ids(cache)
            .map(|group| SessionBlocks::new(cache, group, &self.identity, (&probe, len)))
            .collect::<Result<Vec<_>, _>>()?;
        verify_blocks(&mut file, &blocks, &probe)?;

        let bring = Bring { blocks: &blocks, probe: &probe };
        let first = bring.whole_or_longest(cache, &mut file, len)?;
        // What a sequence that computes the last token of the text again needs besides: blocks at
        // the beginning of windows.
        let last = bring.whole_or_longest(cache, &mut file, len.saturating_sub(1));
        let finished = first.map_or(Ok(()), |import| cache.finish_import(import));
        match last {
            Ok(Some(import)) => cache.finish_import(import)?,
            Ok(None) | Err(SessionError::NoRoom(_)) => {}
            Err(error) => return Err(error),
        }
        finished?;
        let cached = cache.probe(probe.prompt(), options);
        let note = file.header.note;
        Ok(Session { tokens, contents, note, cached })
    }

    /// Describes a session of a cache, without text and blocks.
    fn session_header(
        &self,
        cache: &KvCache<B>,
        options: &StartOptions<'_>,
    ) -> Result<SessionHeader, SessionError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Ok(SessionHeader {
            model: self.identity.model(),
            adapter: self.identity.adapter_digest(options.adapter())?,
            encoding_key: cache.encoding_key(),
            salt: self.identity.salt_digest(options.salt()),
            written_at: now,
            groups: Vec::new(),
            tokens: Vec::new(),
            contents: Vec::new(),
            note: Vec::new(),
        })
    }
}

/// Probes a text so that all of its tokens may be reused: for a prompt that goes on after it.
fn probe<B: Backend>(
    cache: &KvCache<B>,
    tokens: &[u32],
    options: &StartOptions<'_>,
) -> (PrefixProbe, u32) {
    let mut prompt = tokens.to_vec();
    prompt.push(0);
    (cache.probe_keys(&prompt, options), to_u32(tokens.len()))
}

fn group_ids<B: Backend>(cache: &KvCache<B>) -> impl Iterator<Item = GroupId> + use<B> {
    (0..=u8::MAX).map(GroupId).take(cache.spec().groups().len())
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
        if of.root != blocks.root() || of.chunk_bytes != to_u64(blocks.spec().chunk_bytes()) {
            let (group, expected, got) = (blocks.group(), blocks.root(), of.root);
            return Err(SessionError::Root { group, expected, got });
        }
        if of.blocks.last().is_some_and(|last| last.end > blocks.num_blocks()) {
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

fn check_block(
    chunk: &impl AsRef<[u8]>,
    (blocks, probe): (&SessionBlocks, &PrefixProbe),
    block: u32,
) -> Result<(), SessionError> {
    let verified = verify(chunk, &blocks.record(probe, block).expectation());
    let group = blocks.group();
    verified.map(drop).map_err(|source| SessionError::Block { group, block, source })
}

/// Makes room in host memory for a few blocks.
fn host_pool<B: Backend>(
    cache: &KvCache<B>,
    spec: &ChunkSpec,
) -> Result<B::HostPool, SessionError> {
    let shape = ChunkShape { blocks: 1, header_bytes: to_u32(spec.header_bytes()) };
    let storage = cache.storage(spec.group()).invariant(GROUP);
    Ok(cache.backend().host_pool(storage.view(), shape, CHUNKS)?)
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
            zero_unused(blocks.spec(), chunk.as_mut(), record.end);
            encode_header(chunk.as_mut(), &record.expectation(), written_at)?;
            let written = file.write_all(chunk.as_ref());
            written.map_err(|source| failed("write", to, source))?;
        }
    }
    Ok(())
}
