//! Specialisations of the attention shaders. A driver compiles a shader for seconds, so a shader is
//! specialised only where it pays inside the loops: they omit code that a call does not need.
use kv_core::KvFormat;

use crate::params::Plane;
use crate::pipelines::Kernel;

/// Values of a row that are staged at a time.
const CHUNK: u32 = 32;
/// Rows of a workgroup, at most, in the kernel for few rows.
const NARROW_ROWS: u32 = 8;

/// The properties of one of the two planes that the specialisation depends on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Side {
    pub(super) format: u32,
    pub(super) head_dim: u32,
    /// Whether four values that are read together always begin at a whole word.
    pub(super) is_aligned: bool,
}

impl Side {
    pub(super) fn of(plane: &Plane) -> Self {
        // Blocks of 34 and 18 bytes are not multiples of words.
        let ggml = [KvFormat::Q8_0, KvFormat::Q4_0].map(KvFormat::kernel_code);
        let Plane { data, block_bytes, token_stride, head_stride, .. } = *plane;
        let places = [data, block_bytes, token_stride, head_stride];
        let others = [plane.wide_head_stride, plane.mean_begin];
        let is_aligned = !ggml.contains(&plane.format)
            && places.into_iter().chain(others).all(|place| place.is_multiple_of(4));
        Self { format: plane.format, head_dim: plane.head_dim, is_aligned }
    }
}

/// Query rows of a workgroup.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub(super) count: u32,
    /// Whether no sequence has more rows than that.
    pub(super) is_narrow: bool,
}

impl Rows {
    /// Chooses rows for sequences of up to `most` query rows; fewer where rows are long.
    pub(super) fn of(k: &Plane, v: &Plane, most: u32) -> Self {
        let is_long = k.head_dim.max(v.head_dim) > 4 * CHUNK;
        let many = if is_long { NARROW_ROWS } else { 16 };
        match most {
            0..=4 => Self { count: 4, is_narrow: true },
            5..=NARROW_ROWS => Self { count: NARROW_ROWS, is_narrow: true },
            _ => Self { count: many, is_narrow: false },
        }
    }
}

/// A specialisation of attention over KV splits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Form {
    pub(super) k: Side,
    pub(super) v: Side,
    pub(super) rows: Rows,
    pub(super) has_extras: bool,
}

impl Form {
    pub(super) fn of(k: &Plane, v: &Plane, rows: Rows) -> Self {
        let has_extras = k.has_extras() || v.has_extras();
        Self { k: Side::of(k), v: Side::of(v), rows, has_extras }
    }

    pub(super) fn kernel(self) -> Kernel {
        let Self { k, v, rows, .. } = self;
        let kernel = if rows.is_narrow {
            Kernel::new("attend_few.wgsl")
        } else {
            let chunks = v.head_dim.div_ceil(CHUNK).max(2).next_power_of_two();
            Kernel::new("attend.wgsl").with("V_CHUNKS", chunks)
        };
        kernel
            .with("ROWS", rows.count)
            .with("K_FORMAT", k.format)
            .with("V_FORMAT", v.format)
            .with("K_ALIGNED", k.is_aligned.into())
            .with("V_ALIGNED", v.is_aligned.into())
            .with("HAS_EXTRAS", self.has_extras.into())
    }
}

/// Returns the kernel that merges the splits.
pub(super) fn merge(has_lse: bool, dtype: u32, has_transforms: bool) -> Kernel {
    Kernel::new("attend_merge.wgsl")
        .flags(if has_lse { &["LSE"] } else { &[] })
        .with("DTYPE", dtype)
        .with("HAS_TRANSFORMS", has_transforms.into())
}

/// Lists every format with short and long rows, with and without extras, in every tile shape.
#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    use crate::params::FORMATS;
    let form = |format, head_dim, is_aligned| {
        let side = Side { format, head_dim, is_aligned };
        let rows = Rows { count: 4, is_narrow: true };
        Form { k: side, v: side, rows, has_extras: is_aligned }
    };
    let formats = FORMATS.iter().map(|format| format.kernel_code());
    let cases = formats.flat_map(|format| [form(format, 64, true), form(format, 256, false)]);
    let mixed =
        Form { v: Side { format: 1, head_dim: 128, is_aligned: true }, ..form(0, 192, true) };
    let shapes = [(4, true), (8, true), (8, false), (16, false)];
    let shapes = shapes.map(|(count, is_narrow)| Rows { count, is_narrow });
    let all = cases.chain([mixed]);
    let all = all.flat_map(|form| shapes.map(|rows| Form { rows, ..form }.kernel()));
    all.chain([merge(false, 0, false), merge(true, 2, true)]).collect()
}
