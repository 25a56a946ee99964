//! Completion of submitted work: fences, and downloads.
use std::sync::Arc;
use std::task::{Context, Poll};

use kv_core::backend::{Fence, Readback};
use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::device::{Shared, unsupported};
use crate::signal::Signal;
use kv_core::num::{to_offset, to_u64};

/// Signals that the work submitted before it is done.
#[derive(Debug, Clone)]
pub struct WgpuFence {
    pub(crate) shared: Arc<Shared>,
    done: Arc<Signal>,
    index: wgpu::SubmissionIndex,
}

impl WgpuFence {
    /// Creates the fence of everything submitted up to `index`.
    pub(crate) fn new(shared: &Arc<Shared>, index: wgpu::SubmissionIndex) -> Self {
        let done = Arc::new(Signal::default());
        let signal = Arc::clone(&done);
        shared.queue.on_submitted_work_done(move || signal.set(Ok(())));
        Self { shared: Arc::clone(shared), done, index }
    }
}

/// Reports a failed map as `Lost`: our buffers can always be mapped unless the device is lost, and
/// wgpu may report the loss later.
fn outcome(done: Result<(), String>, operation: &'static str) -> Result<(), DeviceError> {
    done.map_err(|why| DeviceError::new(DeviceErrorKind::Lost, operation).with_detail(why))
}

/// Blocks until a callback has run.
fn wait(
    shared: &Shared,
    (signal, index): (&Signal, &wgpu::SubmissionIndex),
    operation: &'static str,
) -> Result<(), DeviceError> {
    if !shared.may_wait {
        return Err(unsupported(operation, "this thread may not block: poll the fence instead"));
    }
    loop {
        if let Some(done) = signal.get() {
            shared.require(operation)?;
            return outcome(done, operation);
        }
        let submission_index = Some(index.clone());
        shared.poll(wgpu::PollType::Wait { submission_index, timeout: None }, operation)?;
    }
}

/// Polls a callback, and registers the task to be woken by it.
fn poll(
    shared: &Shared,
    signal: &Arc<Signal>,
    operation: &'static str,
    cx: &mut Context<'_>,
) -> Poll<Result<(), DeviceError>> {
    if let Err(error) = shared.poll(wgpu::PollType::Poll, operation) {
        return Poll::Ready(Err(error));
    }
    match signal.poll(cx) {
        Poll::Ready(done) => Poll::Ready(outcome(done, operation)),
        Poll::Pending => match shared.poller.request(signal, operation) {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        },
    }
}

impl Fence for WgpuFence {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<(), DeviceError>> {
        poll(&self.shared, &self.done, "poll a fence", cx)
    }
    fn wait(&self) -> Result<(), DeviceError> {
        wait(&self.shared, (&self.done, &self.index), "wait for a fence")
    }
}

/// A download: bytes that the device copies to the host.
#[derive(Debug)]
pub struct WgpuReadback {
    shared: Arc<Shared>,
    /// `None` for a download of no bytes.
    copy: Option<Copy>,
    len: u64,
}

/// A buffer that the host may map.
#[derive(Debug)]
struct Copy {
    buffer: wgpu::Buffer,
    /// Bytes of the buffer before the requested ones.
    skip: u64,
    mapped: Arc<Signal>,
    index: wgpu::SubmissionIndex,
}

impl WgpuReadback {
    /// Creates a download of no bytes.
    pub(crate) fn empty(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), copy: None, len: 0 }
    }

    /// Creates a download of `len` bytes after the first `skip` of a buffer that submission `index`
    /// fills.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        buffer: wgpu::Buffer,
        (skip, len): (u64, u64),
        index: wgpu::SubmissionIndex,
    ) -> Self {
        let mapped = Arc::new(Signal::default());
        let signal = Arc::clone(&mapped);
        buffer.slice(..).map_async(wgpu::MapMode::Read, move |how| {
            signal.set(how.map_err(|error| error.to_string()));
        });
        let copy = Some(Copy { buffer, skip, mapped, index });
        Self { shared: Arc::clone(shared), copy, len }
    }

    fn take(&mut self) -> Result<Vec<u8>, DeviceError> {
        const READ: &str = "read a download";
        let Some(copy) = self.copy.take() else {
            return Ok(Vec::new());
        };
        let view = copy.buffer.slice(..).get_mapped_range().map_err(|error| {
            // Only a lost device unmaps a mapped buffer; its lost callback may still be running on
            // another thread.
            DeviceError::new(DeviceErrorKind::Lost, READ).with_source(error)
        })?;
        let end = copy.skip + self.len;
        let range = to_offset(copy.skip)..to_offset(end);
        let taken = view.get(range).map(<[u8]>::to_vec);
        taken.ok_or_else(|| {
            let why = format!("bytes up to {end} of a download of {}", to_u64(view.len()));
            DeviceError::new(DeviceErrorKind::OutOfRange, READ).with_detail(why)
        })
    }
}

impl Readback for WgpuReadback {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<u8>, DeviceError>> {
        if let Some(copy) = &self.copy {
            match poll(&self.shared, &copy.mapped, "poll a download", cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Ready(Ok(())) => {}
            }
        }
        Poll::Ready(self.take())
    }
    fn wait(mut self) -> Result<Vec<u8>, DeviceError> {
        if let Some(copy) = &self.copy {
            wait(&self.shared, (&copy.mapped, &copy.index), "wait for a download")?;
        }
        self.take()
    }
}
