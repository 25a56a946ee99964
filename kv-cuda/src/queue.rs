//! The lane of work: a stream, and the memory its calls share.
use std::sync::Arc;

use kv_core::backend::{HostOutputs, Queue};
use kv_core::plan::{
    AttendArgs, AttentionPlan, ConvertArgs, ConvertPlan, CopyArgs, CopyPlan, GatherArgs,
    GatherPlan, PlanId, WriteArgs, WritePlan,
};
use kv_core::{DeviceError, DeviceErrorKind, GroupId};

use crate::buffer::CudaBuffer;
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
use crate::step::{StepLimits, StepPlan, Steps, Way};
use crate::tensors::Call;
use crate::waiter::Waiter;
use kv_core::num::{to_offset, to_u64};

/// A lane of work. Keeps its buffers from call to call: none is allocated once they have met their
/// size.
#[derive(Debug)]
pub struct CudaQueue {
    pub(crate) gpu: Arc<dyn Gpu>,
    waiter: Arc<Waiter>,
    stream: Box<dyn Stream>,
    pins: Pins,
    staging: Staging,
    steps: Steps,
    scratch: Scratch,
    /// Outputs on their way to host memory.
    outputs: Scratch,
    /// Counters that are zero between launches.
    counters: Scratch,
    pub(crate) pack: Pack,
    constants: Constants,
    held: Held,
}

