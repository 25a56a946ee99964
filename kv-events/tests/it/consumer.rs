//! A model of a router: what it knows after some batches.
use std::collections::{BTreeMap, BTreeSet};

use crate::client::Batch;
use crate::value::Value;

/// One block that the router knows: its tokens, and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) parent: Option<u64>,
    pub(crate) tokens: Vec<u64>,
    pub(crate) media: BTreeSet<String>,
}

#[derive(Debug, Default)]
pub(crate) struct Consumer {
    pub(crate) blocks: BTreeMap<u64, Known>,
    /// Events that a router would have skipped.
    pub(crate) skipped: usize,
    pub(crate) runs: usize,
}

impl Consumer {
    pub(crate) fn apply(&mut self, batch: &Batch) {
        for event in batch.events() {
            self.event(&event);
        }
    }

    fn event(&mut self, event: &Value) {
        match event.get("type").str() {
            "BlockStored" => self.stored(event),
            "BlockRemoved" => {
                assert_eq!(event.keys(), ["type", "block_hashes", "medium", "group_idx"]);
                assert!(!event.get("block_hashes").items().is_empty());
                for hash in event.get("block_hashes").items() {
                    let hash = hash.uint();
                    let media = self.blocks.get_mut(&hash).map(|known| &mut known.media);
                    if !media.is_some_and(|media| media.remove(event.get("medium").str())) {
                        self.skipped += 1;
                        continue;
                    }
                    self.blocks.retain(|_, known| !known.media.is_empty());
                }
            }
            "AllBlocksCleared" => {
                assert_eq!(event.keys(), ["type"]);
                self.blocks.clear();
            }
            kind => panic!("{kind}"),
        }
    }

    fn stored(&mut self, event: &Value) {
        self.runs += 1;
        let block_size = usize::try_from(event.get("block_size").uint()).unwrap();
        let hashes = event.get("block_hashes").items();
        let tokens: Vec<_> = event.get("token_ids").items().iter().map(Value::uint).collect();
        assert_eq!(tokens.len(), hashes.len() * block_size);
        assert_eq!(event.get("group_idx").uint(), 0);
        assert_eq!(event.get("kv_cache_spec_kind").str(), "full_attention");
        let mut parent = match event.get("parent_block_hash") {
            Value::Nil => None,
            hash => Some(hash.uint()),
        };
        for (hash, tokens) in hashes.iter().zip(tokens.chunks(block_size)) {
            // Routers take no block whose parent they do not know.
            if parent.is_some_and(|parent| !self.blocks.contains_key(&parent)) {
                self.skipped += 1;
                return;
            }
            let fresh = Known { parent, tokens: tokens.to_vec(), media: BTreeSet::new() };
            let known = self.blocks.entry(hash.uint()).or_insert_with(|| fresh.clone());
            assert_eq!((known.parent, &known.tokens), (fresh.parent, &fresh.tokens));
            known.media.insert(event.get("medium").str().into());
            parent = Some(hash.uint());
        }
    }
}
