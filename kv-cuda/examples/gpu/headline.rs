//! The most important measures, run first and within two minutes, in case the run breaks off.
use kv_core::{KvFormat, ScaleGroup, Scaling};

use crate::bench::{Bench, Result};
use crate::{decode, moves, prefill};

const E4M3: KvFormat = KvFormat::Fp8E4m3(Scaling::Tensor);

/// Decode steps with 8 query heads for each kv head: formats, batches, contexts.
const DECODE: [(KvFormat, u32, u32); 8] = [
    (KvFormat::Bf16, 64, 8192),
    (E4M3, 64, 8192),
    (KvFormat::Bf16, 1, 8192),
    (KvFormat::Bf16, 256, 1024),
    (KvFormat::Bf16, 4, 131_072),
    (KvFormat::Int8(Scaling::Row), 64, 8192),
    (KvFormat::L4(ScaleGroup::Row), 64, 8192),
    (E4M3, 1, 8192),
];
/// Prompt lengths.
const PREFILL: [u32; 2] = [4096, 16384];
/// Formats, batches, and new tokens of each sequence.
const APPEND: [(KvFormat, u32, u32); 2] = [(KvFormat::Bf16, 64, 1), (E4M3, 1, 16384)];

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    bench.set_headline(true);
    let scaled = |bench: &Bench, number: u32, tiny: u32| if bench.is_tiny { tiny } else { number };
    for (format, batch, context) in DECODE {
        let (batch, context) = (scaled(bench, batch, 1), scaled(bench, context, 30));
        let shape = decode::shape(bench, format, (16, batch, context));
        decode::with_groups(bench, shape, &[8])?;
    }
    for tokens in PREFILL {
        let tokens = scaled(bench, tokens, 20);
        prefill::one(bench, prefill::whole(bench, tokens))?;
    }
    for (format, batch, new) in APPEND {
        let (batch, new) = (scaled(bench, batch, 2), scaled(bench, new, 3));
        moves::append(bench, format, (batch, new))?;
    }
    bench.set_headline(false);
    Ok(())
}

/// Returns whether a measure is a headline.
pub(crate) fn has(name: &str) -> bool {
    let decode =
        |(format, batch, context)| format!("decode/{format}/block16/gqa8/b{batch}/c{context}");
    let prefill = |tokens| format!("prefill/bf16/gqa4/t{tokens}");
    let append = |(format, batch, new)| format!("append/{format}/b{batch}/t{new}");
    DECODE.into_iter().map(decode).any(|own| own == name)
        || PREFILL.into_iter().map(prefill).any(|own| own == name)
        || APPEND.into_iter().map(append).any(|own| own == name)
}
