//! The command queue: a stream, and the memory that its calls share.
use std::any::Any;
use std::sync::Arc;

use kv_core::GroupId;
use kv_core::backend::{HostOutputs, Queue};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::plan::{
    AttendArgs, AttentionPlan, ConvertArgs, ConvertPlan, CopyArgs, CopyPlan, GatherArgs,
    GatherPlan, PlanId, WriteArgs, WritePlan,
};

use crate::buffer::{CallerStream, CudaBuffer, Place};
use crate::capture::{self, CudaGraph, Held};
use crate::constants::Constants;
use crate::decode::Work;
use crate::fence::{CudaFence, CudaReadback};
use crate::gpu::{Gpu, Launch, Stream};
use crate::op;
use crate::params::Address;
use crate::pins::Pins;
use crate::scratch::{Pack, Scratch};
use crate::staging::Staging;
use crate::step::{StepLimits, StepPlan, Steps, Transfer};
use crate::tensors::Call;
use crate::waiter::Waiter;
use kv_core::num::{to_offset, to_u64};

/// A command queue. Reuses its buffers from call to call: none is allocated once they are large
/// enough.
#[derive(Debug)]
pub struct CudaQueue {
    pub(crate) gpu: Arc<dyn Gpu>,
    waiter: Arc<Waiter>,
    stream: Box<dyn Stream>,
    /// The caller's stream, if memory can be lent on it, and the owner that keeps it open.
    lends: Option<(CallerStream, Arc<dyn Any + Send + Sync>)>,
    pins: Pins,
    staging: Staging,
    steps: Steps,
    scratch: Scratch,
    /// Outputs to be downloaded to host memory.
    outputs: Scratch,
    /// Counters that are zero between launches.
    counters: Scratch,
    pub(crate) pack: Pack,
    constants: Constants,
    held: Held,
}

/// Parts of the queue that a call borrows separately.
pub(crate) struct Parts<'q> {
    pub(crate) call: Call<'q>,
    pub(crate) pack: &'q mut Pack,
    pub(crate) constants: &'q mut Constants,
    pub(crate) transfer: Transfer<'q>,
}

impl CudaQueue {
    pub(crate) fn new(gpu: &Arc<dyn Gpu>, waiter: &Arc<Waiter>) -> Result<Self, DeviceError> {
        Ok(Self::on(gpu, waiter, gpu.stream()?))
    }

    pub(crate) fn on(gpu: &Arc<dyn Gpu>, waiter: &Arc<Waiter>, stream: Box<dyn Stream>) -> Self {
        let pins = Pins::new(gpu);
        Self {
            gpu: Arc::clone(gpu),
            waiter: Arc::clone(waiter),
            stream,
            lends: None,
            staging: Staging::new(&pins),
            pins,
            steps: Steps::new(gpu),
            scratch: Scratch::new(gpu),
            outputs: Scratch::new(gpu),
            counters: Scratch::new(gpu),
            pack: Pack::default(),
            constants: Constants::new(gpu),
            held: Held::default(),
        }
    }

    /// Lets memory be lent on the caller's stream that this queue is on; `keep` keeps it open.
    pub(crate) fn set_lending(&mut self, stream: CallerStream, keep: Arc<dyn Any + Send + Sync>) {
        self.lends = Some((stream, keep));
    }

