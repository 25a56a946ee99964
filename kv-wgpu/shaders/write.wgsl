// New rows of K or of V go to their slots: kv-cpu's write.rs. A workgroup writes one row of one head.
//! include params.wgsl
//! include numbers.wgsl

struct Params {
    plan: Plan,
    rows: Tensor,
    plane: Plane,
    has_constants: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

const THREADS: u32 = 64u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read> constants: array<u32>;
@group(0) @binding(4) var<storage, read_write> plane: array<atomic<u32>>;
//! include reader.wgsl name=rows
//! include writer.wgsl name=plane
//! include entries.wgsl
//! include rows.wgsl
//! include transform.wgsl

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let p = params.plane;
    let dim = p.head_dim;
    let unit = group.x + group.y * groups.x;
    let row = unit / p.num_kv_heads;
    let head = unit % p.num_kv_heads;
    if row >= params.plan.total_new {
        return;
    }
    // The plan's slots say where; the map says how wide the row is.
    let slot = lists[params.plan.slots + row];
    let block = slot / p.block_size;
    if !is_here(p, block) {
        return;
    }
    let entry = entry_of(params.plan.sequences + 3u, SEQUENCE_WORDS, params.plan.num_sequences, row);
    let s = sequence_of(params.plan, entry);
    let token = row - s.new_start;
    let wide = s.kv_len - s.new_len + token < p.sinks;
    let place = Place(0u, slot % p.block_size, wide);
    let read = head_begin(params.rows, entry, s.new_start, token, head);
    let written = block_begin(p, block) + row_begin(p, place, head);
    let constant = head_of(p, head, params.has_constants != 0u);
    for (var i = local; i < dim; i += THREADS) {
        var x = rows_load(params.rows.dtype, read, i);
        if p.transforms != 0u {
            x = (x - bitcast<f32>(constants[constant.mean + i])) * bitcast<f32>(constants[constant.into + i]);
        }
        row_values[i] = x;
    }
    workgroupBarrier();
    if p.transforms != 0u {
        rotate_row(dim, local);
    }
    for (var i = 2u * local; i < dim; i += 2u * THREADS) {
        plane_store_pair(p.format, written, i, row_values[i], row_values[i + 1u]);
    }
}
