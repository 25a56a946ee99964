// Conversions of 16-bit numbers with integers alone, so that results do not depend on a device's
// rounding or on its handling of subnormals, infinities and NaN.

const INFINITY: u32 = 0x7f800000u;

// Returns 2^e, for `e` in -126..=127.
fn power_of_two(e: i32) -> f32 {
    return bitcast<f32>(u32(e + 127) << 23u);
}

fn is_nan(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) > INFINITY;
}

// Returns e^x for x <= 0 to about an ulp, and 0 below the least normal number. WGSL allows exp an
// error of 3 + 2|x| ulps. Cephes' expf.
fn exponential(x: f32) -> f32 {
    let n = round(max(x, -88.0) * 1.442695);
    let r = (max(x, -88.0) - n * 0.69335938) + n * 2.1219444e-4;
    var p = 1.9875691e-4;
    p = p * r + 1.3982e-3;
    p = p * r + 8.333452e-3;
    p = p * r + 4.1665796e-2;
    p = p * r + 1.6666667e-1;
    p = p * r + 0.5;
    p = (p * r) * r + r + 1.0;
    // `n` is -127 only where the result is 0.
    let value = select(p * power_of_two(max(i32(n), -126)), 0.0, x < -87.336);
    return select(value, x, is_nan(x));
}

// Returns the factor that rescales sums from the running maximum `before` to `after`.
fn rescaled(before: f32, after: f32) -> f32 {
    return select(exponential(before - after), 1.0, before == after);
}

// Returns the natural logarithm of a positive normal number to about an ulp; infinity and NaN are
// returned as they are. Cephes' logf.
fn logarithm(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    if bits >= INFINITY {
        return x;
    }
    // Split into a mantissa of 1/sqrt(2) to sqrt(2), less 1, and a power of two.
    let exponent = i32(bits - 0x3f3504f3u) >> 23u;
    let m = bitcast<f32>(bits - (u32(exponent) << 23u)) - 1.0;
    var p = 7.0376836e-2;
    p = p * m - 1.151461e-1;
    p = p * m + 1.1676999e-1;
    p = p * m - 1.2420141e-1;
    p = p * m + 1.4249323e-1;
    p = p * m - 1.6668058e-1;
    p = p * m + 2.0000714e-1;
    p = p * m - 2.4999994e-1;
    p = p * m + 3.333333e-1;
    let z = m * m;
    let e = f32(exponent);
    return (m + (p * m * z - 2.1219444e-4 * e - 0.5 * z)) + 0.69335938 * e;
}

// Widens the bits of an f16 to those of an f32.
fn f16_widen(bits: u32) -> u32 {
    let sign = (bits & 0x8000u) << 16u;
    let exponent = (bits >> 10u) & 31u;
    let mantissa = bits & 1023u;
    if exponent == 31u {
        return sign | INFINITY | (mantissa << 13u);
    }
    if exponent > 0u {
        return sign | ((exponent + 112u) << 23u) | (mantissa << 13u);
    }
    // A subnormal f16: a multiple of 2^-24, which is normal in f32.
    return sign | bitcast<u32>(f32(mantissa) * power_of_two(-24));
}

fn f16_decode(bits: u32) -> f32 {
    return bitcast<f32>(f16_widen(bits));
}

// Decodes four f16, without branches.
fn f16_decode_four(bits: vec4<u32>) -> vec4<f32> {
    let magnitude = (bits & vec4<u32>(0x7fffu)) << vec4<u32>(13u);
    let sign = (bits & vec4<u32>(0x8000u)) << vec4<u32>(16u);
    // An exponent of 0 means a leading 0: decode it with a leading 1, then subtract that.
    let small = bitcast<vec4<f32>>(magnitude + vec4<u32>(113u << 23u)) - power_of_two(-14);
    let bias = select(vec4<u32>(112u << 23u), vec4<u32>(224u << 23u), magnitude >= vec4<u32>(31u << 23u));
    let usual = magnitude + bias;
    return bitcast<vec4<f32>>(sign | select(usual, bitcast<vec4<u32>>(small), magnitude < vec4<u32>(1u << 23u)));
}

// Drops the lowest `shift` bits: rounds to nearest, ties to even.
fn round_shift(bits: u32, shift: u32) -> u32 {
    let kept = bits >> shift;
    return (bits + (1u << (shift - 1u)) - 1u + (kept & 1u)) >> shift;
}

// Rounds an f32 to the nearest f16; infinity beyond the largest.
fn f16_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let magnitude = bits & 0x7fffffffu;
    if magnitude > INFINITY {
        return sign | 0x7e00u;
    }
    if magnitude >= 0x477ff000u {
        return sign | 0x7c00u;  // 65520, which rounds up, and above
    }
    if magnitude >= 0x38800000u {
        return sign | (round_shift(magnitude, 13u) - (112u << 10u));
    }
    // A subnormal result: shift the mantissa with its leading one to multiples of 2^-24.
    let shift = 126u - (magnitude >> 23u);
    if shift > 25u {
        return sign;
    }
    return sign | round_shift((magnitude & 0x7fffffu) | 0x800000u, shift);
}

// Rounds an f32 to the nearest bf16.
fn bf16_bits(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    if (bits & 0x7fffffffu) > INFINITY {
        return (bits >> 16u) | 0x40u;
    }
    return round_shift(bits, 16u);
}

// Rounds to bf16 if `dtype` says so, otherwise to f16.
fn half_bits(dtype: u32, x: f32) -> u32 {
    if dtype == 2u {
        return bf16_bits(x);
    }
    return f16_bits(x);
}
