//! The planes of a layer: roles and layouts.
use crate::error::SpecError;
use crate::geometry::PlaneLayout;
use crate::ids::PlaneRole;
use crate::invariant::Invariant;
use crate::num::to_u64;

/// The planes that every layer of a storage has, by role: a short list, copied freely.
///
/// All planes have equal numbers of blocks, so that a block is one place in each of them.
///
/// ```
/// use kv::KvFormat;
/// use kv::backend::{BlockPlanes, PlaneLayout, PlaneRole, PlaneShape};
///
/// let rows = PlaneLayout::new(PlaneShape {
///     num_blocks: 8,
///     block_size: 16,
///     num_kv_heads: 2,
///     head_dim: 64,
///     order: kv::BlockOrder::Hnd,
///     format: KvFormat::F16,
/// })?;
/// let planes = BlockPlanes::from([rows, rows]);
/// assert_eq!(planes.get(PlaneRole::Key), Some(&rows));
/// assert_eq!(planes.block_bytes(), 2 * 16 * 2 * 64 * 2);
/// # Ok::<(), kv::error::SpecError>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct BlockPlanes {
    /// The first `len` are planes; the others repeat the first.
    list: [(PlaneRole, PlaneLayout); Self::MAX],
    len: usize,
}

impl BlockPlanes {
    /// The most planes of a layer.
    pub const MAX: usize = 6;

    /// Returns the number of planes of a layer.
    #[expect(clippy::len_without_is_empty, reason = "a layer has at least one plane")]
    pub fn len(&self) -> usize {
        self.len
    }
    /// Returns the planes in the order in which their bytes follow each other.
    pub fn as_slice(&self) -> &[(PlaneRole, PlaneLayout)] {
        self.list.get(..self.len).invariant("a list has at most as many planes as it has places")
    }
    /// Iterates over the layouts, in the order of [`Self::as_slice`].
    pub fn layouts(&self) -> impl Iterator<Item = &PlaneLayout> {
        self.as_slice().iter().map(|(_, layout)| layout)
    }
    /// Returns the layout of the plane with a role, `None` if there is none.
    pub fn get(&self, role: PlaneRole) -> Option<&PlaneLayout> {
        let mut planes = self.as_slice().iter();
        planes.find(|(of, _)| *of == role).map(|(_, layout)| layout)
    }
    /// Returns the layouts of K and V, `None` if the layers have no rows.
    pub fn rows(&self) -> Option<[&PlaneLayout; 2]> {
        Some([self.get(PlaneRole::Key)?, self.get(PlaneRole::Value)?])
    }
    /// Returns the layout whose blocks stand for those of all planes.
    pub fn first(&self) -> &PlaneLayout {
        let [(_, first), ..] = &self.list;
        first
    }
    /// Returns the number of blocks.
    pub fn num_blocks(&self) -> u32 {
        self.first().num_blocks()
    }
    /// Returns the bytes of a block in all planes of a layer.
    pub fn block_bytes(&self) -> u64 {
        self.layouts().map(PlaneLayout::block_bytes).sum()
    }
    /// Lists the planes of layers with a recurrent state, by part.
    pub(crate) fn states(
        parts: impl ExactSizeIterator<Item = PlaneLayout>,
    ) -> Result<Self, SpecError> {
        let (got, max) = (to_u64(parts.len()), to_u64(Self::MAX));
        if got > max {
            return Err(SpecError::TooLarge { field: "parts of a state", got, max });
        }
        let mut planes = parts.zip(0_u8..).map(|(layout, part)| (PlaneRole::State(part), layout));
        let first = planes.next().ok_or(SpecError::Missing { field: "a part of a state" })?;
        let (mut list, mut len) = ([first; Self::MAX], 1);
        for (place, plane) in list.iter_mut().skip(1).zip(planes) {
            (*place, len) = (plane, len + 1);
        }
        Ok(Self { list, len })
    }
    /// Divides every plane into segments of `blocks` blocks, so that a block lies in the same
    /// segment of each.
    #[must_use]
    pub fn with_segments_of(mut self, blocks: u32) -> Self {
        for (_, layout) in &mut self.list {
            *layout = layout.with_segments_of(blocks);
        }
        self
    }
}

impl PartialEq for BlockPlanes {
    fn eq(&self, other: &Self) -> bool {
        self.as_slice() == other.as_slice()
    }
}
impl Eq for BlockPlanes {}

impl From<[PlaneLayout; 2]> for BlockPlanes {
    /// Lists the planes of layers with rows: K, then V.
    fn from([k, v]: [PlaneLayout; 2]) -> Self {
        let mut list = [(PlaneRole::Key, k); Self::MAX];
        let [_, second, ..] = &mut list;
        *second = (PlaneRole::Value, v);
        Self { list, len: 2 }
    }
}
