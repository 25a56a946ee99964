//! The sizes of a model's cache in one format, asked of the smallest such cache.
use anyhow::Context;
use kv::quant::{Stored, bits_per_value};
use kv::spec::{GroupSpec, StatesSpec};
use kv::{CacheSpec, DType};
use kv_runner::{LayerGeometry, StatePart};

use super::{Line, Pools};
use crate::args::StateSettings;
use crate::num::to_u64;
use crate::snapshot_pool::SnapshotPool;

/// Longest sequence of a cache whose layers all have windows, or states alone.
const LEN_MAX: u32 = u32::MAX >> 2;

/// What the layers of a model keep.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kept<'a> {
    /// Kinds of layers with rows, and the number of layers of each.
    pub(super) kinds: &'a [(LayerGeometry, u32)],
    /// Kinds of recurrent states, and the layers of each.
    pub(super) states: &'a [(&'a [StatePart], Vec<u32>)],
}

/// Returns the element type in which a cache keeps a part of a state.
pub(super) fn dtype(part: &StatePart, settings: &StateSettings) -> DType {
    part.dtype.unwrap_or(settings.window)
}

/// The smallest cache of one format for a model, to ask it for sizes.
pub(super) struct Plan<'a> {
    stored: &'a Stored,
    pub(super) spec: CacheSpec,
    kinds: &'a [(LayerGeometry, u32)],
    settings: StateSettings,
}

/// A memory after its constants and snapshots.
#[derive(Debug, Clone, Copy)]
struct Shares {
    snapshots: u64,
    /// Bytes for blocks, and for the slots of sequences.
    rest: u64,
}

impl<'a> Plan<'a> {
    pub(super) fn new(
        kept: Kept<'a>,
        block_size: u32,
        stored: &'a Stored,
        settings: StateSettings,
    ) -> anyhow::Result<Self> {
        let Kept { kinds, states } = kept;
        let with_rows: u32 = kinds.iter().map(|(_, layers)| layers).sum();
        let with_states: usize = states.iter().map(|(_, layers)| layers.len()).sum();
        // Which layers have both does not change a size.
        let num_layers = u16::try_from(u64::from(with_rows).max(to_u64(with_states)))?;
        let builder = CacheSpec::builder().layers(num_layers);
        let mut builder = stored.apply(builder).paged(block_size, stored.blocks_min());
        // A group per kind, in order; the default group stays empty.
        let mut first = 0_u16;
        for (kind, layers) in kinds {
            let end = first + u16::try_from(*layers)?;
            builder = builder.group(first..end, |group| {
                let group = group.kv_heads(kind.kv_heads);
                let group = group.head_dims(kind.head_dim_k, kind.head_dim_v);
                match kind.window {
                    Some(window) => group.window_left(window.saturating_sub(1)),
                    None => group,
                }
            });
            first = end;
        }
        let mut first = 0_u16;
        for (parts, layers) in states {
            let end = first + u16::try_from(layers.len())?;
            builder = builder.states(first..end, |of| {
                let of =
                    parts.iter().fold(of, |of, part| of.part(&part.shape, dtype(part, &settings)));
                let of = of.slots(settings.drafts.saturating_add(2)).drafts(settings.drafts);
                of.snapshots(1, settings.format)
            });
            first = end;
        }
        Ok(Self { stored, spec: builder.build()?, kinds, settings })
    }

    pub(super) fn groups(&self) -> impl Iterator<Item = (&GroupSpec, &LayerGeometry, u64)> {
        let kinds = self.spec.groups().iter().zip(self.kinds);
        kinds.map(|(group, (kind, layers))| (group, kind, u64::from(*layers)))
    }

    /// Returns the bytes of one state of all layers.
    pub(super) fn state_bytes(&self) -> u64 {
        self.spec.states().iter().map(StatesSpec::state_bytes).sum()
    }

    /// Returns the bytes of one snapshot of all layers.
    pub(super) fn snapshot_bytes(&self) -> u64 {
        self.spec.states().iter().map(StatesSpec::snapshot_bytes).sum()
    }

    /// Returns the slots of a sequence: of its state, and of those that a step writes.
    fn slots_of_sequence(&self) -> u64 {
        if self.spec.states().is_empty() { 0 } else { u64::from(self.settings.drafts) + 2 }
    }

    /// Returns the bytes of the slots of a sequence, `None` on overflow.
    fn slot_bytes_of_sequence(&self) -> Option<u64> {
        self.slots_of_sequence().checked_mul(self.state_bytes())
    }

    /// Divides a memory; `None` if the snapshots and the slot of zeros do not fit into it.
    fn shares(&self, memory: u64) -> Option<Shares> {
        let of_one = self.snapshot_bytes();
        let snapshots = match self.settings.snapshots {
            _ if of_one == 0 => 0,
            SnapshotPool::Percent(share) => {
                let bytes = u128::from(memory) * u128::from(share) / 100;
                u64::try_from(bytes).ok()?.checked_div(of_one)?
            }
            SnapshotPool::Count(count) => count.into(),
        };
        let rest = memory.checked_sub(self.spec.memory().bytes_constants)?;
        let rest = rest.checked_sub(snapshots.checked_mul(of_one)?)?;
        // The slot that sequences begin with.
        let rest = rest.checked_sub(self.state_bytes())?;
        Some(Shares { snapshots, rest })
    }

