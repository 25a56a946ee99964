// Parameters from the host: src/params.rs, field by field. Strides, sizes and offsets in bindings
// count bytes.

struct Tensor {
    data: u32,
    batch_stride: u32,
    token_stride: u32,
    axes: u32,
    dtype: u32,
    batch: u32,
    tokens: u32,
    heads: u32,
    dim: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

struct Plane {
    data: u32,
    first: u32,
    end: u32,
    block_bytes: u32,
    token_stride: u32,
    head_stride: u32,
    wide_head_stride: u32,
    mean_begin: u32,
    block_size: u32,
    num_kv_heads: u32,
    head_dim: u32,
    format: u32,
    row_bytes: u32,
    scales_begin: u32,
    transforms: u32,
    block_means: u32,
    full_precision_prefix: u32,
    wide_slots: u32,
    wide_per_block: u32,
    has_tail: u32,
}

struct Plan {
    sequences: u32,
    entries: u32,
    splits: u32,
    slots: u32,
    tables: u32,
    num_sequences: u32,
    num_splits: u32,
    total_new: u32,
}

const THD: u32 = 2u;
const F32: u32 = 0u;
const F16: u32 = 1u;
const BF16: u32 = 2u;

fn dtype_bytes(dtype: u32) -> u32 {
    return select(2u, 4u, dtype == F32);
}

// Returns the first byte of head 0 of token `i` of entry `entry`, whose tokens begin at ragged row
// `start`.
fn token_begin(t: Tensor, entry: u32, start: u32, i: u32) -> u32 {
    if t.axes == THD {
        return t.data + (start + i) * t.token_stride;
    }
    return t.data + entry * t.batch_stride + i * t.token_stride;
}

// Returns the first byte of one head of that token.
fn head_begin(t: Tensor, entry: u32, start: u32, i: u32, head: u32) -> u32 {
    return token_begin(t, entry, start, i) + head * t.dim * dtype_bytes(t.dtype);
}
