//! The builder of [`CacheSpec`].
use kv_format::KvFormat;

use crate::error::{SpecConflict, SpecError};
use crate::eviction::Eviction;
use crate::geometry::{BlockOrder, PlaneLayout};
use crate::ids::{GroupId, LayerId};
use crate::num::to_u64;
use crate::plan::Determinism;
use crate::spec::group::{GroupBuilder, KeyMean, Transform};
use crate::spec::reuse::{PrefixReuse, PublishAt, Reuse};
use crate::spec::states::{StatesBuilder, StatesSpec, layers_of};
use crate::spec::{CacheSpec, GroupSpec, LateLayers};

/// The longest sequence if all groups have windows: positions and slots fit `u32`.
const LEN_MAX: u32 = u32::MAX >> 2;

/// Collects the settings of a cache; [`Self::build`] checks them together.
///
/// Three settings have no default: [`layers`](Self::layers), or
/// [`layers_on_demand`](Self::layers_on_demand); the shape of a row ([`kv_heads`](Self::kv_heads),
/// [`head_dim`](Self::head_dim)); and the memory ([`paged`](Self::paged),
/// [`paged_within`](Self::paged_within) or [`contiguous`](Self::contiguous)). Settings of rows and
/// memory hold for all layers, except those that [`group`](Self::group) gives settings of their
/// own.
///
/// ```
/// use kv::{CacheSpec, KvFormat};
///
/// // Layers 0 to 5: every third one attends to all tokens, the others to a window.
/// let spec = CacheSpec::builder()
///     .layers(6)
///     .kv_heads(8)
///     .head_dim(128)
///     .format(KvFormat::Bf16)
///     .paged(16, 1024)
///     .group([0, 1, 3, 4], |group| group.window_left(1023).paged(16, 256))
///     .build()?;
/// assert_eq!(spec.groups().len(), 2);
/// # Ok::<(), kv::error::SpecError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct CacheSpecBuilder {
    layers: Option<u16>,
    on_demand: bool,
    late_layers: LateLayers,
    default_group: GroupBuilder,
    groups: Vec<(Vec<u16>, GroupBuilder)>,
    states: Vec<(Vec<u16>, StatesBuilder)>,
    max_sequences: Option<u32>,
    max_seq_len: Option<u32>,
    determinism: Determinism,
    wipe_on_release: bool,
    reuse: Reuse,
}

macro_rules! forward_to_default_group {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*);)*) => {$(
        $(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $($arg: $type),*) -> Self {
            self.default_group = self.default_group.$name($($arg),*);
            self
        }
    )*};
}

