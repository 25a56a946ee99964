//! Captured work: the launches of a step, replayed for later steps.
use std::cell::RefCell;
use std::sync::Arc;

use kv_core::DeviceError;

use crate::buffer::CudaBuffer;
use crate::gpu::{Gpu, Graph};

/// The captured launches of a step, to be replayed for any later step within the same
/// [`StepLimits`](crate::StepLimits). Keeps all memory that they use.
#[derive(Debug)]
pub struct CudaGraph {
    pub(crate) gpu: Arc<dyn Gpu>,
    pub(crate) graph: Box<dyn Graph>,
    /// Identifies the limits under which it was captured.
    pub(crate) epoch: u64,
    /// Memory that its launches use.
    _held: Vec<CudaBuffer>,
}

impl CudaGraph {
    pub(crate) fn new(
        gpu: &Arc<dyn Gpu>,
        graph: Box<dyn Graph>,
        epoch: u64,
        held: Vec<CudaBuffer>,
    ) -> Self {
        Self { gpu: Arc::clone(gpu), graph, epoch, _held: held }
    }
}

/// Memory that calls use while they are captured.
#[derive(Debug, Default)]
pub(crate) struct Held(RefCell<Option<Vec<CudaBuffer>>>);

impl Held {
    /// Starts to record memory.
    pub(crate) fn begin(&self) {
        *self.0.borrow_mut() = Some(Vec::new());
    }
    /// Stops recording, and returns the recorded memory.
    pub(crate) fn end(&self) -> Vec<CudaBuffer> {
        self.0.borrow_mut().take().unwrap_or_default()
    }
    pub(crate) fn is_on(&self) -> bool {
        self.0.borrow().is_some()
    }
    pub(crate) fn note(&self, buffer: &CudaBuffer) {
        if let Some(held) = self.0.borrow_mut().as_mut() {
            held.push(buffer.clone());
        }
    }
}

/// Returns the error of a call that needs something it cannot get during a capture.
pub(crate) fn refused(what: &str) -> DeviceError {
    let why = format!("{what} while launches are captured: run one such step before");
    crate::tensors::unsupported("capture", why)
}
