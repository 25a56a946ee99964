//! Streams: copies, launches, events, capture.
use std::any::Any;
use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult, CUstream};
use kv_core::error::{DeviceError, DeviceErrorKind};

use super::batch;
use super::context::Context;
use super::dependent::Attribute;
use super::error::refuse;
use super::event::CudaEvent;
use super::graph::CudaGraph;
use super::handle::CudaStreamHandle;
use super::library::{CopyBatch, LaunchConfig, LaunchEx};
use super::memory::check_stream;
use super::modules::{Function, Modules};
use super::pool::DeviceMemory;
use crate::gpu::{Event, Graph, HostCopy, Launch, Stream};
use crate::params::Address;

/// A stream of this crate or of a caller.
#[derive(Debug)]
pub(super) struct CudaStream {
    context: Arc<Context>,
    modules: Arc<Modules>,
    memory: Arc<DeviceMemory>,
    raw: CUstream,
    /// The handle that frees are ordered with.
    handle: Arc<CudaStreamHandle>,
    is_ours: bool,
}

// SAFETY: the driver lets any thread use a stream.
unsafe impl Send for CudaStream {}

impl CudaStream {
    pub(super) fn open(
        context: &Arc<Context>,
        modules: &Arc<Modules>,
        memory: &Arc<DeviceMemory>,
    ) -> Result<Self, DeviceError> {
        let raw = context.open_stream("open a stream")?;
        // SAFETY: the stream is destroyed when the result is dropped.
        Ok(unsafe { Self::on(context, modules, memory, (raw, true)) })
    }

    /// # Safety
    /// 1. The stream lives as long as the result.
    unsafe fn on(
        context: &Arc<Context>,
        modules: &Arc<Modules>,
        memory: &Arc<DeviceMemory>,
        (raw, is_ours): (CUstream, bool),
    ) -> Self {
        // SAFETY: condition 1: the handle is closed when the result is dropped.
        let handle = Arc::new(unsafe { CudaStreamHandle::new(context, raw) });
        memory.open_stream(Arc::<CudaStreamHandle>::clone(&handle));
        let (context, modules) = (Arc::clone(context), Arc::clone(modules));
        Self { context, modules, memory: Arc::clone(memory), raw, handle, is_ours }
    }

    /// Uses a caller's stream.
    ///
    /// # Safety
    /// 1. `raw` is a stream that outlives the result.
    /// 2. While the result is used, no other thread captures on it.
    pub(super) unsafe fn wrap(
        context: &Arc<Context>,
        modules: &Arc<Modules>,
        memory: &Arc<DeviceMemory>,
        raw: *mut c_void,
    ) -> Result<Self, DeviceError> {
        let raw: CUstream = raw.cast();
        // SAFETY: condition 1.
        unsafe { check_stream(context, raw) }?;
        // SAFETY: as above.
        Ok(unsafe { Self::on(context, modules, memory, (raw, false)) })
    }

    /// Returns the call that batches this many copies, if they are batched: on built-in streams and
    /// during captures they cannot be.
    fn batch_call(&self, copies: usize) -> Option<CopyBatch> {
        const BUILT_IN: [usize; 3] = [0, 1, 2];
        let call = batch::call(self.context.driver, copies)?;
        let can_batch = !BUILT_IN.contains(&self.raw.addr()) && !self.handle.is_capturing();
        can_batch.then_some(call)
    }

    /// Launches a kernel that may start before the previous one has ended.
    ///
    /// # Safety
    /// 1. Condition 1 of [`Stream::launch`]; `params` has the kernel's size.
    unsafe fn launch_dependent(
        &self,
        call: LaunchEx,
        function: Function,
        launch: &Launch,
        params: &[u8],
    ) -> CUresult {
        let config = LaunchConfig {
            grid: launch.grid,
            threads: [launch.threads, 1, 1],
            shared_bytes: launch.shared_bytes,
            stream: self.raw,
            attributes: &Attribute::DEPENDENT,
            num_attributes: 1,
        };
        let mut arguments = [params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: condition 1; a configuration with one attribute and a live stream; a kernel has
        // one parameter, whose bytes the driver copies.
        unsafe { call(&raw const config, function.raw, arguments.as_mut_ptr(), ptr::null_mut()) }
    }

    /// Launches a kernel that starts when the previous one has ended.
    ///
    /// # Safety
    /// 1. Condition 1 of [`Stream::launch`]; `params` has the kernel's size.
    unsafe fn launch_serial(&self, function: Function, launch: &Launch, params: &[u8]) -> CUresult {
        let mut arguments = [params.as_ptr().cast_mut().cast::<c_void>()];
        let [x, y, z] = launch.grid;
        // SAFETY: condition 1, on a live stream; a kernel has one parameter, whose bytes the driver
        // copies.
        unsafe {
            sys::cuLaunchKernel(
                function.raw,
                x,
                y,
                z,
                launch.threads,
                1,
                1,
                launch.shared_bytes,
                self.raw,
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        }
    }

    /// Refuses an upload while the owner of the stream captures: a replay would read staging memory
    /// that was reused.
    fn require_no_foreign_capture(&self, what: &'static str) -> Result<(), DeviceError> {
        if self.is_ours || !self.handle.is_captured_by_others() {
            return Ok(());
        }
        let reason = "the stream's owner captures on it: run one step before, or capture by the \
                      queue itself";
        Err(refuse(DeviceErrorKind::Unsupported, what, reason))
    }
}

impl Stream for CudaStream {
    unsafe fn upload(
        &mut self,
        to: Address,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        const UPLOAD: &str = "upload";
        self.require_no_foreign_capture(UPLOAD)?;
        let _current = self.context.enter(UPLOAD)?;
        // SAFETY: conditions 1 and 2 of this function, on a live stream.
        let code = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.cast(), bytes, self.raw) };
        self.context.check(UPLOAD, code)
    }

