//! Settings of the recurrent states of some layers.
use kv_format::{DType, KvFormat};

use crate::error::{SpecConflict, SpecError};
use crate::geometry::{BlockOrder, PlaneLayout, PlaneShape};
use crate::ids::LayerId;
use crate::num::{to_u32, to_u64};
use crate::storage::BlockPlanes;
use crate::tensor::Dims;

/// The most values that a conversion takes as a row.
const ROW_MAX: u32 = 512;
/// Values that share a scale in a quantised snapshot.
const SCALED: u32 = 32;

/// Returns the multiple of values to which a part is padded, so that every slot begins at a
/// multiple of 16 bytes.
fn padding(format: KvFormat) -> u32 {
    match format {
        // Eight blocks of 34 bytes.
        KvFormat::Q8_0 => 8 * SCALED,
        _ => 16,
    }
}

/// Returns the values of the rows as which a conversion takes a part: near a row of attention, so
/// that it runs in parallel.
pub(super) fn row_of(values: u32, format: KvFormat) -> u32 {
    let divisor = |multiple: u32| {
        let mut rows = (1..=ROW_MAX).rev().filter(|row| row.is_multiple_of(multiple));
        rows.find(|row| values.is_multiple_of(*row))
    };
    if format.is_quantised() {
        // Blocks with a scale begin anew in every row. A part that does not divide into whole
        // blocks is one row, whose last block is padded with zeros.
        divisor(SCALED).unwrap_or(values)
    } else {
        divisor(1).unwrap_or(1)
    }
}
/// The most axes of a part: a tensor has one more, for the entries of a batch.
const AXES_MAX: usize = 3;

/// Collects the settings of the recurrent states of some layers;
/// [`CacheSpecBuilder::states`](crate::spec::CacheSpecBuilder::states) passes it to the caller.
#[derive(Debug, Clone, Default)]
pub struct StatesBuilder {
    parts: Vec<(Box<[u32]>, DType)>,
    slots: Option<u32>,
    drafts: u32,
    snapshots: u32,
    format: StateFormat,
    per_path: Option<u32>,
    grid: u32,
}

/// The form in which snapshots keep a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum StateFormat {
    /// That of each part: a sequence that goes on from a snapshot computes the same bits.
    Same,
    /// f16 for parts in f32; the others as they are. Halves the memory of a recurrence in f32, and
    /// moves logits by about a thousandth of their deviation.
    #[default]
    F16,
    /// [`KvFormat::Q8_0`] for the largest parts in f32: a byte for each value and a scale in f16
    /// for 32, which takes about a quarter. A part is one of the largest if it has at least three
    /// quarters of the values of the largest in f32: the matrix of a recurrence, not the window of
    /// the convolution before it. Smaller parts are as with [`Self::F16`]: they are a few percent
    /// of the memory and would cause most of the error.
    ///
    /// The error of a value is about half a step of its block at most, where a step is the largest
    /// magnitude of the 32 values over 127. In models with random weights, what they say diverges
    /// by 1e-5 to 2e-3 nats on average, a hundred times as much as with [`Self::F16`] or more.
    /// Values beyond 127 * 65504, infinities among them, become that; a NaN makes the 32 values of
    /// its block NaN.
    Int8,
}

/// Returns the format of an unquantised part, which must be in f32, f16 or bf16.
fn element(dtype: DType) -> Result<KvFormat, SpecError> {
    KvFormat::of_element(dtype).ok_or_else(|| {
        let problem = SpecConflict::StateType { got: dtype };
        SpecError::Conflict { what: "a part of a state", problem }
    })
}

impl StateFormat {
    /// Returns the format in which snapshots keep a part of `values` values, beside parts in f32 of
    /// up to `largest` values.
    fn of(self, (values, dtype): (u32, DType), largest: u32) -> Result<KvFormat, SpecError> {
        match (self, dtype) {
            (Self::Int8, DType::F32) if u64::from(values) * 4 >= u64::from(largest) * 3 => {
                Ok(KvFormat::Q8_0)
            }
            (Self::F16 | Self::Int8, DType::F32) => Ok(KvFormat::F16),
            _ => element(dtype),
        }
    }
}

