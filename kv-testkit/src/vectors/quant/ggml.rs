//! `quant-ggml-blocks/1`: rows, and the blocks that llama.cpp's reference quantisers make of them.
use std::collections::BTreeMap;

use kv_core::KvFormat;
use kv_core::backend::AnyBackend;
use kv_quant::row::{decode_row, encode_row};
use serde::Deserialize;
use serde_json::Value;

use super::{Content, Quant, Trial, byte_list, f32_list, planes};
use crate::case::{At, CaseError, CaseResult, Outcome, ensure, same};

/// All rows of a file in the blocks of one format.
#[derive(Debug)]
pub(in crate::vectors) struct Blocks {
    kind: Kind,
    rows: Vec<Row>,
}

/// The kind of the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A stored format of this library, byte for byte.
    Stored(KvFormat),
    /// NVFP4 in another byte order, only decoded: ggml chooses scales without a scale per tensor.
    Nvfp4,
}

#[derive(Debug)]
struct Row {
    name: String,
    values: Vec<f32>,
    blocks: Vec<u8>,
    decoded: Vec<f32>,
}

#[derive(Debug, Deserialize)]
struct File {
    meta: Meta,
    rows: Vec<RowText>,
}

#[derive(Debug, Deserialize)]
struct Meta {
    block_bytes: BTreeMap<String, usize>,
    block_elems: BTreeMap<String, usize>,
}

#[derive(Debug, Deserialize)]
struct RowText {
    name: String,
    x_f32_bits: String,
    formats: BTreeMap<String, FormatText>,
}

#[derive(Debug, Deserialize)]
struct FormatText {
    c_ref_block_hex: String,
    c_ref_dequant_f32_bits: String,
}

/// Returns bytes and values of one block in this library.
fn block(kind: Kind) -> (usize, usize) {
    match kind {
        Kind::Stored(format) => (format.row_bytes(32) as usize, 32),
        Kind::Nvfp4 => (36, 64),
    }
}

/// Makes a trial for each format that the file or one of its rows names.
pub(super) fn read(value: &Value) -> Result<Vec<Trial>, String> {
    let file =
        File::deserialize(value).map_err(|error| format!("does not fit its schema: {error}"))?;
    if file.rows.is_empty() {
        return Err("does not fit its schema: no rows".to_owned());
    }
    let of_rows = file.rows.iter().flat_map(|row| row.formats.keys());
    let mut names: Vec<_> = file.meta.block_bytes.keys().chain(of_rows).cloned().collect();
    names.sort();
    names.dedup();
    let one = |name: String| {
        let kind = match name.as_str() {
            "q8_0" => Kind::Stored(KvFormat::Q8_0),
            "q4_0" => Kind::Stored(KvFormat::Q4_0),
            "nvfp4" => Kind::Nvfp4,
            _ => return (Some(name), Content::Skip("not a stored format here".to_owned())),
        };
        let blocks = file.blocks(&name, kind).map(Quant::Ggml);
        (Some(name), Content::from(blocks))
    };
    Ok(names.into_iter().map(one).collect())
}

impl File {
    fn blocks(&self, name: &str, kind: Kind) -> Result<Blocks, String> {
        let (bytes, elements) = block(kind);
        let said = (self.meta.block_bytes.get(name), self.meta.block_elems.get(name));
        if said != (Some(&bytes), Some(&elements)) {
            return Err(format!(
                "a block is {said:?} bytes and values, expected {bytes}, {elements}"
            ));
        }
        let row = |row: &RowText| -> Result<Row, String> {
            let text = row.formats.get(name).ok_or("the format is missing")?;
            let values = f32_list(&row.x_f32_bits)?;
            let blocks = byte_list(&text.c_ref_block_hex)?;
            let decoded = f32_list(&text.c_ref_dequant_f32_bits)?;
            let whole = !values.is_empty()
                && values.len() % elements == 0
                && blocks.len() == values.len() / elements * bytes
                && decoded.len() == values.len();
            if !whole {
                return Err(format!(
                    "{} values, {} bytes, {} decoded values are not whole blocks",
                    values.len(),
                    blocks.len(),
                    decoded.len()
                ));
            }
            Ok(Row { name: row.name.clone(), values, blocks, decoded })
        };
        let with_name =
            |text: &RowText| row(text).map_err(|why| format!("row {}: {why}", text.name));
        Ok(Blocks { kind, rows: self.rows.iter().map(with_name).collect::<Result<_, _>>()? })
    }
}

