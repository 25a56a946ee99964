// Copies a batch of rows to other axes or another element type. A workgroup moves all heads of a
// token. pad.wgsl fills the rows of `dst` that belong to no entry.
//! include params.wgsl
//! include numbers.wgsl

struct Params {
    src: Tensor,
    dst: Tensor,
    num_entries: u32,
    total: u32,
    pad0: u32,
    pad1: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read> src: array<u32>;
@group(0) @binding(3) var<storage, read_write> dst: array<atomic<u32>>;
//! include reader.wgsl name=src aligned=false
//! include writer.wgsl name=dst
//! include entries.wgsl

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let row = group.x + group.y * groups.x;
    if row >= params.total {
        return;
    }
    let entry = entry_of(0u, 2u, params.num_entries, row);
    let start = lists[2u * entry];
    let token = row - start;
    let read = token_begin(params.src, entry, start, token);
    let written = token_begin(params.dst, entry, start, token);
    let values = params.src.heads * params.src.dim;
    for (var i = 2u * local; i < values; i += 128u) {
        let low = src_load(params.src.dtype, read, i);
        if i + 1u == values {
            dst_store(params.dst.dtype, written, i, low);
        } else {
            dst_store_pair(params.dst.dtype, written, i, low, src_load(params.src.dtype, read, i + 1u));
        }
    }
}
