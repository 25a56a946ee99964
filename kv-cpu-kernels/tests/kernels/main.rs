//! Every loop on every instruction set that this CPU has, and the emulated one, against plain code.
//! Seeds are fixed.
//!
//! These are integration tests so that the kernels are compiled once: unit tests would compile the
//! crate, with every instance of every loop, a second time.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::float_cmp,
    reason = "tests: numbers are small, and what is compared is exact"
)]
mod amx;
mod formats;
mod pv;
mod qk;
mod softmax;
mod tensors;

use kv_format::KvFormat;

use kv_cpu_kernels::{Isa, Kernels, KeyRows, PrefetchTarget, RowLayout, TileRows};

/// The kernels of every instruction set of this CPU, and the emulated ones.
fn all_kernels() -> impl Iterator<Item = Kernels> {
    let of = |isa| Kernels::new(isa, PrefetchTarget::L2Twice).unwrap();
    Isa::available().map(of).chain([Kernels::emulated()])
}

/// Lengths of rows: less than a group of 32, groups and a rest, one to nine pairs of groups.
const DIMS: [usize; 12] = [8, 16, 24, 32, 40, 64, 80, 96, 112, 128, 192, 576];
/// Numbers of rows: those of register tiles, and some that need several tiles.
const ROWS: [usize; 7] = [1, 2, 3, 4, 5, 8, 13];
/// Numbers of tokens: less than a register tile, a tile, several.
const TOKENS: [usize; 7] = [1, 2, 3, 7, 15, 16, 37];
const ROWS_MAX: usize = 13;
const TOKENS_MAX: usize = 37;

/// A seeded generator (splitmix64).
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed)
    }
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Between -1 and 1.
    fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

/// A stored format, and whether its values are read in pairs.
type Kind = (KvFormat, bool);

/// Every stored format, and bf16 in pairs.
fn kinds() -> impl Iterator<Item = Kind> {
    KvFormat::all().map(|format| (format, false)).chain([(KvFormat::Bf16, true)])
}

/// Rows of K or V with bytes between them, which are NaN in most formats. Memory ends with the
/// last.
struct Stored {
    layout: RowLayout,
    bytes: Box<[u8]>,
    stride: usize,
    /// Values of the rows by definition, in the order in which kernels take them.
    values: Vec<Vec<f32>>,
}

impl Stored {
    fn new(random: &mut Random, (format, in_pairs): Kind, dim: usize, count: usize) -> Self {
        let rows = (0..count).map(|_| random.units(dim)).collect();
        Self::of(rows, (format, in_pairs), dim % 3 * 8)
    }

    /// Some rows, with `gap` bytes between them.
    fn of(rows: Vec<Vec<f32>>, (format, in_pairs): Kind, gap: usize) -> Self {
        let dim = rows[0].len();
        let layout = RowLayout::of(format, dim as u32).unwrap();
        let layout = if in_pairs { layout.in_pairs() } else { layout };
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for row in rows {
            let (mut encoded, mut decoded) = (vec![0; layout.bytes()], vec![0.0; dim]);
            kv_format::row::encode_row(format, 1.0, &row, &mut encoded);
            kv_format::row::decode_row(format, 1.0, &encoded, &mut decoded);
            if in_pairs {
                split(&mut decoded);
            }
            bytes.extend(encoded);
            bytes.extend(std::iter::repeat_n(0xff, gap));
            values.push(decoded);
        }
        bytes.truncate(bytes.len() - gap);
        Self { layout, stride: layout.bytes() + gap, bytes: bytes.into(), values }
    }

    /// The last rows, after which memory ends.
    fn last(&self, count: usize) -> KeyRows<'_> {
        let begin = (self.values.len() - count) * self.stride;
        KeyRows::new(&self.bytes[begin..], self.stride, count, &self.layout)
    }
    /// Returns the values of the last rows.
    fn last_values(&self, count: usize) -> &[Vec<f32>] {
        &self.values[self.values.len() - count..]
    }
    /// Scales of the last rows, for scores and weights, padded to a register tile.
    fn scales(&self, kernels: Kernels, count: usize) -> Vec<f32> {
        let mut scales = vec![1.0; count.next_multiple_of(16)];
        if self.layout.has_scale() {
            kernels.row_scales(&self.last(count), &mut scales);
        }
        let factor = kernels.factor(self.layout.encoding());
        scales.iter().map(|scale| scale * factor).collect()
    }
}

/// The rows as a tile of several runs: one row, none, five, and the others.
fn runs_of(rows: KeyRows<'_>) -> [KeyRows<'_>; 4] {
    let (one, six) = (rows.len().min(1), rows.len().min(6));
    [0..one, one..one, one..six, six..rows.len()].map(|run| rows.slice(run))
}

/// Even values of whole groups of 32 before odd ones.
fn split(row: &mut [f32]) {
    for group in row.as_chunks_mut::<32>().0 {
        let from = *group;
        for (i, value) in group.iter_mut().enumerate() {
            *value = from[i % 16 * 2 + i / 16];
        }
    }
}

/// Returns whether a value equals another up to the rounding of a sum of `terms` products in `f32`,
/// whose magnitudes add up to `size`.
fn is_near(got: f32, expected: f64, (size, terms): (f64, usize)) -> bool {
    let allowed = f64::from(f32::EPSILON) * size * (4.0 + (terms as f64).sqrt());
    (f64::from(got) - expected).abs() <= allowed
}

/// A dot product, and the sum of its terms' magnitudes.
fn dot(a: &[f32], b: &[f32]) -> (f64, f64) {
    let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()))
}
