//! Runs of values from one element type to another, and past the caches.
use super::{Kernels, of_element};
use crate::encoding::Element;

impl Kernels {
    /// Copies a run of values from one element type to another, through `f32` where they differ.
    pub(crate) fn convert(self, from: (Element, &[u8]), (element, to): (Element, &mut [u8])) {
        if from.0 == element {
            to.copy_from_slice(from.1);
            return;
        }
        let kernel = of_elements(&self.loops.convert, from.0, element);
        // SAFETY: the CPU has the instruction set, by `Kernels::of`.
        unsafe { kernel(from.1, to) }
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
        (element, to): (Element, &mut [u8]),
        ahead: &[u8],
    ) {
        let Self(kernels) = self;
        let kernel = if from.0 == element {
            kernels.loops.copy_past
        } else {
            of_elements(&kernels.loops.convert_past, from.0, element)
        };
        // SAFETY: the CPU has the instruction set, by `Kernels::of`.
        unsafe { kernel(from.1, to, ahead) }
    }
}

/// The kernel of two element types.
fn of_elements<K: Copy>(kernels: &[[K; 3]; 3], from: Element, to: Element) -> K {
    of_element(of_element(*kernels, from), to)
}

impl Drop for PastCaches {
    fn drop(&mut self) {
        // SAFETY: the CPU has the instruction set, by `Kernels::of`.
        unsafe { (self.0.loops.fence)() }
    }
}
