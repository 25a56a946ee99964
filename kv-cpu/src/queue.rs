//! The command queue: every operation runs to its end inside its call.
//!
//! Fences and readbacks are therefore ready when they are made. Passes each operation to its
//! module.
use std::task::{Context, Poll};

use kv_core::backend::{Fence, Queue, Readback};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::plan::{
    AttendArgs, AttentionPlan, ConvertArgs, ConvertPlan, CopyArgs, CopyPlan, GatherArgs,
    GatherPlan, WriteArgs, WritePlan,
};
use kv_core::{GroupId, num};

use crate::access::Access;
use crate::attend;
use crate::buffer::CpuBuffer;
use crate::context::Cpu;
use crate::ops::{convert, copy, gather, write};
use crate::scratch::Workspace;

/// A command queue that runs on the calling thread and its workers. It keeps its buffers from call
/// to call: with one thread, a call allocates nothing once the buffers have their full size.
#[derive(Debug)]
pub struct CpuQueue {
    cpu: Cpu,
    workspace: Workspace,
}

/// Always signalled.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct CpuFence;

/// Bytes that were read when it was made.
#[derive(Debug)]
pub struct CpuReadback {
    bytes: Vec<u8>,
}

impl CpuQueue {
    pub(crate) fn new(cpu: Cpu) -> Self {
        let mut workspace = Workspace::default();
        workspace.scratch.resize_with(cpu.threads.count(), Default::default);
        Self { cpu, workspace }
    }
}

impl Queue for CpuQueue {
    type Buffer = CpuBuffer;
    type Fence = CpuFence;
    type Readback = CpuReadback;

    fn upload(&mut self, dst: &CpuBuffer, at: u64, src: &[u8]) -> Result<(), DeviceError> {
        let range = (at, num::to_u64(src.len()));
        let mut access = Access::new(&mut self.workspace.entries, "upload");
        let span = access.enter(dst, range, true)?;
        let _locked = access.lock()?;
        // SAFETY: the span is locked for writing, and has the length of `src`.
        let to = unsafe { std::slice::from_raw_parts_mut(span.base(), span.len()) };
        to.copy_from_slice(src);
        Ok(())
    }

    fn download(
        &mut self,
        src: &CpuBuffer,
        at: u64,
        bytes: u64,
    ) -> Result<CpuReadback, DeviceError> {
        let mut access = Access::new(&mut self.workspace.entries, "download");
        let span = access.enter(src, (at, bytes), false)?;
        let _locked = access.lock()?;
        let mut copy = Vec::new();
        copy.try_reserve_exact(span.len()).map_err(|error| {
            DeviceError::new(DeviceErrorKind::OutOfMemory, "download").with_source(error)
        })?;
        // SAFETY: the span is locked for reading.
        let from = unsafe { std::slice::from_raw_parts(span.base().cast_const(), span.len()) };
        copy.extend_from_slice(from);
        Ok(CpuReadback { bytes: copy })
    }

    fn zero(&mut self, dst: &CpuBuffer, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        let mut access = Access::new(&mut self.workspace.entries, "zero");
        let span = access.enter(dst, (offset, bytes), true)?;
        let _locked = access.lock()?;
        // SAFETY: the span is locked for writing.
        unsafe { std::slice::from_raw_parts_mut(span.base(), span.len()) }.fill(0);
        Ok(())
    }

    fn prepare(
        &mut self,
        _group: GroupId,
        _write: &WritePlan<'_>,
        _attend: &AttentionPlan<'_>,
    ) -> Result<(), DeviceError> {
        // Plans are read in place.
        Ok(())
    }

    fn write_kv(
        &mut self,
        plan: &WritePlan<'_>,
        args: WriteArgs<'_, CpuBuffer>,
    ) -> Result<(), DeviceError> {
        write::write_kv(&self.cpu, &mut self.workspace, plan, &args)
    }

    fn attend(
        &mut self,
        plan: &AttentionPlan<'_>,
        args: AttendArgs<'_, CpuBuffer>,
    ) -> Result<(), DeviceError> {
        attend::attend(&self.cpu, &mut self.workspace, plan, args)
    }

    fn copy_blocks(
        &mut self,
        plan: &CopyPlan<'_>,
        args: CopyArgs<'_, CpuBuffer>,
    ) -> Result<(), DeviceError> {
        copy::copy_blocks(&self.cpu, &mut self.workspace, plan, &args)
    }

    fn gather(
        &mut self,
        plan: &GatherPlan<'_>,
        args: GatherArgs<'_, CpuBuffer>,
    ) -> Result<(), DeviceError> {
        gather::gather(&self.cpu, &mut self.workspace, plan, args)
    }

    fn convert(
        &mut self,
        plan: &ConvertPlan,
        args: ConvertArgs<'_, CpuBuffer>,
    ) -> Result<(), DeviceError> {
        convert::convert(&self.cpu, &mut self.workspace, plan, args)
    }

    fn flush(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn submit(&mut self) -> Result<CpuFence, DeviceError> {
        Ok(CpuFence)
    }

    fn wait_for(&mut self, _fence: &CpuFence) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl Fence for CpuFence {
    fn poll(&self, _cx: &mut Context<'_>) -> Poll<Result<(), DeviceError>> {
        Poll::Ready(Ok(()))
    }
    fn wait(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl Readback for CpuReadback {
    fn poll(&mut self, _cx: &mut Context<'_>) -> Poll<Result<Vec<u8>, DeviceError>> {
        Poll::Ready(Ok(std::mem::take(&mut self.bytes)))
    }
    fn wait(self) -> Result<Vec<u8>, DeviceError> {
        Ok(self.bytes)
    }
}
