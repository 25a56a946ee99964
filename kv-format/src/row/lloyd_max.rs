//! `l6`, `l4`, `l3`: codes by search, and a scale that keeps inner products unbiased.
//!
//! For a given scale the best codes are known: every value goes to the nearest level. The encoder
//! therefore tries a few scales around an estimate from the row's rms and largest magnitude. Given
//! the codes `c` of a row `x`, the row is decoded as `s c`:
//!
//! - With one f16 scale a row, the codes with the largest cosine between `x` and `c` are kept, and
//!   `s = |x|^2 / <x, c>` makes `<x, s c> = |x|^2`. The scale of least squared error,
//!   `<x, c> / |c|^2`, is smaller and shrinks every score by the share of the error (3 % in `l3`),
//!   which attention sees as a higher temperature. The price is an error of `1 / cos^2 - 1` instead
//!   of `1 - cos^2`.
//! - With an E4M3 scale per 32 values there are few scales to choose from (they are 6 to 12 %
//!   apart), so codes and scale are chosen together, by squared error plus a weight times the
//!   square of `<x, s c> - |x|^2` summed over the row so far: each group compensates the errors of
//!   those before.
#![expect(
    clippy::inline_always,
    reason = "encoders are inlined into callers that enable target features"
)]
#![expect(
    clippy::as_conversions,
    clippy::cast_precision_loss,
    reason = "groups of at most 32 values, a scale for each"
)]

use half::f16;

use super::planes::{self, GROUP};
use super::scale;
use super::sums::{LANES, lanes, sum, total};
use crate::format::ScaleGroup;
use crate::lloyd::Codebook;
use crate::minifloat::{e4m3_decode, e4m3_encode};

/// Bound for magnitudes, infinity included: the scale saturates anyway, and no square overflows.
const LIMIT: f32 = 1_099_511_627_776.0; // 2^40
const E4M3_NAN: u8 = 0x7F;
const E4M3_LARGEST: u8 = 0x7E;
/// Neighbours of the likely E4M3 scale to try, on either side.
const NEIGHBOURS: i16 = 2;
/// Error that a group may compensate, as a share of its own energy: a group that saturated must not
/// spoil the next. In ordinary rows the sum stays below 1/50.
const COMPENSATION_MAX: f32 = 1.0 / 16.0;

/// Encodes a row with one f16 scale. Expects `codes` and `scales` to be zeroed.
#[inline(always)]
pub(super) fn encode<B: Codebook>(values: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    let Some(amax) = scale::amax(values) else {
        scale::put(f16::NAN, scales);
        return;
    };
    let energy = sum(values, values, |x, _| limited(x) * limited(x));
    if energy <= 0.0 {
        return;
    }
    let (inverse, projection) = search::<B>(values, amax.min(LIMIT), energy);
    let unbiased = energy / projection;
    let stored = scale::saturated(unbiased);
    let scale = stored.to_f32();
    // If f16 cannot hold the scale (too large, or subnormal below 2^-14), encode with the stored
    // one.
    let exact = (scale - unbiased).abs() <= unbiased * 0.001;
    let inverse = if exact { inverse } else { scale.recip() };
    // A row too small for any scale becomes zeros.
    if scale > 0.0 {
        scale::put(stored, scales);
        let bytes = codes.chunks_mut(planes::group_bytes(B::BITS));
        for (group, bytes) in values.chunks(GROUP).zip(bytes) {
            encode_group::<B>(group, inverse, bytes);
        }
    }
}

/// Returns the reciprocal of the scale whose codes have the largest cosine with the row, and `<x,
/// c>`.
#[inline(always)]
fn search<B: Codebook>(values: &[f32], amax: f32, energy: f32) -> (f32, f32) {
    let [of_rms, of_amax] = B::NEAR_SCALE;
    let rms = (energy / values.len() as f32).sqrt();
    let near = of_rms * rms + of_amax * amax;
    let mut best = Codes::of::<B>(values, near);
    for tried in B::TRIED {
        best = best.or_better(Codes::of::<B>(values, near * tried));
    }
    // The least-squares scale of these codes may give better codes: one such step often pays.
    best = best.or_better(Codes::of::<B>(values, best.projection / best.energy));
    (best.inverse, best.projection)
}

