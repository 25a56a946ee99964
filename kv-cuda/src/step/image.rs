//! The lists of one batch on the device.
use std::sync::Arc;

use kv_core::block::BlockTables;
use kv_core::error::DeviceError;
use kv_core::invariant::Invariant;
use kv_core::plan::{PlanBuffers, PlanId, WritePlan};

use super::lists::{Lists, extent_of, within};
use super::tables::{Change, DeviceTables};
use super::{StepLimits, StepPlan, Transfer};
use crate::buffer::CudaBuffer;
use crate::decode::{Room, Work};
use crate::gpu::{Gpu, Launch};
use crate::params::{Address, TableParams, WorkItem};
use crate::scratch::{Pack, Scratch};
use kv_core::num::{to_u32, to_u64};

/// The lists of one batch, and the block tables that they refer to.
#[derive(Debug)]
pub(super) struct Image {
    gpu: Arc<dyn Gpu>,
    id: PlanId,
    pub(super) used: u64,
    memory: Scratch,
    /// Lists of batches beyond the limits, and of those that are sent with their tables.
    larger: Scratch,
    tables: DeviceTables,
    /// Changes of the tables that are not on the device, and memory for more of them than the
    /// limits allow for.
    changes: Vec<Change>,
    many_changes: Scratch,
    /// Whether its lists keep their addresses.
    is_fixed: bool,
    step: StepPlan,
    /// Schedules: layers with equal masks share one.
    schedules: Vec<ScheduleImage>,
}

/// A schedule.
#[derive(Debug)]
struct ScheduleImage {
    work: Work,
    memory: Scratch,
    items: Address,
    starts: Address,
    /// Whether it was made for this batch.
    is_made: bool,
}

/// Number of schedules that are kept besides those of the present batch.
const SCHEDULES_KEPT: usize = 16;

impl Image {
    pub(super) fn new(gpu: &Arc<dyn Gpu>) -> Self {
        Self {
            gpu: Arc::clone(gpu),
            id: super::no_plans(),
            used: 0,
            memory: Scratch::new(gpu),
            larger: Scratch::new(gpu),
            tables: DeviceTables::new(gpu),
            changes: Vec::new(),
            many_changes: Scratch::new(gpu),
            is_fixed: false,
            step: StepPlan::default(),
            schedules: Vec::new(),
        }
    }

    pub(super) fn holds(&self, id: PlanId) -> bool {
        self.id == id && id != super::no_plans()
    }
    pub(super) fn step(&self) -> StepPlan {
        self.step
    }

    /// Returns why launches of this batch cannot be captured or replayed, `None` if they can.
    pub(super) fn not_fixed(&self, limits: &StepLimits) -> Option<String> {
        let unknown = || "the step began under other limits".to_owned();
        (!self.is_fixed).then(|| within(&self.step.extent, limits).unwrap_or_else(unknown))
    }

    /// Returns all memory that captured launches may use.
    pub(super) fn memory(&self) -> Vec<CudaBuffer> {
        let schedules = self.schedules.iter().filter_map(|schedule| schedule.memory.memory());
        let own = [self.memory.memory(), self.tables.memory()].into_iter().flatten();
        own.chain(schedules).cloned().collect()
    }

    /// Invalidates the batch until it is sent again.
    fn forget(&mut self) {
        self.id = super::no_plans();
        self.forget_schedules();
    }
    /// Makes schedules be computed again.
    pub(super) fn forget_schedules(&mut self) {
        for schedule in &mut self.schedules {
            schedule.is_made = false;
        }
    }

    /// Returns the addresses of this batch's work items and starts, planned on first use.
    pub(super) fn schedule(
        &mut self,
        transfer: &mut Transfer<'_>,
        work: &Work,
    ) -> Result<(Address, Address), DeviceError> {
        let known = self.schedules.iter().position(|schedule| schedule.work == *work);
        let index = known.unwrap_or_else(|| {
            if self.schedules.len() >= SCHEDULES_KEPT {
                // Those of this batch stay: its next layers use them again.
                self.schedules.retain(|schedule| schedule.is_made);
            }
            let memory = Scratch::new(&self.gpu);
            let (work, items, starts) = (*work, 0, 0);
            self.schedules.push(ScheduleImage { work, memory, items, starts, is_made: false });
            self.schedules.len() - 1
        });
        let schedule = self.schedules.get_mut(index).invariant("a schedule is on the list");
        if schedule.is_made {
            return Ok((schedule.items, schedule.starts));
        }
        // Saturating: step limits may be any, and memory for them is refused.
        let items =
            Room::of(work, &self.step.room).items.saturating_mul(to_u64(size_of::<WorkItem>()));
        let starts = (u64::from(work.slots) + 1) * 4;
        schedule.items = schedule.memory.reserve(items.saturating_add(starts))?;
        schedule.starts = schedule.items + items;
        // SAFETY: the plan lies in the image's memory; the memory fits the work items of any batch
        // of the image's extent, and one more start than there are slots.
        unsafe { work.plan(transfer.stream, self.step.plan, [schedule.items, schedule.starts])? };
        schedule.is_made = true;
        Ok((schedule.items, schedule.starts))
    }

