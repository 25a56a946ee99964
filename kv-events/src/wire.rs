//! Events as vLLM's consumers read them: runs of blocks, batches and their bytes.
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use kv_core::events::Tier;
use kv_core::invariant::Invariant;
use kv_core::reuse::BlockKey;

use crate::msgpack::Writer;

/// The most bytes of a batch. Consumers refuse payloads of 16 MiB; smaller ones are applied sooner.
pub(crate) const BATCH_BYTES: usize = 1 << 20;
/// The most events of a batch: consumers refuse longer lists.
const BATCH_EVENTS: usize = 4096;
/// An upper bound of what a batch has around its events.
const BATCH_OVERHEAD: usize = 64;
/// An upper bound of what an event has around its lists, its salt and its adapter.
const EVENT_OVERHEAD: usize = 384;
/// Upper bounds of one number in a list.
const HASH_BYTES: usize = 9;
const TOKEN_BYTES: usize = 5;
/// The most tokens of a block that fits a batch together with the longest salt.
pub(crate) const BLOCK_TOKENS_MAX: u32 = 128 << 10;
/// The longest salt that is published, in bytes.
pub(crate) const SALT_BYTES_MAX: usize = 4096;
/// Dynamo's mark of a salt among the extra keys of a block.
const SALT_TAG: &str = "dynamo-cache-salt:";

/// How events are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Wire {
    /// Maps with the key `type`: vLLM since June 2026, vllm-router, Dynamo, llm-d.
    #[default]
    Map,
    /// Arrays whose first value is the type: vLLM before, SGLang, AIBrix, kthena.
    Array,
}

/// Where vLLM says that a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Medium {
    Gpu,
    Cpu,
    Storage,
}

impl Medium {
    /// All media.
    pub(crate) const ALL: [Self; 3] = [Self::Gpu, Self::Cpu, Self::Storage];

    /// Returns the name on the wire.
    fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::Cpu => "CPU",
            Self::Storage => "STORAGE",
        }
    }

    /// Returns the bits of its tiers in a set of [`tier_bit`]s.
    pub(crate) fn tiers(self) -> u8 {
        match self {
            Self::Gpu => 1,
            Self::Cpu => 2,
            Self::Storage => 4 | 8,
        }
    }
}

/// Returns the bit of a tier; `None` for tiers that consumers have no medium for.
pub(crate) fn tier_bit(tier: Tier) -> Option<u8> {
    Some(match tier {
        Tier::Device => 1,
        Tier::Host => 2,
        Tier::Disk => 4,
        Tier::Store => 8,
        _ => return None,
    })
}

/// Whose prompts may reuse a block.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(crate) struct Namespace {
    pub(crate) salt: Box<[u8]>,
    pub(crate) adapter: Option<u64>,
}

/// Consecutive blocks of one prompt that became reusable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) medium: Medium,
    pub(crate) namespace: Option<Arc<Namespace>>,
    /// `None` if the first block begins a prompt.
    pub(crate) parent: Option<BlockKey>,
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) tokens: Vec<u32>,
}

impl Run {
    /// Returns an upper bound of the bytes on the wire.
    fn bytes(&self) -> usize {
        let salt = self.namespace.as_ref().map_or(0, |of| SALT_TAG.len() + 2 * of.salt.len());
        EVENT_OVERHEAD + salt + self.list_bytes()
    }

    /// Returns an upper bound of the bytes of its blocks in the lists of an event: one more extra
    /// key, and hashes and tokens.
    fn list_bytes(&self) -> usize {
        self.keys.len() * (1 + HASH_BYTES) + self.tokens.len() * TOKEN_BYTES
    }

    /// Returns whether a run of one block goes on where this one ends.
    fn is_continued_by(&self, next: &Self) -> bool {
        self.medium == next.medium
            && self.namespace == next.namespace
            && next.parent.is_some()
            && next.parent.as_ref() == self.keys.last()
    }
}

/// One event on the wire.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WireEvent {
    Stored(Run),
    Removed { medium: Medium, keys: Vec<BlockKey> },
    Cleared,
}

/// Events, cut into batches in their order.
#[derive(Debug, Default)]
pub(crate) struct Batches {
    full: Vec<Vec<WireEvent>>,
    open: Vec<WireEvent>,
    bytes: usize,
}

impl Batches {
    /// Appends a block that became reusable: to the run before it where the block goes on there.
    pub(crate) fn stored(&mut self, block: Run) {
        let more = block.list_bytes();
        if self.has_room(more, 0)
            && let Some(WireEvent::Stored(run)) = self.open.last_mut()
            && run.is_continued_by(&block)
        {
            run.keys.extend(block.keys);
            run.tokens.extend(block.tokens);
            self.bytes += more;
        } else {
            let bytes = block.bytes();
            self.append(WireEvent::Stored(block), bytes);
        }
    }

    /// Appends a block that left a medium.
    pub(crate) fn removed(&mut self, medium: Medium, key: BlockKey) {
        if self.has_room(HASH_BYTES, 0)
            && let Some(WireEvent::Removed { medium: last, keys }) = self.open.last_mut()
            && *last == medium
        {
            keys.push(key);
            self.bytes += HASH_BYTES;
        } else {
            self.append(WireEvent::Removed { medium, keys: vec![key] }, EVENT_OVERHEAD);
        }
    }

    /// Appends that nothing can be reused any more.
    pub(crate) fn cleared(&mut self) {
        self.append(WireEvent::Cleared, EVENT_OVERHEAD);
    }

    /// Returns the batches; none without an event.
    pub(crate) fn finish(mut self) -> Vec<Vec<WireEvent>> {
        self.close();
        self.full
    }

