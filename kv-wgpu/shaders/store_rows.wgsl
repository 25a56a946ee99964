// Encodes rows to a stored format whose blocks of 32 values each have a scale: kv-cpu's convert.rs. A
// workgroup encodes eight blocks, each as a row of its own.
//! include params.wgsl
//! include numbers.wgsl
//! include stored_params.wgsl

const THREADS: u32 = 64u;
const BLOCK: u32 = 32u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read_write> stored: array<atomic<u32>>;
//! include reader.wgsl name=rows aligned=false
//! include writer.wgsl name=stored
//! include entries.wgsl
//! include row_words.wgsl
//! include codes.wgsl
//! include exchange.wgsl
//! include encode.wgsl
//! include pack.wgsl name=stored

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let dim = params.rows.dim;
    let blocks = (dim + BLOCK - 1u) / BLOCK;
    let items = params.total * params.rows.heads * blocks;
    let first = (group.x + group.y * groups.x) * ROWS;
    if first >= items {
        return;
    }
    // All invocations must reach all barriers: those past the last block read that block too.
    let item = min(first + local / 8u, items - 1u);
    let block = item % blocks;
    let row = head_row(item / blocks);
    for (var i = local % 8u; i < BLOCK; i += 8u) {
        let at = block * BLOCK + i;
        var bits = 0u;
        if at < dim {
            bits = rows_bits(params.rows.dtype, row.plain, at);
        }
        row_bits[row_at(local) + i] = bits;
    }
    encode_codes(false, 1.0, BLOCK, local);
    workgroupBarrier();
    if first + local / 8u == item {
        var one = Plane();
        one.head_dim = BLOCK;
        one.row_bytes = params.block_bytes;
        stored_put_coded(one, row.stored + block * params.block_bytes, false, local);
    }
}
