//! The contract of a backend: the traits that it implements, and the tensors and planes that it is
//! given. Also the type-erased backend.
//!
//! The contract, and the conformance case that proves each part (`kv-testkit`):
//! 1. work recorded on one queue takes effect in program order (`queue/order`);
//! 2. work on two queues is unordered until one waits for the other's fence (`queue/wait_for`);
//! 3. fresh buffers are zero (`buffer/zeroed`);
//! 4. a range past a buffer's end is refused (`buffer/out_of_range`), a handle of another backend
//!    too (`erased/foreign_handle`);
//! 5. an output aliases no input of its call; the caller ensures it;
//! 6. after `Lost` every call says `Lost`;
//! 7. anything may be dropped at any time (`queue/drop_anytime`);
//! 8. the same input twice gives the same bits (`attend/repeatable`);
//! 9. attention reads no block in which none of its queries sees a key, not even to mask it
//!    afterwards (`attend/masked_slots_are_never_read`);
//! 10. storage whose `head_dim` or stored format the device does not support is refused before
//!     anything of a cache is allocated (`cache/unsupported_head_dims_are_refused`,
//!     `cache/unsupported_formats_are_refused`); every operation supports all others;
//! 11. an output in host memory holds its rows when the call returns, equal to the bit to those in
//!     device memory (`attend/host_outputs`, `gather/host_outputs`, `convert/host_outputs`).
mod any;
mod host_outputs;
mod host_pool;
#[doc(hidden)]
pub mod kernels;
mod null;
mod reserved;

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

pub use any::{
    AnyBackend, AnyChunk, AnyFence, AnyHostPool, AnyPendingChunk, AnyQueue, AnyReadback,
};
pub use host_outputs::HostOutputs;
pub use host_pool::{
    ChunkLayout, ChunkShape, HostChunk, HostPool, PendingChunk, QueueChunk, QueueHostPool,
    QueuePendingChunk,
};
use kv_format::KvFormat;
pub use null::{NullBackend, NullBuffer, NullControl, NullFence, NullQueue, NullReadback};
pub use reserved::Reserved;

pub use crate::geometry::{PlaneLayout, PlaneShape};
pub use crate::ids::{Plane, PlaneRole, Slot};
pub use crate::slot_map::{Place, SlotMap};
pub use crate::storage::{AnyBuffer, BlockPlanes, KvStorage, PlaneView, StorageView};
pub use crate::tensor::{
    AxisOrder, Dims, Strided, StridedError, TensorData, TensorDataMut, TokenRows, TokenTensor,
    TokenTensorMut,
};

use crate::error::DeviceError;
use crate::ids::GroupId;
use crate::plan::{
    AttendArgs, AttentionPlan, ConvertArgs, ConvertPlan, CopyArgs, CopyPlan, GatherArgs,
    GatherPlan, WriteArgs, WritePlan,
};

/// Facts about a device, fixed when it is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Largest single allocation, in bytes.
    pub buffer_bytes_max: u64,
    /// Largest range of one kernel argument, in bytes. Storage is divided into segments of whole
    /// blocks no larger than this (wgpu 30 on Vulkan: below 2 GiB; CUDA: `u64::MAX`).
    pub binding_bytes_max: u64,
    /// Whether a thread may block on a fence (false in a browser).
    pub blocking_wait: bool,
    /// Number of parallel workers, for which the planner splits long contexts. Each processes a KV
    /// split at a time: one kv head of it, or all, see `heads_together`.
    pub workers: u32,
    /// Whether a worker processes all kv heads of a split. If not, heads keep workers busy too, and
    /// contexts have fewer splits.
    pub heads_together: bool,
    /// Whether outputs may lie in host memory. A device that writes only its own memory waits for
    /// the rows inside the call, and refuses if a thread may not wait ([`HostOutputs`]).
    pub host_outputs: bool,
    /// `head_dim`s of K and V must be multiples of this; 1 without a restriction.
    pub head_dim_multiple: u32,
    /// Largest `head_dim` of K and of V; `u32::MAX` without a limit.
    pub head_dim_max: u32,
    /// Stored formats that every operation supports; `None` for all.
    pub formats: Option<&'static [KvFormat]>,
}

