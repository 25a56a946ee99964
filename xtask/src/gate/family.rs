//! The kernels that the gate reads: their shapes, and the work of one trip of their main loops.
use std::collections::BTreeSet;
use std::fmt;

use anyhow::{Context, Result, bail};

use super::trip::{Pass, Work};

/// A decode or prefill kernel, by its name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Shape {
    pub(super) family: Family,
    pub(super) head_dim: u32,
}

/// A kernel's algorithm and stored format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Family {
    /// `decode.h`, in a format.
    Decode(Format),
    /// `prefill.h`: rows of the queries' type.
    PrefillPlain(Plain),
    /// `prefill_staged.h`, in a format: kernels of several formats have a main loop for each.
    PrefillStaged(Format),
    /// `prefill_coded.h`: any other format.
    PrefillCoded,
}

/// A stored format of decode kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Format {
    Plain(Plain),
    /// One-byte codes with a calibrated scale.
    E4m3,
    E5m2,
    Int8,
    /// The same with a scale per row.
    E4m3Row,
    E5m2Row,
    Int8Row,
    /// Codes of 4 bits with a scale per row.
    L4,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Plain {
    Bf16,
    F16,
}

/// Families by the names of their kernels, without the head dim.
pub(super) const FAMILIES: [(&str, Family); 19] = [
    ("decode_bf16", Family::Decode(Format::Plain(Plain::Bf16))),
    ("decode_f16", Family::Decode(Format::Plain(Plain::F16))),
    ("decode_e4m3", Family::Decode(Format::E4m3)),
    ("decode_e5m2", Family::Decode(Format::E5m2)),
    ("decode_int8", Family::Decode(Format::Int8)),
    ("decode_e4m3_row", Family::Decode(Format::E4m3Row)),
    ("decode_e5m2_row", Family::Decode(Format::E5m2Row)),
    ("decode_int8_row", Family::Decode(Format::Int8Row)),
    ("decode_l4", Family::Decode(Format::L4)),
    ("prefill_bf16", Family::PrefillPlain(Plain::Bf16)),
    ("prefill_f16", Family::PrefillPlain(Plain::F16)),
    ("prefill_codes", Family::PrefillStaged(Format::E4m3)),
    ("prefill_codes", Family::PrefillStaged(Format::E5m2)),
    ("prefill_codes", Family::PrefillStaged(Format::Int8)),
    ("prefill_rows", Family::PrefillStaged(Format::E4m3Row)),
    ("prefill_rows", Family::PrefillStaged(Format::E5m2Row)),
    ("prefill_rows", Family::PrefillStaged(Format::Int8Row)),
    ("prefill_l4", Family::PrefillStaged(Format::L4)),
    ("prefill_coded", Family::PrefillCoded),
];

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = FAMILIES.iter().find(|(_, family)| family == self);
        f.write_str(name.map_or("", |(name, _)| name))
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let format = match self.family {
            Family::PrefillStaged(Format::E4m3 | Format::E4m3Row) => " e4m3",
            Family::PrefillStaged(Format::E5m2 | Format::E5m2Row) => " e5m2",
            Family::PrefillStaged(Format::Int8 | Format::Int8Row) => " int8",
            _ => "",
        };
        write!(f, "{}{format}", self.kernel())
    }
}

impl Format {
    /// Returns the stored bytes of a row.
    fn row_bytes(self, head_dim: u32) -> u32 {
        match self {
            Self::Plain(_) => head_dim * 2,
            Self::E4m3 | Self::E5m2 | Self::Int8 => head_dim,
            Self::E4m3Row | Self::E5m2Row | Self::Int8Row => head_dim + 2,
            Self::L4 => head_dim / 2 + 2,
        }
    }

    /// Returns whether rows have a scale.
    fn is_scaled(self) -> bool {
        matches!(self, Self::E4m3Row | Self::E5m2Row | Self::Int8Row | Self::L4)
    }

