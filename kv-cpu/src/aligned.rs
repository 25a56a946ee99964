//! Scratch floats that begin with a cache line.

/// Floats that begin with a cache line.
#[derive(Debug, Default)]
pub(crate) struct AlignedFloats(Vec<Line>);

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

// SAFETY: sixteen floats, for which all bits zero are the number 0.
unsafe impl bytemuck::Zeroable for Line {}
// SAFETY: sixteen floats of 64 bytes together, aligned to 64 bytes: no padding, any bits are valid,
// and it is `Copy` and `'static`.
unsafe impl bytemuck::Pod for Line {}

impl AlignedFloats {
    /// The first `len` floats, whose content is left from earlier uses.
    pub(crate) fn get(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        let floats: &mut [f32] = bytemuck::cast_slice_mut(&mut self.0);
        &mut floats[..len]
    }
}