/// Sums over the codes that a row takes at a scale.
#[derive(Clone, Copy)]
struct Codes {
    inverse: f32,
    /// `<x, c>`
    projection: f32,
    /// `|c|^2`
    energy: f32,
    /// The square of the cosine, up to `|x|^2`.
    score: f32,
}

impl Codes {
    #[inline(always)]
    fn of<B: Codebook>(values: &[f32], scale: f32) -> Self {
        let inverse = scale.recip();
        let [projection, energy] = pair_sums::<B>(values, inverse, |a, c| a * c, |_, c| c * c);
        Self { inverse, projection, energy, score: projection * (projection / energy) }
    }

    #[inline(always)]
    fn or_better(self, other: Self) -> Self {
        if other.score > self.score { other } else { self }
    }
}

/// Encodes a row with an E4M3 scale for every 32 values. Expects `codes` and `scales` to be zeroed.
#[inline(always)]
pub(super) fn encode_groups<B: Codebook>(values: &[f32], codes: &mut [u8], scales: &mut [u8]) {
    // <x, s c> - |x|^2 over the groups so far.
    let mut owed = 0.0;
    let bytes = codes.chunks_mut(planes::group_bytes(B::BITS));
    for ((group, bytes), stored) in values.chunks(GROUP).zip(bytes).zip(scales) {
        let Some(amax) = scale::amax(group) else {
            *stored = E4M3_NAN;
            continue;
        };
        let energy = sum(group, group, |x, _| limited(x) * limited(x));
        if energy <= 0.0 {
            continue;
        }
        let code = group_scale::<B>(group, amax.min(LIMIT), energy, &mut owed);
        if code > 0 {
            *stored = code;
            encode_group::<B>(group, e4m3_decode(code).recip(), bytes);
        }
    }
}

/// Returns the code of a group's scale; 0 if zeros have less error than any scale.
#[inline(always)]
fn group_scale<B: Codebook>(values: &[f32], amax: f32, energy: f32, owed: &mut f32) -> u8 {
    let [of_rms, of_amax] = B::NEAR_GROUP_SCALE;
    let rms = (energy / values.len() as f32).sqrt();
    let near = i16::from(e4m3_encode(of_rms * rms + of_amax * amax));
    let carried = owed.clamp(-energy * COMPENSATION_MAX, energy * COMPENSATION_MAX);
    let (mut best, mut best_cost) = (0, f32::INFINITY);
    *owed = carried - energy;
    for code in near - NEIGHBOURS..=near + NEIGHBOURS {
        let Some(code) = u8::try_from(code).ok().filter(|code| (1..=E4M3_LARGEST).contains(code))
        else {
            continue;
        };
        let scale = e4m3_decode(code);
        let inverse = scale.recip();
        let squared = |a: f32, c| (a - c * scale) * (a - c * scale);
        let [error, projection] = pair_sums::<B>(values, inverse, squared, |a, c| a * (c * scale));
        let owing = carried + projection - energy;
        let cost = error + B::BIAS_WEIGHT * owing * (owing / energy);
        // If all scales are too small, take the last, which is the largest.
        if error <= energy && cost <= best_cost {
            (best, best_cost) = (code, cost);
            *owed = owing;
        }
    }
    best
}

/// Encodes up to 32 values, given the reciprocal of the scale.
#[inline(always)]
fn encode_group<B: Codebook>(values: &[f32], inverse: f32, bytes: &mut [u8]) {
    // Constant length for whole groups, so that loops unroll.
    match values.as_array::<GROUP>() {
        Some(whole) => encode_some::<B>(whole, inverse, bytes),
        None => encode_some::<B>(values, inverse, bytes),
    }
}

#[inline(always)]
fn encode_some<B: Codebook>(values: &[f32], inverse: f32, bytes: &mut [u8]) {
    let mut codes = [0; GROUP];
    let codes = &mut codes[..values.len()];
    for (code, value) in codes.iter_mut().zip(values) {
        let sign = u8::from(value.is_sign_negative()) << (B::BITS - 1);
        *code = B::index(limited(*value) * inverse) | sign;
    }
    match B::BITS {
        3 => planes::pack::<3>(codes, bytes),
        4 => planes::pack::<4>(codes, bytes),
        _ => planes::pack::<6>(codes, bytes),
    }
}