impl StatesBuilder {
    /// Adds a part of every layer's state: a tensor of up to three axes in f32, f16 or bf16, such
    /// as the window of a convolution or the matrix of a linear attention. The cache does not
    /// compute with it.
    #[must_use]
    pub fn part(mut self, shape: impl AsRef<[u32]>, dtype: DType) -> Self {
        self.parts.push((shape.as_ref().into(), dtype));
        self
    }
    /// Sets the slots for running states. A sequence with tokens takes one, and every entry of a
    /// step one more for each state that the step writes: one, and one for each draft. The first
    /// step of a sequence that goes on from a snapshot takes one for its copy.
    #[must_use]
    pub fn slots(mut self, slots: u32) -> Self {
        self.slots = Some(slots);
        self
    }
    /// Sets the most draft tokens of an entry, after each of which a step may keep the state; none
    /// unless set.
    #[must_use]
    pub fn drafts(mut self, drafts: u32) -> Self {
        self.drafts = drafts;
        self
    }

    /// Keeps copies of up to `snapshots` states behind prompts and texts, from which other prompts
    /// with the same tokens go on; none unless set, and then no prompt of the cache is reused. They
    /// are evicted as blocks are, but by recency where blocks are by
    /// [`ReuseRate`](crate::eviction::ReuseRate).
    #[must_use]
    pub fn snapshots(mut self, snapshots: u32, format: StateFormat) -> Self {
        (self.snapshots, self.format) = (snapshots, format);
        self
    }
    /// Bounds the snapshots along one text, from its beginning to its longest: no bound unless set.
    /// Those go first that one text alone went on from, the shortest first.
    #[must_use]
    pub fn snapshots_per_path(mut self, most: u32) -> Self {
        self.per_path = Some(most);
        self
    }
    /// Takes snapshots behind multiples of `tokens` tokens alone, for recurrences whose results
    /// depend on where chunks of a prompt end; every position unless set.
    #[must_use]
    pub fn grid(mut self, tokens: u32) -> Self {
        self.grid = tokens;
        self
    }

