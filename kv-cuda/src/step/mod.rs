//! The plan of a step in device memory.
//!
//! A cache brings the plans of every group when a step begins, and every layer then finds them.
//! Block tables of a group stay on the device from step to step, and a step sends what changed: a
//! decode step one block for every sixteenth sequence or so, however long the sequences are.
//! Lists of a group keep their addresses once [`StepLimits`] are set, as a captured graph needs it.
//!
//! Plans that a caller makes by hand come without a group; they are sent whole, and found again by
//! their [`PlanId`].
mod image;
mod lists;
mod tables;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::block::BlockTables;
use kv_core::plan::{PlanBuffers, PlanId, WritePlan};
use kv_core::{DeviceError, GroupId};

use crate::buffer::CudaBuffer;
use crate::decode::Work;
use crate::gpu::{Gpu, Stream};
use crate::params::{Address, Plan};
use crate::scratch::Pack;
use crate::staging::Staging;
use image::Image;

/// Plans made by hand that are kept.
const KEPT: usize = 8;

/// Steps whose lists keep their addresses from one to the next: what captured launches ask for.
/// Memory is reserved for the largest. A larger step, of a prompt for instance, runs as ever, but
/// is neither captured nor replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each limit")]
pub struct StepLimits {
    /// Sequences in one batch.
    pub sequences: u32,
    /// New tokens and queries of one sequence: 1 for plain decoding.
    pub tokens_per_sequence: u32,
    /// Sequences in the cache: rows of its block tables. More are refused when a step begins.
    pub cached_sequences: u32,
    /// Tokens of one sequence.
    pub max_seq_len: u32,
    /// Parts that contexts are cut into, over the batch: see [`kv_core::plan::KvSplit`].
    pub splits: u32,
}

/// What launches are cut for, or memory: the numbers of the step, or the limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) sequences: u32,
    pub(crate) splits: u32,
    pub(crate) total_q: u32,
    pub(crate) total_new: u32,
    pub(crate) q_len_max: u32,
    pub(crate) new_len_max: u32,
    pub(crate) kv_len_max: u32,
    /// Partial results of one head: a query of a part of a cut sequence each.
    pub(crate) parts: u64,
}

/// One batch on the device.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct StepPlan {
    /// What kernels take.
    pub(crate) plan: Plan,
    /// `Entry` of every sequence: its queries in a ragged tensor.
    pub(crate) queries: Address,
    /// For every sequence, how many partial results of one head come before its own.
    pub(crate) part_index: Address,
    /// What launches are cut for: the batch, or any that they may be replayed for.
    pub(crate) extent: Extent,
    /// What memory is reserved for: the limits, where the batch lies within them, so that launches
    /// which are captured later find it there.
    pub(crate) room: Extent,
}

/// The stream that copies go over, and the memory they go through.
pub(crate) struct Way<'a> {
    pub(crate) stream: &'a mut dyn Stream,
    pub(crate) staging: &'a mut Staging,
}

/// The batches that this queue has met last.
#[derive(Debug)]
pub(crate) struct Steps {
    gpu: Arc<dyn Gpu>,
    limits: Option<StepLimits>,
    /// Another one for each limits of each queue.
    epoch: u64,
    /// Of groups, by number.
    groups: Vec<Image>,
    by_hand: Vec<Image>,
    clock: u64,
    pack: Pack,
}

impl Steps {
    pub(crate) fn new(gpu: &Arc<dyn Gpu>) -> Self {
        Self {
            gpu: Arc::clone(gpu),
            limits: None,
            epoch: next_epoch(),
            groups: Vec::new(),
            by_hand: Vec::new(),
            clock: 0,
            pack: Pack::default(),
        }
    }

    /// Fixes addresses from the next step on. What was captured before finds nothing any more.
    pub(crate) fn set_limits(&mut self, limits: StepLimits) {
        self.limits = Some(limits);
        self.epoch = next_epoch();
        self.groups.clear();
    }
    /// Why launches of the step that was begun last cannot be captured or replayed.
    pub(crate) fn not_fixed(&self) -> Option<String> {
        let Some(limits) = &self.limits else {
            return Some("needs limits of steps".to_owned());
        };
        self.groups.iter().find_map(|image| image.not_fixed(limits))
    }
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }
    /// Whether a batch is that of a group in the step that was begun last.
    pub(crate) fn is_begun(&self, id: PlanId) -> bool {
        self.groups.iter().any(|image| image.holds(id))
    }
    /// Where a capture begins or ends: a plan of decoding that was launched on one side of it is
    /// not there on the other.
    pub(crate) fn forget_decodes(&mut self) {
        for image in &mut self.groups {
            image.forget_decodes();
        }
    }
    /// Memory of all groups' plans.
    pub(crate) fn memory(&self) -> Vec<CudaBuffer> {
        self.groups.iter().flat_map(Image::memory).collect()
    }

    /// Brings a group's batch to the device.
    pub(crate) fn prepare(
        &mut self,
        way: &mut Way<'_>,
        group: GroupId,
        write: &WritePlan<'_>,
    ) -> Result<(), DeviceError> {
        let index = usize::from(group.0);
        while self.groups.len() <= index {
            self.groups.push(Image::new(&self.gpu));
        }
        let Some(image) = self.groups.get_mut(index) else {
            return Ok(());
        };
        image.send_with_changes(way, &mut self.pack, write, self.limits)
    }

    /// The batch on the device, sent if it is not there.
    pub(crate) fn get(
        &mut self,
        way: &mut Way<'_>,
        batch: &PlanBuffers,
        tables: &BlockTables,
    ) -> Result<StepPlan, DeviceError> {
        self.clock = self.clock.saturating_add(1);
        let clock = self.clock;
        let mut images = self.groups.iter_mut().chain(&mut self.by_hand);
        if let Some(image) = images.find(|image| image.holds(batch.id())) {
            image.used = clock;
            return Ok(image.step());
        }
        if self.by_hand.len() < KEPT {
            self.by_hand.push(Image::new(&self.gpu));
        }
        let Some(image) = self.by_hand.iter_mut().min_by_key(|image| image.used) else {
            return Ok(StepPlan::default());
        };
        image.used = clock;
        image.send_whole(way, &mut self.pack, batch, tables)?;
        Ok(image.step())
    }
}

impl Steps {
    /// How a batch that [`Self::get`] gave is decoded: the addresses of pieces and starts. The
    /// first call of a step plans on the device.
    pub(crate) fn decode(
        &mut self,
        way: &mut Way<'_>,
        id: PlanId,
        work: &Work,
    ) -> Result<(Address, Address), DeviceError> {
        let mut images = self.groups.iter_mut().chain(&mut self.by_hand);
        match images.find(|image| image.holds(id)) {
            Some(image) => image.decode(way, work),
            None => Ok((0, 0)),
        }
    }
}

fn next_epoch() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
}

/// Nobody's plans.
pub(crate) fn no_plans() -> PlanId {
    PlanId::default()
}
