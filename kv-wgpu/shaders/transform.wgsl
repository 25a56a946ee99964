// Mean, balance, signs and Hadamard rotation of one row: kv-quant's transform.rs. The row is in
// `row_values` in shared memory. All invocations call these functions after a barrier, and they end
// with one. Constants are in the binding `constants`, at words that `Head` has.

var<workgroup> row_values: array<f32, 256>;

//! include head.wgsl
//! include butterflies.wgsl

// Returns where the block begins that contains value `i`, and the exponent of its size. Blocks are
// the powers of two that sum to `dim`, largest first.
fn block_of(dim: u32, i: u32) -> vec2<u32> {
    var begin = 0u;
    for (var bit = 8u; bit > 0u; bit--) {
        let block = dim & (1u << bit);
        if block > 0u && i < begin + block {
            return vec2<u32>(begin, bit);
        }
        begin += block;
    }
    return vec2<u32>(begin, 0u);
}

// Applies up to three strides to set `n` of eight values, from bit `done` on.
fn rotate_set(dim: u32, n: u32, done: u32) {
    let block = block_of(dim, 8u * n);
    let bit = block.y;
    if done > 0u && done >= bit {
        return;
    }
    let first = min(done, max(bit, 3u) - 3u);
    let step = 1u << first;
    let at = block.x + eight_begin(n - block.x / 8u, first);
    // The last block may have fewer than eight values.
    let count = min(8u, 1u << bit);
    var values = Eight(vec4<f32>(0.0), vec4<f32>(0.0));
    for (var j = 0u; j < 4u; j++) {
        if j < count {
            values.low[j] = row_values[at + j * step];
        }
        if j + 4u < count {
            values.high[j] = row_values[at + (j + 4u) * step];
        }
    }
    let strides = (7u << (done - first)) & ((1u << min(bit, 3u)) - 1u);
    values = butterflies(values, strides, select(1.0, rotation_norm(bit), done + 3u >= bit));
    for (var j = 0u; j < 4u; j++) {
        if j < count {
            row_values[at + j * step] = values.low[j];
        }
        if j + 4u < count {
            row_values[at + (j + 4u) * step] = values.high[j];
        }
    }
}

// Applies the orthonormal Walsh-Hadamard transform to every block.
fn rotate_row(dim: u32, local: u32) {
    for (var done = 0u; (2u << done) <= dim; done += 3u) {
        for (var n = local; n < (dim + 7u) / 8u; n += THREADS) {
            rotate_set(dim, n, done);
        }
        workgroupBarrier();
    }
}
