//! Vectors of stored formats: decode tables, encodings, llama.cpp's blocks, codebooks, a recording
//! of a model's K, V and Q.
//!
//! JSON files name their schema. CSV files carry none and are recognised by their header, and
//! decode tables by the file's name. A column that no reader knows is an error, because it may hold
//! values that should be compared.
mod csv;
mod decode;
mod encode;
mod ggml;
mod lloyd;
mod planes;
mod real;

use std::path::Path;

use kv_core::backend::AnyBackend;
use serde_json::Value;

use crate::case::CaseResult;
use csv::Table;

/// The content of one trial.
#[derive(Debug)]
pub(super) enum Quant {
    Decode(decode::Codes),
    Encode(encode::Inputs),
    Ggml(ggml::Blocks),
    Lloyd(lloyd::Codebook),
    Real(real::Recording),
}

/// A trial of a file, with the name that it adds to the file's.
pub(super) type Trial = (Option<String>, Content);

/// The outcome of reading a trial.
#[derive(Debug)]
pub(super) enum Content {
    Run(Quant),
    Skip(String),
    Bad(String),
}

impl From<Result<Quant, String>> for Content {
    fn from(read: Result<Quant, String>) -> Self {
        match read {
            Ok(quant) => Self::Run(quant),
            Err(why) => Self::Bad(why),
        }
    }
}

/// Reads a CSV file called `name`.
pub(super) fn read_csv(name: &str, bytes: &[u8]) -> Result<Vec<Trial>, String> {
    let table = Table::read(bytes)?;
    let quant = match table.columns().first().map(String::as_str) {
        Some("code_hex") => Quant::Decode(decode::of_csv(name, &table)?),
        Some("f32_bits") => Quant::Encode(encode::of_csv(&table)?),
        _ => return Err(format!("a CSV file of an unknown header: {}", table.columns().join(","))),
    };
    Ok(vec![(None, Content::Run(quant))])
}

/// Reads a JSON file of schema `quant-...`; `None` for a schema that is not one of these.
pub(super) fn read_json(
    schema: &str,
    path: &Path,
    value: &Value,
) -> Option<Result<Vec<Trial>, String>> {
    Some(match schema {
        "quant-decode-tables/1" => decode::of_json(value),
        "quant-ggml-blocks/1" => ggml::read(value),
        "quant-lloyd-max-gaussian/1" => lloyd::read(value),
        "quant-meta/1" => {
            real::read(path, value).map(|one| vec![(None, Content::Run(Quant::Real(one)))])
        }
        _ => return None,
    })
}

/// Runs one trial.
pub(super) fn run(backend: &AnyBackend, quant: &Quant) -> CaseResult {
    match quant {
        Quant::Decode(codes) => decode::run(backend, codes),
        Quant::Encode(inputs) => encode::run(backend, inputs),
        Quant::Ggml(blocks) => ggml::run(backend, blocks),
        Quant::Lloyd(codebook) => lloyd::run(codebook),
        Quant::Real(recording) => real::run(backend, recording),
    }
}

/// Returns the members of a JSON object except the schema; an empty object is an error.
fn members<'v>(
    value: &'v Value,
    what: &str,
) -> Result<impl Iterator<Item = (&'v String, &'v Value)>, String> {
    let object = value.as_object().ok_or("no JSON object")?;
    let members = || object.iter().filter(|(name, _)| *name != "schema");
    match members().next() {
        None => Err(format!("does not fit its schema: no {what}")),
        Some(_) => Ok(members()),
    }
}

/// Reads a hexadecimal number of exactly `digits` digits after `0x`.
fn hex(text: &str, digits: usize) -> Result<u32, String> {
    let number = text.strip_prefix("0x").filter(|rest| rest.len() == digits);
    number
        .and_then(unsigned_hex)
        .ok_or_else(|| format!("{text:?} is not a hexadecimal number of {digits} digits after 0x"))
}

/// Reads digits alone: no sign, which Rust's parser would accept.
fn unsigned_hex(digits: &str) -> Option<u32> {
    let plain = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    u32::from_str_radix(digits, 16).ok().filter(|_| plain)
}

/// Reads f32 values from their bits, eight hexadecimal digits each.
fn f32_list(text: &str) -> Result<Vec<f32>, String> {
    let parts = pieces(text, 8)?;
    let bits = parts.iter().map(|part| unsigned_hex(part).map(f32::from_bits));
    bits.collect::<Option<_>>().ok_or_else(|| "f32 bits are not hexadecimal digits".to_owned())
}

/// Reads bytes from two hexadecimal digits each.
fn byte_list(text: &str) -> Result<Vec<u8>, String> {
    let parts = pieces(text, 2)?;
    let bytes = parts.iter().map(|part| u8::try_from(unsigned_hex(part)?).ok());
    bytes.collect::<Option<_>>().ok_or_else(|| "bytes are not hexadecimal digits".to_owned())
}

fn pieces(text: &str, digits: usize) -> Result<Vec<&str>, String> {
    let whole = text.is_ascii() && text.len().is_multiple_of(digits);
    if !whole {
        return Err(format!("{} characters are not numbers of {digits} digits", text.len()));
    }
    (0..text.len() / digits)
        .map(|i| text.get(i * digits..(i + 1) * digits).ok_or_else(|| "no ASCII".to_owned()))
        .collect()
}
