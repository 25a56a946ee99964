//! Inputs and outputs of a model: the contract between the engine and the forward pass.
use std::error::Error;

use kv_core::backend::Backend;
use kv_core::{SequenceId, Step, StepInput};

use crate::num::to_usize;

/// The tokens of one sequence in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chunk {
    /// The sequence.
    pub sequence: SequenceId,
    /// Number of the request that the sequence belongs to.
    pub request: usize,
    /// Number of tokens.
    pub tokens: u32,
    /// Number of draft tokens at the end.
    pub drafts: u32,
    /// Number of last tokens after which logits are needed.
    pub logits: u32,
}

/// One forward pass: all tokens of the step, one sequence after another.
#[derive(Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Batch {
    /// The tokens of all chunks.
    pub tokens: Vec<u32>,
    /// One chunk per sequence.
    pub chunks: Vec<Chunk>,
}

impl Batch {
    /// Returns each chunk with its tokens.
    pub fn iter(&self) -> impl Iterator<Item = (Chunk, &[u32])> {
        let mut rest = self.tokens.as_slice();
        self.chunks.iter().map(move |chunk| {
            let (tokens, after) = rest.split_at(to_usize(chunk.tokens));
            rest = after;
            (*chunk, tokens)
        })
    }

    /// Returns the places in [`Self::tokens`] after which logits are needed, in the order in which
    /// a model returns their rows.
    pub fn logit_rows(&self) -> impl Iterator<Item = u32> {
        let mut end = 0;
        self.chunks.iter().flat_map(move |chunk| {
            end += chunk.tokens;
            end - chunk.logits..end
        })
    }

    /// Returns the number of rows of logits that the step needs.
    pub fn num_logits(&self) -> u32 {
        self.chunks.iter().map(|chunk| chunk.logits).sum()
    }

    /// Returns the inputs of a step.
    pub(crate) fn inputs(&self) -> Vec<StepInput<'_>> {
        let input = |(chunk, tokens): (Chunk, _)| {
            StepInput::tokens(chunk.sequence, tokens).with_drafts(chunk.drafts)
        };
        self.iter().map(input).collect()
    }

    pub(crate) fn clear(&mut self) {
        self.tokens.clear();
        self.chunks.clear();
    }
}

/// Rows of logits, one after another in one list.
///
/// The engine checks them against the batch when the step ends: their number, their width and that
/// the values from which tokens are chosen are finite.
///
/// ```
/// use kv::engine::Logits;
///
/// let two_rows_of_three = Logits::new(vec![0.1, 0.7, 0.2, 0.0, 0.0, 1.0], 3);
/// assert_eq!(two_rows_of_three.row(1), Some(&[0.0, 0.0, 1.0][..]));
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Logits {
    values: Vec<f32>,
    width: u32,
}

impl Logits {
    /// Takes rows of `width` values each: the rows of the first chunk in the order of its tokens,
    /// then those of the next ([`Batch::logit_rows`]).
    ///
    /// # Shapes
    /// `values` is `[rows, width]`, `width` the size of the vocabulary.
    pub fn new(values: Vec<f32>, width: u32) -> Self {
        Self { values, width }
    }

    /// Returns all values, row after row.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns the number of values per row.
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Returns a row; `None` past the last whole one.
    pub fn row(&self, index: u32) -> Option<&[f32]> {
        let width = to_usize(self.width);
        let begin = to_usize(index).checked_mul(width).filter(|_| width > 0)?;
        self.values.get(begin..begin.checked_add(width)?)
    }
}

/// Any error of a model. `?` turns an error of any type into one.
pub type ModelError = Box<dyn Error + Send + Sync>;

/// Computes logits from tokens.
///
/// The model writes K and V and attends through the step itself ([`Step::write`],
/// [`Step::attend`]), once per layer. A layer with a recurrent state reads it and writes the next
/// ones: behind the last token of a chunk, and behind each token that only
/// [drafts](Chunk::drafts) follow ([`Step::write_state_after`]).
pub trait Model<B: Backend> {
    /// Writes K and V of every layer for the tokens of the batch, and returns a row of logits for
    /// each of [`Batch::logit_rows`].
    ///
    /// # Errors
    /// Any failure of the model. The step is rolled back then, and the next one repeats it.
    fn forward(&mut self, step: &mut Step<'_, B>, batch: &Batch) -> Result<Logits, ModelError>;
}

impl<B: Backend, M: Model<B> + ?Sized> Model<B> for &mut M {
    fn forward(&mut self, step: &mut Step<'_, B>, batch: &Batch) -> Result<Logits, ModelError> {
        (**self).forward(step, batch)
    }
}

/// The tokens that the caller has chosen for one chunk with logits.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct Chosen {
    /// The sequence of the chunk.
    pub sequence: SequenceId,
    /// The accepted draft tokens, and the token after them: at least one token.
    pub tokens: Vec<u32>,
}

/// The output of a forward pass: logits from which the engine chooses, or tokens that the caller
/// has chosen, on a device or from a recording.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::exhaustive_enums, reason = "either the engine chooses or the caller")]
pub enum Output {
    /// A row for each of [`Batch::logit_rows`].
    Logits(Logits),
    /// An entry for each chunk with logits, in their order.
    Tokens(Vec<Chosen>),
}

impl From<Logits> for Output {
    fn from(logits: Logits) -> Self {
        Self::Logits(logits)
    }
}

impl From<Vec<Chosen>> for Output {
    fn from(tokens: Vec<Chosen>) -> Self {
        Self::Tokens(tokens)
    }
}
