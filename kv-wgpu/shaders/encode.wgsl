// Rows of f32 values become stored rows: kv-quant's row.rs. What is equal, NaN or larger is decided by
// bits, so that devices which leave out infinities and NaN agree; values are rounded by integers. Sums
// are taken in kv-quant's order.
//
// A workgroup of 64 encodes the row in `row_values`, which has zeros behind its end, into `row_codes`
// and `row_scales`; `put_row` makes bytes of them. Where values have groups, invocation `local` has the
// values `own_first(local) + 8 * j` for `j` below 4: eight neighbours share a group of 32, each with one
// of the eight sums that sums.rs takes side by side.
//! include encode_lloyd.wgsl
const LARGEST_F32: u32 = 0x7f7fffffu;
const SMALLEST_NORMAL: u32 = 0x00800000u;
const F16_NAN: u32 = 0x7e00u;

var<workgroup> row_codes: array<u32, 256>;
// Bits of f16, or codes in E4M3.
var<workgroup> row_scales: array<u32, 16>;

// The same number, infinity as the largest there is.
fn finite(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    return bitcast<f32>((bits & 0x80000000u) | min(bits & 0x7fffffffu, LARGEST_F32));
}

// The nearest f16, no larger than 65504; NaN stays.
fn f16_saturated(x: f32) -> u32 {
    let bits = f16_bits(x);
    return select(bits, bits - 1u, (bits & 0x7fffu) == 0x7c00u);
}
fn round_wide(x: f32) -> f32 {
    return f16_decode(f16_saturated(x));
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

fn byte_encode(format: u32, x: f32) -> u32 {
    switch format {
        case FMT_E4M3, FMT_E4M3_HEAD, FMT_E4M3_ROW: { return e4m3_encode(x); }
        case FMT_E5M2, FMT_E5M2_HEAD, FMT_E5M2_ROW: { return e5m2_encode(x); }
        default: { return int8_encode(x); }
    }
}

// Codes of one byte by a given scale: kv-quant's scaled.rs.
fn encode_given(format: u32, inv_scale: f32, dim: u32, local: u32) {
    for (var i = local; i < dim; i += THREADS) {
        let x = row_values[i];
        row_codes[i] = byte_encode(format, select(finite(x) * inv_scale, x, is_nan(x)));
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
fn encode_own(format: u32, dim: u32, local: u32) {
    var bits = 0u;
    for (var i = local; i < dim; i += THREADS) {
        bits = max(bits, magnitude_bits(row_values[i]));
    }
    let amax = max_of(local, THREADS, vec2<u32>(bits, 0u)).x;
    let largest = select(select(127.0, 57344.0, format == FMT_E5M2_ROW), 448.0, format == FMT_E4M3_ROW);
    var stored = F16_NAN;
    if amax <= INFINITY {
        stored = scale_from_amax(amax, largest);
        let scale = f16_decode(stored);
        if stored > 0u {
            for (var i = local; i < dim; i += THREADS) {
                row_codes[i] = byte_encode(format, finite(row_values[i]) / scale);
            }
        }
    }
    if local == 0u {
        row_scales[0] = stored;
    }
}

fn q4_0_code(x: f32, inverse: f32) -> u32 {
    return u32(clamp(finite(x) * inverse + 8.5, 0.0, 15.0));
}

// llama.cpp's blocks of 32: kv-quant's ggml.rs, which says where we differ.
fn encode_ggml(format: u32, dim: u32, local: u32) {
    let first = own_first(local);
    var bits = 0u;
    for (var j = 0u; j < 4u; j++) {
        bits = max(bits, magnitude_bits(row_values[first + 8u * j]));
    }
    let amax = max_of(local, 8u, vec2<u32>(bits, 0u)).x;
    // The first value of the largest magnitude, with its sign, becomes -8.
    var behind = 0u;  // values behind it
    for (var j = 0u; j < 4u; j++) {
        let i = first + 8u * j;
        behind = max(behind, select(0u, 31u - i % 32u, magnitude_bits(row_values[i]) >= amax));
    }
    behind = max_of(local, 8u, vec2<u32>(behind, 0u)).x;
    let nibbles = format == FMT_Q4_0;
    let extreme = select(0.0, finite(row_values[local / 8u * 32u + 31u - behind]), amax > 0u);
    let scale = select(finite(bitcast<f32>(amax)) / 127.0, extreme / -8.0, nibbles);
    let stored = f16_saturated(scale);
    // ggml takes what values are multiplied with from the scale before it is rounded.
    let saturates = f16_bits(scale) != stored;
    let inverse_of = select(scale, f16_decode(stored), saturates);
    var inverse = 0.0;
    if magnitude_bits(inverse_of) >= SMALLEST_NORMAL {
        inverse = 1.0 / inverse_of;
    }
    let is_broken = amax > INFINITY;
    for (var j = 0u; j < 4u; j++) {
        let x = row_values[first + 8u * j];
        let code = select(int8_round(finite(x) * inverse, true), q4_0_code(x, inverse), nibbles);
        row_codes[first + 8u * j] = select(code, 0u, is_broken);
    }
    if local % 8u == 0u {
        row_scales[local / 8u] = select(stored, F16_NAN, is_broken);
    }
}

// Squared errors of two blocks of NVFP4 at two scales, relative to the largest of each.
fn nvfp4_errors(codes: vec2<u32>, values: vec4<f32>, unit: vec2<f32>, local: u32) -> vec2<f32> {
    var sums = vec2<f32>(0.0);
    for (var b = 0u; b < 2u; b++) {
        let scale = e4m3_decode(codes[b]);
        for (var j = 2u * b; j < 2u * b + 2u; j++) {
            var decoded = 0.0;
            if codes[b] > 0u {
                decoded = e2m1_decode(e2m1_encode(values[j] / scale)) * scale;
            }
            let error = (values[j] - decoded) * unit[b];
            sums[b] += error * error;
        }
    }
    return sum_of_8(local, sums);
}

// Blocks of 16: kv-quant's nvfp4.rs. An invocation has two values of each of two blocks.
fn encode_nvfp4(inv_scale: f32, dim: u32, local: u32) {
    let first = own_first(local);
    var values = vec4<f32>(0.0);
    var bits = vec2<u32>(0u);
    for (var j = 0u; j < 4u; j++) {
        let x = row_values[first + 8u * j];
        bits[j / 2u] = max(bits[j / 2u], magnitude_bits(x));
        values[j] = finite(x) * inv_scale;
    }
    let amax = max_of(local, 8u, bits);
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
    }
    let error_6 = nvfp4_errors(over_6, values, unit, local);
    let error_4 = nvfp4_errors(over_4, values, unit, local);
    let error_1 = nvfp4_errors(vec2<u32>(1u), values, unit, local);
    let error_0 = nvfp4_errors(vec2<u32>(0u), values, unit, local);
    for (var b = 0u; b < 2u; b++) {
        var code = select(over_6[b], over_4[b], error_4[b] < error_6[b] && amax[b] < INFINITY);
        // The smallest scale, where that is nearer than zeros.
        code = select(code, 1u, code == 0u && error_1[b] < error_0[b]);
        code = select(code, E4M3_NAN, amax[b] > INFINITY);
        let scale = e4m3_decode(code);
        for (var j = 2u * b; j < 2u * b + 2u; j++) {
            let is_scaled = code > 0u && code < E4M3_NAN;
            row_codes[first + 8u * j] = select(0u, e2m1_encode(values[j] / scale), is_scaled);
        }
        if local % 8u == 0u {
            row_scales[local / 8u * 2u + b] = select(0u, code, local / 8u * 32u + 16u * b < dim);
        }
    }
}

// Encodes the row in `row_values`, by all invocations, after a barrier and with one behind.
fn encode_codes(format: u32, inv_scale: f32, dim: u32, local: u32) {
    for (var i = local; i < 256u; i += THREADS) {
        row_codes[i] = 0u;
    }
    if local < 16u {
        row_scales[local] = 0u;
    }
    workgroupBarrier();
    switch format {
        case FMT_E4M3, FMT_E4M3_HEAD, FMT_E5M2, FMT_E5M2_HEAD, FMT_INT8, FMT_INT8_HEAD: {
            encode_given(format, inv_scale, dim, local);
        }
        case FMT_E4M3_ROW, FMT_E5M2_ROW, FMT_INT8_ROW: { encode_own(format, dim, local); }
        case FMT_L6, FMT_L4, FMT_L3: { encode_lloyd(lloyd_bits(format), dim, local); }
        case FMT_L6_G32, FMT_L4_G32, FMT_L3_G32: { encode_groups(lloyd_bits(format), dim, local); }
        case FMT_Q8_0, FMT_Q4_0: { encode_ggml(format, dim, local); }
        default: { encode_nvfp4(inv_scale, dim, local); }
    }
    workgroupBarrier();
}