    pub(super) fn line(&self, memory: u64, context: u32) -> anyhow::Result<Line> {
        let rows = self.sequence_bytes(context, true);
        let of_slots = self.slot_bytes_of_sequence().context("a sequence's bytes overflow")?;
        let sequence_bytes = rows.and_then(|rows| rows.checked_add(of_slots));
        let sequence_bytes = sequence_bytes.context("a sequence's bytes overflow")?;
        let shares = self.shares(memory);
        let rest = shares.map_or(0, |shares| shares.rest);
        let is_too_long = context > LEN_MAX;
        let sequences = if is_too_long { 0 } else { rest.checked_div(sequence_bytes).unwrap_or(0) };
        // More count as that many.
        let sequences = u32::try_from(sequences).unwrap_or(u32::MAX);
        let needed: Vec<_> = self.groups().map(bytes_per_token).collect();
        let first = self.spec.groups().first().context("a cache has a group")?;
        let has_rows = !self.kinds.is_empty();
        Ok(Line {
            format: self.stored.to_string(),
            bits_per_value: bits_per_value(&self.spec),
            full_precision_prefix: first.slot_map().full_precision_prefix(),
            bytes_per_token: needed.iter().sum(),
            stored_bytes_per_token: self.spec.memory().bytes_per_token,
            kind_bytes_per_token: needed,
            sequence_bytes,
            tokens: has_rows
                .then(|| rest.checked_sub(of_slots).map_or(0, |rest| self.tokens_within(rest))),
            sequences,
            pools: self.pools(shares, context, sequences),
        })
    }

    /// Returns the sizes of all pools of a memory.
    fn pools(&self, shares: Option<Shares>, context: u32, fitting: u32) -> Pools {
        let running = self.settings.sequences.unwrap_or(fitting.max(1));
        let slots = u64::from(running) * self.slots_of_sequence();
        let of_slots = slots.checked_mul(self.state_bytes());
        let rest = shares.zip(of_slots).and_then(|(shares, slots)| shares.rest.checked_sub(slots));
        let snapshots = shares.map_or(0, |shares| shares.snapshots);
        let Some(rest) = rest else {
            return Pools { blocks: vec![0; self.kinds.len()], slots, snapshots, fit: false };
        };
        // Beside layers without windows, those with one need no more than their windows.
        let grows = self.groups().any(|(_, kind, _)| kind.window.is_none());
        let is_fixed = |kind: &LayerGeometry| grows && kind.window.is_some();
        let fixed =
            |group: &GroupSpec| u64::from(group.blocks_to_grow(context)) * u64::from(running);
        let (mut taken, mut of_block) = (Some(0_u64), 0_u64);
        for (group, kind, layers) in self.groups() {
            let bytes = group.layer_block_bytes() * layers;
            if is_fixed(kind) {
                let all = fixed(group).checked_mul(bytes);
                taken = taken.zip(all).and_then(|(taken, all)| taken.checked_add(all));
            } else {
                of_block += bytes;
            }
        }
        let left = taken.and_then(|taken| rest.checked_sub(taken));
        let growing = left.and_then(|left| left.checked_div(of_block)).unwrap_or(0);
        let blocks = self.groups().map(
            |(group, kind, _)| {
                if is_fixed(kind) { fixed(group) } else { growing }
            },
        );
        let blocks: Vec<_> = blocks.collect();
        let fit = growing > 0 || self.kinds.is_empty();
        Pools { blocks, slots, snapshots, fit }
    }

    /// Returns the bytes of the rows of one sequence of this length, `None` on overflow. Unless
    /// `leaves`, tokens that left a window are counted.
    pub(super) fn sequence_bytes(&self, tokens: u32, leaves: bool) -> Option<u64> {
        self.groups().try_fold(0_u64, |sum, (group, _, layers)| {
            let blocks = if leaves {
                group.blocks_to_grow(tokens)
            } else {
                group.slot_map().blocks_to_grow(tokens)
            };
            let block = group.layer_block_bytes().checked_mul(layers)?;
            sum.checked_add(block.checked_mul(u64::from(blocks))?)
        })
    }

    /// Returns the tokens of the longest sequence whose rows fit; if every layer has a window,
    /// sequences have no limit and it returns the tokens that are kept at once.
    pub(super) fn tokens_within(&self, bytes: u64) -> u64 {
        let leaves = self.groups().any(|(_, kind, _)| kind.window.is_none());
        let fits = |tokens| self.sequence_bytes(tokens, leaves).is_some_and(|all| all <= bytes);
        let (mut fitting, mut beyond) = (0, LEN_MAX);
        while fitting < beyond {
            let tokens = beyond - (beyond - fitting) / 2;
            if fits(tokens) {
                fitting = tokens;
            } else {
                beyond = tokens - 1;
            }
        }
        fitting.into()
    }
}

/// Returns the bytes that the layers of a kind need per token: for MLA, its K.
pub(super) fn bytes_per_token((group, kind, layers): (&GroupSpec, &LayerGeometry, u64)) -> u64 {
    let [k, v] = group.layouts();
    let block = if kind.is_latent { k.block_bytes() } else { k.block_bytes() + v.block_bytes() };
    let all = block * layers;
    all.checked_div(group.block_size().into()).unwrap_or(0)
}
