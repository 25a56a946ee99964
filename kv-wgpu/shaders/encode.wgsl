// Encoding of f32 rows as stored rows: kv-quant's row.rs. Comparisons and NaN tests use bits, so
// that devices that ignore infinities and NaN agree; rounding uses integers. Sums are added in
// kv-quant's order.
//
// A workgroup of 64 encodes the eight rows of new_row.wgsl. Codes replace the values in place and
// scales go to `row_scales`; `put_coded` packs them into bytes.
//! include encode_lloyd.wgsl
// The encoding. Formats that differ only in the source of a given scale share the first of them.
override FORMAT: u32;

const LARGEST_F32: u32 = 0x7f7fffffu;
const SMALLEST_NORMAL: u32 = 0x00800000u;
const F16_NAN: u32 = 0x7e00u;

// Bits of f16, or E4M3 codes: 16 per row.
var<workgroup> row_scales: array<u32, 128>;
// Whether this invocation's row stays in 16 bits.
var<private> is_wide: bool;

// Stores the code of value `i`, which is `x`.
fn keep_code(local: u32, i: u32, x: f32, code: u32) {
    row_bits[row_at(local) + i] = select(code, f16_saturated(x), is_wide);
}
fn keep_scale(local: u32, i: u32, bits: u32) {
    row_scales[local / 8u * 16u + i] = bits;
}

// Replaces infinity by the largest finite number.
fn finite(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    return bitcast<f32>((bits & 0x80000000u) | min(bits & 0x7fffffffu, LARGEST_F32));
}

// Rounds |x| to a code as minifloat.rs's `magnitude` does: saturated at `largest`, ties to even.
// `edge` is the f32 exponent of the smallest number with a leading one.
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
    return select(minifloat(x, 3u, 121u, 448.0) | ((bitcast<u32>(x) >> 31u) << 7u), E4M3_NAN, is_nan(x));
}
// Saturates, so the result is never infinite.
fn e5m2_encode(x: f32) -> u32 {
    return select(minifloat(x, 2u, 113u, 57344.0) | ((bitcast<u32>(x) >> 31u) << 7u), E4M3_NAN, is_nan(x));
}
// NaN, which has no code, becomes 6.
fn e2m1_encode(x: f32) -> u32 {
    return select(minifloat(x, 1u, 127u, 6.0) | ((bitcast<u32>(x) >> 31u) << 3u), 7u, is_nan(x));
}

// Rounds to the nearest integer in -127..=127, in two's complement: ties to even, or away from
// zero.
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
// NaN becomes 0.
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

// Encodes a row in one byte per value with a given scale: kv-quant's scaled.rs.
fn encode_given(inv_scale: f32, dim: u32, local: u32) {
    for (var i = local % 8u; i < dim; i += 8u) {
        let x = row_value(row_at(local) + i);
        keep_code(local, i, x, byte_encode(select(finite(x) * inv_scale, x, is_nan(x))));
    }
}

// Returns the scale, as f16, at which the largest magnitude gets the code of value `largest`.
// Rounds to nearest, and up for a subnormal f16, so that nothing is clipped.
fn scale_from_amax(amax: u32, largest: f32) -> u32 {
    let scale = finite(bitcast<f32>(amax)) / largest;
    let stored = f16_saturated(scale);
    // Devices may flush subnormal scales to 0.
    let is_lost = stored == 0u && amax > 0u;
    return stored + select(0u, 1u, is_lost || (stored < 0x400u && f16_decode(stored) < scale));
}

// Encodes a row with a scale of its own.
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
        let x = row_value(row_at(local) + i);
        keep_code(local, i, x, select(0u, byte_encode(finite(x) / scale), has_codes));
    }
    if local % 8u == 0u {
        keep_scale(local, 0u, stored);
    }
}

fn q4_0_code(x: f32, inverse: f32) -> u32 {
    return u32(clamp(finite(x) * inverse + 8.5, 0.0, 15.0));
}

// Encodes blocks of 32 as llama.cpp does: kv-quant's ggml.rs lists the differences.
fn encode_ggml(dim: u32, local: u32) {
    let nibbles = FORMAT == FMT_Q4_0;
    for (var group = 0u; group * 32u < dim; group++) {
        let x = own_4(local, group);
        // The first value of the largest magnitude gets code -8 with its sign: keep its distance
        // from the row's end, and its sign.
        var first = vec2<u32>(0u);
        for (var j = 0u; j < 4u; j++) {
            let behind = 31u - (8u * j + local % 8u);
            let bits = bitcast<u32>(x[j]);
            first = combine(FIRST_PEAK, first, vec2<u32>(bits & 0x7fffffffu, (behind << 1u) | (bits >> 31u)));
        }
        first = of_8(FIRST_PEAK, local, first);
        let amax = finite(bitcast<f32>(first.x));
        let extreme = select(0.0, select(amax, -amax, (first.y & 1u) == 1u), first.x > 0u);
        let scale = select(amax / 127.0, extreme / -8.0, nibbles);
        let stored = f16_saturated(scale);
        // ggml computes the reciprocal from the scale before rounding.
        let saturates = (f16_bits(scale) & 0x7fffu) == 0x7c00u;
        let inverse_of = select(scale, f16_decode(stored), saturates);
        let inverse = select(0.0, 1.0 / inverse_of, magnitude_bits(inverse_of) >= SMALLEST_NORMAL);
        let is_broken = first.x > INFINITY;
        for (var j = 0u; j < 4u; j++) {
            let code = select(int8_round(finite(x[j]) * inverse, true), q4_0_code(x[j], inverse), nibbles);
            let i = group * 32u + 8u * j + local % 8u;
            keep_code(local, i, x[j], select(code, 0u, is_broken));
        }
        if local % 8u == 0u {
            keep_scale(local, group, select(stored, F16_NAN, is_broken));
        }
    }
}

