//! Requests that cannot run.
use super::Shortage;

/// A request that can never run, or a model that breaks its contract.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The prompt fills the context.
    #[error("prompt {index} has {tokens} tokens, which leaves no room in a context of {context}")]
    PromptTooLong {
        /// The request.
        index: usize,
        /// Tokens of its prompt.
        tokens: usize,
        /// Tokens a sequence may have.
        context: u32,
    },
    /// The request alone needs more blocks than there are.
    #[error(
        "prompt {index} with its new tokens is {tokens} tokens long and needs {} blocks{}, the \
         cache has {}",
        .shortage.needed, of_group(shortage), .shortage.available
    )]
    DoesNotFit {
        /// The request.
        index: usize,
        /// Tokens it has cached at its end.
        tokens: u32,
        /// What is too small, and what would do.
        shortage: Shortage,
    },
    /// The sequence would be longer than the cache allows.
    #[error(
        "prompt {index} with its new tokens is {tokens} tokens long, a sequence of the cache has \
         at most {max}"
    )]
    TooLong {
        /// The request.
        index: usize,
        /// Tokens it has cached at its end.
        tokens: u32,
        /// Tokens a sequence of the cache may have.
        max: u32,
    },
    /// The search is wider than the cache has sequences.
    #[error("prompt {index} needs {needed} sequences at once, the cache has room for {available}")]
    TooManyBeams {
        /// The request.
        index: usize,
        /// Its beams.
        needed: usize,
        /// Sequences of the cache.
        available: u32,
    },
    /// A prompt must have a token.
    #[error("prompt {index} has no tokens")]
    EmptyPrompt {
        /// The request.
        index: usize,
    },
    /// The model returned another number of rows than its batch says.
    #[error("the model gave {got} rows of logits, expected {expected}")]
    Logits {
        /// Rows it returned.
        got: usize,
        /// Rows that the chunks of the batch name.
        expected: usize,
    },
    /// No request can run, and none holds a block.
    #[error("no sequence can go on")]
    Stuck,
}

/// Names the group of a shortage, where there are several.
fn of_group(shortage: &Shortage) -> String {
    let Shortage { group, num_groups, .. } = shortage;
    if *num_groups > 1 { format!(" of layer group {group}") } else { String::new() }
}
