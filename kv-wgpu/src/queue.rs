//! The command queue: recorded calls, and the memory that they share.
use std::sync::Arc;

use kv_core::GroupId;
use kv_core::backend::{HostOutputs, Queue};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::plan::{
    AttendArgs, AttentionPlan, ConvertArgs, ConvertPlan, CopyArgs, CopyPlan, GatherArgs,
    GatherPlan, WriteArgs, WritePlan,
};

use crate::buffer::WgpuBuffer;
use crate::device::{Shared, unsupported};
use crate::fence::{WgpuFence, WgpuReadback};
use crate::op;
use crate::recording::Recorder;
use crate::scratch::Scratch;
use crate::steps::Steps;
use crate::tensors::Call;

/// A command queue. Records calls until it is submitted, and reuses its buffers from call to call.
#[derive(Debug)]
pub struct WgpuQueue {
    pub(crate) recorder: Recorder,
    pub(crate) steps: Steps,
    /// Data that dispatches of one call pass on to each other.
    pub(crate) scratch: Scratch,
    /// Outputs to be downloaded to host memory.
    outputs: Scratch,
}

impl WgpuQueue {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            recorder: Recorder::new(shared),
            steps: Steps::default(),
            scratch: Scratch::default(),
            outputs: Scratch::default(),
        }
    }

    /// Copies `len` bytes from byte `from.1` of one buffer to byte `to.1` of another, with the
    /// device's own command: the baseline for measured bandwidth.
    ///
    /// # Errors
    /// `ForeignHandle` for a buffer of another device, `OutOfRange` past the end of one,
    /// `Unsupported` for ranges that do not begin and end at multiples of 4 bytes and for two
    /// ranges of one buffer, which WebGPU does not copy; `Lost`.
    pub fn copy(
        &mut self,
        from: (&WgpuBuffer, u64),
        to: (&WgpuBuffer, u64),
        len: u64,
    ) -> Result<(), DeviceError> {
        const COPY: &str = "copy";
        self.begin(COPY)?;
        let source = from.0.on(self.shared(), (from.1, len), COPY)?;
        let target = to.0.on(self.shared(), (to.1, len), COPY)?;
        if len == 0 {
            return Ok(());
        }
        if ![source, target, len].iter().all(|bytes| bytes.is_multiple_of(4)) {
            let why = format!(
                "{len} bytes from byte {source} to byte {target}: all three must be multiples of 4"
            );
            return Err(unsupported(COPY, why));
        }
        if from.0.buffer() == to.0.buffer() {
            return Err(unsupported(COPY, "both ranges are of one buffer"));
        }
        let encoder = self.recorder.encoder()?;
        encoder.copy_buffer_to_buffer(from.0.buffer(), source, to.0.buffer(), target, len);
        Ok(())
    }

    /// Starts a call: checks that the device is there, and attributes errors of dispatches to
    /// `operation`.
    fn begin(&mut self, operation: &'static str) -> Result<(), DeviceError> {
        self.recorder.operation = operation;
        self.shared().notice(operation)
    }

    /// Returns a call's view of its tensors and planes.
    pub(crate) fn call(&mut self, operation: &'static str) -> Call<'_> {
        Call { recorder: &mut self.recorder, operation }
    }

    /// Reserves memory for outputs of `bytes` bytes that are downloaded afterwards.
    fn outputs(
        &mut self,
        bytes: Option<u64>,
        operation: &'static str,
    ) -> Result<Option<WgpuBuffer>, DeviceError> {
        let Some(bytes) = bytes else { return Ok(None) };
        let shared = &self.recorder.shared;
        if !shared.may_wait {
            let why = "an output in host memory, for which this thread would have to wait: \
                       write device memory, and await a download";
            return Err(unsupported(operation, why));
        }
        self.outputs.reserve(shared, bytes, operation).map(Some)
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.recorder.shared
    }

    fn send(&mut self, operation: &'static str) -> Result<wgpu::SubmissionIndex, DeviceError> {
        let sent = self.recorder.submit(operation);
        if sent.is_err() {
            // The lists that were part of the submission were not sent.
            self.steps.forget();
        }
        sent
    }
}

impl Queue for WgpuQueue {
    type Buffer = WgpuBuffer;
    type Fence = WgpuFence;
    type Readback = WgpuReadback;

    fn upload(&mut self, dst: &WgpuBuffer, at: u64, src: &[u8]) -> Result<(), DeviceError> {
        self.begin("upload")?;
        op::bytes::upload(&mut self.recorder, (dst, at), src)
    }

