//! Plans of block copies.
use crate::error::PlanError;
use crate::geometry::PlaneLayout;
use crate::ids::BlockId;
use crate::storage::StorageView;

/// One block to copy, whole or its first slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the three numbers")]
pub struct BlockCopy {
    /// Source block.
    pub from: BlockId,
    /// Target block.
    pub to: BlockId,
    /// Number of slots from the block's start: one a token, several a wide row.
    pub slots: u32,
}

/// Copies between blocks of one group, in every plane of all its layers.
///
/// Guarantees: all blocks are in range, no block is written twice, and no block is both read and
/// written, so the copies may run in any order or at once.
#[derive(Debug, Clone, Copy)]
pub struct CopyPlan<'p> {
    layout: PlaneLayout,
    copies: &'p [BlockCopy],
}

impl<'p> CopyPlan<'p> {
    /// Checks a list of copies. Costs O(n log n) for the disjointness and no memory for one copy.
    ///
    /// # Errors
    /// [`PlanError::BlockOutOfRange`], [`PlanError::BlockShared`], [`PlanError::TooMany`] for more
    /// slots than a block has.
    pub fn new(layout: &PlaneLayout, copies: &'p [BlockCopy]) -> Result<Self, PlanError> {
        let plan = Self { layout: *layout, copies };
        for copy in copies {
            for block in [copy.from.0, copy.to.0] {
                if block >= layout.num_blocks() {
                    let num_blocks = layout.num_blocks();
                    return Err(PlanError::BlockOutOfRange { block, num_blocks });
                }
            }
            if copy.slots > layout.block_size() {
                return Err(PlanError::TooMany {
                    what: "slots of one block copy",
                    got: u64::from(copy.slots),
                    max: u64::from(layout.block_size()),
                });
            }
        }
        let shared = |block: BlockId| Err(PlanError::BlockShared { block: block.0 });
        if let [only] = copies {
            return if only.from == only.to { shared(only.to) } else { Ok(plan) };
        }
        let mut written: Vec<_> = copies.iter().map(|copy| copy.to).collect();
        written.sort_unstable();
        for (a, b) in written.iter().zip(written.iter().skip(1)) {
            if a == b {
                return shared(*a);
            }
        }
        match copies.iter().find(|copy| written.binary_search(&copy.from).is_ok()) {
            Some(copy) => shared(copy.from),
            None => Ok(plan),
        }
    }
    /// Returns the copies.
    pub fn copies(&self) -> &'p [BlockCopy] {
        self.copies
    }
}

/// The planes of one group, checked against a [`CopyPlan`].
#[derive(Debug, Clone, Copy)]
pub struct CopyArgs<'a, Buf> {
    storage: StorageView<'a, Buf>,
}

impl<'a, Buf> CopyArgs<'a, Buf> {
    /// Copies inside every allocated plane of `storage`.
    ///
    /// # Errors
    /// [`PlanError::LayoutMismatch`] when the plan was checked against another pool.
    pub fn new(plan: &CopyPlan<'_>, storage: StorageView<'a, Buf>) -> Result<Self, PlanError> {
        for layout in storage.layouts().layouts() {
            plan.layout.check_same_blocks(layout)?;
        }
        Ok(Self { storage })
    }
    /// Returns the planes.
    pub fn storage(&self) -> StorageView<'a, Buf> {
        self.storage
    }
    pub(crate) fn from_parts(storage: StorageView<'a, Buf>) -> Self {
        Self { storage }
    }
}
