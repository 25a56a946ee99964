//! Device memory of one queue for what a call needs for its own length: small lists, tensors that
//! came from the host, partial results.
//!
//! Calls of one queue run one after another, so that each begins at the first byte again. Memory
//! grows to the largest call and stays.
use std::sync::Arc;

use kv_core::DeviceError;

use crate::buffer::CudaBuffer;
use crate::gpu::{Gpu, Stream};
use crate::params::Address;
use crate::staging::Staging;
use kv_core::num::{to_offset, to_u64};

/// Every list begins at a multiple of this.
const ALIGN: usize = 256;

/// Where in a [`Pack`] something is, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct At(u64);

impl At {
    /// Its address once the pack lies at `base`.
    pub(crate) fn from(self, base: Address) -> Address {
        base.saturating_add(self.0)
    }
}

/// Lists that go to the device in one copy, and room behind them that is not copied.
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
    /// Adds values. Not after [`Self::room`].
    pub(crate) fn push<T: bytemuck::NoUninit>(&mut self, values: &[T]) -> At {
        debug_assert_eq!(self.room, 0, "lists come before room");
        let at = self.bytes.len().next_multiple_of(ALIGN);
        self.bytes.resize(at, 0);
        self.bytes.extend_from_slice(bytemuck::cast_slice(values));
        At(to_u64(at))
    }
    /// Adds values one after another, in room for `room` of them at least, so that what comes
    /// behind does not move.
    pub(crate) fn push_each<T: bytemuck::NoUninit>(
        &mut self,
        values: impl ExactSizeIterator<Item = T>,
        room: usize,
    ) -> At {
        let at = self.push::<T>(&[]);
        let begin = self.bytes.len();
        let count = values.len().max(room);
        self.bytes.resize(begin.saturating_add(count.saturating_mul(size_of::<T>())), 0);
        let bytes = self.bytes.get_mut(begin..).unwrap_or_default();
        for (place, value) in bytes.chunks_exact_mut(size_of::<T>()).zip(values) {
            place.copy_from_slice(bytemuck::bytes_of(&value));
        }
        at
    }
    /// Adds room for `len` bytes that are not sent: behind the last list, or for kernels to write.
    pub(crate) fn room(&mut self, len: u64) -> At {
        let at = self.len();
        self.room = at.saturating_add(len).saturating_sub(to_u64(self.bytes.len()));
        At(at)
    }
    /// Whether no list was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
    /// Bytes of all, up to where the next list would begin.
    pub(crate) fn len(&self) -> u64 {
        let end = to_u64(self.bytes.len()).saturating_add(self.room);
        end.checked_next_multiple_of(to_u64(ALIGN)).unwrap_or(u64::MAX)
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

    /// The memory there is.
    pub(crate) fn memory(&self) -> Option<&CudaBuffer> {
        self.memory.as_ref()
    }
    /// Whether it need not grow for `len` bytes.
    pub(crate) fn has(&self, len: u64) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.len() >= len)
    }
    /// Memory of `len` bytes at least. What was there is lost when it has to grow, and zero then.
    pub(crate) fn reserve(&mut self, len: u64) -> Result<Address, DeviceError> {
        if let Some(memory) = self.memory.as_ref().filter(|memory| memory.len() >= len) {
            return Ok(memory.address());
        }
        // The old memory goes first: both need not fit.
        self.memory = None;
        let memory = CudaBuffer::alloc(&self.gpu, len.checked_next_power_of_two().unwrap_or(len))?;
        let address = memory.address();
        self.memory = Some(memory);
        Ok(address)
    }

    /// Brings a pack to the device; its address.
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
