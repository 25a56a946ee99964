//! The shapes that are compared, and their tensors.
use std::fmt;
use std::path::Path;

use anyhow::{Context, Result};
use half::bf16;
use kv::{DType, KvFormat};
use serde::Serialize;

/// Number of kv heads in every case.
const KV_HEADS: u32 = 8;
/// Upper limit of K and V of a case. Each contender has its own copy, so memory must hold several
/// times this.
const BYTES_MAX: u64 = 4 << 30;

/// One layer of a batch in which all sequences have the same length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) batch: u32,
    /// Tokens of each sequence, including those of the queries.
    pub(crate) context: u32,
    /// New tokens per sequence: 1 in decode, all of them in prefill.
    pub(crate) q_len: u32,
    pub(crate) q_heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) format: KvFormat,
}

impl Case {
    fn decode(format: KvFormat, batch: u32, context: u32, group: u32, head_dim: u32) -> Self {
        let q_heads = KV_HEADS * group;
        Self { batch, context, q_len: 1, q_heads, kv_heads: KV_HEADS, head_dim, format }
    }

    fn prefill(format: KvFormat, context: u32, head_dim: u32) -> Self {
        Self { q_len: context, ..Self::decode(format, 1, context, 4, head_dim) }
    }

    pub(crate) fn is_decode(&self) -> bool {
        self.q_len == 1
    }

    /// Returns the element type of all tensors; only quantised formats are stored in another.
    pub(crate) fn dtype(&self) -> DType {
        if self.format == KvFormat::Bf16 { DType::Bf16 } else { DType::F32 }
    }

    pub(crate) fn scale(&self) -> f32 {
        1.0 / f32::from(u16::try_from(self.head_dim).unwrap_or(u16::MAX)).sqrt()
    }

    /// Returns the stored bytes of K and V.
    pub(crate) fn bytes(&self) -> u64 {
        let rows = u64::from(self.batch) * u64::from(self.context) * u64::from(self.kv_heads);
        2 * rows * self.format.row_bytes(self.head_dim)
    }

    /// Returns the floating-point operations of both products; in a prefill, a query sees half of
    /// the keys on average.
    pub(crate) fn flop(&self) -> u64 {
        let pairs = if self.is_decode() {
            u64::from(self.context)
        } else {
            u64::from(self.context) * (u64::from(self.context) + 1) / 2
        };
        4 * pairs * u64::from(self.batch) * u64::from(self.q_heads) * u64::from(self.head_dim)
    }

    pub(crate) fn flop_f64(&self) -> f64 {
        u32::try_from(self.flop() / 1024).map_or(f64::INFINITY, |kilo| f64::from(kilo) * 1024.0)
    }

    /// Returns the bytes of a table of scores in f32.
    pub(crate) fn scores_bytes(&self) -> u64 {
        let rows = u64::from(self.batch) * u64::from(self.q_heads) * u64::from(self.q_len);
        rows * u64::from(self.context) * 4
    }

    /// Returns the largest allowed error: the norm of the difference from our outputs over the norm
    /// of our outputs. Wrong heads, masks or scales give about 1. In 16 bits, a peer may round
    /// weights and partial sums to its element type.
    pub(crate) fn error_max(&self) -> f64 {
        if self.format == KvFormat::F32 { 1e-4 } else { 5e-2 }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format, batch, context, head_dim, .. } = self;
        let group = self.q_heads / self.kv_heads;
        if self.is_decode() {
            write!(f, "decode/{format}/b{batch}/c{context}/gqa{group}/d{head_dim}")
        } else {
            write!(f, "prefill/{format}/t{context}/gqa{group}/d{head_dim}")
        }
    }
}

/// Returns a cross through the middle of the grid, or the full grid.
pub(crate) fn cases(is_full: bool) -> Vec<Case> {
    const CONTEXTS: [u32; 3] = [512, 4096, 32_768];
    let mut cases = Vec::new();
    for format in [KvFormat::Bf16, KvFormat::F32] {
        for batch in [1, 16] {
            for context in CONTEXTS {
                for group in [1, 4, 8] {
                    for head_dim in [64, 128] {
                        let away = [batch != 16, context != 4096, group != 4, head_dim != 128];
                        let steps = away.into_iter().filter(|is_away| *is_away).count();
                        if is_full || steps <= 1 {
                            cases.push(Case::decode(format, batch, context, group, head_dim));
                        }
                    }
                }
            }
        }
        for tokens in [512, 2048, 4096] {
            for head_dim in [64, 128] {
                if is_full || head_dim == 128 {
                    cases.push(Case::prefill(format, tokens, head_dim));
                }
            }
        }
    }
    // Formats of few bits, which llama.cpp has and no other peer.
    for context in CONTEXTS {
        if is_full || context == 4096 {
            cases.push(Case::decode(KvFormat::Q8_0, 16, context, 4, 128));
        }
    }
    cases.retain(|case| case.bytes() < BYTES_MAX);
    cases
}

/// Values of an element type, in aligned memory.
pub(crate) struct Values {
    pub(crate) dtype: DType,
    words: Vec<u32>,
}

