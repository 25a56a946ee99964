//! From a session file, which was verified, to the device.
use kv_core::backend::{Backend, HostPool, Queue};
use kv_core::events::Tier;
use kv_core::invariant::Invariant;
use kv_core::reuse::{Import, PrefixProbe};
use kv_core::{CacheError, KvCache};

use super::blocks::SessionBlocks;
use super::file::SessionFile;
use super::load::check_block;
use super::of_cache::{GROUP, TAKEN, host_pool};
use super::{SessionError, SessionGroup};
use crate::chain::{Chain, reach};

/// The blocks of a file that are imported to the device.
pub(super) struct Bring<'a> {
    pub(super) blocks: &'a [SessionBlocks],
    pub(super) probe: &'a PrefixProbe,
}

impl Bring<'_> {
    /// Brings the blocks that a sequence needs to reuse the first `len` tokens, or as many of them
    /// as the file has the blocks for.
    pub(super) fn whole_or_longest<B: Backend>(
        &self,
        cache: &mut KvCache<B>,
        file: &mut SessionFile,
        len: u32,
    ) -> Result<Option<Import>, SessionError> {
        let has_part = |(group, blocks): (usize, &SessionBlocks)| {
            let part = self.probe.part(blocks.group(), len);
            part.is_some_and(|part| file.has(group, part.index))
        };
        let upto = self.reach(file, len);
        let is_whole = self.probe.hit(upto) == self.probe.hit(len);
        if is_whole && self.blocks.iter().enumerate().all(|(at, of)| has_part((at, of))) {
            let import = cache.reserve_import_with_part(self.probe, len);
            return self.copy(cache, file, (import.map_err(no_room)?, len)).map(Some);
        }
        self.import(cache, file, len)
    }

    /// Brings the longest state of the file, with the rows before it; `None` if there is none, or
    /// if rows before it are missing.
    pub(super) fn with_state<B: Backend>(
        &self,
        cache: &mut KvCache<B>,
        file: &mut SessionFile,
    ) -> Result<Option<Import>, SessionError> {
        let longest = |of: &SessionGroup| of.blocks.last().map(|range| range.end - 1);
        let mut states = file.header.groups.iter().filter(|of| of.is_of_states).map(longest);
        let Some(len) = states.next().flatten().filter(|len| states.all(|of| of == Some(*len)))
        else {
            return Ok(None);
        };
        let mut rows = self.blocks.iter().enumerate().filter(|(_, of)| !of.spec().is_of_states());
        let has = |(at, of): (usize, &SessionBlocks)| {
            of.has_all(self.probe, len, |index| file.has(at, index))
        };
        if !rows.all(has) {
            return Ok(None);
        }
        let import = cache.reserve_import_with_state(self.probe, len).map_err(no_room)?;
        self.copy(cache, file, (import, len)).map(Some)
    }

    /// Brings the full blocks that a sequence needs to reuse at most `most` tokens.
    fn import<B: Backend>(
        &self,
        cache: &mut KvCache<B>,
        file: &mut SessionFile,
        most: u32,
    ) -> Result<Option<Import>, SessionError> {
        let upto = self.reach(file, most);
        if self.probe.hit(upto) == 0 {
            return Ok(None);
        }
        let import = cache.reserve_import(self.probe, upto).map_err(no_room)?;
        self.copy(cache, file, (import, upto)).map(Some)
    }

    /// Returns the most tokens, up to `most`, whose blocks are in the file or on the device.
    fn reach(&self, file: &SessionFile, most: u32) -> u32 {
        let chains: Vec<&Chain> = self.blocks.iter().map(|blocks| &blocks.chain).collect();
        let has = |chain: &Chain, block: u32| file.has(usize::from(chain.group().0), block);
        reach(self.probe, &chains, most, has)
    }

    /// Copies the blocks of an import from the file, and publishes all of them.
    fn copy<B: Backend>(
        &self,
        cache: &mut KvCache<B>,
        file: &mut SessionFile,
        (mut import, upto): (Import, u32),
    ) -> Result<Import, SessionError> {
        let copied = self.copy_in(cache, file, &import);
        let published =
            copied.and_then(|()| Ok(cache.publish_import(&mut import, upto, Tier::Disk)?));
        match published {
            Ok(()) => Ok(import),
            Err(error) => {
                cache.finish_import(import)?;
                Err(error)
            }
        }
    }

    fn copy_in<B: Backend>(
        &self,
        cache: &mut KvCache<B>,
        file: &mut SessionFile,
        import: &Import,
    ) -> Result<(), SessionError> {
        let after = cache.queue_mut().submit()?;
        for run in import.blocks().chunk_by(|a, b| a.group == b.group) {
            let Some(first) = run.first() else { continue };
            let mut all = self.blocks.iter().enumerate();
            // Blocks of a group without layers have no bytes.
            let Some((group, blocks)) = all.find(|(_, of)| of.group() == first.group) else {
                continue;
            };
            let mut pool = host_pool(cache, blocks.spec())?;
            for of in run {
                let mut chunk = pool.take().invariant(TAKEN);
                let at = if blocks.spec().is_of_states() { of.end } else { of.index };
                file.read(group, at, chunk.as_mut())?;
                // The file may have changed since it was verified.
                check_block(&chunk, (blocks, self.probe), at)?;
                let storage = cache.storage(first.group).invariant(GROUP).view();
                let fence = pool.copy_in(&after, storage, &[of.block], &chunk, 0)?;
                cache.queue_mut().wait_for(&fence)?;
            }
        }
        Ok(())
    }
}

fn no_room(error: CacheError) -> SessionError {
    match error {
        CacheError::Exhausted(exhausted) => SessionError::NoRoom(exhausted),
        error => error.into(),
    }
}