    /// Sends a batch with its block tables.
    pub(super) fn send_whole(
        &mut self,
        transfer: &mut Transfer<'_>,
        pack: &mut Pack,
        batch: &PlanBuffers,
        tables: &BlockTables,
    ) -> Result<(), DeviceError> {
        self.forget();
        let (mut blocks, mut begins) = (Vec::new(), Vec::new());
        for sequence in batch.sequences() {
            begins.push(to_u32(blocks.len()));
            blocks.extend(tables.row(sequence.row).iter().map(|block| block.0));
        }
        let begin = |index| begins.get(index).copied();
        let table = |index, _| begin(index).invariant("every sequence has a table");
        let lists = Lists::put(pack, (batch, extent_of(batch)), None, (table, &[]));
        self.is_fixed = false;
        let blocks = pack.push(&blocks);
        let base = self.larger.send((transfer.stream, transfer.staging), pack)?;
        self.step = lists.at(base, blocks.from(base));
        self.id = batch.id();
        Ok(())
    }

    /// Sends a batch, and those entries of the block tables that are not on the device yet.
    pub(super) fn send_with_changes(
        &mut self,
        transfer: &mut Transfer<'_>,
        pack: &mut Pack,
        write: &WritePlan<'_>,
        limits: Option<StepLimits>,
    ) -> Result<(), DeviceError> {
        self.forget();
        let (batch, tables) = (write.batch(), write.tables());
        let rows = || batch.sequences().iter().map(|sequence| sequence.row);
        if let Some(limits) = limits {
            let width = write.layout().slot_map().blocks_reserved(limits.max_seq_len);
            if !self.tables.fit_fixed(rows(), tables, (limits, width))? {
                return self.send_whole(transfer, pack, batch, tables);
            }
        } else {
            self.tables.fit(rows(), tables)?;
        }
        self.tables.changes(rows(), tables, &mut self.changes);
        let table = |_, row: u32| self.tables.begin(row);
        let extent = extent_of(batch);
        let fixed = limits.filter(|limits| within(&extent, limits).is_none());
        self.is_fixed = fixed.is_some();
        let lists = Lists::put(pack, (batch, extent), fixed, (table, &self.changes));
        let is_larger = limits.is_some() && fixed.is_none();
        let memory = if is_larger { &mut self.larger } else { &mut self.memory };
        let sent = memory.send((transfer.stream, transfer.staging), pack).and_then(|base| {
            self.step = lists.at(base, self.tables.address());
            if self.changes.is_empty() {
                return Ok(());
            }
            let at = if let Some(at) = lists.changes(base) {
                at
            } else {
                pack.clear();
                let at = pack.push(&self.changes);
                at.from(self.many_changes.send((transfer.stream, transfer.staging), pack)?)
            };
            update_tables(transfer, (at, self.changes.len()), self.tables.address())
        });
        if sent.is_err() {
            // Rows that were recorded as sent may not have been.
            self.tables.forget();
            return sent;
        }
        self.id = batch.id();
        Ok(())
    }
}

/// Writes changed entries to the tables on the device.
fn update_tables(
    transfer: &mut Transfer<'_>,
    (changes, count): (Address, usize),
    tables: Address,
) -> Result<(), DeviceError> {
    let params = TableParams { changes, tables, num_changes: to_u32(count), pad: 0 };
    let grid = [params.num_changes.div_ceil(256).min(1024), 1, 1];
    let launch = Launch { kernel: "update_tables", grid, threads: 256, shared_bytes: 0 };
    // SAFETY: the changes lie in the image's memory, and refer to entries of the tables.
    unsafe { transfer.stream.launch(&launch, bytemuck::bytes_of(&params)) }
}
