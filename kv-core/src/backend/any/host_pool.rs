//! Type erasure of host pools.
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::{AnyFence, Erased, foreign};
use crate::backend::{ChunkLayout, HostChunk, HostPool, PendingChunk};
use crate::error::DeviceError;
use crate::ids::BlockId;
use crate::storage::{AnyBuffer, StorageView};

const COPY_OUT: &str = "copy blocks to host memory";
const COPY_IN: &str = "copy blocks from host memory";

pub(super) type DynHostPool =
    dyn HostPool<Buffer = AnyBuffer, Fence = AnyFence, Chunk = AnyChunk, Pending = AnyPendingChunk>;

trait DynPendingChunk: fmt::Debug + Send {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<AnyChunk, DeviceError>>;
    fn wait(self: Box<Self>) -> Result<AnyChunk, DeviceError>;
}

/// Host pool of an [`AnyBackend`](super::AnyBackend).
#[derive(Debug)]
pub struct AnyHostPool(pub(super) Box<DynHostPool>);

/// Chunk of an [`AnyHostPool`].
#[derive(Debug)]
pub struct AnyChunk(Box<dyn HostChunk>);

/// Pending chunk of an [`AnyHostPool`].
#[derive(Debug)]
pub struct AnyPendingChunk(Box<dyn DynPendingChunk>);

impl AsRef<[u8]> for AnyChunk {
    fn as_ref(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl AsMut<[u8]> for AnyChunk {
    fn as_mut(&mut self) -> &mut [u8] {
        (*self.0).as_mut()
    }
}

impl<P: HostPool> HostPool for Erased<P> {
    type Buffer = AnyBuffer;
    type Fence = AnyFence;
    type Chunk = AnyChunk;
    type Pending = AnyPendingChunk;

    fn layout(&self) -> &ChunkLayout {
        self.0.layout()
    }
    fn take(&mut self) -> Option<AnyChunk> {
        Some(AnyChunk(Box::new(self.0.take()?)))
    }
    fn copy_out(
        &mut self,
        after: &AnyFence,
        storage: StorageView<'_, AnyBuffer>,
        blocks: &[BlockId],
        chunk: AnyChunk,
        first: u32,
    ) -> Result<AnyPendingChunk, DeviceError> {
        let after = after.downcast_ref().ok_or_else(|| foreign(COPY_OUT))?;
        let storage = storage.downcast().ok_or_else(|| foreign(COPY_OUT))?;
        let chunk: Box<dyn Any> = chunk.0;
        let chunk = *chunk.downcast().map_err(|_| foreign(COPY_OUT))?;
        let pending = self.0.copy_out(after, storage, blocks, chunk, first)?;
        Ok(AnyPendingChunk(Box::new(Erased(pending))))
    }
    fn copy_in(
        &mut self,
        after: &AnyFence,
        storage: StorageView<'_, AnyBuffer>,
        blocks: &[BlockId],
        chunk: &AnyChunk,
        first: u32,
    ) -> Result<AnyFence, DeviceError> {
        let after = after.downcast_ref().ok_or_else(|| foreign(COPY_IN))?;
        let storage = storage.downcast().ok_or_else(|| foreign(COPY_IN))?;
        let chunk: &dyn Any = &*chunk.0;
        let chunk = chunk.downcast_ref().ok_or_else(|| foreign(COPY_IN))?;
        let fence = self.0.copy_in(after, storage, blocks, chunk, first)?;
        Ok(AnyFence(Arc::new(Erased(fence))))
    }
    fn fence(&mut self) -> Result<AnyFence, DeviceError> {
        Ok(AnyFence(Arc::new(Erased(self.0.fence()?))))
    }
}

impl<P: PendingChunk<Chunk: HostChunk>> DynPendingChunk for Erased<P> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<AnyChunk, DeviceError>> {
        self.0.poll(cx).map_ok(|chunk| AnyChunk(Box::new(chunk)))
    }
    fn wait(self: Box<Self>) -> Result<AnyChunk, DeviceError> {
        Ok(AnyChunk(Box::new(self.0.wait()?)))
    }
}

impl HostPool for AnyHostPool {
    type Buffer = AnyBuffer;
    type Fence = AnyFence;
    type Chunk = AnyChunk;
    type Pending = AnyPendingChunk;

    fn layout(&self) -> &ChunkLayout {
        self.0.layout()
    }
    fn take(&mut self) -> Option<AnyChunk> {
        self.0.take()
    }
    fn copy_out(
        &mut self,
        after: &AnyFence,
        storage: StorageView<'_, AnyBuffer>,
        blocks: &[BlockId],
        chunk: AnyChunk,
        first: u32,
    ) -> Result<AnyPendingChunk, DeviceError> {
        self.0.copy_out(after, storage, blocks, chunk, first)
    }
    fn copy_in(
        &mut self,
        after: &AnyFence,
        storage: StorageView<'_, AnyBuffer>,
        blocks: &[BlockId],
        chunk: &AnyChunk,
        first: u32,
    ) -> Result<AnyFence, DeviceError> {
        self.0.copy_in(after, storage, blocks, chunk, first)
    }
    fn fence(&mut self) -> Result<AnyFence, DeviceError> {
        self.0.fence()
    }
}

impl PendingChunk for AnyPendingChunk {
    type Chunk = AnyChunk;
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<AnyChunk, DeviceError>> {
        self.0.poll(cx)
    }
    fn wait(self) -> Result<AnyChunk, DeviceError> {
        self.0.wait()
    }
}
