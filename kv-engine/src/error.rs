//! Errors of requests, of the outputs of a forward pass, and of steps.
use std::path::PathBuf;

use kv_core::error::{BlocksExhausted, PlanError};
use kv_core::{CacheError, SequenceId};
use kv_tier::{SessionError, TierError};

use crate::fit::Shortage;
use crate::model::ModelError;

/// A failure of an engine.
///
/// A step that fails is rolled back: its requests go on as if it had not begun.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A request can never run.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The cache refused a call, or its device failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The tiers below the cache refused a call, or the device failed.
    #[error(transparent)]
    Tier(#[from] TierError),
    /// A session file cannot be used.
    #[error(transparent)]
    Session(#[from] SessionFileError),
    /// The model failed.
    #[error(transparent)]
    Model(ModelError),
    /// Logits or tokens are not those of the step.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// A step is held: end it or roll it back first.
    #[error("{operation}: a step is held")]
    StepOpen {
        /// The refused call.
        operation: &'static str,
    },
    /// No step is held.
    #[error("{operation}: no step is held")]
    NoStep {
        /// The refused call.
        operation: &'static str,
    },
    /// No request can run, and none holds a block.
    #[error("no sequence can continue")]
    Stuck,
}

impl From<PlanError> for EngineError {
    fn from(error: PlanError) -> Self {
        Self::Cache(error.into())
    }
}

impl From<BlocksExhausted> for EngineError {
    fn from(error: BlocksExhausted) -> Self {
        Self::Cache(error.into())
    }
}

/// Logits or tokens that do not belong to the step that they are to end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
    /// There are too few rows of logits, or too many.
    #[error("the model gave {got} rows of logits, expected {expected}")]
    Rows {
        /// Rows given.
        got: usize,
        /// Rows that the chunks of the batch need.
        expected: u32,
    },
    /// The values are not a number of whole rows.
    #[error("the model gave {values} logits, which are no whole rows of {width}")]
    Ragged {
        /// Values given.
        values: usize,
        /// Values per row.
        width: u32,
    },
    /// The rows are not as wide as the vocabulary.
    #[error("the model gave rows of {got} logits, the vocabulary has {expected} tokens")]
    Width {
        /// Values per row.
        got: u32,
        /// Tokens of the vocabulary.
        expected: u32,
    },
    /// A logit is NaN or infinite.
    #[error(
        "the model gave request {request} a logit that is not a number or infinite: its weights \
         may be damaged"
    )]
    NotFinite {
        /// Number of the request.
        request: usize,
    },
    /// The chosen tokens are of another number of chunks.
    #[error("tokens of {got} chunks, the batch has {expected} with logits")]
    Chunks {
        /// Entries given.
        got: usize,
        /// Chunks of the batch that need logits.
        expected: usize,
    },
    /// The chosen tokens are of another sequence.
    #[error("tokens of sequence {}, expected sequence {}", got.0, expected.0)]
    Sequence {
        /// The sequence given.
        got: SequenceId,
        /// The sequence of the chunk in this place.
        expected: SequenceId,
    },
    /// A chunk has no chosen token, or more than one and its drafts.
    #[error("{got} tokens of sequence {}, from 1 to {max} are possible", sequence.0)]
    NumTokens {
        /// The sequence.
        sequence: SequenceId,
        /// Tokens given.
        got: usize,
        /// One more than the drafts.
        max: u32,
    },
    /// A token before the last is not the draft in its place.
    #[error("token {got} of sequence {} is accepted in place of the draft {draft}", sequence.0)]
    NotTheDraft {
        /// The sequence.
        sequence: SequenceId,
        /// The token given.
        got: u32,
        /// The draft token.
        draft: u32,
    },
    /// A token is outside of the vocabulary.
    #[error("token {token} of sequence {} is outside of the {vocab} of the vocabulary", sequence.0)]
    Vocabulary {
        /// The sequence.
        sequence: SequenceId,
        /// The token given.
        token: u32,
        /// Tokens of the vocabulary.
        vocab: u32,
    },
    /// Beams, and several texts after one prompt, are chosen by the engine.
    #[error("request {request} needs logits: it has beams or further texts")]
    LogitsNeeded {
        /// Number of the request.
        request: usize,
    },
}

/// A session file that cannot be written, or is damaged or of another model, cache or program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionFileError {
    /// The operating system reported an error, which names the file.
    #[error(transparent)]
    Io(Box<SessionError>),
    /// The file is no session, or one of another model or cache, or the cache refused a call.
    #[error("{}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Box<SessionError>,
    },
    /// The note of the file is not that of an [`Engine`](crate::Engine).
    #[error("{}: a session of another program: its note cannot be read", path.display())]
    Note {
        /// The file.
        path: PathBuf,
    },
}

/// A request that can never run, even alone.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The prompt leaves no room in the context.
    #[error("prompt {index} has {tokens} tokens, which leaves no room in a context of {context}")]
    PromptTooLong {
        /// Index of the request.
        index: usize,
        /// Tokens of its prompt.
        tokens: usize,
        /// Longest sequence, in tokens.
        context: u32,
    },
    /// The request needs more blocks than the cache has, even alone.
    #[error(
        "prompt {index} with its new tokens is {tokens} tokens long and needs {} blocks{}, the \
         cache has {}",
        .shortage.needed, of_group(shortage), .shortage.available
    )]
    DoesNotFit {
        /// Index of the request.
        index: usize,
        /// Cached tokens at its end.
        tokens: u32,
        /// The shortage and ways to avoid it.
        shortage: Shortage,
    },
    /// The sequence would exceed the cache's longest sequence.
    #[error(
        "prompt {index} with its new tokens is {tokens} tokens long, a sequence of the cache has \
         at most {max}"
    )]
    TooLong {
        /// Index of the request.
        index: usize,
        /// Cached tokens at its end.
        tokens: u32,
        /// Longest sequence of the cache.
        max: u32,
    },
    /// The search has more beams than the cache has sequences.
    #[error("prompt {index} needs {needed} sequences at once, the cache has room for {available}")]
    TooManyBeams {
        /// Index of the request.
        index: usize,
        /// Number of beams.
        needed: u32,
        /// Number of sequences of the cache.
        available: u32,
    },
    /// Stops must ascend, from 1 to the length of the prompt.
    #[error(
        "prompt {index} of {tokens} tokens has a stop of {stop} after {before}: stops ascend up to \
         its length"
    )]
    Stop {
        /// Index of the request.
        index: usize,
        /// The stop before it, 0 for none.
        before: u32,
        /// The stop.
        stop: u32,
        /// Tokens of the prompt.
        tokens: usize,
    },
    /// Beams are already several texts after one prompt.
    #[error("prompt {index} is to have beams and further texts: one of them")]
    BeamsOrChoices {
        /// Index of the request.
        index: usize,
    },
    /// A token of the prompt is outside of the vocabulary.
    #[error("prompt {index} has token {token}, the vocabulary has {vocab}")]
    Vocabulary {
        /// Index of the request.
        index: usize,
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        vocab: u32,
    },
    /// A prompt must have a token.
    #[error("prompt {index} has no tokens")]
    EmptyPrompt {
        /// Index of the request.
        index: usize,
    },
}

/// Names the group of a shortage, if there are several groups.
fn of_group(shortage: &Shortage) -> String {
    let Shortage { group, num_groups, .. } = shortage;
    if *num_groups > 1 { format!(" of layer group {group}") } else { String::new() }
}
