//! Errors of requests that cannot run.
use super::Shortage;

/// A request that can never run, or a model that breaks its contract.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
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
        needed: usize,
        /// Number of sequences of the cache.
        available: u32,
    },
    /// Beams are already several texts after one prompt.
    #[error("prompt {index} is to have beams and further texts: one of them")]
    BeamsOrChoices {
        /// Index of the request.
        index: usize,
    },
    /// A prompt must have a token.
    #[error("prompt {index} has no tokens")]
    EmptyPrompt {
        /// Index of the request.
        index: usize,
    },
    /// The model returned a different number of rows than the batch needs.
    #[error("the model gave {got} rows of logits, expected {expected}")]
    Logits {
        /// Rows returned.
        got: usize,
        /// Rows that the chunks of the batch need.
        expected: usize,
    },
    /// No request can run, and none holds a block.
    #[error("no sequence can continue")]
    Stuck,
}

/// Names the group of a shortage, if there are several groups.
fn of_group(shortage: &Shortage) -> String {
    let Shortage { group, num_groups, .. } = shortage;
    if *num_groups > 1 { format!(" of layer group {group}") } else { String::new() }
}
