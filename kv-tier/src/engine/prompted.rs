//! The chunks that are parts of prompts, as opposed to generated text.
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

use kv_core::eviction::Return;

use crate::name::ChunkName;

/// The chunks of prompts that were prefetched, up to a number of them.
#[derive(Debug, Default)]
pub(super) struct Prompted {
    known: HashMap<ChunkName, Prompt>,
    order: VecDeque<ChunkName>,
}

/// Facts about the prompts that a chunk is a part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Prompt {
    /// Tokens of the longest one.
    pub(super) tokens: u32,
    /// What the last one said of its return.
    pub(super) hint: Option<Return>,
}

impl Prompted {
    const KEPT: usize = 1 << 16;

    pub(super) fn insert(&mut self, name: ChunkName, prompt: Prompt) {
        match self.known.entry(name) {
            Entry::Occupied(known) => {
                let known = known.into_mut();
                *known = Prompt { tokens: prompt.tokens.max(known.tokens), ..prompt };
            }
            Entry::Vacant(place) => {
                place.insert(prompt);
                self.order.push_back(name);
                if self.order.len() > Self::KEPT
                    && let Some(oldest) = self.order.pop_front()
                {
                    self.known.remove(&oldest);
                }
            }
        }
    }

    /// Returns the tokens of the longest prompt of a chunk; `None` for generated text.
    pub(super) fn tokens(&self, name: &ChunkName) -> Option<u32> {
        self.known.get(name).map(|prompt| prompt.tokens)
    }

    /// Returns what the last prompt of a chunk said of its return.
    pub(super) fn hint(&self, name: &ChunkName) -> Option<Return> {
        self.known.get(name).and_then(|prompt| prompt.hint)
    }
}