impl Capabilities {
    /// Returns the smallest capabilities, but with all `head_dim`s and stored formats; a backend
    /// raises its limits.
    pub fn minimal() -> Self {
        Self {
            buffer_bytes_max: 0,
            binding_bytes_max: 0,
            blocking_wait: false,
            workers: 1,
            heads_together: false,
            host_outputs: false,
            head_dim_multiple: 1,
            head_dim_max: u32::MAX,
            formats: None,
        }
    }
    /// Sets the largest buffer, in bytes.
    #[must_use]
    pub fn with_buffer_bytes_max(mut self, bytes: u64) -> Self {
        self.buffer_bytes_max = bytes;
        self
    }
    /// Sets the largest kernel argument, in bytes.
    #[must_use]
    pub fn with_binding_bytes_max(mut self, bytes: u64) -> Self {
        self.binding_bytes_max = bytes;
        self
    }
    /// Declares that a thread may block on a fence.
    #[must_use]
    pub fn with_blocking_wait(mut self) -> Self {
        self.blocking_wait = true;
        self
    }
    /// Sets the number of parallel workers.
    #[must_use]
    pub fn with_workers(mut self, workers: u32) -> Self {
        self.workers = workers.max(1);
        self
    }
    /// Declares that a worker processes all kv heads of a split.
    #[must_use]
    pub fn with_heads_together(mut self) -> Self {
        self.heads_together = true;
        self
    }
    /// Declares that outputs may lie in host memory.
    #[must_use]
    pub fn with_host_outputs(mut self) -> Self {
        self.host_outputs = true;
        self
    }
    /// Supports only `head_dim`s that are multiples of `multiple`, at most `max`.
    #[must_use]
    pub fn with_head_dims(mut self, multiple: u32, max: u32) -> Self {
        (self.head_dim_multiple, self.head_dim_max) = (multiple.max(1), max);
        self
    }
    /// Supports only these stored formats.
    #[must_use]
    pub fn with_formats(mut self, formats: &'static [KvFormat]) -> Self {
        self.formats = Some(formats);
        self
    }
    /// Returns the number of workers for [`PlanBuffers::plan`](crate::plan::PlanBuffers::plan),
    /// where each counts as processing one kv head of a split.
    pub fn workers_of_heads(&self, num_kv_heads: u32) -> u32 {
        match self.workers {
            // More than `u32` counts as that many.
            workers @ 2.. if self.heads_together => workers.saturating_mul(num_kv_heads),
            workers => workers,
        }
    }
    /// Returns whether rows of this many values can be stored and read.
    pub fn takes_head_dim(&self, head_dim: u32) -> bool {
        head_dim <= self.head_dim_max && head_dim.is_multiple_of(self.head_dim_multiple.max(1))
    }
    /// Returns whether rows of this format can be stored and read.
    pub fn takes_format(&self, format: KvFormat) -> bool {
        self.formats.is_none_or(|formats| formats.contains(&format))
    }
}