    /// Returns the work of copying and decoding so many values of a thread in `prefill_staged.h`,
    /// which tells the formats of a kernel apart.
    fn staged(self, values: u32) -> Vec<(Work, u32)> {
        let chunks = if self == Self::L4 { values / 32 } else { values / 16 };
        let scales = u32::from(self.is_scaled());
        let mut work = vec![(Work::AsyncCopy, chunks + scales), (Work::WideStore, values / 8)];
        match self {
            Self::E4m3 | Self::E4m3Row => work.push((Work::FromE4m3, values / 2)),
            Self::Int8 | Self::Int8Row => work.push((Work::FromInt8, values / 2)),
            // Rows with scales are aligned by further ones.
            Self::E5m2 | Self::E5m2Row => {
                work.push((Work::Permutation, values / 2 + scales * values / 4));
            }
            Self::L4 | Self::Plain(_) => {}
        }
        work
    }

    /// Returns the bytes of a row in the ring buffer: where it is scaled, of the codes plus 16.
    fn row_stride(self, head_dim: u32) -> u32 {
        self.row_bytes(head_dim) + if self.is_scaled() { 14 } else { 0 }
    }
}

/// Tokens of a subtile of a decode kernel: one trip of a warp is K and V of one.
const DECODE_TOKENS: u32 = 32;

/// Shared memory of a multiprocessor of Hopper that a thread block may have.
const SHARED_BYTES: u32 = 227 * 1024;

impl Shape {
    /// Returns the name of the kernel.
    pub(super) fn kernel(&self) -> String {
        format!("{}_{}", self.family, self.head_dim)
    }

    /// Parses the name of a kernel, which has a shape for each of its formats.
    pub(super) fn parse(name: &str) -> Result<Vec<Self>> {
        let (family, head_dim) = name.rsplit_once('_').unwrap_or((name, ""));
        let families: Vec<_> = FAMILIES.iter().filter(|(known, _)| *known == family).collect();
        if families.is_empty() {
            bail!("{name}: unknown family");
        }
        let head_dim = head_dim.parse().with_context(|| format!("{name}: no head dim"))?;
        if head_dim == 0 || head_dim % 16 != 0 || head_dim > 1024 {
            bail!("{name}: head dim {head_dim}");
        }
        Ok(families.into_iter().map(|(_, family)| Self { family: *family, head_dim }).collect())
    }

    /// Returns the passes of one trip.
    pub(super) fn passes(&self) -> Vec<Pass> {
        let dim = self.head_dim;
        match self.family {
            Family::Decode(format) => {
                // 32 tokens by 16 rows: for K, 4 products of 8 tokens for each 16 columns; for V, 2
                // products of 16 tokens for each 8 columns.
                let (products, chunks) = (dim / 4, format.row_stride(dim) / 16);
                let stages = self.stages().unwrap_or(2);
                let common = [
                    (Work::WaitFor(stages - 2), 1),
                    (Work::AsyncCopy, chunks),
                    (Work::Product, products),
                ];
                let softmax = [(Work::TableRead, 1), (Work::Exponential, DECODE_TOKENS / 2)];
                let of_k = common.iter().chain(&softmax).copied().collect();
                vec![
                    Pass { work: of_k, is_without_exponentials: false },
                    Pass { work: common.to_vec(), is_without_exponentials: true },
                ]
            }
            Family::PrefillPlain(_) | Family::PrefillStaged(_) | Family::PrefillCoded => {
                let (tiles, tokens) = self.prefill_tile();
                let products = 2 * (tokens / 8) * (dim / 16) * tiles;
                // Values of K and V of a thread.
                let values = 2 * tokens * dim / (PREFILL_WARPS * 32);
                let mut work =
                    vec![(Work::Product, products), (Work::Exponential, tiles * tokens / 2)];
                match self.family {
                    Family::PrefillPlain(_) => work.push((Work::AsyncCopy, values / 8)),
                    Family::PrefillStaged(format) => work.extend(format.staged(values)),
                    // A function decodes codes: it is no part of the trip.
                    _ => {}
                }
                vec![Pass { work, is_without_exponentials: false }]
            }
        }
    }

