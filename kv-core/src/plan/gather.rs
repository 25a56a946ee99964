//! Plans for reading cached rows into a plain tensor.
use crate::block::BlockTables;
use crate::error::PlanError;
use crate::geometry::{Axes, PlaneLayout};
use crate::num::{to_u32, to_usize};
use crate::storage::PlaneView;
use crate::tensor::{TensorViewMut, TokenRequirement, TokenTensorMut};

/// Rows `begin..begin + len` of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the three numbers")]
pub struct GatherRange {
    /// Row of the sequence in the block tables.
    pub row: u32,
    /// First position.
    pub begin: u32,
    /// Number of tokens.
    pub len: u32,
}

/// Ranges of cached rows, checked against one group's tables. [`BlockTables::coded`] says which
/// rows are quantised.
#[derive(Debug, Clone, Copy)]
pub struct GatherPlan<'p> {
    layout: PlaneLayout,
    tables: &'p BlockTables,
    ranges: &'p [GatherRange],
    total: u32,
    len_max: u32,
}

impl<'p> GatherPlan<'p> {
    /// Checks ranges: each must lie inside the blocks of its row.
    ///
    /// # Errors
    /// [`PlanError::TableTooShort`], [`PlanError::TooMany`] when the end of a range or the total
    /// does not fit `u32`, [`PlanError::LengthMismatch`] for tables of another pool.
    pub fn new(
        layout: &PlaneLayout,
        tables: &'p BlockTables,
        ranges: &'p [GatherRange],
    ) -> Result<Self, PlanError> {
        layout.check_pool(tables.num_blocks())?;
        let (mut total, mut len_max) = (0_u64, 0);
        for (index, range) in ranges.iter().enumerate() {
            let blocks = tables.row(range.row).len();
            let end = range.begin.checked_add(range.len).ok_or(PlanError::TooMany {
                what: "positions of a range",
                got: u64::from(range.begin) + u64::from(range.len),
                max: u64::from(u32::MAX),
            })?;
            let block_size = layout.block_size();
            let coded = tables.coded(range.row);
            if to_usize(layout.slot_map().blocks_in(end, coded)) > blocks {
                return Err(PlanError::TableTooShort { index, tokens: end, blocks, block_size });
            }
            total += u64::from(range.len);
            len_max = len_max.max(range.len);
        }
        let total = u32::try_from(total).map_err(|_| PlanError::TooMany {
            what: "tokens to gather",
            got: total,
            max: u64::from(u32::MAX),
        })?;
        Ok(Self { layout: *layout, tables, ranges, total, len_max })
    }
    /// Returns the geometry of the group.
    pub fn layout(&self) -> &PlaneLayout {
        &self.layout
    }
    /// Returns the block tables of the group.
    pub fn tables(&self) -> &'p BlockTables {
        self.tables
    }
    /// Returns the ranges: range `b` fills batch entry `b` of the output.
    pub fn ranges(&self) -> &'p [GatherRange] {
        self.ranges
    }
    /// Returns the tokens of all ranges.
    pub fn total(&self) -> u32 {
        self.total
    }
}

/// Plane and output of one gather, checked against a [`GatherPlan`].
#[derive(Debug)]
pub struct GatherArgs<'a, Buf> {
    plane: PlaneView<'a, Buf>,
    out: TokenTensorMut<'a, Buf>,
}

impl<'a, Buf> GatherArgs<'a, Buf> {
    /// Checks `out` (axes by `axes`, heads and dim of the plane); rows past a range become zero.
    ///
    /// # Errors
    /// Those of [`AttendArgs::new`](crate::plan::AttendArgs::new) for `out`.
    pub fn new(
        plan: &GatherPlan<'_>,
        plane: PlaneView<'a, Buf>,
        out: TensorViewMut<'a, Buf>,
        axes: Axes,
    ) -> Result<Self, PlanError> {
        plan.layout.check_same_blocks(plane.layout())?;
        plane.check_constants()?;
        let need = TokenRequirement {
            tensor: "out",
            axes,
            batch: to_u32(plan.ranges.len()),
            tokens_max: plan.len_max,
            tokens_total: plan.total,
            heads: Some(plane.layout().num_kv_heads()),
            dim: plane.layout().head_dim(),
        };
        let out = TokenTensorMut::check(out, &need)?;
        Ok(Self { plane, out })
    }
    /// Returns the plane that is read.
    pub fn plane(&self) -> &PlaneView<'a, Buf> {
        &self.plane
    }
    /// Returns the target.
    pub fn out(&mut self) -> &mut TokenTensorMut<'a, Buf> {
        &mut self.out
    }
    /// Returns the outputs: only the target.
    pub fn outputs(&mut self) -> [Option<&mut TokenTensorMut<'a, Buf>>; 2] {
        [Some(&mut self.out), None]
    }
    pub(crate) fn into_parts(self) -> (PlaneView<'a, Buf>, TokenTensorMut<'a, Buf>) {
        (self.plane, self.out)
    }
    pub(crate) fn from_parts(plane: PlaneView<'a, Buf>, out: TokenTensorMut<'a, Buf>) -> Self {
        Self { plane, out }
    }
}