impl CacheSpecBuilder {
    /// Sets the number of layers of the model.
    #[must_use]
    pub fn layers(mut self, layers: u16) -> Self {
        self.layers = Some(layers);
        self
    }
    /// Leaves the number of layers open: each gets memory from
    /// [`KvCache::allocate_layer`](crate::KvCache::allocate_layer), in one group.
    #[must_use]
    pub fn layers_on_demand(mut self) -> Self {
        self.on_demand = true;
        self
    }
    /// Sets the reads of rows that a layer on demand lacks, because it got memory after tokens were
    /// cached; [`LateLayers::Refuse`] unless set. No effect without [`Self::layers_on_demand`].
    #[must_use]
    pub fn late_layers(mut self, late_layers: LateLayers) -> Self {
        self.late_layers = late_layers;
        self
    }
    forward_to_default_group! {
        /// Sets the heads of K and V: as many as query heads for MHA, fewer for GQA, 1 for MQA.
        kv_heads(heads: u32);
        /// Sets the values of one row of K and of V.
        head_dim(dim: u32);
        /// Sets the values of one row of K, and of V.
        head_dims(k: u32, v: u32);
        /// Sets the stored format of K and V; [`KvFormat::F16`] by default.
        format(format: KvFormat);
        /// Sets the stored format of K, and of V.
        formats(k: KvFormat, v: KvFormat);
        /// Sets the axes inside a block; [`BlockOrder::Hnd`] by default.
        block_order(order: BlockOrder);
        /// Sets whether quantised rows are transformed; [`Transform::Auto`] by default.
        transform(transform: Transform);
        /// Keeps the first tokens of every sequence in 16 bits; see
        /// [`GroupBuilder::full_precision_prefix`].
        full_precision_prefix(tokens: u32);
        /// Keeps the block that is being filled in 16 bits; see [`GroupBuilder::tail`].
        tail(tail: bool);
        /// Sets the mean that is subtracted from keys; [`KeyMean::Calibrated`] by default.
        key_mean(key_mean: KeyMean);
        /// Keeps a sliding window of every sequence; see [`GroupBuilder::window_left`].
        window_left(tokens: u32);
        /// Keeps the first tokens of every sequence besides its window.
        sink_tokens(tokens: u32);
        /// Keeps tokens before the window, so that sequences can be truncated; see
        /// [`GroupBuilder::window_slack`].
        window_slack(tokens: u32);
        /// Sets a pool of `num_blocks` blocks of `block_size` tokens each; see
        /// [`GroupBuilder::paged`].
        paged(block_size: u32, num_blocks: u32);
        /// Sets a pool of as many blocks of `block_size` tokens as fit in `bytes`, over all layers
        /// of the group.
        paged_within(block_size: u32, bytes: u64);
        /// Sets a pool of one block of `max_seq_len` tokens for each of `max_sequences` sequences.
        contiguous(max_sequences: u32, max_seq_len: u32);
    }
    /// Gives some layers their own settings: `change` gets the settings made so far. Layers in no
    /// group form the first group.
    #[must_use]
    pub fn group(
        mut self,
        layers: impl IntoIterator<Item = u16>,
        change: impl FnOnce(GroupBuilder) -> GroupBuilder,
    ) -> Self {
        let group = change(self.default_group.clone());
        self.groups.push((layers.into_iter().collect(), group));
        self
    }
    /// Gives some layers a recurrent state of fixed size for every sequence. They have no rows of
    /// keys and values unless [`Self::group`] lists them too. A prompt is reused up to a length at
    /// which the rows of all groups and a [snapshot](StatesBuilder::snapshots) of all states are
    /// cached; without snapshots, no prompt is ([`PrefixReuse::Off`]).
    ///
    /// ```
    /// use kv::{CacheSpec, DType, KvFormat};
    ///
    /// // Every fourth of 8 layers attends; the others have a delta rule and a convolution.
    /// let spec = CacheSpec::builder()
    ///     .layers(8)
    ///     .kv_heads(4)
    ///     .head_dim(256)
    ///     .format(KvFormat::Bf16)
    ///     .paged(16, 1024)
    ///     .states((0..8).filter(|layer| layer % 4 != 3), |states| {
    ///         states.part([10_240, 3], DType::Bf16).part([48, 128, 128], DType::F32).slots(64)
    ///     })
    ///     .build()?;
    /// assert_eq!(spec.groups()[0].layers().len(), 2);
    /// assert_eq!(spec.states()[0].state_bytes(), 6 * (10_240 * 3 * 2 + 48 * 128 * 128 * 4));
    /// # Ok::<(), kv::error::SpecError>(())
    /// ```
    #[must_use]
    pub fn states(
        mut self,
        layers: impl IntoIterator<Item = u16>,
        set: impl FnOnce(StatesBuilder) -> StatesBuilder,
    ) -> Self {
        self.states.push((layers.into_iter().collect(), set(StatesBuilder::default())));
        self
    }
    /// Sets the maximum number of live sequences; unlimited by default, `num_blocks` if contiguous.
    #[must_use]
    pub fn max_sequences(mut self, sequences: u32) -> Self {
        self.max_sequences = Some(sequences);
        self
    }
    /// Sets the maximum tokens of one sequence; the whole pool by default.
    #[must_use]
    pub fn max_seq_len(mut self, tokens: u32) -> Self {
        self.max_seq_len = Some(tokens);
        self
    }
    /// Sets the inputs of KV splits; [`Determinism::Fast`] by default.
    #[must_use]
    pub fn determinism(mut self, determinism: Determinism) -> Self {
        self.determinism = determinism;
        self
    }
    /// Sets how much of a cached prompt another prompt may reuse; [`PrefixReuse::Partial`] by
    /// default.
    #[must_use]
    pub fn prefix_reuse(mut self, prefixes: PrefixReuse) -> Self {
        self.reuse.prefixes = prefixes;
        self
    }
    /// Sets when blocks that a step fills become reusable; [`PublishAt::Commit`] by default.
    #[must_use]
    pub fn publish_at(mut self, publish_at: PublishAt) -> Self {
        self.reuse.publish_at = publish_at;
        self
    }
    /// Sets which cached block is evicted first; [`Eviction::ReuseRate`] by default.
    #[must_use]
    pub fn eviction(mut self, eviction: Eviction) -> Self {
        self.reuse.eviction = eviction;
        self
    }
    /// Keeps the last `events` [events](crate::events) until they are taken; none by default.
    #[must_use]
    pub fn events(mut self, events: usize) -> Self {
        self.reuse.events = events;
        self
    }
    /// Keeps up to `changes` [changes](crate::block::BlockChange) of blocks until they are
    /// [taken](crate::KvCache::drain_changes); none by default, which costs nothing.
    /// If there are more, all are lost: twice the blocks of all groups is ample if they are taken
    /// after each step.
    #[must_use]
    pub fn changes(mut self, changes: usize) -> Self {
        self.reuse.changes = changes;
        self
    }
    /// Zeroes every block that lost its last holder or its cached content before the block is
    /// handed out again, for callers that share a device between tenants. The next call that hands
    /// out blocks, such as a step or a start, does so; [`KvCache::wipe`](crate::KvCache::wipe) does
    /// it at once.
    #[must_use]
    pub fn wipe_on_release(mut self, wipe: bool) -> Self {
        self.wipe_on_release = wipe;
        self
    }

