//! Streams of the emulated GPU: submitted work is done at once. In a replay, where launches are
//! known in advance, each begins before the previous one has run, as on a card.
use std::any::Any;
use std::ptr;
use std::sync::Arc;

use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::num::to_u64;

use super::library::Library;
use super::memory::Memory;
use crate::gpu::{Event, Graph, Launch, Stream};
use crate::params::Address;

/// An in-order stream whose work is done as soon as it is submitted.
#[derive(Debug)]
pub(super) struct EmulatedStream {
    kernels: Arc<Library>,
    memory: Arc<Memory>,
    /// 0 keeps blocks and threads in order.
    seed: u32,
    launches: u32,
    /// Captured work, while a capture is active.
    captured: Option<Vec<Captured>>,
}

/// A captured operation.
#[derive(Debug, Clone)]
enum Captured {
    Launch(Launch, Vec<u8>),
    Zero(Address, u64),
    Copy { to: Address, from: Address, bytes: u64 },
}

/// Captured work of one device.
#[derive(Debug)]
struct EmulatedGraph {
    memory: Arc<Memory>,
    work: Vec<Captured>,
}

impl Graph for EmulatedGraph {}

/// Lists the kernels of captured work, in order.
#[cfg(test)]
pub(crate) fn kernels_of(graph: &dyn Graph) -> Vec<&'static str> {
    let graph: &dyn Any = graph;
    let work = graph.downcast_ref::<EmulatedGraph>().map_or(&[][..], |graph| &graph.work);
    let name = |work: &Captured| match work {
        Captured::Launch(launch, _) => launch.kernel,
        Captured::Zero(..) => "a memset",
        Captured::Copy { .. } => "a copy",
    };
    work.iter().map(name).collect()
}

impl EmulatedStream {
    pub(super) fn new(kernels: Arc<Library>, memory: Arc<Memory>, seed: u32) -> Self {
        Self { kernels, memory, seed, launches: 0, captured: None }
    }

    /// Refuses captures of host memory, which is gone when captured work runs.
    fn refuse_captured(&self, operation: &'static str) -> Result<(), DeviceError> {
        if self.captured.is_none() {
            return Ok(());
        }
        Err(DeviceError::new(DeviceErrorKind::Unsupported, operation).with_detail("in a capture"))
    }

    /// Runs launches that may overlap, or one other operation.
    ///
    /// # Safety
    /// 1. Conditions of every captured call hold now.
    unsafe fn run(&mut self, chain: &[Captured]) -> Result<(), DeviceError> {
        let mut launches = Vec::new();
        for work in chain {
            match work {
                Captured::Launch(launch, params) => {
                    launches.push((*launch, params.as_slice(), self.next_seed()));
                }
                // SAFETY: condition 1 is that of the zeroing.
                Captured::Zero(at, bytes) => unsafe { self.zero(*at, *bytes)? },
                // SAFETY: condition 1 is that of the copy.
                Captured::Copy { to, from, bytes } => unsafe { self.copy(*to, *from, *bytes)? },
            }
        }
        // SAFETY: condition 1 is that of every launch.
        unsafe { self.kernels.launch(&launches) }
    }

    /// Returns the seed of the next launch; 0 stays 0.
    fn next_seed(&mut self) -> u32 {
        if self.seed == 0 {
            return 0;
        }
        self.launches = self.launches.wrapping_add(1);
        self.seed.wrapping_add(self.launches.wrapping_mul(SEED_STEP)).max(1)
    }
}

impl Stream for EmulatedStream {
    unsafe fn upload(
        &mut self,
        to: Address,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.refuse_captured("upload")?;
        let to = self.memory.find(to, to_u64(bytes), "upload")?;
        // SAFETY: `find` has found the bytes at `to`, condition 1 covers those at `from`; device
        // memory and page-locked memory are separate allocations.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
        Ok(())
    }

    unsafe fn download(
        &mut self,
        to: *mut u8,
        from: Address,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.refuse_captured("download")?;
        let from = self.memory.find(from, to_u64(bytes), "download")?;
        // SAFETY: `find` has found the bytes at `from`, condition 1 covers those at `to`; device
        // memory and page-locked memory are separate allocations.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
        Ok(())
    }

