//! Device memory that callers hold.
use std::sync::Arc;

use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::device::{Shared, unsupported};

/// Usages that the backend needs of a buffer.
const USAGES: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE
    .union(wgpu::BufferUsages::COPY_SRC)
    .union(wgpu::BufferUsages::COPY_DST);

/// A range of device memory: a cheap handle that keeps the memory alive.
#[derive(Debug, Clone)]
pub struct WgpuBuffer {
    shared: Arc<Shared>,
    buffer: wgpu::Buffer,
    begin: u64,
    len: u64,
}

impl WgpuBuffer {
    /// Allocates zeroed memory.
    pub(crate) fn alloc(
        shared: &Arc<Shared>,
        len: u64,
        operation: &'static str,
    ) -> Result<Self, DeviceError> {
        // A length past `u64` is refused as any that is too large.
        let size = len.max(4).checked_next_multiple_of(4).unwrap_or(u64::MAX);
        let most = shared.limits.max_buffer_size;
        if size > most {
            return Err(unsupported(
                operation,
                format!("{len} bytes; a buffer holds at most {most}"),
            ));
        }
        let descriptor = wgpu::BufferDescriptor {
            label: Some(operation),
            size,
            usage: USAGES,
            mapped_at_creation: false,
        };
        let buffer = shared.watch(operation, |shared| shared.device.create_buffer(&descriptor))?;
        Ok(Self { shared: Arc::clone(shared), buffer, begin: 0, len })
    }

    /// Wraps the caller's buffer.
    pub(crate) fn wrap(shared: &Arc<Shared>, buffer: wgpu::Buffer) -> Result<Self, DeviceError> {
        const WRAP: &str = "wrap a buffer";
        let missing = USAGES.difference(buffer.usage());
        if !missing.is_empty() {
            return Err(unsupported(WRAP, format!("the buffer was made without {missing:?}")));
        }
        if !buffer.size().is_multiple_of(4) {
            let why = format!("{} bytes, not a multiple of 4", buffer.size());
            return Err(unsupported(WRAP, why));
        }
        let len = buffer.size();
        Ok(Self { shared: Arc::clone(shared), buffer, begin: 0, len })
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> u64 {
        self.len
    }
    /// Returns whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Returns the wgpu buffer that holds the range.
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }
    /// Returns the offset of the range in that buffer, in bytes.
    pub fn offset(&self) -> u64 {
        self.begin
    }

    /// Returns the `len` bytes from byte `offset` on, as a handle to the same memory.
    ///
    /// # Errors
    /// `OutOfRange` past the end.
    pub fn view(&self, offset: u64, len: u64) -> Result<Self, DeviceError> {
        let begin = self.range((offset, len), "view")?;
        Ok(Self { begin, len, ..self.clone() })
    }

    /// Returns where bytes `offset..offset + len` begin in [`Self::buffer`].
    pub(crate) fn range(
        &self,
        (offset, len): (u64, u64),
        operation: &'static str,
    ) -> Result<u64, DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.begin + offset),
            _ => {
                let asked = format!("{len} bytes at {offset} of {}", self.len);
                Err(DeviceError::new(DeviceErrorKind::OutOfRange, operation).with_detail(asked))
            }
        }
    }

    /// Does the same for a buffer that must belong to `shared`.
    pub(crate) fn on(
        &self,
        shared: &Arc<Shared>,
        range: (u64, u64),
        operation: &'static str,
    ) -> Result<u64, DeviceError> {
        if !Arc::ptr_eq(shared, &self.shared) {
            return Err(DeviceError::new(DeviceErrorKind::ForeignHandle, operation));
        }
        self.range(range, operation)
    }
}
