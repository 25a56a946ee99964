//! Geometries of differential runs: all formats one after another, with random options.
use kv_core::eviction::Eviction;
use kv_core::spec::{KeyMean, PrefixReuse, Transform};
use kv_core::{CacheSpec, DType, KvFormat};

use crate::case::CaseError;
use crate::fixture::DTYPES;
use crate::rng::Rng;
use crate::suite::ORDERS;

/// The geometry of one run.
#[derive(Debug, Clone)]
pub(super) struct Geometry {
    pub(super) spec: CacheSpec,
    /// Element type of K and V as they are written.
    pub(super) dtype: DType,
    /// Whether sequences reuse each other's prefixes.
    pub(super) shares: bool,
    /// Whether the cache may be recalibrated.
    pub(super) recalibrates: bool,
}

/// Longest sequence, in tokens.
pub(super) const LEN_MAX: u32 = 30;
/// Number of sequences.
pub(super) const SEQUENCES: u32 = 4;

/// Chooses the geometry of run number `number`, with `head_dim`s that `fit` both devices.
///
/// Layers with a tail are not transformed: their codes are compared with the definition's alone,
/// and a device that rounds the transform in another place may get another code.
pub(super) fn choose(
    rng: &mut Rng,
    number: u64,
    fit: impl Fn(u32) -> u32,
) -> Result<Geometry, CaseError> {
    let all: Vec<_> = KvFormat::all().collect();
    let k = all[(number % all.len() as u64) as usize];
    let v = if rng.one_in(2) { k } else { rng.pick(&all) };
    let has_codes = k.is_quantised() || v.is_quantised();
    let tail = k.is_quantised() && rng.one_in(3);
    let full_precision_prefix = if has_codes && rng.one_in(2) { rng.within(1, 4) } else { 0 };
    // A row in 16 bits takes the slots of several rows of codes, all in one block.
    let block_size = if tail || full_precision_prefix > 0 {
        rng.pick(&[9, 16])
    } else {
        rng.pick(&[1, 3, 4, 16])
    };
    let dims = [20, 34, 64, 40].map(&fit);
    let (dim_k, dim_v) = (rng.pick(&dims), rng.pick(&dims));
    let heads = rng.pick(&[1, 2]);
    let transform = match rng.below(3) {
        _ if tail => Transform::Off,
        0 => Transform::Off,
        1 => Transform::Auto,
        _ => Transform::On,
    };
    let key_mean = if tail && rng.one_in(2) { KeyMean::PerBlock } else { KeyMean::Calibrated };
    let reuse = rng.pick(&[PrefixReuse::Off, PrefixReuse::FullBlocks, PrefixReuse::Partial]);
    let reuse = if tail { PrefixReuse::Off } else { reuse };
    // A row in the full-precision prefix or in a tail takes several slots.
    let blocks = SEQUENCES * LEN_MAX.div_ceil(block_size) + if has_codes { 24 } else { 2 };
    let spec = CacheSpec::builder()
        .layers(rng.pick(&[1, 1, 2]))
        .kv_heads(heads)
        .head_dims(dim_k, dim_v)
        .formats(k, v)
        .block_order(rng.pick(&ORDERS))
        .transform(transform)
        .full_precision_prefix(full_precision_prefix)
        .tail(tail)
        .key_mean(key_mean)
        .paged(block_size, blocks)
        .max_seq_len(LEN_MAX)
        .max_sequences(SEQUENCES)
        .prefix_reuse(reuse)
        // The default policy reads the clock, and two caches would read it at different times.
        .eviction(Eviction::Lru)
        .wipe_on_release(rng.one_in(4))
        .build()?;
    let transforms =
        spec.groups()[0].layouts().iter().any(kv_core::backend::PlaneLayout::transforms);
    let shares = reuse != PrefixReuse::Off;
    let recalibrates = has_codes && !transforms && !shares && !tail;
    Ok(Geometry { spec, dtype: rng.pick(&DTYPES), shares, recalibrates })
}
