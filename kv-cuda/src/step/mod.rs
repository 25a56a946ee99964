//! Plans of steps in device memory.
//!
//! A cache prepares the plan of every group when a step begins, and every layer uses it. A group's
//! block tables stay on the device from step to step, and a step sends only changes: a decode step
//! sends about one block for every sixteenth sequence, however long the sequences are. With
//! [`StepLimits`], the lists of a group keep their addresses, as a captured graph requires.
//!
//! Plans that a caller makes by hand have no group. They are sent whole, and found again by their
//! [`PlanId`].
mod image;
mod lists;
mod tables;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::GroupId;
use kv_core::block::BlockTables;
use kv_core::error::DeviceError;
use kv_core::invariant::Invariant;
use kv_core::plan::{PlanBuffers, PlanId, WritePlan};

use crate::buffer::CudaBuffer;
use crate::decode::Work;
use crate::gpu::{Gpu, Stream};
use crate::params::{Address, Plan};
use crate::scratch::Pack;
use crate::staging::Staging;
use image::Image;

/// Number of hand-made plans that are kept.
const KEPT: usize = 8;

/// Limits of steps whose lists keep their addresses, as captured launches require. Memory is
/// reserved for the largest. A larger step, such as a prompt, runs as usual, but cannot be captured
/// or replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each limit")]
pub struct StepLimits {
    /// Sequences in one batch.
    pub sequences: u32,
    /// New tokens and queries of one sequence: 1 for plain decoding.
    pub tokens_per_sequence: u32,
    /// Sequences in the cache: rows of its block tables. A step with more is refused when it
    /// begins.
    pub cached_sequences: u32,
    /// Tokens of one sequence.
    pub max_seq_len: u32,
    /// KV splits of the batch: see [`kv_core::plan::KvSplit`].
    pub splits: u32,
}

/// Sizes for which work is split or memory is reserved: those of the step, or the limits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) sequences: u32,
    pub(crate) splits: u32,
    pub(crate) total_q: u32,
    pub(crate) total_new: u32,
    pub(crate) q_len_max: u32,
    /// Queries of an entry that is decoded.
    pub(crate) decode_q_len_max: u32,
    pub(crate) new_len_max: u32,
    pub(crate) kv_len_max: u32,
    /// Partial results of one head: one per query and KV split of a split sequence.
    pub(crate) partials: u64,
}

/// One batch on the device.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct StepPlan {
    /// Parameters of kernels.
    pub(crate) plan: Plan,
    /// `Entry` of every sequence: its queries in a ragged tensor.
    pub(crate) queries: Address,
    /// For every sequence, the number of partial results of one head before its own.
    pub(crate) partial_index: Address,
    /// Sizes for which launches are made: the batch, or any batch they may be replayed for.
    pub(crate) extent: Extent,
    /// Sizes for which memory is reserved: the limits, if the batch is within them, so that
    /// launches captured later find it.
    pub(crate) room: Extent,
}

/// A stream, and the staging memory of its copies.
pub(crate) struct Transfer<'a> {
    pub(crate) stream: &'a mut dyn Stream,
    pub(crate) staging: &'a mut Staging,
}

/// The batches that this queue used last.
#[derive(Debug)]
pub(crate) struct Steps {
    gpu: Arc<dyn Gpu>,
    limits: Option<StepLimits>,
    /// Differs for every limits of every queue.
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

    /// Fixes addresses from the next step on. Graphs captured before become invalid.
    pub(crate) fn set_limits(&mut self, limits: StepLimits) {
        self.limits = Some(limits);
        self.epoch = next_epoch();
        self.groups.clear();
    }
    /// Returns why launches of the current step cannot be captured or replayed.
    pub(crate) fn not_fixed(&self) -> Option<String> {
        let Some(limits) = &self.limits else {
            return Some("step limits are not set".to_owned());
        };
        self.groups.iter().find_map(|image| image.not_fixed(limits))
    }
    /// The numbers of the step that was begun last, which its groups share but for the splits.
    pub(crate) fn extent(&self) -> Extent {
        self.groups.first().map_or_else(Extent::default, |image| image.step().extent)
    }
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }
    /// Returns whether a batch belongs to a group of the current step.
    pub(crate) fn is_begun(&self, id: PlanId) -> bool {
        self.groups.iter().any(|image| image.holds(id))
    }
    /// Makes schedules be computed again when a capture begins or ends: a schedule that is computed
    /// before that does not exist after it.
    pub(crate) fn forget_schedules(&mut self) {
        for image in &mut self.groups {
            image.forget_schedules();
        }
    }
    /// Returns the memory of all groups' plans.
    pub(crate) fn memory(&self) -> Vec<CudaBuffer> {
        self.groups.iter().flat_map(Image::memory).collect()
    }

    /// Sends a group's batch to the device.
    pub(crate) fn prepare(
        &mut self,
        transfer: &mut Transfer<'_>,
        group: GroupId,
        write: &WritePlan<'_>,
    ) -> Result<(), DeviceError> {
        let index = usize::from(group.0);
        while self.groups.len() <= index {
            self.groups.push(Image::new(&self.gpu));
        }
        let image = self.groups.get_mut(index).invariant("the list was made long enough");
        image.send_with_changes(transfer, &mut self.pack, write, self.limits)
    }

    /// Returns the batch on the device, and sends it if necessary.
    pub(crate) fn get(
        &mut self,
        transfer: &mut Transfer<'_>,
        batch: &PlanBuffers,
        tables: &BlockTables,
    ) -> Result<StepPlan, DeviceError> {
        self.clock += 1;
        let clock = self.clock;
        let mut images = self.groups.iter_mut().chain(&mut self.by_hand);
        if let Some(image) = images.find(|image| image.holds(batch.id())) {
            image.used = clock;
            return Ok(image.step());
        }
        if self.by_hand.len() < KEPT {
            self.by_hand.push(Image::new(&self.gpu));
        }
        let image = self.by_hand.iter_mut().min_by_key(|image| image.used);
        let image = image.invariant("some plans made by hand are kept");
        image.used = clock;
        image.send_whole(transfer, &mut self.pack, batch, tables)?;
        Ok(image.step())
    }
}

impl Steps {
    /// Returns a schedule of a batch that [`Self::get`] returned: the addresses of work items and
    /// starts. The first call of a step plans on the device.
    pub(crate) fn schedule(
        &mut self,
        transfer: &mut Transfer<'_>,
        id: PlanId,
        work: &Work,
    ) -> Result<(Address, Address), DeviceError> {
        let mut images = self.groups.iter_mut().chain(&mut self.by_hand);
        let image = images.find(|image| image.holds(id));
        image
            .invariant("a batch is scheduled after it was brought to the device")
            .schedule(transfer, work)
    }
}

fn next_epoch() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1)
}

/// Returns an ID that no plan has.
pub(crate) fn no_plans() -> PlanId {
    PlanId::default()
}
