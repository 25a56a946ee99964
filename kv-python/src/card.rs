//! The device of a cache: whose memory its tensors may be in, and on which stream it works.
use std::fmt;

use kv::backend::{AnyBackend, AnyQueue, Fence, Queue};
#[cfg(feature = "cuda")]
use kv::cuda::CudaBackend;
use kv::error::DeviceError;
use kv::{CacheError, Device, KvCache, Step};
use kv_compat::InferenceParams;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::memory::Stream;
use crate::report::Failure;
use crate::tensor::{Lender, Tensor};
use crate::torch::{Torch, likely_stream, torch};

/// The device of a cache, and the CUDA device that it is, if it is one.
#[derive(Debug)]
pub(crate) struct Home {
    device: Device,
    card: Option<Card>,
}

/// The home of tensors that are in host memory alone.
pub(crate) static HOST: Home = Home { device: Device::Cpu, card: None };

impl Home {
    /// Makes the home of a cache, and opens its queue on the caller's stream, which the caller may
    /// have named. Devices that are not of CUDA have no such queue.
    ///
    /// # Errors
    /// `ForeignHandle` for a stream of another device; `Lost` or `Driver`.
    pub(crate) fn open(
        device: Device,
        backend: &AnyBackend,
        stream: (Stream, bool),
    ) -> Result<(Self, Option<AnyQueue>), DeviceError> {
        let card = ordinal(&device).and_then(|ordinal| Card::of(backend, ordinal, stream));
        let queue = card.as_ref().map(|card| card.stream().queue(card)).transpose()?;
        Ok((Self { device, card }, queue))
    }

    pub(crate) fn card(&self) -> Option<&Card> {
        self.card.as_ref()
    }
}

impl fmt::Display for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.device.fmt(f)
    }
}

/// Returns the ordinal of a CUDA device, as frameworks count them.
pub(crate) fn ordinal(device: &Device) -> Option<u32> {
    match device {
        Device::Cuda { index } => Some(*index),
        #[cfg(feature = "emulated")]
        Device::Emulated => Some(0),
        _ => None,
    }
}

/// A CUDA device, and the stream of a cache on it.
#[cfg(feature = "cuda")]
#[derive(Debug)]
pub(crate) struct Card {
    pub(crate) backend: CudaBackend,
    ordinal: u32,
    stream: Stream,
    /// Whether the caller has named the stream, and answers for what it does on others.
    is_named: bool,
}

#[cfg(feature = "cuda")]
impl Card {
    /// Returns the device of a backend, `None` for one that is not of CUDA.
    pub(crate) fn of(
        backend: &AnyBackend,
        ordinal: u32,
        (stream, is_named): (Stream, bool),
    ) -> Option<Self> {
        let backend = backend.downcast_ref::<CudaBackend>()?.clone();
        Some(Self { backend, ordinal, stream, is_named })
    }

    pub(crate) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    pub(crate) fn stream(&self) -> Stream {
        self.stream
    }

    fn is_named(&self) -> bool {
        self.is_named
    }
}

/// A CUDA device: none without the feature `cuda`.
#[cfg(not(feature = "cuda"))]
#[derive(Debug)]
pub(crate) enum Card {}

#[cfg(not(feature = "cuda"))]
impl Card {
    pub(crate) fn of(_: &AnyBackend, _ordinal: u32, _: (Stream, bool)) -> Option<Self> {
        None
    }

    pub(crate) fn ordinal(&self) -> u32 {
        match *self {}
    }

    pub(crate) fn stream(&self) -> Stream {
        match *self {}
    }

    fn is_named(&self) -> bool {
        match *self {}
    }
}

/// Something that records on the queue of a cache.
pub(crate) trait Recorder {
    fn queue(&mut self) -> &mut AnyQueue;
}

impl Recorder for KvCache {
    fn queue(&mut self) -> &mut AnyQueue {
        self.queue_mut()
    }
}

impl Recorder for Step<'_> {
    fn queue(&mut self) -> &mut AnyQueue {
        self.queue_mut()
    }
}

impl Recorder for InferenceParams {
    fn queue(&mut self) -> &mut AnyQueue {
        self.queue_mut()
    }
}

/// The order of one call's work with that of the tensors' owners.
#[derive(Debug)]
pub(crate) struct Order<'a> {
    card: Option<&'a Card>,
    /// The stream that torch works on, if it is another than the cache's.
    other: Option<Stream>,
    /// Whether the call waits for its work, because nobody knows what the owner does next, on which
    /// stream.
    waits: bool,
}

