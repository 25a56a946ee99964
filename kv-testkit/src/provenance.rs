//! K and V that show which tokens they were made from: rows are equal exactly if the whole prefix
//! is, including salt, adapter and contents. The rows that a sequence reads must be those of its
//! own tokens.
//!
//! Rows of f32 hold a hash of the prefix, and are read back to the bit. Rows of any other format
//! are 1 or -1: their signs are the hash, and no rounding changes a sign.
use kv_core::backend::Plane;
use kv_core::reuse::ContentSpan;
use kv_core::{Axes, CacheSpec, DType, KvCache, KvFormat, SequenceId, StartOptions, Step};

use crate::case::{At, CaseError, same};
use crate::device::{Device, Place, Staged};
use crate::fixture::dense;

/// A hash that stands for a prefix.
pub(crate) type PrefixHash = u64;

fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23).wrapping_add(b).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Returns the hash of the empty prefix.
pub(crate) fn root(options: &StartOptions<'_>) -> PrefixHash {
    let salt = options.salt().iter().fold(1, |hash, byte| mix(hash, u64::from(*byte)));
    mix(salt, options.adapter().map_or(0, |adapter| adapter + 1))
}

/// Returns the hash of a prefix with one more token; `id` is the content of a placeholder.
pub(crate) fn extend(before: PrefixHash, token: u32, id: Option<u128>) -> PrefixHash {
    let hash = mix(before, u64::from(token));
    id.map_or(hash, |id| mix(hash, id as u64 | 1 << 63))
}

/// Returns the hashes of all prefixes of a prompt.
pub(crate) fn prefix_hashes(tokens: &[u32], options: &StartOptions<'_>) -> Vec<PrefixHash> {
    let mut hash = root(options);
    let content_id = |at: u32| {
        let covers = |span: &&ContentSpan| at >= span.begin && at - span.begin < span.len;
        options.contents().iter().find(covers).map(|span| span.id)
    };
    let next = |(token, at): (&u32, u32)| {
        hash = extend(hash, *token, content_id(at));
        hash
    };
    tokens.iter().zip(0..).map(next).collect()
}

/// Returns heads and head dim of a layer's rows, and their format.
fn shape(spec: &CacheSpec, layer: u16, plane: Plane) -> Result<([usize; 2], KvFormat), CaseError> {
    let (group, _) = spec.locate(layer.into()).ok_or("a layer of no group")?;
    let layouts = spec.groups()[usize::from(group.0)].layouts();
    let layout = &layouts[usize::from(plane == Plane::Value)];
    Ok(([layout.num_kv_heads() as usize, layout.head_dim() as usize], layout.format()))
}

/// Makes K or V of tokens as multiples of 2^-23 in -1..1, exact in f32.
pub(crate) fn rows(
    prefix_hashes: &[PrefixHash],
    layer: u16,
    plane: Plane,
    width: usize,
) -> Vec<f32> {
    let salt = u64::from(layer) * 2 + u64::from(plane == Plane::Value);
    let row = |hash: &PrefixHash| {
        let hash = mix(*hash, salt);
        (0..width as u64)
            .map(move |at| (mix(hash, at) >> 40) as f32 / 8_388_608.0 - 1.0)
            .collect::<Vec<_>>()
    };
    prefix_hashes.iter().flat_map(row).collect()
}

/// Makes K or V of tokens as 1 and -1, exact in every format of 16 bits or more. 32 values
/// distinguish prefixes.
fn signs(prefix_hashes: &[PrefixHash], layer: u16, plane: Plane, width: usize) -> Vec<f32> {
    let salt = u64::from(layer) * 2 + u64::from(plane == Plane::Value);
    let row = |hash: &PrefixHash| {
        let hash = mix(*hash, salt);
        let bit = move |at: u64| (mix(hash, at / 64) >> (at % 64)) & 1;
        (0..width as u64).map(move |at| if bit(at) == 0 { 1.0 } else { -1.0 }).collect::<Vec<_>>()
    };
    prefix_hashes.iter().flat_map(row).collect()
}

