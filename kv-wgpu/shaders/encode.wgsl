// Rows of f32 values become stored rows: kv-quant's row.rs. What is equal, NaN or larger is decided by
// bits, so that devices which leave out infinities and NaN agree; values are rounded by integers. Sums
// are taken in kv-quant's order.
//
// A workgroup of 64 encodes the eight rows of new_row.wgsl: codes take the place of values, and scales are
// in `row_scales`; `put_row` makes bytes of them. Where values have groups of 32, neighbour `i` sees to
// the scale of group `i`.
//! include encode_lloyd.wgsl
// The encoding: of those that differ in where their scale is from, the first.
override FORMAT: u32;

const LARGEST_F32: u32 = 0x7f7fffffu;
const SMALLEST_NORMAL: u32 = 0x00800000u;
const F16_NAN: u32 = 0x7e00u;

// Bits of f16, or codes in E4M3: 16 of each row.
var<workgroup> row_scales: array<u32, 128>;
// Whether the row stays in 16 bits.
var<private> is_wide: bool;

// The code of value `i`; it and what is behind the row's end is written by who has it.
fn keep_code(local: u32, i: u32, code: u32) {
    let at = row_at(local) + i;
    row_bits[at] = select(code, f16_saturated(row_value(at)), is_wide);
}
fn keep_scale(local: u32, i: u32, bits: u32) {
    row_scales[local / 8u * 16u + i] = bits;
}

// The same number, infinity as the largest there is.
fn finite(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    return bitcast<f32>((bits & 0x80000000u) | min(bits & 0x7fffffffu, LARGEST_F32));
}

// minifloat.rs's `magnitude`: the code of |x|, saturated at `largest`, ties to even. `edge` is the
// exponent of the smallest number that has a leading one, as f32 has it.
fn minifloat(x: f32, mantissa: u32, edge: u32, largest: f32) -> u32 {
    let inside = min(magnitude_bits(x), bitcast<u32>(largest));
    let exponent = inside >> 23u;
    if exponent >= edge {
        return round_shift(inside, 23u - mantissa) - ((edge - 1u) << mantissa);
    }
    let shift = 23u - mantissa + (edge - exponent);
    if shift > 25u {
        return 0u;
    }
    return round_shift((inside & 0x7fffffu) | 0x800000u, shift);
}
fn e4m3_encode(x: f32) -> u32 {
    return select(minifloat(x, 3u, 121u, 448.0) | bitcast<u32>(x) >> 31u << 7u, E4M3_NAN, is_nan(x));
}
// Never infinite.
fn e5m2_encode(x: f32) -> u32 {
    return select(minifloat(x, 2u, 113u, 57344.0) | bitcast<u32>(x) >> 31u << 7u, E4M3_NAN, is_nan(x));
}
// NaN, which has no code, is 6.
fn e2m1_encode(x: f32) -> u32 {
    return select(minifloat(x, 1u, 127u, 6.0) | bitcast<u32>(x) >> 31u << 3u, 7u, is_nan(x));
}

// The nearest integer in -127..=127, in two's complement: ties to even, or away from zero.
fn int8_round(x: f32, away: bool) -> u32 {
    let inside = min(magnitude_bits(x), bitcast<u32>(127.0));
    let shift = 150u - (inside >> 23u);  // 17 and more
    var code = 0u;
    if shift <= 24u {
        let whole = (inside & 0x7fffffu) | 0x800000u;
        code = select(round_shift(whole, shift), (whole + (1u << (shift - 1u))) >> shift, away);
    }
    return select(code, 0u - code, bitcast<u32>(x) >> 31u == 1u) & 0xffu;
}
// NaN is 0.
fn int8_encode(x: f32) -> u32 {
    return select(int8_round(x, false), 0u, is_nan(x));
}

fn byte_encode(x: f32) -> u32 {
    switch FORMAT {
        case FMT_E4M3, FMT_E4M3_ROW: { return e4m3_encode(x); }
        case FMT_E5M2, FMT_E5M2_ROW: { return e5m2_encode(x); }
        default: { return int8_encode(x); }
    }
}

// Codes of one byte by a given scale: kv-quant's scaled.rs.
fn encode_given(inv_scale: f32, dim: u32, local: u32) {
    for (var i = local % 8u; i < dim; i += 8u) {
        let x = row_value(row_at(local) + i);
        keep_code(local, i, byte_encode(select(finite(x) * inv_scale, x, is_nan(x))));
    }
}