    /// Checks all settings together.
    ///
    /// # Errors
    /// [`SpecError`] with the first setting that is missing, zero or too large, or the first layer
    /// that is in no group or in two, or two settings that exclude each other.
    pub fn build(self) -> Result<CacheSpec, SpecError> {
        let states = self.build_states()?;
        let (layers, lists) = self.assign_layers(&states)?;
        let mut groups = Vec::new();
        let (mut max_seq_len, mut max_sequences) = (u32::MAX, u32::MAX);
        for (list, builder) in lists {
            let (group, limit) = builder.build(list)?;
            let map = group.slot_map();
            let most = map.tokens(group.num_blocks().saturating_sub(map.tail_blocks_max()));
            if most == 0 {
                let (num_blocks, tail) = (group.num_blocks(), map.tail_blocks_max());
                let problem = SpecConflict::TailBlocks { tail, num_blocks };
                return Err(SpecError::Conflict { what: "tail", problem });
            }
            // With a window, more tokens need no more blocks.
            let most = if group.window.is_some() { LEN_MAX } else { most };
            max_seq_len = max_seq_len.min(limit.unwrap_or(most));
            if group.contiguous {
                max_sequences = max_sequences.min(group.num_blocks());
            }
            self.check_late_layers(&group)?;
            groups.push(group);
        }
        for of in &states {
            max_sequences = max_sequences.min(of.slots());
        }
        for (field, given, limit) in [
            ("max_seq_len", self.max_seq_len, &mut max_seq_len),
            ("max_sequences", self.max_sequences, &mut max_sequences),
        ] {
            match given {
                Some(0) => return Err(SpecError::Zero { field }),
                Some(n) => *limit = n.min(*limit),
                None => {}
            }
        }
        let mut reuse = self.reuse;
        if states.iter().any(|of| of.snapshots().is_none()) {
            reuse.prefixes = PrefixReuse::Off;
        }
        let spec = CacheSpec {
            groups,
            layers,
            states,
            on_demand: self.on_demand,
            late_layers: self.late_layers,
            max_sequences,
            max_seq_len,
            determinism: self.determinism,
            wipe_on_release: self.wipe_on_release,
            reuse,
        };
        match spec.memory_checked() {
            Some(_) => Ok(spec),
            None => Err(SpecError::Overflow { what: "bytes of the cache" }),
        }
    }