/// One opened device.
pub trait Backend: fmt::Debug + Send + Sync + 'static {
    /// Device-resident bytes; a cheap handle that keeps its memory alive.
    type Buffer: Clone + fmt::Debug + Send + Sync + 'static;
    /// The command queue.
    type Queue: Queue<Buffer = Self::Buffer>;
    /// Host memory for blocks outside the device: [`QueueHostPool`] unless the device has a faster
    /// way.
    type HostPool: HostPool<Buffer = Self::Buffer, Fence = <Self::Queue as Queue>::Fence>;

    /// Returns a short stable name, for logs and test names.
    fn name(&self) -> &'static str;
    /// Returns the capabilities of the device.
    fn capabilities(&self) -> &Capabilities;
    /// Reserves the memory that a cache is about to allocate, all of it together. For a device
    /// whose [`Self::alloc`] takes memory when it is written: a cache that does not fit has to be
    /// refused before. Other devices reserve nothing.
    ///
    /// # Errors
    /// `OutOfMemory` with both numbers ([`DeviceError::shortage`]).
    fn reserve_planes(&self, bytes: u64) -> Result<Reserved, DeviceError> {
        let _ = bytes;
        Ok(Reserved::default())
    }
    /// Allocates zeroed memory.
    ///
    /// # Errors
    /// `OutOfMemory`, or `Unsupported` above [`Capabilities::buffer_bytes_max`].
    fn alloc(&self, bytes: u64) -> Result<Self::Buffer, DeviceError>;
    /// Opens a new command queue.
    ///
    /// # Errors
    /// `Lost` or `Driver`.
    fn queue(&self) -> Result<Self::Queue, DeviceError>;
    /// Reserves host memory for `chunks` chunks of blocks of one group, whose layers all have
    /// memory: layers that are allocated later need another pool.
    ///
    /// # Errors
    /// Those of [`ChunkLayout::of`]; `ForeignHandle` for storage of another device, `OutOfMemory`
    /// if the host lacks the memory, `Lost` or `Driver`.
    fn host_pool(
        &self,
        storage: StorageView<'_, Self::Buffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<Self::HostPool, DeviceError>;
}

/// A shared backend is a backend: several caches may use one device without erasing it.
impl<B: Backend> Backend for Arc<B> {
    type Buffer = B::Buffer;
    type Queue = B::Queue;
    type HostPool = B::HostPool;

    fn name(&self) -> &'static str {
        B::name(self)
    }
    fn capabilities(&self) -> &Capabilities {
        B::capabilities(self)
    }
    fn reserve_planes(&self, bytes: u64) -> Result<Reserved, DeviceError> {
        B::reserve_planes(self, bytes)
    }
    fn alloc(&self, bytes: u64) -> Result<Self::Buffer, DeviceError> {
        B::alloc(self, bytes)
    }
    fn queue(&self) -> Result<Self::Queue, DeviceError> {
        B::queue(self)
    }
    fn host_pool(
        &self,
        storage: StorageView<'_, Self::Buffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<Self::HostPool, DeviceError> {
        B::host_pool(self, storage, shape, chunks)
    }
}