    pub(super) fn build(&self, layers: Vec<LayerId>) -> Result<StatesSpec, SpecError> {
        let slots = match self.slots {
            None => return Err(SpecError::Missing { field: "slots of states" }),
            Some(0) => return Err(SpecError::Zero { field: "slots of states" }),
            Some(slots) => slots,
        };
        // A sequence keeps its state while a step writes the next ones.
        let needed = u64::from(self.drafts) + 2;
        if u64::from(slots) < needed {
            let problem = SpecConflict::StateSlots { needed, got: slots };
            return Err(SpecError::Conflict { what: "slots of states", problem });
        }
        if self.parts.is_empty() {
            return Err(SpecError::Missing { field: "a part of a state" });
        }
        // The slot after the last stays zero: sequences begin with it.
        let overflow = || SpecError::Overflow { what: "slots of states" };
        let blocks = slots.checked_add(1).ok_or_else(overflow)?;
        let parts = self.parts.iter().map(|(shape, dtype)| {
            let format = element(*dtype)?;
            StatePart::new(shape, format, blocks)
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let planes = BlockPlanes::states(parts.iter().map(|part| part.layout))?;
        let snapshots = (self.snapshots > 0).then(|| self.build_snapshots(&parts)).transpose()?;
        let (drafts, grid) = (self.drafts, self.grid.max(1));
        Ok(StatesSpec { layers, parts, planes, slots, drafts, snapshots, grid })
    }

    fn build_snapshots(&self, parts: &[StatePart]) -> Result<SnapshotsSpec, SpecError> {
        let in_f32 = parts.iter().filter(|part| part.dtype() == DType::F32);
        let largest = in_f32.map(StatePart::values).max().unwrap_or(0);
        let parts = parts.iter().map(|part| {
            let format = self.format.of((part.values, part.dtype()), largest)?;
            StatePart::new(part.shape.as_slice(), format, self.snapshots)
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let planes = BlockPlanes::states(parts.iter().map(|part| part.layout))?;
        if self.per_path == Some(0) {
            return Err(SpecError::Zero { field: "snapshots of a path" });
        }
        let (count, format, per_path) = (self.snapshots, self.format, self.per_path);
        Ok(SnapshotsSpec { count, format, per_path, parts, planes })
    }
}

/// The recurrent states of some layers of a [`CacheSpec`](crate::CacheSpec): a group of its own,
/// with slots in the place of blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatesSpec {
    layers: Vec<LayerId>,
    parts: Vec<StatePart>,
    planes: BlockPlanes,
    slots: u32,
    drafts: u32,
    snapshots: Option<SnapshotsSpec>,
    grid: u32,
}

/// Copies of the states of some layers, kept behind prompts and texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotsSpec {
    count: u32,
    format: StateFormat,
    per_path: Option<u32>,
    parts: Vec<StatePart>,
    planes: BlockPlanes,
}

impl SnapshotsSpec {
    /// Returns the most snapshots.
    pub fn count(&self) -> u32 {
        self.count
    }
    /// Returns the form in which they are kept.
    pub fn format(&self) -> StateFormat {
        self.format
    }
    /// Returns the most snapshots along one text, `None` for any number.
    pub fn per_path(&self) -> Option<u32> {
        self.per_path
    }
    /// Returns the parts of a layer's state, as they are kept.
    pub fn parts(&self) -> &[StatePart] {
        &self.parts
    }
    /// Returns the planes of a layer. Snapshots are their blocks.
    pub fn planes(&self) -> &BlockPlanes {
        &self.planes
    }
}

/// A part of every layer's state: one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatePart {
    shape: Dims,
    values: u32,
    /// A divisor of `values`.
    row: u32,
    layout: PlaneLayout,
}

impl StatePart {
    fn new(shape: &[u32], format: KvFormat, num_blocks: u32) -> Result<Self, SpecError> {
        let axes = shape.len();
        if axes > AXES_MAX {
            let (got, max) = (to_u64(axes), to_u64(AXES_MAX));
            return Err(SpecError::TooLarge { field: "axes of a part of a state", got, max });
        }
        if axes == 0 || shape.contains(&0) {
            return Err(SpecError::Zero { field: "values of a part of a state" });
        }
        let values = shape.iter().try_fold(1_u32, |product, extent| product.checked_mul(*extent));
        let padded = values.and_then(|values| values.checked_next_multiple_of(padding(format)));
        let overflow = || SpecError::Overflow { what: "values of a part of a state" };
        let (values, padded) = values.zip(padded).ok_or_else(overflow)?;
        let layout = PlaneLayout::new(PlaneShape {
            num_blocks,
            block_size: 1,
            num_kv_heads: 1,
            head_dim: padded,
            order: BlockOrder::Nhd,
            format,
        })?;
        Ok(Self { shape: Dims::new(shape), values, row: row_of(values, format), layout })
    }

