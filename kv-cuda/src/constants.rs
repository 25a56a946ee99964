//! Small lists that are the same call after call: sink logits of a layer, addresses of a plane's
//! segments.
//!
//! Sent once and kept, so that a layer costs one launch and nothing else, and a captured launch
//! finds them at every replay.
use std::sync::Arc;

use hashbrown::HashMap;
use kv_core::DeviceError;

use crate::buffer::CudaBuffer;
use crate::gpu::Gpu;
use crate::num::to_u64;
use crate::params::Address;
use crate::step::Way;

/// More lists than any model has; where there are more, the caller changes them all the time.
const KEPT: usize = 4096;

#[derive(Debug)]
pub(crate) struct Constants {
    gpu: Arc<dyn Gpu>,
    known: HashMap<Box<[u8]>, CudaBuffer>,
    /// Lists that were used since [`Self::begin_capture`].
    captured: Option<Vec<CudaBuffer>>,
}

impl Constants {
    pub(crate) fn new(gpu: &Arc<dyn Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu), known: HashMap::new(), captured: None }
    }

    /// A list in device memory, sent if it is not there.
    pub(crate) fn get<T: bytemuck::NoUninit>(
        &mut self,
        way: &mut Way<'_>,
        values: &[T],
    ) -> Result<Address, DeviceError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        if let Some(buffer) = self.known.get(bytes) {
            if let Some(captured) = &mut self.captured {
                captured.push(buffer.clone());
            }
            return Ok(buffer.address());
        }
        if self.captured.is_some() {
            let why = "a list that no step before the capture has used: run one first";
            return Err(crate::tensors::unsupported("capture", why));
        }
        if self.known.len() >= KEPT {
            self.known.clear();
        }
        let buffer = CudaBuffer::alloc(&self.gpu, to_u64(bytes.len()))?;
        // SAFETY: the buffer has as many bytes.
        unsafe { way.staging.upload(way.stream, buffer.address(), bytes)? };
        let address = buffer.address();
        self.known.insert(bytes.into(), buffer);
        Ok(address)
    }

    /// From here on lists must be known, and are noted.
    pub(crate) fn begin_capture(&mut self) {
        self.captured = Some(Vec::new());
    }
    /// The lists that were used since, to be kept as long as they may be used again.
    pub(crate) fn end_capture(&mut self) -> Vec<CudaBuffer> {
        self.captured.take().unwrap_or_default()
    }
}