// The scale at which the largest magnitude takes the code worth `largest`, as f16: to nearest, where
// f16 has fewer bits than usual up, so that nothing is clipped.
fn scale_from_amax(amax: u32, largest: f32) -> u32 {
    let scale = finite(bitcast<f32>(amax)) / largest;
    let stored = f16_saturated(scale);
    // A scale that is no ordinary number may count as 0 here.
    let is_lost = stored == 0u && amax > 0u;
    return stored + select(0u, 1u, is_lost || (stored < 0x400u && f16_decode(stored) < scale));
}

// The same by a scale of the row.
fn encode_own(dim: u32, local: u32) {
    var bits = 0u;
    for (var i = local % 8u; i < dim; i += 8u) {
        bits = max(bits, magnitude_bits(row_value(row_at(local) + i)));
    }
    let amax = of_8(PEAKS, local, vec2<u32>(bits, 0u)).x;
    let largest = select(select(127.0, 57344.0, FORMAT == FMT_E5M2_ROW), 448.0, FORMAT == FMT_E4M3_ROW);
    let stored = select(F16_NAN, scale_from_amax(amax, largest), amax <= INFINITY);
    let scale = f16_decode(stored);
    let has_codes = amax <= INFINITY && stored > 0u;
    for (var i = local % 8u; i < dim; i += 8u) {
        let code = byte_encode(finite(row_value(row_at(local) + i)) / scale);
        keep_code(local, i, select(0u, code, has_codes));
    }
    if local % 8u == 0u {
        keep_scale(local, 0u, stored);
    }
}

fn q4_0_code(x: f32, inverse: f32) -> u32 {
    return u32(clamp(finite(x) * inverse + 8.5, 0.0, 15.0));
}

// llama.cpp's blocks of 32: kv-quant's ggml.rs, which says where we differ.
fn encode_ggml(dim: u32, local: u32) {
    let own = row_at(local) + local % 8u;
    let groups = filled(dim) / 32u;
    // The first value of the largest magnitude, with its sign, becomes -8: values behind it, and the sign.
    for (var group = 0u; group < groups; group++) {
        var first = vec2<u32>(0u);
        for (var j = 0u; j < 4u; j++) {
            let x = row_bits[own + group * 32u + 8u * j];
            let behind = 31u - (8u * j + local % 8u);
            first = combine(FIRST_PEAK, first, vec2<u32>(x & 0x7fffffffu, behind << 1u | x >> 31u));
        }
        give(FIRST_PEAK, local, group, first);
    }
    let first = take(FIRST_PEAK, local);
    let amax = finite(bitcast<f32>(first.x));
    let nibbles = FORMAT == FMT_Q4_0;
    let extreme = select(0.0, select(amax, -amax, (first.y & 1u) == 1u), first.x > 0u);
    let scale = select(amax / 127.0, extreme / -8.0, nibbles);
    let stored = f16_saturated(scale);
    // ggml takes what values are multiplied with from the scale before it is rounded.
    let saturates = f16_bits(scale) != stored;
    let inverse_of = select(scale, f16_decode(stored), saturates);
    let has_inverse = magnitude_bits(inverse_of) >= SMALLEST_NORMAL;
    let is_broken = first.x > INFINITY;
    keep_scale(local, local % 8u, select(stored, F16_NAN, is_broken));
    share(local, vec2<u32>(bitcast<u32>(select(0.0, 1.0 / inverse_of, has_inverse)), u32(is_broken)));
    for (var group = 0u; group < groups; group++) {
        let shared_here = shared_by(local, group);
        let inverse = bitcast<f32>(shared_here.x);
        for (var j = 0u; j < 4u; j++) {
            let x = row_value(own + group * 32u + 8u * j);
            let code = select(int8_round(finite(x) * inverse, true), q4_0_code(x, inverse), nibbles);
            keep_code(local, group * 32u + 8u * j + local % 8u, select(code, 0u, shared_here.y != 0u));
        }
    }
}

// Squared errors of the two blocks of a neighbour's group at two scales, relative to the largest of each.
// Of each pair of codes that a neighbour shares the error is that of the pair in byte `which`.
fn nvfp4_errors(which: u32, inv_scale: f32, dim: u32, local: u32) -> vec2<f32> {
    let own = row_at(local) + local % 8u;
    for (var group = 0u; group * 32u < dim; group++) {
        let units = bitcast<vec2<f32>>(shared_by(local, group));
        var sums = vec2<f32>(0.0);
        for (var j = 0u; j < 4u; j++) {
            let code = row_scales[local / 8u * 16u + 2u * group + j / 2u] >> (8u * which) & 0xffu;
            let scale = e4m3_decode(code);
            let x = finite(row_value(own + group * 32u + 8u * j)) * inv_scale;
            let decoded = select(0.0, e2m1_decode(e2m1_encode(x / scale)) * scale, code > 0u);
            let error = (x - decoded) * units[j / 2u];
            sums[j / 2u] += error * error;
        }
        give(SUMS, local, group, bitcast<vec2<u32>>(sums));
    }
    return bitcast<vec2<f32>>(take(SUMS, local));
}

