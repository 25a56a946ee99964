// Copies the tail rows that a step quantises to scratch memory, as f32: their blocks and those of
// the codes may be in one binding or in different ones. A workgroup reads one head of a run.
//! include params.wgsl
//! include numbers.wgsl
//! include write_params.wgsl

const THREADS: u32 = 64u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read> plane: array<u32>;
@group(0) @binding(3) var<storage, read> runs: array<u32>;
@group(0) @binding(4) var<storage, read_write> staged: array<u32>;
//! include reader.wgsl name=plane aligned=false
//! include rows.wgsl
//! include coded_runs.wgsl

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let p = params.plane;
    let item = group.x + group.y * groups.x;
    if item / p.num_kv_heads >= params.num_runs {
        return;
    }
    let run = coded_run_of(item / p.num_kv_heads);
    let head = item % p.num_kv_heads;
    let s = sequence_of(params.plan, run.entry);
    let dtype = select(F16, p.format, p.format <= BF16);
    for (var position = run.begin; position < min(run.end, s.kv_len - s.new_len); position++) {
        let place = place_sealed(p, s, position);
        let block = lists[params.plan.tables + s.table + place.index];
        if !is_here(p, block) {
            continue;
        }
        let read = block_begin(p, block) + row_begin(p, place, head);
        let written = staged_begin(p, run, position, head);
        for (var i = local; i < p.head_dim; i += THREADS) {
            staged[written + i] = plane_bits(dtype, read, i);
        }
    }
}
