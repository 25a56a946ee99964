//! Runs decoder models over a KV cache: reads weights and tokenizers, samples tokens, and schedules
//! many requests in continuous batches.
//!
//! | to | see |
//! |---|---|
//! | read a model, from safetensors or GGUF | [`Decoder`], [`ModelConfig`] |
//! | turn text into tokens and back | [`Tokenizer`], [`TextStream`] |
//! | make a cache for it | [`CacheOptions`], [`stored::Stored`], [`calibrate`] |
//! | run requests | [`Scheduler`], [`Request`], [`Limits`], [`Event`] |
//! | run a model of your own | [`Model`], [`Batch`] |
//! | compare stored formats | [`reader::Reader`] |
//!
//! The model computes in f32 on the CPU; its keys and values are in the cache of any backend.
//!
//! ```
//! use kv::Device;
//! use kv_runner::{CacheOptions, Decoder, Event, Layout, Limits, Request, Scheduler, Tokenizer};
//!
//! let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K");
//! let model = Decoder::read(&dir)?;
//! let tokenizer = Tokenizer::read(&dir.join("tokenizer.json"))?;
//! let layout = Layout::Paged { block_size: 16, num_blocks: 64 };
//! let cache = CacheOptions::new(layout).open(&model, Device::open("cpu")?, None)?;
//! let mut scheduler = Scheduler::new(cache, &model, Limits::of(model.config()));
//! let prompt = tokenizer.encode("Once upon a time", model.config())?;
//! scheduler.submit(Request::new(prompt.tokens.clone(), 8))?;
//! while scheduler.has_work() {
//!     for event in scheduler.step()? {
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
pub mod gguf;
mod model;
mod num;
pub mod reader;
mod rope;
mod sampler;
pub mod scheduler;
pub mod stored;
mod text;
mod text_file;
mod weights;

pub use cache::{CacheOptions, Layout};
pub use config::ModelConfig;
pub use error::{ConfigError, Error, ForeignError, TextError, WeightError};
pub use model::{Batch, Chunk, Decoder, Model};
pub use sampler::{SampleError, Sampler};
pub use scheduler::{Event, Finish, Generated, Limits, Request, ScheduleError, Scheduler};
pub use text::{Encoded, TextStream, Tokenizer, check_vocabulary};
pub use text_file::read_text;
