// Rows on their way into a plane: a workgroup has eight side by side, each of eight neighbours, which
// have every eighth value of it. Values that an invocation does not have are seen behind a barrier.

const ROWS: u32 = 8u;
// Neighbouring rows begin in different banks of memory.
const ROW_WORDS: u32 = 264u;

// Bits of f32.
var<workgroup> row_bits: array<u32, 2112>;

fn row_at(local: u32) -> u32 {
    return local / 8u * ROW_WORDS;
}
// Values with the zeros behind them, which fill a group of 32.
fn filled(dim: u32) -> u32 {
    return (dim + 31u) / 32u * 32u;
}
fn row_value(at: u32) -> f32 {
    return bitcast<f32>(row_bits[at]);
}

// Of floats without sign the order of the bits is that of the values, NaN behind infinity.
fn magnitude_bits(x: f32) -> u32 {
    return bitcast<u32>(x) & 0x7fffffffu;
}

// The nearest f16, no larger than 65504; NaN stays.
fn f16_saturated(x: f32) -> u32 {
    let bits = f16_bits(x);
    return select(bits, bits - 1u, (bits & 0x7fffu) == 0x7c00u);
}

fn new_value(read: u32, constant: Head, i: u32) -> f32 {
    if i >= params.plane.head_dim {
        return 0.0;
    }
    let x = rows_load(params.rows.dtype, read, i);
    if params.plane.transforms == 0u {
        return x;
    }
    return (x - bitcast<f32>(constants[constant.mean + i])) * bitcast<f32>(constants[constant.into + i]);
}

// Strides 1, 2 and 4 of eight neighbouring values, which are not an invocation's own.
fn rotate_8(at: u32, has_8: bool) {
    var low = vec4<f32>(row_value(at), row_value(at + 1u), row_value(at + 2u), row_value(at + 3u));
    var high = vec4<f32>(row_value(at + 4u), row_value(at + 5u), row_value(at + 6u), row_value(at + 7u));
    low = vec4<f32>(low.x + low.y, low.x - low.y, low.z + low.w, low.z - low.w);
    high = vec4<f32>(high.x + high.y, high.x - high.y, high.z + high.w, high.z - high.w);
    low = vec4<f32>(low.xy + low.zw, low.xy - low.zw);
    high = vec4<f32>(high.xy + high.zw, high.xy - high.zw);
    if has_8 {  // or else a block of 4
        let sums = low + high;
        high = low - high;
        low = sums;
    }
    for (var j = 0u; j < 4u; j++) {
        row_bits[at + j] = bitcast<u32>(low[j]);
        row_bits[at + 4u + j] = bitcast<u32>(high[j]);
    }
}

// The strides behind those, and the norm: pairs are one invocation's.
fn rotate_own(dim: u32, local: u32) {
    var begin = row_at(local) + local % 8u;
    for (var bit = 8u; bit >= 2u; bit--) {
        let block = 1u << bit;
        if (dim & block) == 0u {
            continue;
        }
        for (var s = 3u; s < bit; s++) {
            for (var pair = 0u; pair < block / 16u; pair++) {
                let i = begin + 8u * (pair >> (s - 3u) << (s - 2u) | (pair & ((1u << (s - 3u)) - 1u)));
                let j = i + (1u << s);
                let a = row_value(i);
                let b = row_value(j);
                row_bits[i] = bitcast<u32>(a + b);
                row_bits[j] = bitcast<u32>(a - b);
            }
        }
        let norm = rotation_norm(bit);
        for (var i = begin; i < begin - local % 8u + block; i += 8u) {
            row_bits[i] = bitcast<u32>(row_value(i) * norm);
        }
        begin += block;
    }
}

// A row of the step's input through the plane's transform, with zeros behind its end. Rows that are not
// `read_here` stay as they are.
fn load_new_row(read: u32, constant: Head, read_here: bool, local: u32) {
    let dim = params.plane.head_dim;
    let at = row_at(local);
    if read_here {
        for (var i = local % 8u; i < filled(dim); i += 8u) {
            row_bits[at + i] = bitcast<u32>(new_value(read, constant, i));
        }
    }
    if params.plane.transforms == 0u {
        return;
    }
    workgroupBarrier();
    if read_here {
        for (var i = 8u * (local % 8u); i < dim; i += 64u) {
            rotate_8(at + i, i + 8u <= dim);
        }
    }
    workgroupBarrier();
    if read_here {
        rotate_own(dim, local);
    }
}
