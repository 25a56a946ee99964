// Mean, balance, signs and Hadamard rotation of one row: kv-quant's transform.rs. The row is in
// `row_values`, which the workgroup shares; all invocations call, after a barrier, and another one is
// behind them. Constants are in the binding `constants`, at words that `Head` has.

var<workgroup> row_values: array<f32, 256>;

//! include head.wgsl

// The orthonormal Walsh-Hadamard transform of the blocks of powers of two that sum to `dim`, largest
// first.
fn rotate_row(dim: u32, local: u32) {
    var begin = 0u;
    for (var bit = 8u; bit >= 1u; bit--) {  // a block of one value stays
        let block = 1u << bit;
        if (dim & block) == 0u {
            continue;
        }
        let norm = rotation_norm(bit);
        for (var s = 0u; s < bit; s++) {
            for (var pair = local; pair < block / 2u; pair += THREADS) {
                let i = begin + (pair >> s << (s + 1u) | (pair & ((1u << s) - 1u)));
                let j = i + (1u << s);
                let a = row_values[i];
                let b = row_values[j];
                let last = s + 1u == bit;
                row_values[i] = select(a + b, (a + b) * norm, last);
                row_values[j] = select(a - b, (a - b) * norm, last);
            }
            workgroupBarrier();
        }
        begin += block;
    }
}