    fn download(
        &mut self,
        src: &WgpuBuffer,
        at: u64,
        len: u64,
    ) -> Result<WgpuReadback, DeviceError> {
        const DOWNLOAD: &str = "download";
        self.begin(DOWNLOAD)?;
        let from = src.on(self.shared(), (at, len), DOWNLOAD)?;
        if len == 0 {
            return Ok(WgpuReadback::empty(self.shared()));
        }
        // Copy commands move whole words.
        let (begin, skip) = (from - from % 4, from % 4);
        let size = (skip + len).next_multiple_of(4);
        let descriptor = wgpu::BufferDescriptor {
            label: Some(DOWNLOAD),
            size,
            usage: wgpu::BufferUsages::COPY_DST.union(wgpu::BufferUsages::MAP_READ),
            mapped_at_creation: false,
        };
        let staging =
            self.shared().watch(DOWNLOAD, |shared| shared.device.create_buffer(&descriptor))?;
        let source = src.buffer();
        self.recorder.encoder()?.copy_buffer_to_buffer(source, begin, &staging, 0, size);
        // A download completes only after its commands are submitted.
        let index = self.send(DOWNLOAD)?;
        Ok(WgpuReadback::new(self.shared(), staging, (skip, len), index))
    }

    fn zero(&mut self, dst: &WgpuBuffer, offset: u64, len: u64) -> Result<(), DeviceError> {
        self.begin("zero")?;
        op::bytes::zero(&mut self.recorder, (dst, offset), len)
    }

    fn prepare(
        &mut self,
        _group: GroupId,
        write: &WritePlan<'_>,
        _attend: &AttentionPlan<'_>,
    ) -> Result<(), DeviceError> {
        self.begin("prepare")?;
        self.steps.get(&mut self.recorder, write.batch(), write.tables()).map(drop)
    }

    fn write_kv(
        &mut self,
        plan: &WritePlan<'_>,
        args: WriteArgs<'_, WgpuBuffer>,
    ) -> Result<(), DeviceError> {
        self.begin("write_kv")?;
        op::write::write_kv(self, plan, &args)
    }

    fn attend(
        &mut self,
        plan: &AttentionPlan<'_>,
        mut args: AttendArgs<'_, WgpuBuffer>,
    ) -> Result<(), DeviceError> {
        const ATTEND: &str = "attend";
        self.begin(ATTEND)?;
        let buffer = self.outputs(HostOutputs::bytes(args.outputs()), ATTEND)?;
        let mut args = args; // for as long as the buffer
        let host = HostOutputs::take(args.outputs(), buffer.as_ref());
        op::attend::attend(self, plan, args)?;
        host.fetch(self, buffer.as_ref())
    }

    fn copy_blocks(
        &mut self,
        plan: &CopyPlan<'_>,
        args: CopyArgs<'_, WgpuBuffer>,
    ) -> Result<(), DeviceError> {
        self.begin("copy_blocks")?;
        op::copy::copy_blocks(self, plan, &args)
    }

    fn gather(
        &mut self,
        plan: &GatherPlan<'_>,
        mut args: GatherArgs<'_, WgpuBuffer>,
    ) -> Result<(), DeviceError> {
        const GATHER: &str = "gather";
        self.begin(GATHER)?;
        let buffer = self.outputs(HostOutputs::bytes(args.outputs()), GATHER)?;
        let mut args = args; // for as long as the buffer
        let host = HostOutputs::take(args.outputs(), buffer.as_ref());
        op::gather::gather(self, plan, args)?;
        host.fetch(self, buffer.as_ref())
    }

    fn convert(
        &mut self,
        plan: &ConvertPlan,
        mut args: ConvertArgs<'_, WgpuBuffer>,
    ) -> Result<(), DeviceError> {
        const CONVERT: &str = "convert";
        self.begin(CONVERT)?;
        let buffer = self.outputs(HostOutputs::bytes(args.outputs()), CONVERT)?;
        let mut args = args; // for as long as the buffer
        let host = HostOutputs::take(args.outputs(), buffer.as_ref());
        op::convert::convert(self, plan, args)?;
        host.fetch(self, buffer.as_ref())
    }

    fn flush(&mut self) -> Result<(), DeviceError> {
        self.begin("flush")?;
        self.send("flush").map(drop)
    }

    fn submit(&mut self) -> Result<WgpuFence, DeviceError> {
        self.begin("submit")?;
        let index = self.send("submit")?;
        Ok(WgpuFence::new(self.shared(), index))
    }

    fn wait_for(&mut self, fence: &WgpuFence) -> Result<(), DeviceError> {
        const WAIT: &str = "wait for another queue";
        if !Arc::ptr_eq(self.shared(), &fence.shared) {
            return Err(DeviceError::new(DeviceErrorKind::ForeignHandle, WAIT));
        }
        // The fence's work was submitted before, and the device runs submissions in order.
        self.shared().notice(WAIT)
    }
}
