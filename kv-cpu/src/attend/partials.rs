//! Partial results of contexts that were split: an output row, and its maximum and sum of weights.
use std::marker::PhantomData;

use kv_cpu_kernels::Partial;

use super::call::Heads;

/// Partial results of all work items, each written by one of them.
#[derive(Debug)]
pub(super) struct Partials<'a> {
    rows: (*mut f32, usize),
    sums: (*mut Partial, usize),
    held: PhantomData<&'a mut [f32]>,
}

// SAFETY: threads reach the results through `put` and `get` alone, whose conditions keep them
// apart.
unsafe impl Sync for Partials<'_> {}

impl<'a> Partials<'a> {
    pub(super) fn new(rows: &'a mut [f32], partials: &'a mut [Partial]) -> Self {
        Self {
            rows: (rows.as_mut_ptr(), rows.len()),
            sums: (partials.as_mut_ptr(), partials.len()),
            held: PhantomData,
        }
    }

    /// Returns the first float of result `index`.
    fn begin(&self, index: usize, heads: Heads) -> usize {
        let begin = index * heads.stride_v;
        assert!(
            index < self.sums.1 && begin + heads.dim_v <= self.rows.1,
            "a partial result lies inside its memory"
        );
        begin
    }

    /// Writes result `index`; `row` has `dim_v` values.
    ///
    /// # Safety
    /// 1. No other thread uses the result meanwhile.
    pub(super) unsafe fn put(&self, index: usize, heads: Heads, partial: Partial, row: &[f32]) {
        let begin = self.begin(index, heads);
        let to = self.sums.0.wrapping_add(index);
        // SAFETY: inside the slice `new` got, by the assertion in `begin`; unshared by condition 1.
        unsafe { to.write(partial) };
        let to = self.rows.0.wrapping_add(begin);
        // SAFETY: as above.
        let to = unsafe { std::slice::from_raw_parts_mut(to, heads.dim_v) };
        to.copy_from_slice(row);
    }

    /// Result `index`.
    ///
    /// # Safety
    /// 1. No thread writes the result meanwhile.
    pub(super) unsafe fn get(&self, index: usize, heads: Heads) -> (Partial, &[f32]) {
        let begin = self.begin(index, heads);
        let from = self.sums.0.cast_const().wrapping_add(index);
        // SAFETY: inside the slice `new` got, by the assertion in `begin`; not written by condition
        // 1.
        let partial = unsafe { from.read() };
        let from = self.rows.0.cast_const().wrapping_add(begin);
        // SAFETY: as above.
        (partial, unsafe { std::slice::from_raw_parts(from, heads.dim_v) })
    }
}
