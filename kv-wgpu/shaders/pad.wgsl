// Sets every row of an output that belongs to no entry to one value. A workgroup fills all heads of
// a token.
//! include params.wgsl
//! include numbers.wgsl

struct Params {
    out: Tensor,
    num_entries: u32,
    total: u32,
    value: f32,
    entries: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read_write> out: array<atomic<u32>>;
//! include writer.wgsl name=out

// Returns the number of rows that belong to an entry; they come first.
fn owned(entry: u32) -> u32 {
    if params.out.axes == THD {
        return params.total;
    }
    if entry < params.num_entries {
        return lists[params.entries + 2u * entry + 1u];
    }
    return 0u;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let row = group.x + group.y * groups.x;
    let t = params.out;
    if row >= t.batch * t.tokens {
        return;
    }
    let entry = row / t.tokens;
    let token = row % t.tokens;
    if token < owned(entry) {
        return;
    }
    let begin = token_begin(t, entry, 0u, token);
    for (var i = local; i < t.heads * t.dim; i += 64u) {
        out_store(t.dtype, begin, i, params.value);
    }
}
