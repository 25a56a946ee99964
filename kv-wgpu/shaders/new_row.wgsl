// Loading and transforming new rows. A barrier must precede reads of other invocations' values.
//! include row_words.wgsl

// Saturates at 2^112, infinities too, so that no sum of a rotation overflows; keeps NaN. kv-quant's
// STORED_MAX.
fn saturated(x: f32) -> f32 {
    let bits = bitcast<u32>(x);
    let magnitude = bits & 0x7fffffffu;
    let is_large = magnitude > 0x77800000u && magnitude <= 0x7f800000u;
    return bitcast<f32>(select(bits, (bits & 0x80000000u) | 0x77800000u, is_large));
}

fn new_value(read: u32, constant: Head, i: u32) -> f32 {
    if i >= params.plane.head_dim {
        return 0.0;
    }
    let x = rows_load(params.rows.dtype, read, i);
    if params.plane.transforms == 0u {
        return x;
    }
    let stored = (x - bitcast<f32>(constants[constant.mean + i])) * bitcast<f32>(constants[constant.into + i]);
    return saturated(stored);
}

// Applies some butterfly strides to eight values that are `step` apart.
fn rotate_8(at: u32, step: u32, strides: u32, factor: f32) {
    var values = Eight(
        vec4<f32>(row_value(at), row_value(at + step), row_value(at + 2u * step), row_value(at + 3u * step)),
        vec4<f32>(row_value(at + 4u * step), row_value(at + 5u * step), row_value(at + 6u * step),
                  row_value(at + 7u * step)));
    values = butterflies(values, strides, factor);
    for (var j = 0u; j < 4u; j++) {
        row_bits[at + j * step] = bitcast<u32>(values.low[j]);
        row_bits[at + (4u + j) * step] = bitcast<u32>(values.high[j]);
    }
}

// Applies the strides of 8 and more, and the norm, to a block that begins at an invocation's own
// value: the invocation holds both values of each pair.
fn rotate_own(begin: u32, bit: u32) {
    let block = 1u << bit;
    let norm = rotation_norm(bit);
    if bit >= 6u {
        let bits = bit - 3u;
        var done = 0u;
        while done < bits {
            let first = min(done, bits - 3u);
            let factor = select(1.0, norm, first + 3u == bits);
            for (var n = 0u; n < block / 64u; n++) {
                rotate_8(begin + 8u * eight_begin(n, first), 8u << first, 7u << (done - first), factor);
            }
            done = first + 3u;
        }
        return;
    }
    // The block has one, two or four of this invocation's values.
    for (var s = 8u; s < block; s *= 2u) {
        for (var i = 0u; i < block; i += 8u) {
            if (i & s) == 0u {
                let a = row_value(begin + i);
                let b = row_value(begin + i + s);
                row_bits[begin + i] = bitcast<u32>(a + b);
                row_bits[begin + i + s] = bitcast<u32>(a - b);
            }
        }
    }
    for (var i = 0u; i < block; i += 8u) {
        row_bits[begin + i] = bitcast<u32>(row_value(begin + i) * norm);
    }
}

// Reads a row of the step's input, transforms it and pads it with zeros. Does nothing for rows
// without `read_here`.
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
            rotate_8(at + i, 1u, select(3u, 7u, i + 8u <= dim), 1.0);  // or a block of 4
        }
    }
    workgroupBarrier();
    if read_here {
        var begin = local % 8u;
        for (var bit = 8u; bit >= 2u; bit--) {
            if (dim & (1u << bit)) != 0u && begin < dim {
                rotate_own(at + begin, bit);
                begin += 1u << bit;
            }
        }
    }
}
