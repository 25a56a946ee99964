//! Decoder models over a KV cache: weights, tokenizers and forward passes for the scheduler of
//! [`kv::engine`].
//!
//! | to | see |
//! |---|---|
//! | read a model, from safetensors or GGUF | [`Decoder`], [`ModelConfig`] |
//! | read what a model keeps in a cache, also one that cannot be run | [`ModelGeometry`] |
//! | turn text into tokens and back | [`Tokenizer`], [`TextStream`] |
//! | make a cache for it | [`CacheOptions`], [`StateOptions`], [`calibrate`], [`kv::quant`] |
//! | run requests, also with a model of your own | [`kv::engine`], [`ModelConfig::limits`] |
//! | compare stored formats | [`reader::Reader`] |
//!
//! The model computes in f32 on the CPU; its keys and values are in the cache of any backend.
//!
//! ```
//! use kv::Device;
//! use kv::engine::{Engine, Event, Request};
//! use kv_runner::{CacheOptions, Decoder, Layout, Tokenizer};
//!
//! let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K");
//! let model = Decoder::read(&dir)?;
//! let tokenizer = Tokenizer::read(&dir.join("tokenizer.json"))?;
//! let layout = Layout::Paged { block_size: 16, num_blocks: 64 };
//! let cache = CacheOptions::new(layout).open(&model, Device::open("cpu")?, None)?;
//! let mut engine = Engine::new(cache, model.config().limits());
//! let prompt = tokenizer.encode("Once upon a time", model.config())?;
//! engine.submit(Request::new(prompt.tokens.clone(), 8))?;
//! while engine.has_work() {
//!     for event in engine.step(&model)? {
//!         if let Event::Finished { generated, .. } = event {
//!             let text = tokenizer.decode_after(&prompt.tokens, &generated.tokens)?;
//!             assert_eq!(text, ", there was a little girl");
//!         }
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
mod cache;
pub mod calibrate;
mod config;
mod error;
mod geometry;
pub mod gguf;
mod model;
mod object;
pub mod reader;
mod rope;
mod text;
mod text_file;
mod weights;

use kv::num;

pub use cache::{CacheOptions, Layout, StateOptions, blocks_of};
pub use config::ModelConfig;
pub use error::{ConfigError, Error, ForeignError, TextError, WeightError};
pub use geometry::{LayerGeometry, LayerStates, ModelGeometry, StatePart};
pub use model::Decoder;
pub use text::{Encoded, TextStream, Tokenizer, check_vocabulary};
pub use text_file::read_text;
