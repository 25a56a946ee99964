// Merges the partial results of attend.wgsl in a fixed order, adds the sink logit, and writes
// output rows and log-sum-exp. A workgroup has one tile of rows of one kv head; attend_item.wgsl
// describes the indices.
//! include params.wgsl
//! include numbers.wgsl

struct Params {
    plan: Plan,
    out: Tensor,
    lse: Tensor,
    v: Plane,
    group: u32,
    first_tile: u32,
    splits: u32,
    slices: u32,
    segments: u32,
    stats: u32,
    rows: u32,      // of a workgroup of attend.wgsl
    sink_logits: u32,  // whether there are sink logits
    v_constants: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

override DTYPE: u32 = 0u;  // of the output
override HAS_TRANSFORMS: bool = true;

const THREADS: u32 = 64u;
const EMPTY: f32 = -3.0e38;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read> partials: array<f32>;
@group(0) @binding(3) var<storage, read> sink_logits: array<f32>;
@group(0) @binding(4) var<storage, read> constants: array<u32>;
@group(0) @binding(5) var<storage, read_write> out: array<atomic<u32>>;
//! if LSE
@group(0) @binding(6) var<storage, read_write> lse: array<atomic<u32>>;
//! include writer.wgsl name=lse
//! end
//! include writer.wgsl name=out
//! include rows.wgsl
//! include tiles.wgsl
//! include transform.wgsl

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let rows = params.rows;
    let x = params.first_tile + group.x;
    if params.plan.num_sequences == 0u {
        return;
    }
    let entry = owner_of(x, rows);
    let s = sequence_of(params.plan, entry);
    let all = s.q_len * params.group;
    let first = (x - start_of(entry, rows)) * rows;
    if first >= all {
        return;
    }
    let splits = max(s.num_splits, 1u);
    let first_partial = (group.x * groups.y + group.y) * params.slices;
    let dim = params.v.head_dim;
    let constant = head_of(params.v, group.y, params.v_constants != 0u);
    for (var row = 0u; row < min(all - first, rows); row++) {
        let query = (first + row) / params.group;
        let head = group.y * params.group + (first + row) % params.group;
        var most = EMPTY;
        var sum = 0.0;
        for (var segment = 0u; segment < params.segments; segment++) {
            for (var split = 0u; split < splits; split++) {
                let at = params.stats + 2u * ((first_partial + segment * params.splits + split) * rows + row);
                most = max(most, partials[at]);
            }
        }
        for (var segment = 0u; segment < params.segments; segment++) {
            for (var split = 0u; split < splits; split++) {
                let at = params.stats + 2u * ((first_partial + segment * params.splits + split) * rows + row);
                if partials[at + 1u] != 0.0 {
                    sum += partials[at + 1u] * rescaled(partials[at], most);
                }
            }
        }
        let is_empty = sum == 0.0;
        var total = most;
        var total_sum = sum;
        if params.sink_logits != 0u {
            let sink_logit = sink_logits[head];
            if sink_logit > EMPTY {
                total = max(most, sink_logit);
                total_sum = exponential(sink_logit - total);
                if !is_empty {
                    total_sum += sum * rescaled(most, total);
                }
            }
        }
        workgroupBarrier();
        for (var d = local; d < dim; d += THREADS) {
            var value = 0.0;
            for (var segment = 0u; segment < params.segments; segment++) {
                for (var split = 0u; split < splits; split++) {
                    let partial = (first_partial + segment * params.splits + split) * rows + row;
                    let at = params.stats + 2u * partial;
                    if partials[at + 1u] != 0.0 {
                        value += partials[partial * dim + d] * rescaled(partials[at], most);
                    }
                }
            }
            row_values[d] = select(value * rescaled(most, total) / total_sum, 0.0, is_empty);
        }
        workgroupBarrier();
        if HAS_TRANSFORMS {
            rotate_row(dim, local);
        }
        let written = head_begin(params.out, entry, s.q_start, query, head);
        for (var d = 2u * local; d < dim; d += 2u * THREADS) {
            var a = row_values[d];
            var b = row_values[d + 1u];
            if HAS_TRANSFORMS {
                a *= bitcast<f32>(constants[constant.back + d]);
                b *= bitcast<f32>(constants[constant.back + d + 1u]);
            }
            out_store_pair(DTYPE, written, d, a, b);
        }
        //! if LSE
        if local == 0u {
            let at = head_begin(params.lse, entry, s.q_start, query, head);
            let bits = select(bitcast<u32>(total + logarithm(total_sum)), 0xff800000u, total_sum == 0.0);
            lse_put_word(at, bits);
        }
        //! end
    }
}