    /// Returns the extents, at most three.
    pub fn shape(&self) -> Dims {
        self.shape
    }
    /// Returns the element type of the values; f32 for a part that is kept quantised.
    pub fn dtype(&self) -> DType {
        self.format().element().unwrap_or(DType::F32)
    }
    /// Returns the format in which the cache keeps it.
    pub fn format(&self) -> KvFormat {
        self.layout.format()
    }
    /// Returns the number of values.
    pub fn values(&self) -> u32 {
        self.values
    }
    pub(crate) fn row(&self) -> u32 {
        self.row
    }
    /// Returns the bytes of a slot, a multiple of 16.
    pub fn slot_bytes(&self) -> u64 {
        self.layout.block_bytes()
    }
}

impl StatesSpec {
    /// Returns the layers with this state, in ascending order.
    pub fn layers(&self) -> &[LayerId] {
        &self.layers
    }
    /// Returns the parts of a layer's state.
    pub fn parts(&self) -> &[StatePart] {
        &self.parts
    }
    /// Returns the slots for running states.
    pub fn slots(&self) -> u32 {
        self.slots
    }
    /// Returns the most draft tokens of an entry with states.
    pub fn drafts(&self) -> u32 {
        self.drafts
    }
    /// Returns the bytes of one state, over all layers.
    pub fn state_bytes(&self) -> u64 {
        self.planes.block_bytes() * to_u64(self.layers.len())
    }
    /// Returns the planes of a layer. Slots are their blocks; the one after the last is zero.
    pub fn planes(&self) -> &BlockPlanes {
        &self.planes
    }
    /// Returns the snapshots of these states, `None` if none are kept.
    pub fn snapshots(&self) -> Option<&SnapshotsSpec> {
        self.snapshots.as_ref()
    }
    /// Returns the number of tokens of which the length of every snapshot is a multiple.
    pub fn grid(&self) -> u32 {
        self.grid
    }
    /// Returns the bytes of one snapshot, over all layers; 0 if none are kept.
    pub fn snapshot_bytes(&self) -> u64 {
        let of = self.snapshots.as_ref().map_or(0, |of| of.planes.block_bytes());
        of * to_u64(self.layers.len())
    }
    /// Returns the bytes of all slots, the one of zeros included, and of all snapshots; `None` if
    /// they overflow.
    pub(super) fn bytes(&self) -> Option<u64> {
        let planes = std::iter::once(&self.planes);
        let planes = planes.chain(self.snapshots.as_ref().map(|snapshots| &snapshots.planes));
        let layer = planes.flat_map(BlockPlanes::layouts).try_fold(0_u64, |sum, layout| {
            sum.checked_add(layout.block_bytes().checked_mul(u64::from(layout.num_blocks()))?)
        })?;
        layer.checked_mul(to_u64(self.layers.len()))
    }
    /// Returns the slots that an entry writes: behind its last token that is no draft, and behind
    /// each draft.
    pub(crate) fn slots_of_entry(new_tokens: u32, drafts: u32) -> u32 {
        // Drafts may be any number before they are checked.
        new_tokens.min(drafts.saturating_add(1))
    }
    /// Returns how many sequences have a state at once that all are in a step.
    pub(super) fn sequences(&self) -> u32 {
        self.slots / 2
    }
}

/// Lists the layers of states, ascending, and refuses a layer that the model lacks or that has two
/// states.
pub(super) fn layers_of<'a>(
    lists: impl Iterator<Item = &'a [u16]>,
    num_layers: u16,
) -> Result<Vec<Vec<LayerId>>, SpecError> {
    let mut seen = vec![false; usize::from(num_layers)];
    let mut sorted = Vec::new();
    for list in lists {
        let mut layers: Vec<_> = list.iter().copied().map(LayerId).collect();
        layers.sort_unstable();
        for layer in &layers {
            match seen.get_mut(usize::from(layer.0)) {
                None => return Err(SpecError::LayerOutOfRange { layer: *layer, num_layers }),
                Some(true) => return Err(SpecError::LayerStates { layer: *layer }),
                Some(seen) => *seen = true,
            }
        }
        if layers.is_empty() {
            return Err(SpecError::Zero { field: "layers of states" });
        }
        sorted.push(layers);
    }
    let max = 64;
    if to_u32(sorted.len()) > max {
        let (got, max) = (to_u64(sorted.len()), max.into());
        return Err(SpecError::TooLarge { field: "groups of states", got, max });
    }
    Ok(sorted)
}
