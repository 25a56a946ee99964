//! Invariants of a cache after all texts have ended.
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
    let sequences = cache.state().num_sequences();
    ensure!(sequences == 0, "{sequences} sequences are left in the cache");
    if cache.state().num_holds() > 0 || cache.state().num_imports() > 0 {
        return Ok(());
    }
    for (group, pool) in (0..=u8::MAX).map_while(|id| Some((id, cache.state().pool(GroupId(id))?)))
    {
        let blocks = || (0..pool.num_blocks()).map(BlockId);
        let held: Vec<_> = blocks().filter(|block| pool.holders(*block) > 0).collect();
        ensure!(held.is_empty(), "group {group}: nothing uses the blocks {held:?}, which are held");
        let cached = blocks().filter(|block| pool.is_stored(*block)).count();
        let counted = (pool.num_idle(), pool.index().len(), pool.num_empty());
        let expected = u32::try_from(cached)?;
        ensure!(
            counted == (expected, cached, pool.num_blocks() - expected),
            "group {group}: {cached} of {} blocks are cached, counted (idle, indexed, empty) are \
             {counted:?}",
            pool.num_blocks()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kv::{Axes, CacheSpec, Device, SequenceId, StartOptions, StepInput, TensorView};

    use super::*;

    fn why(cache: &KvCache<AnyBackend>) -> String {
        check(cache).expect_err("it is in use").to_string()
    }

    #[test]
    fn a_sequence_and_a_held_block_are_named() {
        let builder = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(2, 4);
        let device = Device::open("cpu").expect("the CPU");
        let mut cache = KvCache::new(device, builder.build().expect("a spec")).expect("a cache");
        check(&cache).expect("nothing has begun");
        let (sequence, prompt) = (SequenceId(0), [1, 2, 3]);
        cache.start(sequence, &prompt, StartOptions::default()).expect("a sequence");
        let input = StepInput::prompt(sequence, &prompt);
        let mut step = cache.begin_step(&[input]).expect("a step");
        let (rows, dims) = ([0.5_f32; 12], [3, 1, 4]);
        let rows = || TensorView::host(&rows, &dims);
        step.write(0, rows(), rows(), Axes::Thd).expect("a write");
        step.commit().expect("a commit");
        assert_eq!(why(&cache), "1 sequences are left in the cache");
        cache.release(sequence).expect("a release");
        check(&cache).expect("nothing is left, and a block is cached");
        let pin = cache.pin_prefix(&[1, 2], StartOptions::default());
        assert!(why(&cache).contains("which are held"), "{}", why(&cache));
        assert!(cache.unpin(pin.id).expect("no step is held"));
        check(&cache).expect("nothing is pinned");
    }
}
