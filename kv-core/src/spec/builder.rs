//! From settings to a checked [`CacheSpec`].
use crate::error::SpecError;
use crate::format::KvFormat;
use crate::geometry::{BlockOrder, PlaneLayout, PlaneShape};
use crate::ids::{GroupId, LayerId};
use crate::num::to_u64;
use crate::plan::Determinism;
use crate::spec::{CacheSpec, GroupSpec};

/// Collects settings; [`Self::build`] checks them together.
#[derive(Debug, Clone, Default)]
pub struct CacheSpecBuilder {
    layers: Option<u16>,
    on_demand: bool,
    default_group: GroupBuilder,
    groups: Vec<(Vec<u16>, GroupBuilder)>,
    max_sequences: Option<u32>,
    max_seq_len: Option<u32>,
    determinism: Determinism,
    wipe_on_release: bool,
}

/// Settings of one group; those not set are the builder's own.
#[derive(Debug, Clone, Default)]
pub struct GroupBuilder {
    kv_heads: Option<u32>,
    head_dim_k: Option<u32>,
    head_dim_v: Option<u32>,
    format_k: Option<KvFormat>,
    format_v: Option<KvFormat>,
    order: BlockOrder,
    transform: Transform,
    sinks: u32,
    blocks: Option<Blocks>,
}

/// Whether rows are transformed before they are stored; see [`calibration`](crate::calibration).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(clippy::exhaustive_enums, reason = "as the format asks, or as the caller does")]
pub enum Transform {
    /// Where the format is made for it ([`KvFormat::is_for_transformed`]).
    #[default]
    Auto,
    /// Never: codes mean what they mean elsewhere.
    Off,
    /// In every quantised plane.
    On,
}

