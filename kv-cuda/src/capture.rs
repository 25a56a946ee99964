//! Captured work: the launches of a step, run again for later steps.
use std::cell::RefCell;
use std::sync::Arc;

use kv_core::DeviceError;

use crate::buffer::CudaBuffer;
use crate::gpu::{Gpu, Graph};

/// The launches of a step, ready to be run for any later step within the same
/// [`StepLimits`](crate::StepLimits). Keeps all memory that they use.
#[derive(Debug)]
pub struct CudaGraph {
    pub(crate) gpu: Arc<dyn Gpu>,
    pub(crate) graph: Box<dyn Graph>,
    /// Tells the limits it was captured under from later ones.
    pub(crate) epoch: u64,
    /// Memory that its launches name.
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
    /// From here on, memory is noted.
    pub(crate) fn begin(&self) {
        *self.0.borrow_mut() = Some(Vec::new());
    }
    /// What was noted, and no more from here on.
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

/// What a call needs and cannot get while it is captured.
pub(crate) fn refused(what: &str) -> DeviceError {
    let why = format!("{what} while launches are captured: run one step before");
    crate::tensors::unsupported("capture", why)
}