/// Encodes and decodes every row.
pub(super) fn run(backend: &AnyBackend, blocks: &Blocks) -> CaseResult {
    for row in &blocks.rows {
        match blocks.kind {
            Kind::Stored(format) => row.check(backend, format),
            Kind::Nvfp4 => row.check_nvfp4(backend),
        }
        .at(format!("row {}", row.name))?;
    }
    Ok(Outcome::Holds)
}

impl Row {
    /// Checks the blocks on the host and on the device.
    fn check(&self, backend: &AnyBackend, format: KvFormat) -> Result<(), CaseError> {
        let mut row = vec![0xAA; self.blocks.len()];
        encode_row(format, 1.0, &self.values, &mut row);
        self.check_blocks(format, &row)?;
        let mut decoded = vec![0.0; self.values.len()];
        decode_row(format, 1.0, &self.blocks, &mut decoded);
        compare(&decoded, &self.decoded)?;
        let dim = self.values.len();
        let row = planes::encoded(backend, format, dim, &self.values)?;
        self.check_blocks(format, &row).at("on the device")?;
        let decoded = planes::decoded(backend, format, dim, &self.blocks)?;
        compare(&decoded, &self.decoded).at("on the device")
    }

    fn check_blocks(&self, format: KvFormat, row: &[u8]) -> Result<(), CaseError> {
        let size = block(Kind::Stored(format)).0;
        let parts = row.chunks(size).zip(self.blocks.chunks(size)).zip(self.values.chunks(32));
        for ((got, expected), values) in parts {
            if half::f16::from_le_bytes([expected[0], expected[1]]).is_finite() {
                same("block", got, expected)?;
            } else {
                saturated(format, got, values)?;
            }
        }
        Ok(())
    }

    /// Checks that the same numbers in this library's byte order decode to the same values.
    fn check_nvfp4(&self, backend: &AnyBackend) -> Result<(), CaseError> {
        let dim = self.values.len() as u32;
        let mut row = vec![0; KvFormat::Nvfp4.row_bytes(dim) as usize];
        let scales = KvFormat::Nvfp4.scales_begin(dim) as usize;
        for (block, nth) in self.blocks.chunks(36).zip(0..) {
            for (part, group) in block[4..].chunks(8).zip(nth * 4..) {
                // ggml reads the code of NaN as 0.
                let scale = block[group % 4];
                row[scales + group] = if scale == 0x7F { 0 } else { scale };
                // Values 0..8 of 16 are in the low nibbles, 8..16 in the high ones.
                let code = |i: usize| (part[i % 8] >> (i / 8 * 4)) & 15;
                for pair in 0..8 {
                    row[group * 8 + pair] = code(2 * pair) | code(2 * pair + 1) << 4;
                }
            }
        }
        let mut decoded = vec![0.0; self.values.len()];
        decode_row(KvFormat::Nvfp4, 1.0, &row, &mut decoded);
        compare(&decoded, &self.decoded)?;
        let decoded = planes::decoded(backend, KvFormat::Nvfp4, self.values.len(), &row)?;
        compare(&decoded, &self.decoded).at("on the device")
    }
}

/// Checks blocks whose scale overflows f16, which llama.cpp loses. This library uses the largest
/// scale, and values as near as its steps allow.
fn saturated(format: KvFormat, block: &[u8], values: &[f32]) -> Result<(), CaseError> {
    let scale = half::f16::from_le_bytes([block[0], block[1]]);
    same("magnitude of the scale", scale.to_f32().abs(), half::f16::MAX.to_f32())?;
    let mut decoded = vec![0.0; values.len()];
    decode_row(format, 1.0, block, &mut decoded);
    let step = half::f16::MAX.to_f32();
    let reach = if format == KvFormat::Q8_0 { 127.0 } else { 8.0 } * step;
    for (got, x) in decoded.iter().zip(values) {
        let near = (got - x.clamp(-reach, reach)).abs() <= step;
        ensure(near, || format!("{x:e} is stored as {got:e}, with steps of {step:e}"))?;
    }
    Ok(())
}

/// Compares decoded values; zeros of either sign are equal. An infinite scale times a code of 0 is
/// NaN in both.
fn compare(got: &[f32], expected: &[f32]) -> Result<(), CaseError> {
    for ((got, expected), index) in got.iter().zip(expected).zip(0..) {
        let same = got == expected || (got.is_nan() && expected.is_nan());
        ensure(same, || format!("value {index} decodes to {got:e}, expected {expected:e}"))?;
    }
    Ok(())
}