    unsafe fn copy(&mut self, to: Address, from: Address, bytes: u64) -> Result<(), DeviceError> {
        if let Some(captured) = &mut self.captured {
            captured.push(Captured::Copy { to, from, bytes });
            return Ok(());
        }
        let to = self.memory.find(to, bytes, "copy")?;
        let from = self.memory.find(from, bytes, "copy")?;
        let bytes = usize::try_from(bytes).unwrap_or(0);
        // SAFETY: `find` has found the bytes of both, so their number fits memory; condition 1 for
        // the rest.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
        Ok(())
    }

    unsafe fn zero(&mut self, at: Address, bytes: u64) -> Result<(), DeviceError> {
        if let Some(captured) = &mut self.captured {
            captured.push(Captured::Zero(at, bytes));
            return Ok(());
        }
        let to = self.memory.find(at, bytes, "zero")?;
        let bytes = usize::try_from(bytes).unwrap_or(0);
        // SAFETY: `find` has found the bytes at `at`, so their number fits memory.
        unsafe { ptr::write_bytes(to, 0, bytes) };
        Ok(())
    }

    unsafe fn launch(&mut self, launch: &Launch, params: &[u8]) -> Result<(), DeviceError> {
        if let Some(captured) = &mut self.captured {
            captured.push(Captured::Launch(*launch, params.to_vec()));
            return Ok(());
        }
        let seed = self.next_seed();
        // SAFETY: condition 1 of this function.
        unsafe { self.kernels.launch(&[(*launch, params, seed)]) }
    }

    fn begin_capture(&mut self) -> Result<(), DeviceError> {
        self.refuse_captured("begin capture")?;
        self.captured = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&mut self) -> Result<Box<dyn Graph>, DeviceError> {
        match self.captured.take() {
            Some(work) => Ok(Box::new(EmulatedGraph { memory: Arc::clone(&self.memory), work })),
            None => Err(DeviceError::new(DeviceErrorKind::Driver, "end capture")),
        }
    }

    unsafe fn replay(&mut self, graph: &dyn Graph) -> Result<(), DeviceError> {
        let graph: &dyn Any = graph;
        let ours = graph.downcast_ref::<EmulatedGraph>();
        let Some(graph) = ours.filter(|graph| Arc::ptr_eq(&graph.memory, &self.memory)) else {
            return Err(DeviceError::new(DeviceErrorKind::ForeignHandle, "replay"));
        };
        self.refuse_captured("replay")?;
        let is_launch = |work: &Captured| matches!(work, Captured::Launch(..));
        for run in graph.work.chunk_by(|work, next| is_launch(work) && is_launch(next)) {
            for chain in run.chunks(CHAIN_MAX) {
                // SAFETY: condition 1.
                unsafe { self.run(chain) }?;
            }
        }
        Ok(())
    }

    fn record(&mut self) -> Result<Arc<dyn Event>, DeviceError> {
        Ok(Arc::new(Done { memory: Arc::clone(&self.memory) }))
    }

    fn wait_for(&mut self, event: &Arc<dyn Event>) -> Result<(), DeviceError> {
        let event: &dyn Any = &**event;
        let ours = event.downcast_ref::<Done>();
        if ours.is_some_and(|done| Arc::ptr_eq(&done.memory, &self.memory)) {
            return Ok(());
        }
        Err(DeviceError::new(DeviceErrorKind::ForeignHandle, "wait_for"))
    }
}

/// An event: everything before it is done when it is recorded.
#[derive(Debug)]
struct Done {
    /// Identifies the device.
    memory: Arc<Memory>,
}

impl Event for Done {
    fn is_done(&self) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn wait(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// Launches that begin one within the other in a replay. Each has stacks for its threads.
const CHAIN_MAX: usize = 4;

/// An odd number with bits in all places, so that seeds of consecutive launches have little in
/// common.
const SEED_STEP: u32 = 0x9e37_79b9;