    /// Returns the 16-row matrices of a warp and the tokens of a KV tile.
    fn prefill_tile(&self) -> (u32, u32) {
        let is_staged = matches!(self.family, Family::PrefillStaged(_));
        let tokens = match self.head_dim {
            dim if is_staged => 4096 / dim,
            ..=128 => 64,
            _ => 32,
        };
        let has_two = self.head_dim <= 128 && self.family != Family::PrefillCoded;
        (if has_two { 2 } else { 1 }, tokens)
    }

    /// Returns the stages of a decode kernel's ring buffer, as `kv_decode_stages` in `decode.h`.
    fn stages(&self) -> Option<u32> {
        let Family::Decode(format) = self.family else { return None };
        let stage = self.warps_of_block() * DECODE_TOKENS * format.row_stride(self.head_dim);
        let own = self.head_dim * 32;
        let queries = if format.is_scaled() {
            2 * own
        } else if self.head_dim >= 192 {
            own
        } else {
            0
        };
        let halved = ((SHARED_BYTES - 1024) / 2).saturating_sub(queries) / stage;
        let stages = if halved >= 2 { halved } else { (SHARED_BYTES - queries) / stage };
        Some(stages.clamp(2, 8))
    }

    fn warps_of_block(&self) -> u32 {
        match self.family {
            Family::Decode(_) if self.head_dim >= 192 => 2,
            _ => PREFILL_WARPS,
        }
    }

    /// Returns the warps that share a scheduler: two thread blocks share a multiprocessor, which
    /// has four schedulers.
    pub(super) fn warps(&self) -> u32 {
        self.warps_of_block() * 2 / 4
    }

    /// Returns the bytes of K and V that a warp reads in one trip; for prefill, its part of the
    /// tile that the warps of a block share, and for prefill of codes, those of one byte a value.
    pub(super) fn bytes(&self) -> u32 {
        match self.family {
            Family::Decode(format) => 2 * DECODE_TOKENS * format.row_bytes(self.head_dim),
            Family::PrefillPlain(_) => {
                2 * self.prefill_tile().1 * self.head_dim * 2 / PREFILL_WARPS
            }
            Family::PrefillStaged(format) => {
                2 * self.prefill_tile().1 * format.row_bytes(self.head_dim) / PREFILL_WARPS
            }
            Family::PrefillCoded => 2 * self.prefill_tile().1 * self.head_dim / PREFILL_WARPS,
        }
    }

    /// Returns how often 64 query rows see 64 tokens in the trips of two thread blocks of prefill.
    pub(super) fn squares(&self) -> f64 {
        let (tiles, tokens) = self.prefill_tile();
        f64::from(2 * tiles * tokens) / 64.0
    }

    /// Returns whether it is a decode kernel, which is compared with memory.
    pub(super) fn is_decode(&self) -> bool {
        matches!(self.family, Family::Decode(_))
    }
}

const PREFILL_WARPS: u32 = 4;

/// Returns the kernels of a family that a source file defines.
pub(super) fn defined(source: &str) -> Result<BTreeSet<Shape>> {
    let macros = ["KV_DECODE(", "KV_KERNEL("];
    let names = source.lines().filter_map(|line| {
        let rest = macros.iter().find_map(|known| line.strip_prefix(known))?;
        rest.split(',').next().map(str::trim)
    });
    let read = |name: &&str| name.starts_with("decode_") || name.starts_with("prefill_");
    let shapes: Result<Vec<_>> = names.filter(read).map(Shape::parse).collect();
    Ok(shapes?.into_iter().flatten().collect())
}
