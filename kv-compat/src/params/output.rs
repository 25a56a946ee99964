//! What a step answers.
use kv_core::backend::{AnyBackend, Backend, PlaneView};

use crate::config::OutputFormat;

/// What [`step`](crate::InferenceParams::step) answers: where the cache is, and how its rows are
/// divided.
#[derive(Debug)]
#[non_exhaustive]
pub struct StepOutput<'a, B: Backend = AnyBackend> {
    /// Keys of the layer.
    pub k: CacheView<'a, B::Buffer>,
    /// Values of the layer.
    pub v: CacheView<'a, B::Buffer>,
    /// As [`cu_seqlens_q`](crate::InferenceParams::cu_seqlens_q), the whole array.
    pub cu_seqlens_q: &'a [u32],
    /// As [`cu_seqlens_kv`](crate::InferenceParams::cu_seqlens_kv), the whole array.
    pub cu_seqlens_kv: &'a [u32],
    /// The device's copy of `cu_seqlens_q`.
    pub cu_seqlens_q_buffer: &'a B::Buffer,
    /// The device's copy of `cu_seqlens_kv`.
    pub cu_seqlens_kv_buffer: &'a B::Buffer,
    /// The most tokens a sequence can have: the longest K and V of an attention kernel.
    pub max_sequence_length: u32,
    /// Axes of q and of the cache.
    pub format: OutputFormat,
}

/// One plane of a layer under the shape that other systems give it.
#[derive(Debug)]
pub struct CacheView<'a, Buf> {
    shape: [u32; 4],
    plane: PlaneView<'a, Buf>,
}

impl<'a, Buf> CacheView<'a, Buf> {
    pub(super) fn new(shape: [u32; 4], plane: PlaneView<'a, Buf>) -> Self {
        Self { shape, plane }
    }
    /// Paged `[total_num_pages, page_size, heads, dim]`; else
    /// `[b, max_sequence_length, heads, dim]`, `b` being the batch of `new_k`, or `max_batch_size`
    /// for `thd`. Row `i` of the batch is slot `page_table[i]`, not slot `i`: rows are not moved
    /// when the batch changes.
    pub fn shape(&self) -> [u32; 4] {
        self.shape
    }
    /// The memory itself: all pages, or all slots.
    pub fn plane(&self) -> &PlaneView<'a, Buf> {
        &self.plane
    }
}