impl Transform {
    fn applies(self, format: KvFormat) -> bool {
        match self {
            Self::Auto => format.is_for_transformed(),
            Self::Off => false,
            Self::On => format.is_quantised(),
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Blocks {
    Paged { block_size: u32, num_blocks: u32 },
    PagedWithin { block_size: u32, bytes: u64 },
    Contiguous { max_sequences: u32, max_seq_len: u32 },
}

impl GroupBuilder {
    /// Heads of K and V: as many as query heads for MHA, fewer for GQA, 1 for MQA.
    #[must_use]
    pub fn kv_heads(mut self, heads: u32) -> Self {
        self.kv_heads = Some(heads);
        self
    }
    /// Values of one row of K and of V.
    #[must_use]
    pub fn head_dim(self, dim: u32) -> Self {
        self.head_dims(dim, dim)
    }
    /// Values of one row of K, and of V.
    #[must_use]
    pub fn head_dims(mut self, k: u32, v: u32) -> Self {
        (self.head_dim_k, self.head_dim_v) = (Some(k), Some(v));
        self
    }
    /// Stored format of K and V.
    #[must_use]
    pub fn format(self, format: KvFormat) -> Self {
        self.formats(format, format)
    }
    /// Stored format of K, and of V.
    #[must_use]
    pub fn formats(mut self, k: KvFormat, v: KvFormat) -> Self {
        (self.format_k, self.format_v) = (Some(k), Some(v));
        self
    }
    /// Axes inside a block; [`BlockOrder::Hnd`] unless set.
    #[must_use]
    pub fn block_order(mut self, order: BlockOrder) -> Self {
        self.order = order;
        self
    }
    /// Whether quantised rows are transformed; [`Transform::Auto`] unless set.
    #[must_use]
    pub fn transform(mut self, transform: Transform) -> Self {
        self.transform = transform;
        self
    }
    /// Keeps the first `tokens` tokens of every sequence in 16 bits where the rest is quantised;
    /// none unless set, 4 are enough. Each takes several slots, see
    /// [`SlotMap`](crate::SlotMap).
    #[must_use]
    pub fn sinks(mut self, tokens: u32) -> Self {
        self.sinks = tokens;
        self
    }
    /// `num_blocks` blocks of `block_size` tokens each. Any number of blocks will do: fewer than
    /// the worst case is the point of paging.
    #[must_use]
    pub fn paged(mut self, block_size: u32, num_blocks: u32) -> Self {
        self.blocks = Some(Blocks::Paged { block_size, num_blocks });
        self
    }
    /// As many blocks of `block_size` tokens as `bytes` hold, over all layers of the group.
    #[must_use]
    pub fn paged_within(mut self, block_size: u32, bytes: u64) -> Self {
        self.blocks = Some(Blocks::PagedWithin { block_size, bytes });
        self
    }
    /// One block of `max_seq_len` tokens for each of `max_sequences` sequences.
    #[must_use]
    pub fn contiguous(mut self, max_sequences: u32, max_seq_len: u32) -> Self {
        self.blocks = Some(Blocks::Contiguous { max_sequences, max_seq_len });
        self
    }

    fn build(&self, layers: Vec<LayerId>) -> Result<(GroupSpec, Option<u32>), SpecError> {
        let required = |value: Option<u32>, field| value.ok_or(SpecError::Missing { field });
        let blocks = self.blocks.ok_or(SpecError::Missing { field: "paged or contiguous" })?;
        let format = |format: Option<KvFormat>| format.unwrap_or(KvFormat::F16);
        let shape = |dim: Option<u32>, format: KvFormat, block_size, num_blocks| {
            Ok(PlaneShape {
                num_blocks,
                block_size,
                num_kv_heads: required(self.kv_heads, "kv_heads")?,
                head_dim: required(dim, "head_dim")?,
                order: self.order,
                format,
            })
        };
        let layouts = |block_size, num_blocks| {
            let k = shape(self.head_dim_k, format(self.format_k), block_size, num_blocks)?;
            let v = shape(self.head_dim_v, format(self.format_v), block_size, num_blocks)?;
            self.refine([PlaneLayout::new(k)?, PlaneLayout::new(v)?])
        };
        let (layouts, contiguous, max_seq_len) = match blocks {
            Blocks::Paged { block_size, num_blocks } => {
                (layouts(block_size, num_blocks)?, false, None)
            }
            Blocks::PagedWithin { block_size, bytes } => {
                let [k, v] = layouts(block_size, 1)?;
                let num_blocks = blocks_within([k, v], layers.len(), bytes);
                (layouts(block_size, num_blocks)?, false, None)
            }
            Blocks::Contiguous { max_sequences, max_seq_len } => {
                for (field, n) in [("max_sequences", max_sequences), ("max_seq_len", max_seq_len)] {
                    if n == 0 {
                        return Err(SpecError::Zero { field });
                    }
                }
                // A block has a slot for every token and the further slots of the sinks.
                let planes = [(self.format_k, self.head_dim_k), (self.format_v, self.head_dim_v)];
                let [k, v] = planes.map(|(f, dim)| format(f).sink_slots(dim.unwrap_or(0)));
                let further = k.max(v).saturating_sub(1);
                let further = further.saturating_mul(self.sinks.min(max_seq_len));
                let block_size = max_seq_len
                    .checked_add(further)
                    .ok_or(SpecError::Overflow { what: "slots of a sequence" })?;
                (layouts(block_size, max_sequences)?, true, Some(max_seq_len))
            }
        };
        Ok((GroupSpec { layers, layouts, contiguous }, max_seq_len))
    }

    /// Adds the transform and the sinks, which lie in the same slots of K and V.
    fn refine(&self, layouts: [PlaneLayout; 2]) -> Result<[PlaneLayout; 2], SpecError> {
        let [k, v] = layouts.map(|l| l.with_transform(self.transform.applies(l.format())));
        // Rows of 16 bits or more need no others of 16 bits.
        let quantised = k.format().is_quantised() || v.format().is_quantised();
        let sinks = if quantised { self.sinks } else { 0 };
        let slots = [k, v].map(|l| l.format().sink_slots(l.head_dim())).into_iter().max();
        let slots = slots.unwrap_or(1);
        Ok([k.with_sinks(sinks, slots)?, v.with_sinks(sinks, slots)?])
    }
}

/// How many blocks of all layers of a group `bytes` hold.
fn blocks_within([k, v]: [PlaneLayout; 2], num_layers: usize, bytes: u64) -> u32 {
    let block = k.block_bytes().saturating_add(v.block_bytes());
    let block = block.saturating_mul(to_u64(num_layers.max(1)));
    // The slots of a pool are numbered in u32.
    let most = u32::MAX.checked_div(k.block_size()).unwrap_or(0);
    let fit = bytes.checked_div(block).unwrap_or(0);
    u32::try_from(fit).unwrap_or(u32::MAX).min(most)
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
    /// Number of layers of the model.
    #[must_use]
    pub fn layers(mut self, layers: u16) -> Self {
        self.layers = Some(layers);
        self
    }
    /// Layers are not counted in advance: each gets memory from
    /// [`KvCache::allocate_layer`](crate::KvCache::allocate_layer), in one group.
    #[must_use]
    pub fn layers_on_demand(mut self) -> Self {
        self.on_demand = true;
        self
    }
    forward_to_default_group! {
        /// Heads of K and V: as many as query heads for MHA, fewer for GQA, 1 for MQA.
        kv_heads(heads: u32);
        /// Values of one row of K and of V.
        head_dim(dim: u32);
        /// Values of one row of K, and of V.
        head_dims(k: u32, v: u32);
        /// Stored format of K and V; [`KvFormat::F16`] unless set.
        format(format: KvFormat);
        /// Stored format of K, and of V.
        formats(k: KvFormat, v: KvFormat);
        /// Axes inside a block; [`BlockOrder::Hnd`] unless set.
        block_order(order: BlockOrder);
        /// Whether quantised rows are transformed; [`Transform::Auto`] unless set.
        transform(transform: Transform);
        /// Keeps the first tokens of every sequence in 16 bits; see [`GroupBuilder::sinks`].
        sinks(tokens: u32);
        /// `num_blocks` blocks of `block_size` tokens each; see [`GroupBuilder::paged`].
        paged(block_size: u32, num_blocks: u32);
        /// As many blocks of `block_size` tokens as `bytes` hold, over all layers of the group.
        paged_within(block_size: u32, bytes: u64);
        /// One block of `max_seq_len` tokens for each of `max_sequences` sequences.
        contiguous(max_sequences: u32, max_seq_len: u32);
    }
    /// Gives some layers settings of their own: `change` gets the settings made so far. Layers that
    /// no group lists form the first group.
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
    /// The most sequences that may live at once; unlimited unless set, `num_blocks` if contiguous.
    #[must_use]
    pub fn max_sequences(mut self, sequences: u32) -> Self {
        self.max_sequences = Some(sequences);
        self
    }
    /// The most tokens one sequence may have; the whole pool unless set.
    #[must_use]
    pub fn max_seq_len(mut self, tokens: u32) -> Self {
        self.max_seq_len = Some(tokens);
        self
    }
    /// How contexts are cut; [`Determinism::Fast`] unless set.
    #[must_use]
    pub fn determinism(mut self, determinism: Determinism) -> Self {
        self.determinism = determinism;
        self
    }
    /// Zeroes every block when its last holder lets go, for callers that share a device between
    /// tenants.
    #[must_use]
    pub fn wipe_on_release(mut self, wipe: bool) -> Self {
        self.wipe_on_release = wipe;
        self
    }

    /// Checks everything together.
    ///
    /// # Errors
    /// [`SpecError`], naming the first setting that is missing, zero or too large, or the first
    /// layer that is in no group or in two.
    pub fn build(self) -> Result<CacheSpec, SpecError> {
        let (layers, lists) = self.assign_layers()?;
        let mut groups = Vec::new();
        let (mut max_seq_len, mut max_sequences) = (u32::MAX, u32::MAX);
        for (list, builder) in lists {
            let (group, limit) = builder.build(list)?;
            let most = group.slot_map().tokens(group.num_blocks());
            max_seq_len = max_seq_len.min(limit.unwrap_or(most));
            if group.contiguous {
                max_sequences = max_sequences.min(group.num_blocks());
            }
            groups.push(group);
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
        let spec = CacheSpec {
            groups,
            layers,
            on_demand: self.on_demand,
            max_sequences,
            max_seq_len,
            determinism: self.determinism,
            wipe_on_release: self.wipe_on_release,
        };
        match spec.memory_checked() {
            Some(_) => Ok(spec),
            None => Err(SpecError::Overflow { what: "bytes of the cache" }),
        }
    }

    /// Gives every layer its group.
    #[expect(clippy::type_complexity, reason = "used once, two lines above")]
    fn assign_layers(
        &self,
    ) -> Result<(Vec<(GroupId, usize)>, Vec<(Vec<LayerId>, &GroupBuilder)>), SpecError> {
        if self.on_demand {
            return Ok((Vec::new(), vec![(Vec::new(), &self.default_group)]));
        }
        let num_layers = match self.layers {
            None => return Err(SpecError::Missing { field: "layers" }),
            Some(0) => return Err(SpecError::Zero { field: "layers" }),
            Some(n) => n,
        };
        let mut listed = vec![0_usize; usize::from(num_layers)];
        for &layer in self.groups.iter().flat_map(|(layers, _)| layers) {
            match listed.get_mut(usize::from(layer)) {
                Some(times) => *times = times.saturating_add(1),
                None => {
                    return Err(SpecError::LayerOutOfRange { layer: LayerId(layer), num_layers });
                }
            }
        }
        if let Some((&groups, layer)) = listed.iter().zip(0..).find(|(times, _)| **times > 1) {
            return Err(SpecError::LayerGroups { layer: LayerId(layer), groups });
        }
        let rest =
            listed.iter().zip(0..).filter(|(times, _)| **times == 0).map(|(_, l)| LayerId(l));
        let mut lists = vec![(rest.collect::<Vec<_>>(), &self.default_group)];
        lists.extend(self.groups.iter().map(|(layers, builder)| {
            let mut layers: Vec<_> = layers.iter().copied().map(LayerId).collect();
            layers.sort_unstable();
            (layers, builder)
        }));
        lists.retain(|(layers, _)| !layers.is_empty());
        let max = 255;
        if lists.len() > max {
            let (got, max) = (to_u64(lists.len()), to_u64(max));
            return Err(SpecError::TooLarge { field: "groups", got, max });
        }
        let mut places = vec![(GroupId(0), 0); usize::from(num_layers)];
        for ((layers, _), group) in lists.iter().zip(0..) {
            for (index, layer) in layers.iter().enumerate() {
                if let Some(place) = places.get_mut(usize::from(layer.0)) {
                    *place = (GroupId(group), index);
                }
            }
        }
        Ok((places, lists))
    }
}
