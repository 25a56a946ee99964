//! What can be read off an [`InferenceParams`] without changing it.
use std::fmt;

use kv_core::backend::Backend;
use kv_core::{Axes, BlockId, SequenceId};

use crate::config::OutputFormat;
use crate::manager::{CacheManager, CacheManagerConfig, TrackedSequence};
use crate::params::InferenceParams;

impl<B: Backend> InferenceParams<B> {
    /// The device.
    pub fn backend(&self) -> &B {
        self.manager.backend()
    }
    /// The queue that all work of this cache is recorded on. A step's work goes to the device when
    /// the next step begins; submit this queue to send it earlier.
    pub fn queue_mut(&mut self) -> &mut B::Queue {
        self.manager.queue_mut()
    }
    /// The manager; its own type through [`Any`](std::any::Any).
    pub fn manager(&self) -> &dyn CacheManager<B> {
        &*self.manager
    }
    /// The arguments the manager was made from.
    pub fn config(&self) -> &CacheManagerConfig {
        &self.config
    }
    /// Whether sequences share a pool of pages.
    pub fn is_paged(&self) -> bool {
        self.config.pages.is_some()
    }
    /// Longest prompt as configured, in tokens, whatever the format.
    pub fn max_ctx_len(&self) -> Option<u32> {
        self.max_ctx_len
    }
    /// Axes of the tensors of the last `step` call, of the configuration before the first.
    pub fn input_qkv_format(&self) -> Axes {
        self.input_format
    }
    /// Axes of q and of the cache that go with [`Self::input_qkv_format`].
    pub fn output_qkv_format(&self) -> OutputFormat {
        OutputFormat::of(self.input_format)
    }
    /// Axes of the cache: always `bshd`.
    pub fn cache_qkv_format(&self) -> Axes {
        Axes::Bshd
    }

    /// Sequences of the current step.
    pub fn batch_size(&self) -> usize {
        self.sequences().len()
    }
    /// The batch, in the order of the step; `len` counts the step's tokens.
    pub fn sequences(&self) -> &[TrackedSequence] {
        self.manager.sequences()
    }
    /// Tokens of a sequence, the step's included; 0 for an unknown one.
    pub fn sequence_length(&self, sequence: impl Into<SequenceId>) -> u32 {
        let id = sequence.into();
        self.sequences().iter().find(|row| row.id == id).map_or(0, |row| row.len)
    }
    /// Pages that no sequence holds; free slots when not paged.
    pub fn num_free_pages(&self) -> u32 {
        self.manager.num_free_pages()
    }
    /// Whether there is a page that no sequence holds.
    pub fn has_free_page(&self) -> bool {
        self.num_free_pages() > 0
    }
    /// Pages of a sequence in token order; none for an unknown one. When not paged, its one slot.
    pub fn page_list(&self, sequence: impl Into<SequenceId>) -> &[BlockId] {
        self.manager.pages(sequence.into())
    }
    /// Number of pages of a sequence; 0 for an unknown one.
    pub fn page_count(&self, sequence: impl Into<SequenceId>) -> usize {
        self.page_list(sequence).len()
    }

    /// Tokens of every row before the step, `[max_batch_size]`; 0 past the batch. The start
    /// positions for rotary embeddings.
    pub fn get_seqlens_pre_step(&self) -> &[u32] {
        self.buffers.seqlens_pre_step.host()
    }
    /// The device's copy of [`Self::get_seqlens_pre_step`].
    pub fn seqlens_pre_step_buffer(&self) -> &B::Buffer {
        self.buffers.seqlens_pre_step.device()
    }
    /// Prefix sums of the step's tokens, `[max_batch_size + 1]`; the last value repeats past the
    /// batch.
    pub fn cu_seqlens_q(&self) -> &[u32] {
        self.buffers.cu_seqlens_q.host()
    }
    /// The device's copy of [`Self::cu_seqlens_q`].
    pub fn cu_seqlens_q_buffer(&self) -> &B::Buffer {
        self.buffers.cu_seqlens_q.device()
    }
    /// Prefix sums of the lengths after the step, `[max_batch_size + 1]`; the last value repeats
    /// past the batch.
    pub fn cu_seqlens_kv(&self) -> &[u32] {
        self.buffers.cu_seqlens_kv.host()
    }
    /// The device's copy of [`Self::cu_seqlens_kv`].
    pub fn cu_seqlens_kv_buffer(&self) -> &B::Buffer {
        self.buffers.cu_seqlens_kv.device()
    }
    /// Pages of every row, `[max_batch_size, page_table_width]`; 0 past a row's pages and past the
    /// batch. When not paged a row has one entry, the slot its sequence lies in.
    pub fn page_table(&self) -> &[u32] {
        self.buffers.page_table.host()
    }
    /// The device's copy of [`Self::page_table`].
    pub fn page_table_buffer(&self) -> &B::Buffer {
        self.buffers.page_table.device()
    }
    /// Entries of one row of [`Self::page_table`]: pages of the longest sequence.
    pub fn page_table_width(&self) -> usize {
        self.buffers.page_table_width()
    }
}

impl<B: Backend> fmt::Display for InferenceParams<B> {
    /// The information of the original's `__repr__`, in its order.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let CacheManagerConfig { max_batch_size, max_seqlen, num_heads, .. } = self.config;
        let CacheManagerConfig { dtype, head_dim_k, head_dim_v, pages, .. } = self.config;
        write!(f, "dtype={dtype}, is_paged={}, ", pages.is_some())?;
        match pages {
            Some(p) => write!(f, "total_pages={}, page_size={}, ", p.total_num_pages, p.page_size)?,
            None => write!(f, "max_batch_size={max_batch_size}, max_seqlen={max_seqlen}, ")?,
        }
        write!(f, "num_heads={num_heads}, head_dim_k={head_dim_k}, head_dim_v={head_dim_v}")
    }
}