impl Values {
    /// Makes `count` pseudo-random values between -`size` and `size`; `count` is even.
    fn random(dtype: DType, count: u64, size: f32, seed: u32) -> Result<Self> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let [_, _, low, high] = state.to_le_bytes();
            f32::from(i16::from_le_bytes([low, high])) / 32768.0 * size
        };
        let count = usize::try_from(count)?;
        let words = match dtype {
            DType::F32 => (0..count).map(|_| next().to_bits()).collect(),
            DType::Bf16 => {
                let mut half = || u32::from(bf16::from_f32(next()).to_bits());
                (0..count / 2).map(|_| half() | half() << 16).collect()
            }
            other => anyhow::bail!("no values are made in {other}"),
        };
        Ok(Self { dtype, words })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// Transposes rows with axes `[a, b, row]` to `[b, a, row]`.
    fn transposed(&self, [a, b, row_bytes]: [usize; 3]) -> Self {
        let row = row_bytes / 4;
        let rows = (0..b).flat_map(|at_b| (0..a).map(move |at_a| (at_a * b + at_b) * row));
        let mut words = Vec::with_capacity(self.words.len());
        rows.for_each(|at| words.extend_from_slice(&self.words[at..at + row]));
        Self { dtype: self.dtype, words }
    }

    /// Returns `len` words from `at` on.
    fn part(&self, at: usize, len: usize) -> Self {
        Self { dtype: self.dtype, words: self.words[at..at + len].to_vec() }
    }
}

/// `q` of a case as `[batch, q_heads, q_len, head_dim]`, `k` and `v` as `[batch, kv_heads, context,
/// head_dim]`.
pub(crate) struct Tensors {
    pub(crate) q: Values,
    pub(crate) k: Values,
    pub(crate) v: Values,
}

impl Tensors {
    /// Makes random tensors. Queries are large enough that softmax weights differ, as in a model.
    pub(crate) fn random(case: &Case) -> Result<Self> {
        let rows = |heads: u32, tokens: u32| {
            u64::from(case.batch) * u64::from(heads) * u64::from(tokens) * u64::from(case.head_dim)
        };
        let kv = rows(case.kv_heads, case.context);
        Ok(Self {
            q: Values::random(case.dtype(), rows(case.q_heads, case.q_len), 4.0, 1)?,
            k: Values::random(case.dtype(), kv, 1.0, 2)?,
            v: Values::random(case.dtype(), kv, 1.0, 3)?,
        })
    }

    /// Saves the tensors to files for contenders in other processes.
    pub(crate) fn save(&self, folder: &Path) -> Result<()> {
        for (name, values) in [("q", &self.q), ("k", &self.k), ("v", &self.v)] {
            let path = folder.join(name);
            std::fs::write(&path, values.bytes())
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(())
    }

    /// Returns queries as `[batch * q_len, q_heads, head_dim]`; in a batch, each sequence has one
    /// query.
    pub(crate) fn q_rows(&self, case: &Case) -> Result<Values> {
        let [heads, tokens] = sizes([case.q_heads, case.q_len])?;
        if case.is_decode() {
            return Ok(self.q.part(0, self.q.words.len()));
        }
        Ok(self.q.transposed([heads, tokens, row_bytes(case)?]))
    }

    /// Returns K and V of one sequence as `[context, kv_heads, head_dim]`.
    pub(crate) fn kv_rows(&self, case: &Case, sequence: u32) -> Result<[Values; 2]> {
        let [heads, tokens, at] = sizes([case.kv_heads, case.context, sequence])?;
        let row = row_bytes(case)?;
        let words = heads * tokens * row / 4;
        Ok([&self.k, &self.v]
            .map(|all| all.part(at * words, words).transposed([heads, tokens, row])))
    }
}

fn row_bytes(case: &Case) -> Result<usize> {
    Ok(usize::try_from(case.head_dim)? * case.dtype().size())
}

pub(crate) fn sizes<const N: usize>(numbers: [u32; N]) -> Result<[usize; N]> {
    let mut sizes = [0; N];
    for (size, number) in sizes.iter_mut().zip(numbers) {
        *size = usize::try_from(number)?;
    }
    Ok(sizes)
}

/// The description of a case for another process.
#[derive(Serialize)]
pub(crate) struct Description<'a> {
    dir: &'a Path,
    batch: u32,
    context: u32,
    q_len: u32,
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    dtype: String,
    format: String,
}

impl<'a> Description<'a> {
    pub(crate) fn new(case: &Case, dir: &'a Path) -> Self {
        Self {
            dir,
            batch: case.batch,
            context: case.context,
            q_len: case.q_len,
            q_heads: case.q_heads,
            kv_heads: case.kv_heads,
            head_dim: case.head_dim,
            dtype: case.dtype().to_string(),
            format: case.format.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cross_is_a_part_of_the_grid() {
        let (cross, full) = (cases(false), cases(true));
        assert!(cross.iter().all(|case| full.contains(case)) && cross.len() < full.len());
        let mut names: Vec<_> = full.iter().map(ToString::to_string).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), full.len());
        assert!(names.contains(&"decode/bf16/b16/c32768/gqa8/d128".to_owned()));
        assert!(names.contains(&"prefill/f32/t4096/gqa4/d128".to_owned()));
    }

    #[test]
    fn rows_are_transposed_whole() {
        let values = Values { dtype: DType::F32, words: (0..12).collect() };
        let transposed = values.transposed([2, 3, 8]);
        assert_eq!(transposed.words, [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]);
        assert_eq!(transposed.transposed([3, 2, 8]).words, values.words);
    }
}
