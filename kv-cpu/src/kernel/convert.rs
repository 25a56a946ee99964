//! Runs of values from one element type to another, and past the caches.
use super::Kernels;
use crate::encoding::{Element, RowLayout};

impl Kernels {
    /// Copies a run of values from one element type to another, through `f32` where they differ.
    pub(crate) fn convert(self, from: (Element, &[u8]), to: (Element, &mut [u8])) {
        self.convert_with(from, to, |from, to| to.copy_from_slice(from));
    }

    /// As [`Self::convert`]; `copy` brings what has the right type to its place.
    fn convert_with(
        self,
        (from_element, from): (Element, &[u8]),
        (to_element, to): (Element, &mut [u8]),
        mut copy: impl FnMut(&[u8], &mut [u8]),
    ) {
        const CHUNK: usize = 256;
        if from_element == to_element {
            copy(from, to);
            return;
        }
        let (mut values, mut encoded) = ([0.0; CHUNK], [0; 4 * CHUNK]);
        let from = from.chunks(CHUNK.saturating_mul(from_element.size()));
        let to = to.chunks_mut(CHUNK.saturating_mul(to_element.size()));
        for (from, to) in from.zip(to) {
            let len = to.len().checked_div(to_element.size()).unwrap_or(0);
            let (Some(values), Some(encoded)) =
                (values.get_mut(..len), encoded.get_mut(..to.len()))
            else {
                continue;
            };
            self.decode(&RowLayout::plain(from_element, len), from, values);
            self.encode(to_element, values, encoded);
            copy(encoded, to);
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
        kernels.convert_with(from, to, |from, to| {
            // SAFETY: the CPU has the instruction set, by `Kernels::of`.
            unsafe { (kernels.0.copy_past)(from, to, std::mem::take(&mut ahead)) }
        });
    }
}

impl Drop for PastCaches {
    fn drop(&mut self) {
        // SAFETY: the CPU has the instruction set, by `Kernels::of`.
        unsafe { (self.0.0.fence)() }
    }
}