/// Decodes a row.
pub(super) fn decode<B: Codebook>(
    group: ScaleGroup,
    codes: &[u8],
    scales: &[u8],
    values: &mut [f32],
) {
    let of_row = scale::get(scales);
    let groups = codes.chunks(planes::group_bytes(B::BITS));
    for ((values, bytes), index) in values.chunks_mut(GROUP).zip(groups).zip(0_usize..) {
        let scale = match group {
            ScaleGroup::Row => of_row,
            ScaleGroup::Group32 => e4m3_decode(scales[index]),
        };
        match values.as_mut_array::<GROUP>() {
            Some(whole) => decode_some::<B>(bytes, scale, whole),
            None => decode_some::<B>(bytes, scale, values),
        }
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "so that whole groups are compiled apart")]
fn decode_some<B: Codebook>(bytes: &[u8], scale: f32, values: &mut [f32]) {
    let mut codes = [0; GROUP];
    let codes = &mut codes[..values.len()];
    match B::BITS {
        3 => planes::unpack::<3>(bytes, codes),
        4 => planes::unpack::<4>(bytes, codes),
        _ => planes::unpack::<6>(bytes, codes),
    }
    for (value, code) in values.iter_mut().zip(codes) {
        let magnitude = B::magnitude(*code);
        let is_negative = *code >> (B::BITS - 1) == 1;
        *value = (if is_negative { -magnitude } else { magnitude }) * scale;
    }
}

/// Returns the magnitude of a value, at most [`LIMIT`].
#[inline(always)]
fn limited(value: f32) -> f32 {
    let magnitude = value.abs();
    if magnitude < LIMIT { magnitude } else { LIMIT }
}

/// Sums two terms of every magnitude and its level.
#[inline(always)]
fn pair_sums<B: Codebook>(
    values: &[f32],
    inverse: f32,
    first: impl Fn(f32, f32) -> f32,
    second: impl Fn(f32, f32) -> f32,
) -> [f32; 2] {
    // Constant length for whole groups, so that loops unroll.
    let (groups, rest) = values.as_chunks::<GROUP>();
    let mut totals = [0.0; 2];
    for groups in groups.chunks(TOGETHER) {
        // Lane sums are added in a separate loop: together, the compiler vectorises badly.
        let mut all = [[[0.0; LANES]; 2]; TOGETHER];
        for (lanes, group) in all.iter_mut().zip(groups) {
            *lanes = group_sums::<B>(group, inverse, &first, &second);
        }
        for lanes in &all[..groups.len()] {
            totals = [totals[0] + total(lanes[0]), totals[1] + total(lanes[1])];
        }
    }
    if !rest.is_empty() {
        let lanes = group_sums::<B>(rest, inverse, &first, &second);
        totals = [totals[0] + total(lanes[0]), totals[1] + total(lanes[1])];
    }
    totals
}

/// Groups that are summed together.
const TOGETHER: usize = 8;

/// Does the same for up to 32 values, lane by lane. Several simple loops vectorise better than one
/// that does everything.
#[inline(always)]
fn group_sums<B: Codebook>(
    values: &[f32],
    inverse: f32,
    first: &impl Fn(f32, f32) -> f32,
    second: &impl Fn(f32, f32) -> f32,
) -> [[f32; LANES]; 2] {
    let (mut magnitudes, mut levels) = ([0.0; GROUP], [0.0; GROUP]);
    let magnitudes = &mut magnitudes[..values.len()];
    let levels = &mut levels[..values.len()];
    for (magnitude, value) in magnitudes.iter_mut().zip(values) {
        *magnitude = limited(*value);
    }
    for (level, magnitude) in levels.iter_mut().zip(&*magnitudes) {
        *level = B::nearest(magnitude * inverse);
    }
    [lanes(magnitudes, levels, first), lanes(magnitudes, levels, second)]
}
