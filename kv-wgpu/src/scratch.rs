//! Device memory that the calls of one queue reuse.
use std::sync::Arc;

use kv_core::error::DeviceError;

use crate::buffer::WgpuBuffer;
use crate::device::Shared;

/// Memory that grows to the need of the largest call and stays. Commands recorded before it grew
/// keep the buffer they use.
#[derive(Debug, Default)]
pub(crate) struct Scratch(Option<WgpuBuffer>);

impl Scratch {
    /// Returns memory of at least `len` bytes; growing it drops its content.
    ///
    /// # Errors
    /// `OutOfMemory`, `Unsupported` for more than a buffer can hold, or `Lost`.
    pub(crate) fn reserve(
        &mut self,
        shared: &Arc<Shared>,
        len: u64,
        operation: &'static str,
    ) -> Result<WgpuBuffer, DeviceError> {
        if let Some(memory) = self.0.as_ref().filter(|memory| memory.len() >= len) {
            return Ok(memory.clone());
        }
        self.0 = None;
        let most = shared.limits.max_buffer_size;
        let roomy = len.checked_next_power_of_two().unwrap_or(len).min(most).max(len);
        let memory = WgpuBuffer::alloc(shared, roomy, operation)?;
        Ok(self.0.insert(memory).clone())
    }
}