    fn place(&self) -> Place<'_> {
        Place { gpu: &self.gpu, stream: self.lends.as_ref().map(|(stream, _)| *stream) }
    }

    /// Sets the largest step that can be captured or replayed. From the next step on, lists of
    /// steps within the limits keep their addresses, so that captured launches find the plan of any
    /// later step.
    pub fn set_step_limits(&mut self, limits: StepLimits) {
        self.steps.set_limits(limits);
    }

    /// Returns whether calls are captured instead of run.
    pub(crate) fn is_capturing(&self) -> bool {
        self.held.is_on()
    }

    /// Refuses calls that a replay cannot repeat, such as reads of host memory.
    fn require_no_capture(&self, what: &str) -> Result<(), DeviceError> {
        if self.held.is_on() { Err(capture::refused(what)) } else { Ok(()) }
    }

    /// Returns the plan of a step in device memory.
    pub(crate) fn step(
        &mut self,
        batch: &kv_core::plan::PlanBuffers,
        tables: &kv_core::block::BlockTables,
    ) -> Result<StepPlan, DeviceError> {
        if !self.steps.is_begun(batch.id()) {
            self.require_no_capture("a batch that is not the step's")?;
        }
        let mut transfer = Transfer { stream: self.stream.as_mut(), staging: &mut self.staging };
        let step = self.steps.get(&mut transfer, batch, tables)?;
        // Replays run captured launches for other batches.
        let extent = if self.held.is_on() { step.room } else { step.extent };
        Ok(StepPlan { extent, ..step })
    }

    /// Returns a schedule of a batch that [`Self::step`] returned: the addresses of work items and
    /// starts.
    pub(crate) fn schedule(
        &mut self,
        id: PlanId,
        work: &Work,
    ) -> Result<(Address, Address), DeviceError> {
        let mut transfer = Transfer { stream: self.stream.as_mut(), staging: &mut self.staging };
        let schedule = self.steps.schedule(&mut transfer, id, work);
        if self.is_capturing() {
            // Every replay uses these schedules, even if later ones of this capture replace them.
            self.steps.memory().iter().for_each(|memory| self.held.note(memory));
        }
        schedule
    }

    /// Starts to capture launches instead of running them. Calls on this queue until
    /// [`Self::end_capture`] must be those of one step: its writes and attention, in device memory.
    /// Tensors should have room for the largest step that is replayed. In a replay some rows of an
    /// output may belong to no query. The kernels for decoding clear them; a captured attention
    /// without one of those also launches a small kernel that does, even if the captured step has
    /// no such row.
    ///
    /// The step must be within [`Self::set_step_limits`], and a similar step must have run before,
    /// so that all memory is allocated and kernels are loaded.
    ///
    /// # Errors
    /// `Unsupported` without limits, or during another capture; the driver's errors.
    pub fn begin_capture(&mut self) -> Result<(), DeviceError> {
        let is_on = self.held.is_on().then(|| "one capture at a time".to_owned());
        if let Some(why) = is_on.or_else(|| self.steps.not_fixed()) {
            return Err(crate::tensors::unsupported("begin capture", why));
        }
        self.stream.begin_capture()?;
        self.held.begin();
        // Plans made before are not part of the graph, which plans in every replay.
        self.steps.forget_schedules();
        Ok(())
    }

    /// Ends a capture. Nothing has run yet: [`Self::replay`] runs it.
    ///
    /// # Errors
    /// `Unsupported` without a capture; the driver's errors.
    pub fn end_capture(&mut self) -> Result<CudaGraph, DeviceError> {
        if !self.held.is_on() {
            return Err(crate::tensors::unsupported("end capture", "no capture is active"));
        }
        let mut held = self.held.end();
        // Plans made during the capture have not run.
        self.steps.forget_schedules();
        let graph = self.stream.end_capture()?;
        held.memory.extend(self.scratch.memory().cloned());
        held.memory.extend(self.counters.memory().cloned());
        held.memory.extend(self.steps.memory());
        Ok(CudaGraph::new(&self.gpu, graph, self.steps.epoch(), held))
    }

    /// Runs captured launches for the step that began last. They read and write the tensors with
    /// which they were captured.
    ///
    /// # Errors
    /// `ForeignHandle` for a graph of another device; `Unsupported` for one that was captured under
    /// other limits, and for a step that is beyond the limits or that a captured tensor has no room
    /// for; the driver's errors.
    pub fn replay(&mut self, graph: &CudaGraph) -> Result<(), DeviceError> {
        if !Arc::ptr_eq(&self.gpu, &graph.gpu) {
            return Err(DeviceError::new(DeviceErrorKind::ForeignHandle, "replay"));
        }
        self.require_no_capture("a replay")?;
        if graph.epoch != self.steps.epoch() {
            let why = "the graph was captured under other step limits, or on another queue";
            return Err(crate::tensors::unsupported("replay", why));
        }
        let too_large = || graph.lacks_room(&self.steps.extent());
        if let Some(why) = self.steps.not_fixed().or_else(too_large) {
            return Err(crate::tensors::unsupported("replay", why));
        }
        // SAFETY: the graph holds all memory that its launches use, and its tensors have room for
        // the step; limits fix the addresses of a step's lists, and their content was checked when
        // the step began.
        unsafe { self.stream.replay(graph.graph.as_ref()) }
    }

    /// Copies `len` bytes from byte `from.1` of one buffer to byte `to.1` of another, with the
    /// driver's own copy: the baseline for measured bandwidth.
    ///
    /// # Errors
    /// `ForeignHandle` for a buffer of another device, `OutOfRange` past the end of one,
    /// `Unsupported` for ranges that overlap; the driver's errors.
    pub fn copy(
        &mut self,
        from: (&CudaBuffer, u64),
        to: (&CudaBuffer, u64),
        len: u64,
    ) -> Result<(), DeviceError> {
        let source = from.0.on(self.place(), (from.1, len), "copy")?;
        let target = to.0.on(self.place(), (to.1, len), "copy")?;
        if len == 0 {
            return Ok(());
        }
        if source.abs_diff(target) < len {
            return Err(crate::tensors::unsupported("copy", "the ranges overlap"));
        }
        self.held.note(from.0);
        self.held.note(to.0);
        // SAFETY: `on` found both ranges inside memory of this device; they do not overlap.
        unsafe { self.stream.copy(target, source, len) }
    }

    /// Begins a call with an empty pack.
    pub(crate) fn parts(&mut self, operation: &'static str) -> Parts<'_> {
        self.pack.clear();
        let stream = self.place().stream;
        Parts {
            call: Call { place: Place { gpu: &self.gpu, stream }, operation, held: &self.held },
            pack: &mut self.pack,
            constants: &mut self.constants,
            transfer: Transfer { stream: self.stream.as_mut(), staging: &mut self.staging },
        }
    }

    /// Sends the lists of this call to the device and returns their address.
    pub(crate) fn send(&mut self) -> Result<Address, DeviceError> {
        let is_captured = self.held.is_on();
        if is_captured && !(self.pack.is_empty() && self.scratch.has(self.pack.len())) {
            return Err(capture::refused("lists of one call, or more room than before,"));
        }
        self.scratch.send((self.stream.as_mut(), &mut self.staging), &self.pack)
    }

    /// Reserves memory for outputs of `bytes` bytes that are downloaded afterwards.
    fn outputs(&mut self, bytes: Option<u64>) -> Result<Option<CudaBuffer>, DeviceError> {
        let Some(bytes) = bytes else { return Ok(None) };
        if self.held.is_on() {
            let why = "an output in host memory: replays write device memory alone";
            return Err(crate::tensors::unsupported("capture", why));
        }
        self.outputs.reserve(bytes)?;
        Ok(self.outputs.memory().cloned())
    }

    /// Reserves `count` counters that are zero.
    pub(crate) fn counters(&mut self, count: u64) -> Result<Address, DeviceError> {
        let bytes = count.max(1) * 4;
        if self.held.is_on() && !self.counters.has(bytes) {
            return Err(capture::refused("more counters than before"));
        }
        self.counters.reserve(bytes)
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// As [`Stream::launch`].
    pub(crate) unsafe fn launch<P: bytemuck::NoUninit>(
        &mut self,
        launch: &Launch,
        params: &P,
    ) -> Result<(), DeviceError> {
        if launch.grid.contains(&0) {
            return Ok(());
        }
        // SAFETY: a condition of this function.
        unsafe { self.stream.launch(launch, bytemuck::bytes_of(params)) }
    }

    fn fence(&mut self) -> Result<CudaFence, DeviceError> {
        self.require_no_capture("a fence")?;
        CudaFence::record(&self.gpu, &self.waiter, self.stream.as_mut())
    }
}

impl Drop for CudaQueue {
    fn drop(&mut self) {
        if self.held.is_on() {
            // The captured work is dropped; uploads from before the capture are waited for.
            let _ = self.end_capture();
        }
        self.staging.drain(self.stream.as_mut());
    }
}

impl Queue for CudaQueue {
    type Buffer = CudaBuffer;
    type Fence = CudaFence;
    type Readback = CudaReadback;

    fn upload(&mut self, dst: &CudaBuffer, at: u64, src: &[u8]) -> Result<(), DeviceError> {
        self.require_no_capture("an upload")?;
        let to = dst.on(self.place(), (at, to_u64(src.len())), "upload")?;
        // SAFETY: `on` found the range inside memory of this device.
        unsafe { self.staging.upload(self.stream.as_mut(), to, src) }
    }

    fn download(
        &mut self,
        src: &CudaBuffer,
        at: u64,
        len: u64,
    ) -> Result<CudaReadback, DeviceError> {
        self.require_no_capture("a download")?;
        let from = src.on(self.place(), (at, len), "download")?;
        let len = to_offset(len);
        if len == 0 {
            return Ok(CudaReadback { copy: None, len });
        }
        let pinned = self.pins.take(len)?;
        // SAFETY: `on` found the range inside memory of this device; the readback keeps the pinned
        // bytes, untouched, until the fence is done.
        let copied = unsafe { self.stream.download(pinned.base(), from, len) };
        match copied.and_then(|()| self.fence()) {
            Ok(fence) => Ok(CudaReadback { copy: Some((fence, pinned)), len }),
            Err(error) => {
                // The copy may still run.
                pinned.leak();
                Err(error)
            }
        }
    }

    fn zero(&mut self, dst: &CudaBuffer, offset: u64, len: u64) -> Result<(), DeviceError> {
        let at = dst.on(self.place(), (offset, len), "zero")?;
        if len == 0 {
            return Ok(());
        }
        // SAFETY: `on` found the range inside memory of this device.
        unsafe { self.stream.zero(at, len) }
    }

    fn prepare(
        &mut self,
        group: GroupId,
        write: &WritePlan<'_>,
        _attend: &AttentionPlan<'_>,
    ) -> Result<(), DeviceError> {
        self.require_no_capture("the begin of a step")?;
        let mut transfer = Transfer { stream: self.stream.as_mut(), staging: &mut self.staging };
        self.steps.prepare(&mut transfer, group, write)
    }

    fn write_kv(
        &mut self,
        plan: &WritePlan<'_>,
        args: WriteArgs<'_, CudaBuffer>,
    ) -> Result<(), DeviceError> {
        op::write::write_kv(self, plan, &args)
    }

    fn attend(
        &mut self,
        plan: &AttentionPlan<'_>,
        mut args: AttendArgs<'_, CudaBuffer>,
    ) -> Result<(), DeviceError> {
        let buffer = self.outputs(HostOutputs::bytes(args.outputs()))?;
        let mut args = args; // for as long as the buffer
        let host = HostOutputs::take(args.outputs(), buffer.as_ref());
        op::attend::attend(self, plan, args)?;
        host.fetch(self, buffer.as_ref())
    }

    fn copy_blocks(
        &mut self,
        plan: &CopyPlan<'_>,
        args: CopyArgs<'_, CudaBuffer>,
    ) -> Result<(), DeviceError> {
        op::copy::copy_blocks(self, plan, &args)
    }

    fn gather(
        &mut self,
        plan: &GatherPlan<'_>,
        mut args: GatherArgs<'_, CudaBuffer>,
    ) -> Result<(), DeviceError> {
        let buffer = self.outputs(HostOutputs::bytes(args.outputs()))?;
        let mut args = args; // for as long as the buffer
        let host = HostOutputs::take(args.outputs(), buffer.as_ref());
        op::gather::gather(self, plan, args)?;
        host.fetch(self, buffer.as_ref())
    }

    fn convert(
        &mut self,
        plan: &ConvertPlan,
        mut args: ConvertArgs<'_, CudaBuffer>,
    ) -> Result<(), DeviceError> {
        let buffer = self.outputs(HostOutputs::bytes(args.outputs()))?;
        let mut args = args; // for as long as the buffer
        let host = HostOutputs::take(args.outputs(), buffer.as_ref());
        op::convert::convert(self, plan, args)?;
        host.fetch(self, buffer.as_ref())
    }

    fn flush(&mut self) -> Result<(), DeviceError> {
        // The driver has all work already.
        Ok(())
    }

    fn submit(&mut self) -> Result<CudaFence, DeviceError> {
        self.fence()
    }

    fn wait_for(&mut self, fence: &CudaFence) -> Result<(), DeviceError> {
        self.require_no_capture("waiting for a fence")?;
        self.stream.wait_for(fence.event_on(&self.gpu, "wait_for")?)
    }
}
