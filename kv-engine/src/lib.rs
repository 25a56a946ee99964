//! A scheduler over a KV cache: continuous batching for any model, on any backend.
//!
//! An engine takes prompts at any time and decides for each forward pass which tokens of which
//! sequences it has, which request is admitted, and which is preempted when blocks run out. The
//! caller brings the model, which writes K and V and attends through the step itself.
//!
//! | to | see |
//! |---|---|
//! | run requests with a model | [`Engine::step`], [`Model`], [`Logits`] |
//! | drive steps elsewhere | [`Engine::begin_step`], [`Engine::with_step`], [`Engine::end_step`] |
//! | choose tokens elsewhere | [`Chosen`], [`Output`] |
//! | describe a request | [`Request`], [`Sampler`], [`BeamOptions`], [`Limits`] |
//! | read results | [`Event`], [`Generated`], [`Stats`] |
//! | end a request early | [`Engine::cancel`] |
//! | know whether a request fits | [`RequestSize`], [`Shortage`], [`Advice`] |
//! | reuse blocks of lower tiers | [`Engine::tiered`] |
//! | save a text and go on in another process | [`Engine::save_session`], [`SavedText`] |
//! | run in the time of a trace | [`Engine::with_clock`] |
//!
//! ```
//! use kv::backend::{Backend, NullBackend};
//! use kv::{Axes, CacheSpec, KvCache, Step, TensorView};
//! use kv::engine::{Batch, Engine, Event, Limits, Logits, Model, ModelError, Request};
//!
//! /// Counts up, in a vocabulary of 10 tokens.
//! struct Counter;
//!
//! impl<B: Backend> Model<B> for Counter {
//!     fn forward(&mut self, step: &mut Step<'_, B>, batch: &Batch) -> Result<Logits, ModelError> {
//!         let rows = vec![0.0_f32; batch.tokens.len()];
//!         let dims = [rows.len() as u32, 1, 1]; // tokens, heads, head_dim
//!         let rows = TensorView::host(&rows, &dims);
//!         step.write(0, rows, rows, Axes::Thd)?; // and attend: this model needs no context
//!         let mut logits = Vec::new();
//!         for row in batch.logit_rows() {
//!             let token = batch.tokens[row as usize];
//!             logits.extend((0..10).map(|next| f32::from(u8::from(next == (token + 1) % 10))));
//!         }
//!         Ok(Logits::new(logits, 10))
//!     }
//! }
//!
//! let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(1).paged(16, 64).build()?;
//! let cache = KvCache::new(NullBackend::new(), spec)?;
//! let limits = Limits { vocab: Some(10), ..Limits::new(1024) };
//! let mut engine = Engine::new(cache, limits);
//! engine.submit(Request::new(vec![5, 6, 7], 4))?;
//! engine.submit(Request::new(vec![1], 2))?;
//! let mut texts = vec![Vec::new(); 2];
//! while engine.has_work() {
//!     for event in engine.step(&mut Counter)? {
//!         if let Event::Finished { index, generated } = event {
//!             texts[index] = generated.tokens;
//!         }
//!     }
//! }
//! assert_eq!(texts, [vec![8, 9, 0, 1], vec![2, 3]]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Steps
//!
//! A sequence is its tokens, and the cache knows how many of them it has; the rest is added to
//! steps, all at once, in chunks, or again after a preemption. This one rule covers prefill,
//! decode, recomputation and the mode without a cache. Requests are admitted while a step is open,
//! so that requests that arrive together compute their common prefix once. The oldest request is
//! never preempted and fits alone, which is checked when it is submitted, so every step makes
//! progress.
//!
//! A step that fails changes nothing: whatever the model or the output was, the step is rolled back
//! before a token is sampled, and the next step repeats it. After an error, cancel the request that
//! is the cause, or go on.
//!
//! # Fairness
//!
//! A step has [`Limits::max_step_tokens`] tokens, B. Each of the `d` sequences that decode gets one
//! token. Drafts come next: at most half of the rest while a prompt is to be computed. The
//! remaining tokens are split among prompts by equal shares: tokens that a short prompt does not
//! need go to the other prompts, the remainder of the division to the oldest. With `k` prompts,
//! each gets the tokens that it needs, or at least `floor((B - d) / k)`, half of that with drafts.
//! So a prompt of `n` tokens beside at most `k - 1` others, with at most `d < B` sequences that
//! decode, is computed within `ceil(n / floor((B - d) / k))` steps after its admission, unless it
//! is preempted.
//!
//! Requests are admitted in the order of their arrival, up to [`Limits::max_batch`] sequences. A
//! request without room may be overtaken by [`Limits::max_overtakes`] younger ones; then nothing is
//! admitted before it. A request has no room while the cache lacks blocks for its whole prompt
//! beside those that present tokens of running sequences need, while its beams are too many for the
//! batch, or while a tier looks for its blocks. So a long prompt delays a short one only by its
//! blocks: the short one waits if its own blocks do not fit, or if the long one has been overtaken
//! that often. A prompt whose first blocks another request is about to compute waits until they can
//! be reused.
//!
//! # Recurrent states
//!
//! In a cache with [recurrent states](kv_core::spec::StatesSpec), a chunk of a prompt ends where
//! the cache keeps a state for other prompts: in front of the last token, where a prompt that is
//! cached in part branches off, at [`Request::stops`], and where a request that arrived later needs
//! it. A prompt takes one step more, of one token. At most half as many sequences run as there are
//! slots, and a sequence has no more drafts than the states keep.
#![forbid(unsafe_code)]
mod accept;
mod admit;
mod beams;
mod choices;
mod drafts;
mod engine;
mod error;
mod fit;
mod forks;
mod held;
mod memory;
mod model;
mod num;
mod outcome;
mod plan;
mod queues;
mod request;
mod sampler;
mod session;
mod share;
mod state;
mod stats;
mod task;

pub use beams::{BeamOptions, Hypothesis};
pub use engine::Engine;
pub use error::{EngineError, OutputError, RequestError, SessionFileError};
pub use fit::{Advice, RequestSize, Shortage};
pub use model::{Batch, Chosen, Chunk, Logits, Model, ModelError, Output};
pub use request::{Event, Finish, Generated, Limits, Request};
pub use sampler::{SampleError, Sampler};
pub use session::SavedText;
pub use stats::Stats;