// Returns the squared errors of two blocks at two scales, relative to the largest magnitude of
// each.
fn nvfp4_error(codes: vec2<u32>, values: vec4<f32>, unit: vec2<f32>, local: u32) -> vec2<f32> {
    let scales = vec4<f32>(vec2<f32>(e4m3_decode(codes.x)), vec2<f32>(e4m3_decode(codes.y)));
    var decoded = vec4<f32>(0.0);
    for (var j = 0u; j < 4u; j++) {
        decoded[j] = e2m1_decode(e2m1_encode(values[j] / scales[j])) * scales[j];
    }
    let has_scale = vec4<bool>(vec2<bool>(codes.x > 0u), vec2<bool>(codes.y > 0u));
    let errors = (values - select(vec4<f32>(0.0), decoded, has_scale)) * unit.xxyy;
    let squares = errors * errors;
    return sums_of_8(local, squares.xz + squares.yw);
}

// Encodes blocks of 16: kv-quant's nvfp4.rs. An invocation has two values of each of two blocks.
fn encode_nvfp4(inv_scale: f32, dim: u32, local: u32) {
    for (var group = 0u; group * 32u < dim; group++) {
        let x = own_4(local, group);
        let bits = bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu);
        let amax = of_8(PEAKS, local, max(bits.xz, bits.yw));
        let values = vec4<f32>(finite(x.x), finite(x.y), finite(x.z), finite(x.w)) * inv_scale;
        // Candidate scales: amax over 6, amax over 4, the smallest, and zero.
        var tried = array<vec2<u32>, 4>(vec2<u32>(0u), vec2<u32>(0u), vec2<u32>(1u), vec2<u32>(0u));
        var unit = vec2<f32>(0.0);
        for (var b = 0u; b < 2u; b++) {
            let largest = finite(bitcast<f32>(amax[b]));
            tried[0][b] = e4m3_encode(largest / 6.0 * inv_scale);
            tried[1][b] = e4m3_encode(largest / 4.0 * inv_scale);
            let scaled = largest * inv_scale;
            // Without a normal unit the errors do not differ: then amax over 6.
            if magnitude_bits(scaled) >= SMALLEST_NORMAL && magnitude_bits(scaled) < INFINITY {
                unit[b] = 1.0 / scaled;
            }
        }
        var errors = array<vec2<f32>, 4>();
        for (var i = 0u; i < 4u; i++) {
            errors[i] = nvfp4_error(tried[i], values, unit, local);
        }
        let over_4 = (errors[1] < errors[0]) & (amax < vec2<u32>(INFINITY));
        var code = select(tried[0], tried[1], over_4);
        // The smallest scale, if it has less error than zeros.
        code = select(code, vec2<u32>(1u), (code == vec2<u32>(0u)) & (errors[2] < errors[3]));
        code = select(code, vec2<u32>(E4M3_NAN), amax > vec2<u32>(INFINITY));
        for (var j = 0u; j < 4u; j++) {
            let own = code[j / 2u];
            let nibble = e2m1_encode(values[j] / e4m3_decode(own));
            let i = group * 32u + 8u * j + local % 8u;
            keep_code(local, i, x[j], select(0u, nibble, own > 0u && own < E4M3_NAN));
        }
        if local % 8u < 2u {
            let block = 2u * group + local % 8u;
            keep_scale(local, block, select(0u, select(code.x, code.y, local % 8u == 1u), block * 16u < dim));
        }
    }
}

// Keeps all eight rows in 16 bits.
fn keep_wide(dim: u32, local: u32) {
    is_wide = true;
    for (var i = local % 8u; i < dim; i += 8u) {
        keep_code(local, i, row_value(row_at(local) + i), 0u);
    }
}

// Encodes eight rows; rows with `wide` set stay in 16 bits. Other invocations see the result after
// a barrier.
fn encode_codes(wide: bool, inv_scale: f32, dim: u32, local: u32) {
    is_wide = wide;
    switch FORMAT {
        case FMT_E4M3, FMT_E5M2, FMT_INT8: { encode_given(inv_scale, dim, local); }
        case FMT_E4M3_ROW, FMT_E5M2_ROW, FMT_INT8_ROW: { encode_own(dim, local); }
        case FMT_L6, FMT_L4, FMT_L3: { encode_lloyd(lloyd_bits(FORMAT), dim, local); }
        case FMT_L6_G32, FMT_L4_G32, FMT_L3_G32: { encode_groups(lloyd_bits(FORMAT), dim, local); }
        case FMT_Q8_0, FMT_Q4_0: { encode_ggml(dim, local); }
        case FMT_NVFP4: { encode_nvfp4(inv_scale, dim, local); }
        default: {}
    }
}