impl<'a> Order<'a> {
    /// Finds out for the tensors of a call.
    ///
    /// # Errors
    /// A `StateError` while torch captures a graph; those of torch.
    pub(crate) fn of(
        py: Python<'_>,
        home: &'a Home,
        tensors: &[&Tensor<'_, '_>],
    ) -> PyResult<Self> {
        let mut order = Self { card: home.card(), other: None, waits: false };
        let Some(card) = order.card else { return Ok(order) };
        let on_card = |lender| tensors.iter().any(|tensor| tensor.lender() == Some(lender));
        if on_card(Lender::Torch)
            && let Some(torch) = torch(py)?
        {
            order.other = other_stream(py, torch, card)?;
        }
        order.waits = on_card(Lender::Dlpack) && !card.is_named();
        Ok(order)
    }

    /// Does the same for a call that writes memory of which torch may have tensors.
    ///
    /// # Errors
    /// Those of [`Self::of`].
    pub(crate) fn of_shared(
        py: Python<'_>,
        home: &'a Home,
        tensors: &[&Tensor<'_, '_>],
    ) -> PyResult<Self> {
        let mut order = Self::of(py, home, tensors)?;
        if let Some(card) = order.card
            && let Some(torch) = torch(py)?
            && torch.uses_cuda(py)?
        {
            order.other = other_stream(py, torch, card)?;
        }
        Ok(order)
    }

    /// Runs a call after the work that torch has submitted, and what torch submits later after the
    /// call.
    pub(crate) fn run<R: Recorder, T>(
        &self,
        recorder: &mut R,
        call: impl FnOnce(&mut R) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        self.begin(recorder.queue()).map_err(CacheError::from)?;
        let done = call(recorder);
        // A call that fails may have submitted a part of its work.
        let ended = self.end(recorder.queue());
        let done = done?;
        ended.map_err(CacheError::from)?;
        Ok(done)
    }

    fn begin(&self, queue: &mut AnyQueue) -> Result<(), DeviceError> {
        match (self.card, self.other) {
            (Some(card), Some(other)) => queue.wait_for(&other.mark(card)?),
            _ => Ok(()),
        }
    }

    fn end(&self, queue: &mut AnyQueue) -> Result<(), DeviceError> {
        if let (Some(card), Some(other)) = (self.card, self.other) {
            other.hold(card, &queue.submit()?)?;
        }
        if self.waits {
            queue.submit()?.wait()?;
        }
        Ok(())
    }
}

/// Returns the stream that torch works on, if it is another than the cache's.
///
/// # Errors
/// A `StateError` while torch captures a graph; those of torch.
fn other_stream(py: Python<'_>, torch: &Torch, card: &Card) -> PyResult<Option<Stream>> {
    if torch.is_capturing(py)? {
        return Err(Failure::State(CAPTURED).into());
    }
    let current = torch.current_stream(py, card.ordinal())?;
    Ok(Some(current).filter(|current| *current != card.stream()))
}

/// Refuses to hand out a cache's memory while torch captures a graph.
///
/// # Errors
/// A `StateError` then; those of torch.
pub(crate) fn check_not_captured(py: Python<'_>) -> PyResult<()> {
    match torch(py)? {
        Some(torch) if torch.uses_cuda(py)? && torch.is_capturing(py)? => {
            Err(Failure::State(CAPTURED).into())
        }
        _ => Ok(()),
    }
}

/// Makes the stream of somebody who is given a cache's memory wait for the work that the cache has
/// submitted. `None` is a stream that has no name here: the call itself waits.
///
/// # Errors
/// `ForeignHandle` for a stream of another device; `Lost` or `Driver`.
pub(crate) fn hand_over<R: Recorder>(
    card: &Card,
    recorder: &mut R,
    reader: Option<Stream>,
) -> Result<(), Failure> {
    if reader == Some(card.stream()) {
        return Ok(());
    }
    let fence = recorder.queue().submit().map_err(CacheError::from)?;
    let ordered = match reader {
        Some(stream) => stream.hold(card, &fence),
        None => fence.wait(),
    };
    Ok(ordered.map_err(CacheError::from)?)
}

/// Returns the stream of a cache on a device, and whether the caller has named it.
///
/// # Errors
/// Those of [`Stream::of`]; a `ValueError` for a stream of a cache that is not on a CUDA device.
pub(crate) fn stream_of_caller(
    py: Python<'_>,
    device: &Device,
    stream: Option<&Bound<'_, PyAny>>,
) -> PyResult<(Stream, bool)> {
    match (ordinal(device), stream) {
        (Some(_), Some(stream)) => Ok((Stream::of(stream)?, true)),
        (Some(ordinal), None) => Ok((likely_stream(py, ordinal)?, false)),
        (None, None) => Ok((Stream::LEGACY, false)),
        (None, Some(_)) => {
            let message = format!("stream= is one of a CUDA device, the cache is on {device}");
            Err(PyValueError::new_err(message))
        }
    }
}

/// Refuses calls that would become part of a graph.
const CAPTURED: &str = "torch captures a CUDA graph: a step is planned anew each time, and a \
                        replay would write the blocks of this one";
