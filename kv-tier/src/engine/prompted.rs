//! The chunks that are parts of prompts, as opposed to generated text.
use std::collections::{HashMap, VecDeque};

use crate::name::ChunkName;

/// The chunks of prompts that were prefetched, up to a number of them.
#[derive(Debug, Default)]
pub(super) struct Prompted {
    tokens: HashMap<ChunkName, u32>,
    order: VecDeque<ChunkName>,
}

impl Prompted {
    const KEPT: usize = 1 << 16;

    pub(super) fn insert(&mut self, name: ChunkName, prompt_tokens: u32) {
        use std::collections::hash_map::Entry;
        match self.tokens.entry(name) {
            Entry::Occupied(mut known) => {
                let longest = prompt_tokens.max(*known.get());
                known.insert(longest);
            }
            Entry::Vacant(place) => {
                place.insert(prompt_tokens);
                self.order.push_back(name);
                if self.order.len() > Self::KEPT
                    && let Some(oldest) = self.order.pop_front()
                {
                    self.tokens.remove(&oldest);
                }
            }
        }
    }

    pub(super) fn get(&self, name: &ChunkName) -> Option<u32> {
        self.tokens.get(name).copied()
    }
}
