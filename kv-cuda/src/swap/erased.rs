//! Swapping for a cache whose backend was chosen at run time.
use kv_core::BlockId;
use kv_core::backend::{AnyBuffer, AnyFence, StorageView};
use kv_core::error::{DeviceError, DeviceErrorKind};

use super::CudaSwap;
use crate::backend::CudaBackend;
use crate::buffer::CudaBuffer;
use crate::fence::CudaFence;

impl CudaBackend {
    /// Does what [`Self::swap`] does, for a cache over
    /// [`AnyBackend`](kv_core::backend::AnyBackend), whose `downcast_ref` returns this backend.
    ///
    /// # Errors
    /// Those of [`Self::swap`], and `ForeignHandle` for another backend's storage.
    pub fn swap_any(
        &self,
        storage: StorageView<'_, AnyBuffer>,
        capacity: u32,
    ) -> Result<CudaSwap, DeviceError> {
        self.swap(own(storage, "reserve swap space")?, capacity)
    }
}

impl CudaSwap {
    /// Does what [`Self::swap_out`] does, with fences and storage of a cache over
    /// [`AnyBackend`](kv_core::backend::AnyBackend).
    ///
    /// # Errors
    /// Those of [`Self::swap_out`], and `ForeignHandle` for another backend's fence or storage.
    pub fn swap_out_any(
        &mut self,
        after: &AnyFence,
        storage: StorageView<'_, AnyBuffer>,
        blocks: &[(BlockId, u32)],
    ) -> Result<AnyFence, DeviceError> {
        const SWAP_OUT: &str = "swap out";
        let (after, storage) = (own_fence(after, SWAP_OUT)?, own(storage, SWAP_OUT)?);
        self.swap_out(after, storage, blocks).map(AnyFence::new)
    }

    /// Does what [`Self::swap_in`] does, with fences and storage of a cache over
    /// [`AnyBackend`](kv_core::backend::AnyBackend).
    ///
    /// # Errors
    /// Those of [`Self::swap_in`], and `ForeignHandle` for another backend's fence or storage.
    pub fn swap_in_any(
        &mut self,
        after: &AnyFence,
        storage: StorageView<'_, AnyBuffer>,
        blocks: &[(BlockId, u32)],
    ) -> Result<AnyFence, DeviceError> {
        const SWAP_IN: &str = "swap in";
        let (after, storage) = (own_fence(after, SWAP_IN)?, own(storage, SWAP_IN)?);
        self.swap_in(after, storage, blocks).map(AnyFence::new)
    }
}

fn own<'a>(
    storage: StorageView<'a, AnyBuffer>,
    operation: &'static str,
) -> Result<StorageView<'a, CudaBuffer>, DeviceError> {
    storage.downcast().ok_or_else(|| DeviceError::new(DeviceErrorKind::ForeignHandle, operation))
}

fn own_fence<'a>(
    fence: &'a AnyFence,
    operation: &'static str,
) -> Result<&'a CudaFence, DeviceError> {
    fence.downcast_ref().ok_or_else(|| DeviceError::new(DeviceErrorKind::ForeignHandle, operation))
}
