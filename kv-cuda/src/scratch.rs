//! Device memory that the calls of one queue reuse: small lists, tensors from the host, partial
//! results.
//!
//! Calls of one queue run one after another, so each starts at the first byte. Memory grows to the
//! need of the largest call and stays.
use std::sync::Arc;

use kv_core::error::DeviceError;

use crate::buffer::CudaBuffer;
use crate::gpu::{Gpu, Stream};
use crate::params::Address;
use crate::staging::Staging;
use kv_core::num::{to_offset, to_u64};

/// Alignment of every list.
const ALIGN: usize = 256;

/// Offset in a [`Pack`], in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct At(u64);

impl At {
    /// Returns its address in a pack that lies at `base`.
    pub(crate) fn from(self, base: Address) -> Address {
        base + self.0
    }
}

/// Lists that are sent to the device in one copy, followed by memory that is not copied.
#[derive(Debug, Default)]
pub(crate) struct Pack {
    bytes: Vec<u8>,
    room: u64,
}

impl Pack {
    /// Empties it.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.room = 0;
    }
    /// Appends values. Not after [`Self::room`].
    pub(crate) fn push<T: bytemuck::NoUninit>(&mut self, values: &[T]) -> At {
        debug_assert_eq!(self.room, 0, "lists come before room");
        let at = self.bytes.len().next_multiple_of(ALIGN);
        self.bytes.resize(at, 0);
        self.bytes.extend_from_slice(bytemuck::cast_slice(values));
        At(to_u64(at))
    }
    /// Appends values one after another and reserves space for at least `room` of them, so that
    /// later values do not move.
    pub(crate) fn push_each<T: bytemuck::NoUninit>(
        &mut self,
        values: impl ExactSizeIterator<Item = T>,
        room: usize,
    ) -> At {
        let at = self.push::<T>(&[]);
        let begin = self.bytes.len();
        let count = values.len().max(room);
        self.bytes.resize(begin + count * size_of::<T>(), 0);
        let bytes = &mut self.bytes[begin..];
        for (place, value) in bytes.chunks_exact_mut(size_of::<T>()).zip(values) {
            place.copy_from_slice(bytemuck::bytes_of(&value));
        }
        at
    }
    /// Appends `len` bytes that are not sent: the rest of the last list, or memory that kernels
    /// write.
    pub(crate) fn room(&mut self, len: u64) -> At {
        let at = self.len();
        self.room = at + len - to_u64(self.bytes.len());
        At(at)
    }
    /// Returns whether no list was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
    /// Returns the length of everything, up to where the next list would begin.
    pub(crate) fn len(&self) -> u64 {
        let end = to_u64(self.bytes.len()) + self.room;
        end.next_multiple_of(to_u64(ALIGN))
    }
}

/// Memory that grows.
#[derive(Debug)]
pub(crate) struct Scratch {
    gpu: Arc<dyn Gpu>,
    memory: Option<CudaBuffer>,
}

impl Scratch {
    pub(crate) fn new(gpu: &Arc<dyn Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu), memory: None }
    }

    /// Returns the current memory.
    pub(crate) fn memory(&self) -> Option<&CudaBuffer> {
        self.memory.as_ref()
    }
    /// Returns whether `len` bytes fit without growing.
    pub(crate) fn has(&self, len: u64) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.len() >= len)
    }
    /// Returns memory of at least `len` bytes. Growing drops its content and zeroes it.
    pub(crate) fn reserve(&mut self, len: u64) -> Result<Address, DeviceError> {
        if let Some(memory) = self.memory.as_ref().filter(|memory| memory.len() >= len) {
            return Ok(memory.address());
        }
        // Free the old memory first: both may not fit together.
        self.memory = None;
        let memory = CudaBuffer::alloc(&self.gpu, len.checked_next_power_of_two().unwrap_or(len))?;
        let address = memory.address();
        self.memory = Some(memory);
        Ok(address)
    }

    /// Sends a pack to the device and returns its address.
    pub(crate) fn send(
        &mut self,
        (stream, staging): (&mut dyn Stream, &mut Staging),
        pack: &Pack,
    ) -> Result<Address, DeviceError> {
        let base = self.reserve(pack.len().max(1))?;
        debug_assert!(pack.bytes.len() <= to_offset(pack.len()), "the lists are part of the pack");
        // SAFETY: the memory has room for the whole pack.
        unsafe { staging.upload(stream, base, &pack.bytes)? };
        Ok(base)
    }
}
