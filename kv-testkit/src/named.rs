//! K and V that say which tokens they come from: rows are equal exactly where the whole prefix is,
//! salt, adapter and contents included. What a sequence reads must be what its own tokens name.
//!
//! Rows of f32 hold as much of a name as they can, and come back to the bit. Values of any other
//! format are 1 or -1: their signs are the name, and no rounding changes one.
use kv_core::reuse::ContentSpan;
use kv_core::{
    CacheSpec, DType, KvCache, KvFormat, Plane, QkvFormat, SequenceId, StartOptions, Step,
};

use crate::case::{At, CaseError, same};
use crate::device::{Device, Place, Staged};
use crate::lab::dense;

/// Stands for a prefix.
pub(crate) type Name = u64;

fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23).wrapping_add(b).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The name of no tokens.
pub(crate) fn root(options: &StartOptions<'_>) -> Name {
    let salt = options.salt().iter().fold(1, |name, byte| mix(name, u64::from(*byte)));
    mix(salt, options.adapter().map_or(0, |adapter| adapter + 1))
}

/// The name of one token more; `id`: what lies behind a placeholder.
pub(crate) fn then(before: Name, token: u32, id: Option<u128>) -> Name {
    let name = mix(before, u64::from(token));
    id.map_or(name, |id| mix(name, id as u64 | 1 << 63))
}

/// Names of all prefixes of a prompt.
pub(crate) fn names(tokens: &[u32], options: &StartOptions<'_>) -> Vec<Name> {
    let mut name = root(options);
    let behind = |at: u32| {
        let covers = |span: &&ContentSpan| at >= span.begin && at - span.begin < span.len;
        options.contents().iter().find(covers).map(|span| span.id)
    };
    let next = |(token, at): (&u32, u32)| {
        name = then(name, *token, behind(at));
        name
    };
    tokens.iter().zip(0..).map(next).collect()
}

/// Heads and values of a row of one layer, and how it is stored.
fn shape(spec: &CacheSpec, layer: u16, plane: Plane) -> Result<([usize; 2], KvFormat), CaseError> {
    let (group, _) = spec.locate(layer.into()).ok_or("a layer of no group")?;
    let layouts = spec.groups()[usize::from(group.0)].layouts();
    let layout = &layouts[usize::from(plane == Plane::Value)];
    Ok(([layout.num_kv_heads() as usize, layout.head_dim() as usize], layout.format()))
}

/// K or V of tokens: multiples of 2^-23 in -1..1, exact in f32.
pub(crate) fn rows(names: &[Name], layer: u16, plane: Plane, width: usize) -> Vec<f32> {
    let salt = u64::from(layer) * 2 + u64::from(plane == Plane::Value);
    let row = |name: &Name| {
        let name = mix(*name, salt);
        (0..width as u64)
            .map(move |at| (mix(name, at) >> 40) as f32 / 8_388_608.0 - 1.0)
            .collect::<Vec<_>>()
    };
    names.iter().flat_map(row).collect()
}

/// K or V of tokens: 1 and -1, exact in every format of 16 bits or more. 32 values tell prefixes
/// apart.
fn signs(names: &[Name], layer: u16, plane: Plane, width: usize) -> Vec<f32> {
    let salt = u64::from(layer) * 2 + u64::from(plane == Plane::Value);
    let row = |name: &Name| {
        let name = mix(*name, salt);
        let bit = move |at: u64| (mix(name, at / 64) >> (at % 64)) & 1;
        (0..width as u64).map(move |at| if bit(at) == 0 { 1.0 } else { -1.0 }).collect::<Vec<_>>()
    };
    names.iter().flat_map(row).collect()
}

/// K or V of tokens, for planes of a format.
fn stored(
    names: &[Name],
    (layer, plane): (u16, Plane),
    width: usize,
    format: KvFormat,
) -> Vec<f32> {
    let make = if format == KvFormat::F32 { rows } else { signs };
    make(names, layer, plane, width)
}

/// Writes the rows of a step's new tokens to every layer.
pub(crate) fn write<B: Device>(
    step: &mut Step<'_, B>,
    spec: &CacheSpec,
    names: &[Name],
) -> Result<(), CaseError> {
    (0..spec.num_layers()).try_for_each(|layer| write_layer(step, spec, layer, names))
}

/// Writes the rows of a step's new tokens to one layer.
pub(crate) fn write_layer<B: Device>(
    step: &mut Step<'_, B>,
    spec: &CacheSpec,
    layer: u16,
    names: &[Name],
) -> Result<(), CaseError> {
    let mut kv = Vec::new();
    for plane in [Plane::Key, Plane::Value] {
        let ([heads, dim], format) = shape(spec, layer, plane)?;
        let dims = [names.len() as u32, heads as u32, dim as u32];
        kv.push((stored(names, (layer, plane), heads * dim, format), dims));
    }
    let [k, v] = [0, 1].map(|i| kv_core::TensorView::host(&kv[i].0, &kv[i].1));
    Ok(step.write(layer, k, v, QkvFormat::Thd)?)
}

/// Fails unless the rows of a sequence from `begin` on are those of `names`, in every layer of the
/// group: to the bit, or by the signs of codes.
pub(crate) fn check<B: Device>(
    backend: &B,
    cache: &mut KvCache<B>,
    (sequence, group): (SequenceId, usize),
    begin: u32,
    names: &[Name],
) -> Result<(), CaseError> {
    let layers = cache.spec().groups()[group].layers().to_vec();
    let mut layers = layers.iter();
    layers.try_for_each(|layer| check_layer(backend, cache, (sequence, layer.0), begin, names))
}

/// As [`check`], of one layer.
pub(crate) fn check_layer<B: Device>(
    backend: &B,
    cache: &mut KvCache<B>,
    (sequence, layer): (SequenceId, u16),
    begin: u32,
    names: &[Name],
) -> Result<(), CaseError> {
    let spec = cache.spec().clone();
    for plane in [Plane::Key, Plane::Value] {
        let ([heads, dim], format) = shape(&spec, layer, plane)?;
        let layout = dense(QkvFormat::Thd, &[names.len()], [heads, dim]);
        let made = (layout, DType::F32);
        let mut out = Staged::output(backend, cache.queue_mut(), made, Place::Host)?;
        let range = (sequence, begin, names.len() as u32);
        cache.gather(layer, plane, &[range], out.view_mut(), QkvFormat::Thd)?;
        let capabilities = backend.capabilities();
        let got = out.read(capabilities, cache.queue_mut())?.values();
        let expected = stored(names, (layer, plane), heads * dim, format);
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