/// Makes K or V of tokens for planes of a format.
fn stored(
    prefix_hashes: &[PrefixHash],
    (layer, plane): (u16, Plane),
    width: usize,
    format: KvFormat,
) -> Vec<f32> {
    let make = if format == KvFormat::F32 { rows } else { signs };
    make(prefix_hashes, layer, plane, width)
}

/// Writes the rows of a step's new tokens to every layer.
pub(crate) fn write<B: Device>(
    step: &mut Step<'_, B>,
    spec: &CacheSpec,
    prefix_hashes: &[PrefixHash],
) -> Result<(), CaseError> {
    (0..spec.num_layers()).try_for_each(|layer| write_layer(step, spec, layer, prefix_hashes))
}

/// Writes the rows of a step's new tokens to one layer.
pub(crate) fn write_layer<B: Device>(
    step: &mut Step<'_, B>,
    spec: &CacheSpec,
    layer: u16,
    prefix_hashes: &[PrefixHash],
) -> Result<(), CaseError> {
    let mut kv = Vec::new();
    for plane in [Plane::Key, Plane::Value] {
        let ([heads, dim], format) = shape(spec, layer, plane)?;
        let dims = [prefix_hashes.len() as u32, heads as u32, dim as u32];
        kv.push((stored(prefix_hashes, (layer, plane), heads * dim, format), dims));
    }
    let [k, v] = [0, 1].map(|i| kv_core::TensorView::host(&kv[i].0, &kv[i].1));
    Ok(step.write(layer, k, v, Axes::Thd)?)
}

/// Fails unless the rows of a sequence from `begin` on were made from `hashes`, in every layer of
/// the group: equal to the bit, or in sign for codes.
pub(crate) fn check<B: Device>(
    backend: &B,
    cache: &mut KvCache<B>,
    (sequence, group): (SequenceId, usize),
    begin: u32,
    prefix_hashes: &[PrefixHash],
) -> Result<(), CaseError> {
    let layers = cache.state().spec().groups()[group].layers().to_vec();
    let mut layers = layers.iter();
    layers.try_for_each(|layer| {
        check_layer(backend, cache, (sequence, layer.0), begin, prefix_hashes)
    })
}

/// Checks one layer like [`check`].
pub(crate) fn check_layer<B: Device>(
    backend: &B,
    cache: &mut KvCache<B>,
    (sequence, layer): (SequenceId, u16),
    begin: u32,
    prefix_hashes: &[PrefixHash],
) -> Result<(), CaseError> {
    let spec = cache.state().spec().clone();
    for plane in [Plane::Key, Plane::Value] {
        let ([heads, dim], format) = shape(&spec, layer, plane)?;
        let layout = dense(Axes::Thd, &[prefix_hashes.len()], [heads, dim]);
        let made = (layout, DType::F32);
        let mut out = Staged::output(backend, cache.queue_mut(), made, Place::Host)?;
        let range = (sequence, begin, prefix_hashes.len() as u32);
        cache.gather(layer, plane, &[range], out.view_mut(), Axes::Thd)?;
        let capabilities = backend.capabilities();
        let got = out.read(capabilities, cache.queue_mut())?.values();
        let expected = stored(prefix_hashes, (layer, plane), heads * dim, format);
        let is_exact = !format.is_quantised();
        let is_same = |(a, b): (&f32, &f32)| {
            if is_exact { a == b } else { a.is_finite() && a * b > 0.0 }
        };
        let differs = |(a, b): (&[f32], &[f32])| !a.iter().zip(b).all(is_same);
        let width = heads * dim;
        let first = got.chunks(width).zip(expected.chunks(width)).position(differs);
        same("rows", got.len(), expected.len())?;
        same("first position with another's row", first.map(|at| at + begin as usize), None)
            .at(format!("sequence {sequence}, {plane:?} of layer {layer}"))?;
    }
    Ok(())
}
