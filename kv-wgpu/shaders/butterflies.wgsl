// Steps of the Hadamard rotation that an invocation does in registers: kv-quant's transform.rs.

// Returns the factor of the rotation of a block of `1 << bit` values: one over its square root.
fn rotation_norm(bit: u32) -> f32 {
    let halved = power_of_two(-i32(bit / 2u));
    return select(halved, halved * 0.70710678118654752440, bit % 2u == 1u);
}

// Eight values whose indices differ in three neighbouring bits.
struct Eight {
    low: vec4<f32>,
    high: vec4<f32>,
}

// Computes sums and differences at the strides of those three bits that `strides` has set, and
// multiplies with `factor`.
fn butterflies(values: Eight, strides: u32, factor: f32) -> Eight {
    var low = values.low;
    var high = values.high;
    if (strides & 1u) != 0u {
        low = vec4<f32>(low.x + low.y, low.x - low.y, low.z + low.w, low.z - low.w);
        high = vec4<f32>(high.x + high.y, high.x - high.y, high.z + high.w, high.z - high.w);
    }
    if (strides & 2u) != 0u {
        low = vec4<f32>(low.xy + low.zw, low.xy - low.zw);
        high = vec4<f32>(high.xy + high.zw, high.xy - high.zw);
    }
    if (strides & 4u) != 0u {
        let sums = low + high;
        high = low - high;
        low = sums;
    }
    return Eight(low * factor, high * factor);
}

// Returns where set `n` of eight values begins, whose indices differ in bits `first` to `first +
// 2`.
fn eight_begin(n: u32, first: u32) -> u32 {
    return ((n >> first) << (first + 3u)) | (n & ((1u << first) - 1u));
}
