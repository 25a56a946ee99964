//! What must hold of a cache when all texts have ended.
use anyhow::ensure;
use kv::backend::AnyBackend;
use kv::{BlockId, GroupId, KvCache};

/// Checks that no sequence is left, and that every block is free and counted once: as cached if the
/// index finds its content, otherwise as empty.
///
/// # Errors
/// A block or a sequence that was leaked, with the counts. Blocks that a transfer to a tier still
/// holds are none: then nothing is checked.
pub(super) fn check(cache: &KvCache<AnyBackend>) -> anyhow::Result<()> {
    let sequences = cache.num_sequences();
    ensure!(sequences == 0, "{sequences} sequences are left in the cache");
    if cache.num_holds() > 0 || cache.num_imports() > 0 {
        return Ok(());
    }
    for (group, pool) in (0..=u8::MAX).map_while(|id| Some((id, cache.pool(GroupId(id))?))) {
        let blocks = || (0..pool.num_blocks()).map(BlockId);
        let held: Vec<_> = blocks().filter(|block| pool.holders(*block) > 0).collect();
        ensure!(held.is_empty(), "group {group}: nothing uses the blocks {held:?}, which are held");
        let cached = blocks().filter(|block| pool.is_stored(*block)).count();
        let counted = (pool.num_idle(), pool.index().len(), pool.num_empty());
        let expected = u32::try_from(cached)?;
        ensure!(
            counted == (expected, cached, pool.num_blocks().saturating_sub(expected)),
            "group {group}: {cached} of {} blocks are cached, counted (idle, indexed, empty) are \
             {counted:?}",
            pool.num_blocks()
        );
    }
    Ok(())
}
