//! Write plans: the slots of a step's new rows.
use crate::block::BlockTables;
use crate::error::PlanError;
use crate::geometry::{Axes, PlaneLayout};
use crate::ids::Slot;
use crate::num::to_u32;
use crate::plan::batch::{PlanBuffers, PlannedSequence};
use crate::storage::PlaneView;
use crate::tensor::{TensorView, TokenRequirement, TokenTensor};

/// The slots of a step's new K and V, checked against one group's tables.
///
/// A backend may index by these guarantees: every slot is inside the plane, and no slot, nor any
/// block, is written by two entries, so entries may be written in parallel.
#[derive(Debug, Clone, Copy)]
pub struct WritePlan<'p> {
    layout: &'p PlaneLayout,
    tables: &'p BlockTables,
    batch: &'p PlanBuffers,
}

impl<'p> WritePlan<'p> {
    pub(crate) fn from_checked(
        layout: &'p PlaneLayout,
        tables: &'p BlockTables,
        batch: &'p PlanBuffers,
    ) -> Self {
        Self { layout, tables, batch }
    }
    /// Returns the pool and block geometry that the slots were checked against.
    pub fn layout(&self) -> &'p PlaneLayout {
        self.layout
    }
    /// Returns the block tables of the group.
    pub fn tables(&self) -> &'p BlockTables {
        self.tables
    }
    /// Returns everything planned for this batch, for backends that keep a copy on their device:
    /// writes and attention of every layer share it.
    pub fn batch(&self) -> &'p PlanBuffers {
        self.batch
    }
    /// Returns the batch, in the caller's order.
    pub fn sequences(&self) -> &'p [PlannedSequence] {
        self.batch.sequences()
    }
    /// Returns the first slot of each new token, entries one after another: the slot mapping of a
    /// `thd` tensor.
    pub fn slots(&self) -> &'p [Slot] {
        self.batch.slots()
    }
    /// Returns the new tokens of the whole batch.
    pub fn total_new(&self) -> u32 {
        self.batch.total_new()
    }
    /// Returns the largest number of new tokens of an entry.
    pub fn new_len_max(&self) -> u32 {
        self.batch.new_len_max()
    }

    pub(crate) fn requirement(
        &self,
        tensor: &'static str,
        axes: Axes,
        layout: &PlaneLayout,
    ) -> TokenRequirement {
        TokenRequirement {
            tensor,
            axes,
            batch: to_u32(self.sequences().len()),
            tokens_max: self.new_len_max(),
            tokens_total: self.total_new(),
            heads: Some(layout.num_kv_heads()),
            dim: layout.head_dim(),
        }
    }
}

/// Tensors and planes of one layer's write, checked against a [`WritePlan`].
#[derive(Debug)]
pub struct WriteArgs<'a, Buf> {
    k: TokenTensor<'a, Buf>,
    v: TokenTensor<'a, Buf>,
    k_plane: PlaneView<'a, Buf>,
    v_plane: PlaneView<'a, Buf>,
}

impl<'a, Buf> WriteArgs<'a, Buf> {
    /// Checks `k` and `v` (axes by `axes`, row `i` of entry `b` as in [`Axes`]) against the
    /// plan.
    ///
    /// A `bshd` or `sbhd` tensor may have more entries and longer ones than the plan, a `thd`
    /// tensor more rows: those are padding.
    ///
    /// # Errors
    /// [`PlanError::Shape`], [`PlanError::ElementType`], [`PlanError::TensorBytes`] or
    /// [`PlanError::Misaligned`], naming the tensor; [`PlanError::LayoutMismatch`] for a plane of
    /// another pool, [`PlanError::ConstantsMissing`] for one without its constants.
    pub fn new(
        plan: &WritePlan<'_>,
        k: TensorView<'a, Buf>,
        v: TensorView<'a, Buf>,
        axes: Axes,
        k_plane: PlaneView<'a, Buf>,
        v_plane: PlaneView<'a, Buf>,
    ) -> Result<Self, PlanError> {
        plan.layout.check_same_blocks(k_plane.layout())?;
        plan.layout.check_same_blocks(v_plane.layout())?;
        k_plane.check_constants()?;
        v_plane.check_constants()?;
        let k = TokenTensor::check(k, &plan.requirement("k", axes, k_plane.layout()))?;
        let v = TokenTensor::check(v, &plan.requirement("v", axes, v_plane.layout()))?;
        Ok(Self { k, v, k_plane, v_plane })
    }
    /// Returns the new keys.
    pub fn k(&self) -> &TokenTensor<'a, Buf> {
        &self.k
    }
    /// Returns the new values.
    pub fn v(&self) -> &TokenTensor<'a, Buf> {
        &self.v
    }
    /// Returns the plane of keys.
    pub fn k_plane(&self) -> &PlaneView<'a, Buf> {
        &self.k_plane
    }
    /// Returns the plane of values.
    pub fn v_plane(&self) -> &PlaneView<'a, Buf> {
        &self.v_plane
    }
    pub(crate) fn into_parts(self) -> ([TokenTensor<'a, Buf>; 2], [PlaneView<'a, Buf>; 2]) {
        ([self.k, self.v], [self.k_plane, self.v_plane])
    }
    pub(crate) fn from_parts(
        [k, v]: [TokenTensor<'a, Buf>; 2],
        [k_plane, v_plane]: [PlaneView<'a, Buf>; 2],
    ) -> Self {
        Self { k, v, k_plane, v_plane }
    }
}
