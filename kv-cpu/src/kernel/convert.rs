//! Runs of values from one element type to another, and past the caches.
use super::Kernels;
use crate::encoding::{Element, RowLayout};

/// Values that are converted at a time: short, as memory for them is cleared each time.
const CHUNK: usize = 128;

impl Kernels {
    /// Copies a run of values from one element type to another, through `f32` where they differ.
    pub(crate) fn convert(self, from: (Element, &[u8]), to: (Element, &mut [u8])) {
        if from.0 == to.0 {
            to.1.copy_from_slice(from.1);
        } else {
            self.convert_chunks(from, to, |values, to| self.encode(to.0, values, to.1));
        }
    }

    /// Decodes a run, which `encode` brings to its place, chunk by chunk.
    fn convert_chunks(
        self,
        (from_element, from): (Element, &[u8]),
        (to_element, to): (Element, &mut [u8]),
        mut encode: impl FnMut(&[f32], (Element, &mut [u8])),
    ) {
        let mut values = [0.0; CHUNK];
        let from = from.chunks(CHUNK.saturating_mul(from_element.size()));
        let to = to.chunks_mut(CHUNK.saturating_mul(to_element.size()));
        for (from, to) in from.zip(to) {
            let len = to.len().checked_div(to_element.size()).unwrap_or(0);
            if let Some(values) = values.get_mut(..len) {
                self.decode(&RowLayout::plain(from_element, len), from, values);
                encode(values, (to_element, to));
            }
        }
    }

    /// To write past the caches.
    pub(crate) fn past_caches(self) -> PastCaches {
        PastCaches(self)
    }
}

/// Writes past the caches, where the CPU can. What was written is there for other threads once this
/// is dropped.
#[derive(Debug)]
pub(crate) struct PastCaches(Kernels);

impl PastCaches {
    /// As [`Kernels::convert`]. Fetches `ahead` meanwhile, which is wanted soon.
    pub(crate) fn convert(
        &self,
        from: (Element, &[u8]),
        to: (Element, &mut [u8]),
        mut ahead: &[u8],
    ) {
        let Self(kernels) = self;
        let mut copy = |from: &[u8], to: &mut [u8]| {
            // SAFETY: the CPU has the instruction set, by `Kernels::of`.
            unsafe { (kernels.0.copy_past)(from, to, std::mem::take(&mut ahead)) }
        };
        if from.0 == to.0 {
            copy(from.1, to.1);
            return;
        }
        let mut encoded = [0; 4 * CHUNK];
        kernels.convert_chunks(from, to, |values, (element, to)| {
            if let Some(encoded) = encoded.get_mut(..to.len()) {
                kernels.encode(element, values, encoded);
                copy(encoded, to);
            }
        });
    }
}

impl Drop for PastCaches {
    fn drop(&mut self) {
        // SAFETY: the CPU has the instruction set, by `Kernels::of`.
        unsafe { (self.0.0.fence)() }
    }
}