    unsafe fn download(
        &mut self,
        to: *mut u8,
        from: Address,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        const DOWNLOAD: &str = "download";
        let _current = self.context.enter(DOWNLOAD)?;
        // SAFETY: conditions 1 and 2 of this function, on a live stream.
        let code = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes, self.raw) };
        self.context.check(DOWNLOAD, code)
    }

    unsafe fn copy(&mut self, to: Address, from: Address, bytes: u64) -> Result<(), DeviceError> {
        const COPY: &str = "copy";
        let _current = self.context.enter(COPY)?;
        let bytes = usize::try_from(bytes)
            .map_err(|_| refuse(DeviceErrorKind::OutOfRange, COPY, format!("{bytes} bytes")))?;
        // SAFETY: condition 1 of this function, on a live stream.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw) };
        self.context.check(COPY, code)
    }

    unsafe fn zero(&mut self, at: Address, bytes: u64) -> Result<(), DeviceError> {
        const ZERO: &str = "zero";
        let _current = self.context.enter(ZERO)?;
        let bytes = usize::try_from(bytes)
            .map_err(|_| refuse(DeviceErrorKind::OutOfRange, ZERO, format!("{bytes} bytes")))?;
        // SAFETY: condition 1 of this function, on a live stream.
        let code = unsafe { sys::cuMemsetD8Async(at, 0, bytes, self.raw) };
        self.context.check(ZERO, code)
    }

    unsafe fn launch(&mut self, launch: &Launch, params: &[u8]) -> Result<(), DeviceError> {
        let function = self.modules.function(launch.kernel)?;
        function.require_params(launch.kernel, params.len())?;
        let _current = self.context.enter("launch")?;
        let dependent = &self.modules.dependent;
        let mut refused = None;
        if let Some(call) = dependent.call(function.dependent) {
            // SAFETY: condition 1 of this function; the size of the parameters was checked above.
            let code = unsafe { self.launch_dependent(call, function, launch, params) };
            if code == CUresult::CUDA_SUCCESS {
                return Ok(());
            }
            refused = Some(code);
        }
        // SAFETY: as above.
        let code = unsafe { self.launch_serial(function, launch, params) };
        // The same launch is right without the attribute: it was the attribute that was refused.
        if let Some(refused) = refused.filter(|_| code == CUresult::CUDA_SUCCESS) {
            dependent.refuse(refused);
        }
        // Adds the name of the kernel, which is known only here.
        self.context.check("launch", code).map_err(|error| {
            DeviceError::new(error.kind(), "launch")
                .with_detail(format!("{launch:?}: {error}"))
                .with_source(error)
        })
    }

    unsafe fn upload_batch(&mut self, copies: &[HostCopy]) -> Result<(), DeviceError> {
        if let Some(call) = self.batch_call(copies.len()) {
            // SAFETY: condition 1 of this function, on a live stream.
            return unsafe { batch::upload(&self.context, (call, self.raw), copies) };
        }
        for copy in copies {
            // SAFETY: condition 1 of this function.
            unsafe { self.upload(copy.device, copy.host, copy.bytes) }?;
        }
        Ok(())
    }

    unsafe fn download_batch(&mut self, copies: &[HostCopy]) -> Result<(), DeviceError> {
        if let Some(call) = self.batch_call(copies.len()) {
            // SAFETY: condition 1 of this function, on a live stream.
            return unsafe { batch::download(&self.context, (call, self.raw), copies) };
        }
        for copy in copies {
            // SAFETY: condition 1 of this function.
            unsafe { self.download(copy.host, copy.device, copy.bytes) }?;
        }
        Ok(())
    }

    fn begin_capture(&mut self) -> Result<(), DeviceError> {
        self.handle.begin_capture()
    }

    fn end_capture(&mut self) -> Result<Box<dyn Graph>, DeviceError> {
        Ok(Box::new(self.handle.end_capture()?))
    }

    unsafe fn replay(&mut self, graph: &dyn Graph) -> Result<(), DeviceError> {
        let graph: &dyn Any = graph;
        let graph = graph.downcast_ref::<CudaGraph>();
        let graph = graph.filter(|graph| graph.is_of(&self.context)).ok_or_else(|| {
            refuse(DeviceErrorKind::ForeignHandle, "replay", "a graph of another device")
        })?;
        // SAFETY: a live stream of this context; condition 1 of this function.
        unsafe { graph.launch(self.raw) }
    }

    fn record(&mut self) -> Result<Arc<dyn Event>, DeviceError> {
        // SAFETY: a live stream of this context.
        let event = unsafe { CudaEvent::record(&self.context, self.raw) }?;
        Ok(Arc::new(event))
    }

    fn wait_for(&mut self, event: &Arc<dyn Event>) -> Result<(), DeviceError> {
        // SAFETY: a live stream of this context.
        unsafe { CudaEvent::hold(&self.context, self.raw, &**event) }
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        self.handle.abandon_capture();
        self.memory.close_stream(&*self.handle);
        if !self.is_ours {
            return;
        }
        let Ok(_current) = self.context.enter("close a stream") else { return };
        // SAFETY: opened by `open`, destroyed only here. Submitted work completes.
        let code = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        let _ = self.context.check("close a stream", code);
    }
}