/// What a call takes apart from the queue, side by side.
pub(crate) struct Parts<'q> {
    pub(crate) call: Call<'q>,
    pub(crate) pack: &'q mut Pack,
    pub(crate) constants: &'q mut Constants,
    pub(crate) way: Way<'q>,
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

    /// Sets the largest step that is captured or replayed: from the next one on, lists of steps
    /// within the limits keep their addresses, so that captured launches find the plan of any later
    /// step.
    pub fn set_step_limits(&mut self, limits: StepLimits) {
        self.steps.set_limits(limits);
    }

    /// Whether calls are kept instead of run.
    pub(crate) fn is_capturing(&self) -> bool {
        self.held.is_on()
    }

    /// Refuses what a replay cannot do again: bytes of the host are there only once.
    fn require_no_capture(&self, what: &str) -> Result<(), DeviceError> {
        if self.held.is_on() { Err(capture::refused(what)) } else { Ok(()) }
    }

    /// The plan of a step in device memory.
    pub(crate) fn step(
        &mut self,
        batch: &kv_core::plan::PlanBuffers,
        tables: &kv_core::block::BlockTables,
    ) -> Result<StepPlan, DeviceError> {
        if !self.steps.is_begun(batch.id()) {
            self.require_no_capture("a batch that is not the step's")?;
        }
        let mut way = Way { stream: self.stream.as_mut(), staging: &mut self.staging };
        let step = self.steps.get(&mut way, batch, tables)?;
        // Captured launches meet other batches when they are replayed.
        let extent = if self.held.is_on() { step.room } else { step.extent };
        Ok(StepPlan { extent, ..step })
    }

    /// How the batch of a plan that [`Self::step`] gave is decoded.
    pub(crate) fn decode(
        &mut self,
        id: PlanId,
        work: &Work,
    ) -> Result<(Address, Address), DeviceError> {
        let mut way = Way { stream: self.stream.as_mut(), staging: &mut self.staging };
        let decoded = self.steps.decode(&mut way, id, work);
        if self.is_capturing() {
            // Plans that later ones of this capture push out are used by every replay.
            self.steps.memory().iter().for_each(|memory| self.held.note(memory));
        }
        decoded
    }

    /// Begins to keep launches instead of running them. Calls on this queue until
    /// [`Self::end_capture`] must be those of one step: its writes and attention, in device memory.
    ///
    /// The step must lie within [`Self::set_step_limits`], and a step like it must have run before,
    /// so that all memory is there and kernels are loaded.
    ///
    /// # Errors
    /// `Unsupported` without limits, or where one is on already; the driver's.
    pub fn begin_capture(&mut self) -> Result<(), DeviceError> {
        let is_on = self.held.is_on().then(|| "one capture at a time".to_owned());
        if let Some(why) = is_on.or_else(|| self.steps.not_fixed()) {
            return Err(crate::tensors::unsupported("begin capture", why));
        }
        self.stream.begin_capture()?;
        self.held.begin();
        // What was planned before is no part of the graph, which plans every replay anew.
        self.steps.forget_decodes();
        Ok(())
    }

    /// Ends what [`Self::begin_capture`] began. Nothing has run yet: [`Self::replay`] runs it.
    ///
    /// # Errors
    /// `Unsupported` where nothing was begun; the driver's.
    pub fn end_capture(&mut self) -> Result<CudaGraph, DeviceError> {
        if !self.held.is_on() {
            return Err(crate::tensors::unsupported("end capture", "nothing was begun"));
        }
        let mut held = self.held.end();
        // What was planned since has not run.
        self.steps.forget_decodes();
        let graph = self.stream.end_capture()?;
        held.extend(self.scratch.memory().cloned());
        held.extend(self.counters.memory().cloned());
        held.extend(self.steps.memory());
        Ok(CudaGraph::new(&self.gpu, graph, self.steps.epoch(), held))
    }

    /// Runs captured launches for the step that was begun last. They read and write the tensors
    /// that they were captured with.
    ///
    /// # Errors
    /// `ForeignHandle` for a graph of another device, `Unsupported` for one that was captured
    /// under other limits; the driver's.
    pub fn replay(&mut self, graph: &CudaGraph) -> Result<(), DeviceError> {
        if !Arc::ptr_eq(&self.gpu, &graph.gpu) {
            return Err(DeviceError::new(DeviceErrorKind::ForeignHandle, "replay"));
        }
        self.require_no_capture("a replay")?;
        if graph.epoch != self.steps.epoch() {
            let why = "the graph was captured under other limits of steps, or on another queue";
            return Err(crate::tensors::unsupported("replay", why));
        }
        if let Some(why) = self.steps.not_fixed() {
            return Err(crate::tensors::unsupported("replay", why));
        }
        // SAFETY: the graph holds all memory its launches name; lists of a step have the addresses
        // they had, as limits promise, and their content was checked when the step began.
        unsafe { self.stream.replay(graph.graph.as_ref()) }
    }

    /// Copies `len` bytes from byte `from.1` of one buffer to byte `to.1` of another, as the driver
    /// does it: what bandwidth is measured against.
    ///
    /// # Errors
    /// `ForeignHandle` for a buffer of another device, `OutOfRange` past the end of one,
    /// `Unsupported` for ranges that overlap; the driver's.
    pub fn copy(
        &mut self,
        from: (&CudaBuffer, u64),
        to: (&CudaBuffer, u64),
        len: u64,
    ) -> Result<(), DeviceError> {
        let source = from.0.on(&self.gpu, (from.1, len), "copy")?;
        let target = to.0.on(&self.gpu, (to.1, len), "copy")?;
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

    /// Begins a call, with nothing packed.
    pub(crate) fn parts(&mut self, operation: &'static str) -> Parts<'_> {
        self.pack.clear();
        Parts {
            call: Call { gpu: &self.gpu, operation, held: &self.held },
            pack: &mut self.pack,
            constants: &mut self.constants,
            way: Way { stream: self.stream.as_mut(), staging: &mut self.staging },
        }
    }

    /// Brings the lists of this call to the device; where they lie.
    pub(crate) fn send(&mut self) -> Result<Address, DeviceError> {
        let is_captured = self.held.is_on();
        if is_captured && !(self.pack.is_empty() && self.scratch.has(self.pack.len())) {
            return Err(capture::refused("lists of one call, or more room than before,"));
        }
        self.scratch.send((self.stream.as_mut(), &mut self.staging), &self.pack)
    }

    /// Memory in which outputs of so many bytes wait for the host.
    fn outputs(&mut self, bytes: Option<u64>) -> Result<Option<CudaBuffer>, DeviceError> {
        let Some(bytes) = bytes else { return Ok(None) };
        if self.held.is_on() {
            let why = "an output in host memory: replays write device memory alone";
            return Err(crate::tensors::unsupported("capture", why));
        }
        self.outputs.reserve(bytes)?;
        Ok(self.outputs.memory().cloned())
    }

    /// Memory of so many counters, which are zero.
    pub(crate) fn counters(&mut self, count: u64) -> Result<Address, DeviceError> {
        let bytes = count.max(1).saturating_mul(4);
        if self.held.is_on() && !self.counters.has(bytes) {
            return Err(capture::refused("more counters than before"));
        }
        self.counters.reserve(bytes)
    }

    /// Starts a kernel.
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
        // SAFETY: the caller's promise.
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
            // What was captured is nobody's; uploads from before the capture are waited for.
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
        let to = dst.on(&self.gpu, (at, to_u64(src.len())), "upload")?;
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
        let from = src.on(&self.gpu, (at, len), "download")?;
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
                // Whether the copy runs nobody can tell any more.
                pinned.leak();
                Err(error)
            }
        }
    }

    fn zero(&mut self, dst: &CudaBuffer, offset: u64, len: u64) -> Result<(), DeviceError> {
        let at = dst.on(&self.gpu, (offset, len), "zero")?;
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
        let mut way = Way { stream: self.stream.as_mut(), staging: &mut self.staging };
        self.steps.prepare(&mut way, group, write)
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
        // The driver has everything already.
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
