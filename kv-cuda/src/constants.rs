//! Small lists that do not change from call to call: sink logits of a layer, addresses of a plane's
//! segments.
//!
//! The lists are sent once and kept, so that a layer costs one launch and nothing else, and a
//! captured launch finds them at every replay.
use std::sync::Arc;

use hashbrown::HashMap;
use kv_core::error::DeviceError;

use crate::buffer::CudaBuffer;
use crate::capture::{self, Held};
use crate::gpu::Gpu;
use crate::params::Address;
use crate::step::Transfer;
use kv_core::num::to_u64;

/// More lists than any model has: beyond it the caller changes them with every call, and all are
/// dropped.
const KEPT: usize = 4096;

#[derive(Debug)]
pub(crate) struct Constants {
    gpu: Arc<dyn Gpu>,
    known: HashMap<Box<[u8]>, CudaBuffer>,
}

impl Constants {
    pub(crate) fn new(gpu: &Arc<dyn Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu), known: HashMap::new() }
    }

    /// Returns the address of a list in device memory, which is sent on first use.
    pub(crate) fn get<T: bytemuck::NoUninit>(
        &mut self,
        (transfer, held): (&mut Transfer<'_>, &Held),
        values: &[T],
    ) -> Result<Address, DeviceError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if let Some(buffer) = self.known.get(bytes) {
            held.note(buffer);
            return Ok(buffer.address());
        }
        if held.is_on() {
            return Err(capture::refused("a new list"));
        }
        if self.known.len() >= KEPT {
            self.known.clear();
        }
        let buffer = CudaBuffer::alloc(&self.gpu, to_u64(bytes.len()))?;
        // SAFETY: the buffer has the length of `bytes`.
        unsafe { transfer.staging.upload(transfer.stream, buffer.address(), bytes)? };
        let address = buffer.address();
        self.known.insert(bytes.into(), buffer);
        Ok(address)
    }
}
