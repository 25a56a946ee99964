// Decodes rows of a stored format whose blocks of 32 values each have a scale: kv-cpu's convert.rs. A
// workgroup decodes up to 256 values of a row. pad.wgsl fills the rows that belong to no entry.
//! include params.wgsl
//! include numbers.wgsl
//! include stored_params.wgsl

// The stored format.
override FORMAT: u32 = 0u;

const THREADS: u32 = 64u;
const VALUES: u32 = 256u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read> stored: array<u32>;
@group(0) @binding(3) var<storage, read_write> rows: array<atomic<u32>>;
//! include reader.wgsl name=stored aligned=false
//! include writer.wgsl name=rows
//! include entries.wgsl
//! include codes.wgsl
//! include format.wgsl name=stored

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let dim = params.rows.dim;
    let parts = (dim + VALUES - 1u) / VALUES;
    let item = group.x + group.y * groups.x;
    let at = item % parts * VALUES + 4u * local;
    if item / parts >= params.total * params.rows.heads || at >= dim {
        return;
    }
    let row = head_row(item / parts);
    let x = stored_levels(FORMAT, row.stored, 0u, dim, 1.0, at);
    for (var j = 0u; j < min(dim - at, 4u); j++) {
        rows_store(params.rows.dtype, row.plain, at + j, x[j]);
    }
}
