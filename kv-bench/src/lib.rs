//! Measures the KV cache. [`measure`] times its operations on any device, for `kv bench`; the other
//! modules are for the benches: shapes, filled caches, tensors.
#![forbid(unsafe_code)]
pub mod blocks;
pub mod chunks;
pub mod measure;
mod random;

use kv::backend::Backend;
pub use kv::eviction::Eviction;
use kv::num;
use kv::{
    Axes, BlockOrder, CacheSpec, Error, KvCache, KvFormat, SequenceId, StartOptions, StepInput,
    TensorView,
};

use random::Random;

/// Tokens per block in every bench.
pub const BLOCK_SIZE: u32 = 16;

/// A batch over one layer of a model.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the numbers")]
pub struct Shape {
    /// Number of sequences.
    pub batch: u32,
    /// Cached tokens per sequence.
    pub context: u32,
    /// Number of query heads.
    pub q_heads: u32,
    /// Number of kv heads.
    pub kv_heads: u32,
    /// Head dim.
    pub head_dim: u32,
    /// Stored format.
    pub format: KvFormat,
    /// Order of axes inside a block.
    pub order: BlockOrder,
}

impl Shape {
    /// Creates a layer of an 8-billion-parameter Llama with 4 query heads per kv head, in f16.
    pub fn llama(batch: u32, context: u32) -> Self {
        Self {
            batch,
            context,
            q_heads: 32,
            kv_heads: 8,
            head_dim: 128,
            format: KvFormat::F16,
            order: BlockOrder::Hnd,
        }
    }

    /// Creates a shape with as little data as possible, so that only the bookkeeping is measured.
    pub fn bookkeeping(batch: u32, context: u32) -> Self {
        Self { q_heads: 1, kv_heads: 1, head_dim: 2, ..Self::llama(batch, context) }
    }

    /// Builds the spec of a cache for this shape, with room for `more` tokens per sequence.
    ///
    /// # Errors
    /// Those of the builder.
    pub fn spec(&self, more: u32) -> Result<CacheSpec, Error> {
        let blocks = (self.context + more).div_ceil(BLOCK_SIZE);
        Ok(CacheSpec::builder()
            .layers(1)
            .kv_heads(self.kv_heads)
            .head_dim(self.head_dim)
            .format(self.format)
            .block_order(self.order)
            .paged(BLOCK_SIZE, blocks * self.batch)
            .build()?)
    }

    /// Returns the bytes of K and V per token.
    pub fn token_bytes(&self) -> u64 {
        let row = self.format.row_bytes(self.head_dim);
        row * u64::from(self.kv_heads) * 2
    }

    /// Returns the number of values of one token's K, and of its V.
    pub fn token_values(&self) -> u64 {
        u64::from(self.kv_heads) * u64::from(self.head_dim)
    }

    /// Returns the sequences of the batch.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> + use<> {
        (0..u64::from(self.batch)).map(SequenceId)
    }

    /// Makes a cache in which every sequence has its context, less a few tokens that differ from
    /// sequence to sequence, so that they do not all reach the end of a block together.
    ///
    /// # Errors
    /// Those of the cache.
    pub fn filled<B: Backend>(&self, backend: B, more: u32) -> Result<KvCache<B>, Error> {
        let mut cache = KvCache::new(backend, self.spec(more)?)?;
        let values = values(self.token_values() * u64::from(self.context));
        for (sequence, short) in self.sequences().zip((0..BLOCK_SIZE.min(self.context)).cycle()) {
            let tokens = self.context - short;
            cache.start(sequence, &[], StartOptions::default())?;
            let mut step = cache.begin_step(&[StepInput::count(sequence, tokens)])?;
            let dims = [self.context, self.kv_heads, self.head_dim];
            let rows = TensorView::host(&values, &dims);
            step.write(0, rows, rows, Axes::Thd)?;
            step.commit()?;
        }
        Ok(cache)
    }
}

/// Returns `count` pseudo-random values between -1 and 1, the same in every run.
pub fn values(count: u64) -> Vec<f32> {
    (0..count).zip(Random::new(1)).map(|(_, value)| value).collect()
}

/// Returns whether benches run once each, as tests, and may use small shapes.
pub fn is_smoke() -> bool {
    let mut args = std::env::args().skip(1);
    let (mut bench, mut test) = (false, false);
    args.by_ref().for_each(|arg| {
        bench |= arg == "--bench";
        test |= arg == "--test";
    });
    test || !bench
}

#[cfg(test)]
mod tests {
    use kv::backend::NullBackend;

    use super::*;

    #[test]
    fn a_filled_cache_has_its_context() {
        let shape = Shape::bookkeeping(20, 40);
        let cache = shape.filled(NullBackend::new(), 1).unwrap();
        let lens: Vec<_> = shape.sequences().map(|id| cache.state().seq_len(id).unwrap()).collect();
        assert_eq!((lens[0], lens[1], lens[15], lens[16]), (40, 39, 25, 40));
        assert_eq!(shape.token_bytes(), 8);
    }

    #[test]
    fn values_repeat_and_stay_small() {
        let values = values(1000);
        assert_eq!(values, super::values(1000));
        assert!(values.iter().all(|value| (-1.0..1.0).contains(value)));
        assert!(values.iter().any(|value| *value > 0.5) && values.iter().any(|v| *v < -0.5));
    }
}
