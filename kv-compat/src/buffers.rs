//! The arrays that describe a step, on the host and on the device, allocated once.
use kv_core::backend::{Backend, Queue};
use kv_core::error::{DeviceError, DeviceErrorKind, PlanError, SpecError};
use kv_core::num::{to_u64, to_usize};
use kv_core::{BlockId, CacheError};

use crate::manager::{CacheManager, CacheManagerConfig, TrackedSequence};

/// An array with a copy on the device. Neither ever moves; only what changed is uploaded.
#[derive(Debug)]
pub(crate) struct StaticArray<Buf> {
    host: Box<[u32]>,
    device: Buf,
    /// Entries that the device does not have yet, `begin..end`.
    dirty: (usize, usize),
}

impl<Buf: 'static> StaticArray<Buf> {
    fn new<B: Backend<Buffer = Buf>>(backend: &B, len: usize) -> Result<Self, DeviceError> {
        let operation = "allocate step buffers";
        let too_large = || DeviceError::new(DeviceErrorKind::OutOfMemory, operation);
        let mut host = Vec::new();
        host.try_reserve_exact(len).map_err(|error| too_large().with_source(error))?;
        host.resize(len, 0);
        let bytes = to_u64(len).checked_mul(4).ok_or_else(too_large)?;
        let device = backend.alloc(bytes)?; // zero, as the host's
        Ok(Self { host: host.into_boxed_slice(), device, dirty: (0, 0) })
    }

    pub(crate) fn host(&self) -> &[u32] {
        &self.host
    }
    pub(crate) fn device(&self) -> &Buf {
        &self.device
    }

    fn set(&mut self, index: usize, value: u32) {
        let entry = &mut self.host[index];
        if *entry == value {
            return;
        }
        *entry = value;
        let (begin, end) = self.dirty;
        let after = index + 1;
        self.dirty = if begin == end { (index, after) } else { (begin.min(index), end.max(after)) };
    }

    fn upload<Q: Queue<Buffer = Buf>>(&mut self, queue: &mut Q) -> Result<(), DeviceError> {
        let (begin, end) = self.dirty;
        let changed = &self.host[begin..end];
        if !changed.is_empty() {
            let at = to_u64(begin) * 4;
            queue.upload(&self.device, at, bytemuck::cast_slice(changed))?;
        }
        self.dirty = (0, 0);
        Ok(())
    }
}

/// Prefix sums, lengths and the page table of the current step.
#[derive(Debug)]
pub(crate) struct StepBuffers<Buf> {
    pub(crate) cu_seqlens_q: StaticArray<Buf>,
    pub(crate) cu_seqlens_kv: StaticArray<Buf>,
    pub(crate) seqlens_pre_step: StaticArray<Buf>,
    pub(crate) page_table: StaticArray<Buf>,
    max_batch: usize,
    /// Entries of one row of the page table.
    width: usize,
    /// Entries of each row that may differ from 0.
    filled: Box<[usize]>,
}

impl<Buf: 'static> StepBuffers<Buf> {
    pub(crate) fn new<B: Backend<Buffer = Buf>>(
        backend: &B,
        config: &CacheManagerConfig,
    ) -> Result<Self, CacheError> {
        let max_batch = to_usize(config.max_batch_size);
        let width = to_usize(config.max_pages_per_sequence());
        let overflow = SpecError::Overflow { what: "entries of the page table" };
        let entries = max_batch.checked_mul(width).ok_or(overflow)?;
        let sums = max_batch + 1;
        Ok(Self {
            cu_seqlens_q: StaticArray::new(backend, sums)?,
            cu_seqlens_kv: StaticArray::new(backend, sums)?,
            seqlens_pre_step: StaticArray::new(backend, max_batch)?,
            page_table: StaticArray::new(backend, entries)?,
            max_batch,
            width,
            filled: vec![0; max_batch].into_boxed_slice(),
        })
    }

    /// Entries of one row of the page table.
    pub(crate) fn page_table_width(&self) -> usize {
        self.width
    }

    /// Describes the batch that `manager` has prepared.
    pub(crate) fn fill<B: Backend<Buffer = Buf>>(
        &mut self,
        manager: &dyn CacheManager<B>,
    ) -> Result<(), PlanError> {
        let batch = manager.sequences();
        let (mut q, mut kv) = (0_u32, 0_u32);
        for row in 0..self.max_batch {
            let sequence = batch.get(row);
            self.seqlens_pre_step.set(row, sequence.map_or(0, |s| s.pre_step_len));
            let (new, len) = sequence.map_or((0, 0), |s| (new_len(s), s.len));
            q = sum(q, new)?;
            kv = sum(kv, len)?;
            let next = row + 1;
            self.cu_seqlens_q.set(next, q);
            self.cu_seqlens_kv.set(next, kv);
            self.fill_row(row, sequence.map_or(&[], |s| manager.pages(s.id)));
        }
        Ok(())
    }

    fn fill_row(&mut self, row: usize, pages: &[BlockId]) {
        let filled = &mut self.filled[row];
        let used = pages.len().min(self.width);
        let start = row * self.width;
        for index in 0..used.max(*filled) {
            let page = pages.get(index).map_or(0, |page| page.0);
            self.page_table.set(start + index, page);
        }
        *filled = used;
    }

    /// Makes everything zero.
    pub(crate) fn clear(&mut self) {
        for array in [&mut self.cu_seqlens_q, &mut self.cu_seqlens_kv, &mut self.seqlens_pre_step] {
            for index in 0..array.host.len() {
                array.set(index, 0);
            }
        }
        for row in 0..self.max_batch {
            self.fill_row(row, &[]);
        }
    }

    pub(crate) fn upload<Q: Queue<Buffer = Buf>>(
        &mut self,
        queue: &mut Q,
    ) -> Result<(), DeviceError> {
        self.cu_seqlens_q.upload(queue)?;
        self.cu_seqlens_kv.upload(queue)?;
        self.seqlens_pre_step.upload(queue)?;
        self.page_table.upload(queue)
    }
}

/// Tokens a row brought to the step.
pub(crate) fn new_len(sequence: &TrackedSequence) -> u32 {
    sequence.len - sequence.pre_step_len
}

fn sum(a: u32, b: u32) -> Result<u32, PlanError> {
    a.checked_add(b).ok_or_else(|| PlanError::TooMany {
        what: "tokens of the batch",
        got: u64::from(a) + u64::from(b),
        max: u64::from(u32::MAX),
    })
}