/// A command queue: a CUDA stream, a wgpu encoder with its queue, or the calling thread.
///
/// Plans and arguments are already checked; a backend checks only facts that it alone knows: that a
/// device range lies inside its buffer, and that it supports the call.
pub trait Queue: fmt::Debug + Send + 'static {
    /// The backend's buffer handle.
    type Buffer: 'static;
    /// Signals that submitted work is done.
    type Fence: Fence;
    /// A pending copy to the host.
    type Readback: Readback;

    /// Records a host-to-device copy. `src` is copied before the call returns.
    ///
    /// # Errors
    /// `OutOfRange`, `ForeignHandle`, `OutOfMemory` (staging) or `Lost`.
    fn upload(
        &mut self,
        dst: &Self::Buffer,
        dst_offset: u64,
        src: &[u8],
    ) -> Result<(), DeviceError>;
    /// Records a device-to-host copy.
    ///
    /// # Errors
    /// `OutOfRange`, `ForeignHandle` or `Lost`.
    fn download(
        &mut self,
        src: &Self::Buffer,
        src_offset: u64,
        bytes: u64,
    ) -> Result<Self::Readback, DeviceError>;
    /// Records zeroing of a byte range.
    ///
    /// # Errors
    /// `OutOfRange`, `ForeignHandle` or `Lost`.
    fn zero(&mut self, dst: &Self::Buffer, offset: u64, bytes: u64) -> Result<(), DeviceError>;
    /// Sends the plans of a step for one group of layers to the device, before any layer uses them:
    /// a captured graph of launches then finds every step's plans at the same addresses. Plans that
    /// were not prepared work too. A backend that reads plans in host memory does nothing; one that
    /// wraps another passes the call on.
    ///
    /// # Errors
    /// `OutOfMemory`, `OutOfRange` for a step larger than what was reserved, or `Lost`.
    fn prepare(
        &mut self,
        group: GroupId,
        write: &WritePlan<'_>,
        attend: &AttentionPlan<'_>,
    ) -> Result<(), DeviceError>;
    /// Records writes of new K and V rows into their slots, encoded in the planes' formats.
    ///
    /// # Errors
    /// `Unsupported`, `OutOfRange`, `ForeignHandle` or `Lost`.
    fn write_kv(
        &mut self,
        plan: &WritePlan<'_>,
        args: WriteArgs<'_, Self::Buffer>,
    ) -> Result<(), DeviceError>;
    /// Records attention of a batch of queries over their sequences' cached rows.
    ///
    /// The mask is given by [`visible`] and [`visible_sink_tokens`]: rows at or past `kv_len` are
    /// never read, nor is a block in which no query of its sequence sees a key. Such a block may
    /// belong to another owner by now: its entry of the block table is in range but meaningless,
    /// and its bytes may be NaN or change meanwhile. An invisible row in a block with a visible one
    /// may be loaded, but must not affect any output. Padding rows of outputs become zero, as does
    /// the row of a query that sees no key.
    ///
    /// [`visible`]: crate::AttentionOptions::visible
    /// [`visible_sink_tokens`]: crate::AttentionOptions::visible_sink_tokens
    ///
    /// # Errors
    /// `Unsupported`, `OutOfRange`, `ForeignHandle` or `Lost`.
    fn attend(
        &mut self,
        plan: &AttentionPlan<'_>,
        args: AttendArgs<'_, Self::Buffer>,
    ) -> Result<(), DeviceError>;
    /// Records copies between blocks, in K and V of every allocated layer of a group.
    ///
    /// # Errors
    /// `ForeignHandle` or `Lost`.
    fn copy_blocks(
        &mut self,
        plan: &CopyPlan<'_>,
        args: CopyArgs<'_, Self::Buffer>,
    ) -> Result<(), DeviceError>;
    /// Records reads of cached rows into a plain tensor, decoded to its element type.
    ///
    /// # Errors
    /// `Unsupported`, `OutOfRange`, `ForeignHandle` or `Lost`.
    fn gather(
        &mut self,
        plan: &GatherPlan<'_>,
        args: GatherArgs<'_, Self::Buffer>,
    ) -> Result<(), DeviceError>;
    /// Records a change of axes and element type of a batch of rows, or encodes or decodes it: see
    /// [`ConvertPlan::encodes`](crate::plan::ConvertPlan::encodes).
    ///
    /// # Errors
    /// `Unsupported`, `OutOfRange`, `ForeignHandle` or `Lost`.
    fn convert(
        &mut self,
        plan: &ConvertPlan,
        args: ConvertArgs<'_, Self::Buffer>,
    ) -> Result<(), DeviceError>;
    /// Submits everything recorded so far, without a fence.
    ///
    /// # Errors
    /// Those of [`Self::submit`].
    fn flush(&mut self) -> Result<(), DeviceError>;
    /// Submits everything recorded so far, and returns a fence for it.
    ///
    /// # Errors
    /// `Lost`, `Driver`, or a failure of work submitted earlier.
    fn submit(&mut self) -> Result<Self::Fence, DeviceError>;
    /// Makes later work on this queue wait for `fence`, without blocking the host.
    ///
    /// # Errors
    /// `ForeignHandle` or `Lost`.
    fn wait_for(&mut self, fence: &Self::Fence) -> Result<(), DeviceError>;
}

/// Completion of submitted work.
pub trait Fence: Clone + fmt::Debug + Send + Sync + 'static {
    /// Checks without blocking and registers the waker.
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<(), DeviceError>>;
    /// Blocks the thread until the work is done.
    ///
    /// # Errors
    /// `Unsupported` without [`Capabilities::blocking_wait`]; otherwise the device's failure.
    fn wait(&self) -> Result<(), DeviceError>;
}

/// A download: bytes that the device copies to the host.
pub trait Readback: fmt::Debug + Send + 'static {
    /// Returns the bytes once they have arrived.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<u8>, DeviceError>>;
    /// Blocks the thread until they have arrived.
    ///
    /// # Errors
    /// Those of [`Fence::wait`].
    fn wait(self) -> Result<Vec<u8>, DeviceError>;
}
