// New rows of K or of V go to their slots: kv-cpu's write.rs. A workgroup writes one row of one head.
// Rows that a tail keeps for later are here; those that become codes with their block are
// write_blocks.wgsl's.
//! include params.wgsl
//! include numbers.wgsl
//! include write_params.wgsl

const THREADS: u32 = 64u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read> constants: array<u32>;
@group(0) @binding(4) var<storage, read_write> plane: array<atomic<u32>>;
//! include reader.wgsl name=rows aligned=false
//! include writer.wgsl name=plane
//! include entries.wgsl
//! include rows.wgsl
//! include transform.wgsl
//! include new_row.wgsl
//! if CODES
//! include codes.wgsl
//! include encode.wgsl
//! include pack.wgsl name=plane
//! end

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let p = params.plane;
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
    let position = s.kv_len - s.new_len + token;
    let wide = position < p.sinks || position >= tail_begin(p, s.kv_len, s.coded);
    if p.has_tail != 0u && !wide {
        return;
    }
    let read = head_begin(params.rows, entry, s.new_start, token, head);
    let written = block_begin(p, block) + row_begin(p, Place(0u, slot % p.block_size, wide), head);
    let constant = head_of(p, head, params.has_constants != 0u);
    load_new_row(read, constant, local);
//! if CODES
    if is_lloyd(p.format) {
        fill_bounds(local);
    }
    plane_put_row(p, written, wide, constant.inv_scale, local);
//! else
    for (var i = 2u * local; i < p.head_dim; i += 2u * THREADS) {
        plane_store_pair(p.format, written, i, row_values[i], row_values[i + 1u]);
    }
//! end
}