    fn has_room(&self, bytes: usize, events: usize) -> bool {
        BATCH_OVERHEAD + self.bytes + bytes <= BATCH_BYTES
            && self.open.len() + events <= BATCH_EVENTS
    }

    fn append(&mut self, event: WireEvent, bytes: usize) {
        if !self.has_room(bytes, 1) {
            self.close();
        }
        self.open.push(event);
        self.bytes += bytes;
    }

    fn close(&mut self) {
        if !self.open.is_empty() {
            self.full.push(std::mem::take(&mut self.open));
        }
        self.bytes = 0;
    }
}

/// What all batches of a publisher have in common.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Format {
    pub(crate) wire: Wire,
    pub(crate) block_size: u32,
    pub(crate) rank: u32,
}

impl Format {
    /// Returns the payload of a batch; `time` is in seconds since 1970.
    pub(crate) fn payload(&self, time: f64, events: &[WireEvent]) -> Vec<u8> {
        let mut out = Writer::default();
        out.list(3);
        out.float(time);
        out.list(events.len());
        for event in events {
            match self.wire {
                Wire::Map => self.map(&mut out, event),
                Wire::Array => self.array(&mut out, event),
            }
        }
        out.uint(u64::from(self.rank));
        out.finish()
    }

    fn map(&self, out: &mut Writer, event: &WireEvent) {
        let name = |out: &mut Writer, keys, name| {
            out.map(keys);
            out.text("type");
            out.text(name);
        };
        match event {
            WireEvent::Stored(run) => {
                let salt = salt_of(run);
                name(out, 10 + usize::from(salt.is_some()), "BlockStored");
                for (key, write) in Self::fields() {
                    out.text(key);
                    write(self, out, run);
                }
                if let Some(salt) = salt {
                    out.text("extra_keys");
                    extra_keys(out, &salt, run.keys.len());
                }
                out.text("group_idx");
                out.uint(0);
                out.text("kv_cache_spec_kind");
                out.text("full_attention");
            }
            WireEvent::Removed { medium, keys } => {
                name(out, 4, "BlockRemoved");
                out.text("block_hashes");
                out.uints(keys.iter().map(hash));
                out.text("medium");
                out.text(medium.name());
                out.text("group_idx");
                out.uint(0);
            }
            WireEvent::Cleared => name(out, 1, "AllBlocksCleared"),
        }
    }

    /// Readers of arrays take a group that is not named for the first, of full attention.
    fn array(&self, out: &mut Writer, event: &WireEvent) {
        match event {
            WireEvent::Stored(run) => {
                let salt = salt_of(run);
                out.list(8 + usize::from(salt.is_some()));
                out.text("BlockStored");
                for (_, write) in Self::fields() {
                    write(self, out, run);
                }
                if let Some(salt) = salt {
                    extra_keys(out, &salt, run.keys.len());
                }
            }
            WireEvent::Removed { medium, keys } => {
                out.list(3);
                out.text("BlockRemoved");
                out.uints(keys.iter().map(hash));
                out.text(medium.name());
            }
            WireEvent::Cleared => {
                out.list(1);
                out.text("AllBlocksCleared");
            }
        }
    }

    /// Returns the fields of a stored run that every event has, in vLLM's order.
    fn fields() -> [(&'static str, Field); 7] {
        [
            ("block_hashes", |_, out, run| out.uints(run.keys.iter().map(hash))),
            ("parent_block_hash", |_, out, run| match &run.parent {
                Some(parent) => out.uint(hash(parent)),
                None => out.nil(),
            }),
            ("token_ids", |_, out, run| out.uints(run.tokens.iter().map(|&id| u64::from(id)))),
            ("block_size", |of, out, _| out.uint(u64::from(of.block_size))),
            ("lora_id", |_, out, run| match adapter(run) {
                Some(id) => out.uint(id),
                None => out.nil(),
            }),
            ("medium", |_, out, run| out.text(run.medium.name())),
            ("lora_name", |_, out, run| match adapter(run) {
                Some(id) => out.text(&id.to_string()),
                None => out.nil(),
            }),
        ]
    }
}

/// Writes one field.
type Field = fn(&Format, &mut Writer, &Run);

/// Returns the name of a block on the wire.
fn hash(key: &BlockKey) -> u64 {
    let bytes = key.0.to_le_bytes();
    u64::from_le_bytes(*bytes.first_chunk().invariant("a key has 16 bytes"))
}

fn adapter(run: &Run) -> Option<u64> {
    run.namespace.as_ref().and_then(|of| of.adapter)
}

/// Returns the extra key of a salted run.
fn salt_of(run: &Run) -> Option<String> {
    let salt = run.namespace.as_ref().map(|of| &of.salt).filter(|salt| !salt.is_empty())?;
    let mut text = String::from(SALT_TAG);
    match str::from_utf8(salt) {
        Ok(salt) => text.push_str(salt),
        Err(_) => salt.iter().for_each(|byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
        }),
    }
    Some(text)
}

/// Writes the extra keys of `blocks` blocks: a reader takes those of the first for the whole event.
fn extra_keys(out: &mut Writer, salt: &str, blocks: usize) {
    out.list(blocks);
    out.list(1);
    out.text(salt);
    (1..blocks).for_each(|_| out.nil());
}

/// Returns the number of the first batch of a life that begins so long after 1970: above every
/// number of a life before, of which none publishes 2^20 batches in a millisecond.
pub(crate) fn first_number(since_1970: Duration) -> u64 {
    u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX) << 20
}