// Blocks of 16: kv-quant's nvfp4.rs. A group has two.
fn encode_nvfp4(inv_scale: f32, dim: u32, local: u32) {
    let own = row_at(local) + local % 8u;
    for (var group = 0u; group * 32u < dim; group++) {
        var bits = vec2<u32>(0u);
        for (var j = 0u; j < 4u; j++) {
            bits[j / 2u] = max(bits[j / 2u], magnitude_bits(row_value(own + group * 32u + 8u * j)));
        }
        give(PEAKS, local, group, bits);
    }
    let amax = take(PEAKS, local);
    var over_6 = vec2<u32>(0u);
    var over_4 = vec2<u32>(0u);
    var unit = vec2<f32>(0.0);
    for (var b = 0u; b < 2u; b++) {
        let largest = finite(bitcast<f32>(amax[b]));
        over_6[b] = e4m3_encode(largest / 6.0 * inv_scale);
        over_4[b] = e4m3_encode(largest / 4.0 * inv_scale);
        let scaled = largest * inv_scale;
        // Without a unit no error is smaller than another: then over 6.
        if magnitude_bits(scaled) >= SMALLEST_NORMAL && magnitude_bits(scaled) < INFINITY {
            unit[b] = 1.0 / scaled;
        }
        // Codes that are tried: over 6, over 4, 1 and 0.
        keep_scale(local, local % 8u * 2u + b, over_6[b] | over_4[b] << 8u | 1u << 16u);
    }
    share(local, bitcast<vec2<u32>>(unit));
    let error_6 = nvfp4_errors(0u, inv_scale, dim, local);
    let error_4 = nvfp4_errors(1u, inv_scale, dim, local);
    let error_1 = nvfp4_errors(2u, inv_scale, dim, local);
    let error_0 = nvfp4_errors(3u, inv_scale, dim, local);
    workgroupBarrier();
    for (var b = 0u; b < 2u; b++) {
        var code = select(over_6[b], over_4[b], error_4[b] < error_6[b] && amax[b] < INFINITY);
        // The smallest scale, where that is nearer than zeros.
        code = select(code, 1u, code == 0u && error_1[b] < error_0[b]);
        code = select(code, E4M3_NAN, amax[b] > INFINITY);
        let block = local % 8u * 2u + b;
        keep_scale(local, block, select(0u, code, block * 16u < dim));
    }
    workgroupBarrier();
    for (var i = local % 8u; i < dim; i += 8u) {
        let code = row_scales[local / 8u * 16u + i / 16u];
        let x = finite(row_value(row_at(local) + i)) * inv_scale;
        let nibble = e2m1_encode(x / e4m3_decode(code));
        keep_code(local, i, select(0u, nibble, code > 0u && code < E4M3_NAN));
    }
}

// Leaves all eight rows in 16 bits.
fn keep_wide(dim: u32, local: u32) {
    is_wide = true;
    for (var i = local % 8u; i < dim; i += 8u) {
        keep_code(local, i, 0u);
    }
}

// Encodes eight rows, those that are `wide` in 16 bits; what is encoded is seen behind a barrier.
fn encode_codes(wide: bool, inv_scale: f32, dim: u32, local: u32) {
    is_wide = wide;
    switch FORMAT {
        case FMT_E4M3, FMT_E5M2, FMT_INT8: { encode_given(inv_scale, dim, local); }
        case FMT_E4M3_ROW, FMT_E5M2_ROW, FMT_INT8_ROW: { encode_own(dim, local); }
        case FMT_L6, FMT_L4, FMT_L3: { encode_lloyd(lloyd_bits(FORMAT), dim, local); }
        case FMT_L6_G32, FMT_L4_G32, FMT_L3_G32: { encode_groups(lloyd_bits(FORMAT), dim, local); }
        case FMT_Q8_0, FMT_Q4_0: { encode_ggml(dim, local); }
        default: { encode_nvfp4(inv_scale, dim, local); }
    }
}
