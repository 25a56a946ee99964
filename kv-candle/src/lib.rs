//! A KV cache for models written on [candle](candle_core): paged attention over ragged batches,
//! prefix reuse, forks, and quantised K and V, with tensors of candle read in place.
//!
//! A model keeps its own code up to attention. There it calls [`CandleStep::attend`] with the q, k
//! and v of the step's tokens, instead of a cache, a mask, repeated heads and two products:
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use kv_candle::kv::{AttentionOptions, CacheSpec, KvFormat, SequenceId, StartOptions, StepInput};
//! use kv_candle::CandleCache;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A cache stores f16 unless its spec says otherwise; f32 models lose bits then.
//! let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).format(KvFormat::F32);
//! let mut cache = CandleCache::new(&Device::Cpu, spec.paged(16, 8).build()?)?;
//!
//! let (seq, prompt) = (SequenceId(0), [11, 22, 33]);
//! cache.kv_mut().start(seq, &prompt, StartOptions::default())?;
//! let step = cache.step(&[StepInput::prompt(seq, &prompt)])?;
//! assert_eq!(step.positions().to_vec1::<u32>()?, [0, 1, 2]); // for RoPE
//!
//! // What a layer of the model computes: [tokens, heads, head_dim].
//! let k = Tensor::zeros((3, 1, 2), candle_core::DType::F32, &Device::Cpu)?;
//! let v = Tensor::new(&[[[1.0_f32, 2.0]], [[3.0, 4.0]], [[5.0, 6.0]]], &Device::Cpu)?;
//! let out = step.attend(0, &k, &k, &v, &AttentionOptions::causal(0.5_f32.sqrt()))?;
//! assert_eq!(out.to_vec2::<f32>()?, [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]);
//! step.commit()?; // lengths advance; a step that is dropped instead never happened
//! # Ok(())
//! # }
//! ```
//!
//! Batches are ragged: the tokens of all sequences of a step lie in one tensor, one sequence after
//! another, and [`CandleStep::positions`] has the position of each. Sequences join and leave
//! between steps.
#![forbid(unsafe_code)]
mod attend;
mod axes;
mod cache;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod state;
mod step;

pub use cache::CandleCache;
pub use error::Error;
pub use kv;
pub use step::CandleStep;

/// Compiles and runs the examples of the project's documents.
#[cfg(all(doctest, feature = "cpu"))]
mod documents {
    #[doc = include_str!("../../README.md")]
    struct Readme;
    #[doc = include_str!("../../docs/candle.md")]
    struct Guide;
}