    /// Refuses zeroed late layers in quantised formats: zero bytes may decode to other values.
    fn check_late_layers(&self, group: &GroupSpec) -> Result<(), SpecError> {
        let mut formats = group.layouts().iter().map(PlaneLayout::format);
        match formats.find(|format| format.is_quantised()) {
            Some(format) if self.late_layers == LateLayers::Zeros => {
                let problem = SpecConflict::ZeroRows { format };
                Err(SpecError::Conflict { what: "late_layers", problem })
            }
            _ => Ok(()),
        }
    }

    fn num_layers(&self) -> Result<u16, SpecError> {
        match self.layers {
            None => Err(SpecError::Missing { field: "layers" }),
            Some(0) => Err(SpecError::Zero { field: "layers" }),
            Some(n) => Ok(n),
        }
    }

    fn build_states(&self) -> Result<Vec<StatesSpec>, SpecError> {
        if self.states.is_empty() {
            return Ok(Vec::new());
        }
        if self.on_demand {
            let problem = SpecConflict::StatesOnDemand;
            return Err(SpecError::Conflict { what: "states", problem });
        }
        let lists = self.states.iter().map(|(layers, _)| layers.as_slice());
        let lists = layers_of(lists, self.num_layers()?)?;
        lists
            .into_iter()
            .zip(&self.states)
            .map(|(layers, (_, states))| states.build(layers))
            .collect()
    }

    /// Gives every layer with rows its group.
    #[expect(clippy::type_complexity, reason = "used once, in `build`")]
    fn assign_layers(
        &self,
        states: &[StatesSpec],
    ) -> Result<(Vec<Option<(GroupId, usize)>>, Vec<(Vec<LayerId>, GroupBuilder)>), SpecError> {
        if self.on_demand {
            return Ok((Vec::new(), vec![(Vec::new(), self.default_group.clone())]));
        }
        let num_layers = self.num_layers()?;
        let mut listed = vec![0_usize; usize::from(num_layers)];
        for &layer in self.groups.iter().flat_map(|(layers, _)| layers) {
            match listed.get_mut(usize::from(layer)) {
                Some(times) => *times += 1,
                None => {
                    return Err(SpecError::LayerOutOfRange { layer: LayerId(layer), num_layers });
                }
            }
        }
        if let Some((&groups, layer)) = listed.iter().zip(0..).find(|(times, _)| **times > 1) {
            return Err(SpecError::LayerGroups { layer: LayerId(layer), groups });
        }
        let has_state = |layer: &LayerId| states.iter().any(|of| of.layers().contains(layer));
        let unlisted = listed.iter().zip(0..).filter(|(times, _)| **times == 0);
        let rest = unlisted.map(|(_, layer)| LayerId(layer)).filter(|layer| !has_state(layer));
        let mut lists = vec![(rest.collect::<Vec<_>>(), self.default_group.clone())];
        lists.extend(self.groups.iter().map(|(layers, builder)| {
            let mut layers: Vec<_> = layers.iter().copied().map(LayerId).collect();
            layers.sort_unstable();
            (layers, builder.clone())
        }));
        lists.retain(|(layers, _)| !layers.is_empty());
        if lists.is_empty() {
            // Blocks without bytes still count and name the tokens of sequences.
            lists.push((Vec::new(), self.default_group.clone().without_rows()));
        }
        let max = 255;
        // Slots and snapshots.
        let got = lists.len() + states.len() * 2;
        if got > max {
            let (got, max) = (to_u64(got), to_u64(max));
            return Err(SpecError::TooLarge { field: "groups", got, max });
        }
        let mut places = vec![None; usize::from(num_layers)];
        for ((layers, _), group) in lists.iter().zip(0..) {
            for (index, layer) in layers.iter().enumerate() {
                places[usize::from(layer.0)] = Some((GroupId(group), index));
            }
        }
        Ok((places, lists))
    }
}
