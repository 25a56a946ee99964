// Quantises the blocks that a step fills: kv-cpu's write/tail.rs. A workgroup writes one head of a
// run, the rows of one block that are quantised in this step, eight rows at a time. Rows come from
// the step's input, or from the old tail, which stage_tail.wgsl copied to scratch memory.
//! include params.wgsl
//! include numbers.wgsl
//! include write_params.wgsl

const THREADS: u32 = 64u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read> constants: array<u32>;
@group(0) @binding(4) var<storage, read_write> plane: array<atomic<u32>>;
@group(0) @binding(5) var<storage, read> runs: array<u32>;
@group(0) @binding(6) var<storage, read> staged: array<u32>;
//! include reader.wgsl name=rows aligned=false
//! include writer.wgsl name=plane
//! include rows.wgsl
//! include head.wgsl
//! include butterflies.wgsl
//! include new_row.wgsl
//! include codes.wgsl
//! include exchange.wgsl
//! include coded_runs.wgsl
//! if CODES
//! include encode.wgsl
//! include pack.wgsl name=plane
//! end

var<workgroup> row_mean: array<f32, 256>;
// Whether a row counts in the mean.
var<workgroup> is_sound: array<u32, 8>;

// Loads an invocation's row before it is encoded. The caller has a barrier after the reads of
// earlier rows.
fn read_row(run: CodedRun, s: Sequence, position: u32, head: u32, constant: Head, local: u32) {
    let p = params.plane;
    let dim = p.head_dim;
    let cached = s.kv_len - s.new_len;
    let is_new = position >= cached;
    if !is_new {
        let read = staged_begin(p, run, position, head);
        for (var i = local % 8u; i < filled(dim); i += 8u) {
            var bits = 0u;
            if i < dim {
                bits = staged[read + i];
            }
            row_bits[row_at(local) + i] = bits;
        }
    }
    let read = head_begin(params.rows, run.entry, s.new_start, position - cached, head);
    load_new_row(read, constant, is_new, local);
//! if CODES
    if is_new {
        for (var i = local % 8u; i < dim; i += 8u) {
            let at = row_at(local) + i;
            row_bits[at] = f16_widen(f16_saturated(row_value(at)));
        }
    }
//! end
}

// Computes the mean of all rows of a block. Rows with a value that is not finite or that saturated
// do not count.
fn take_mean(run: CodedRun, s: Sequence, head: u32, constant: Head, local: u32) {
    let dim = params.plane.head_dim;
    for (var i = local; i < dim; i += THREADS) {
        row_mean[i] = 0.0;
    }
    var counted = 0u;
    for (var first = run.begin; first < run.end; first += ROWS) {
        workgroupBarrier();  // reads of the rows before are done
        read_row(run, s, min(first + local / 8u, run.end - 1u), head, constant, local);
        var bits = 0u;
        for (var i = local % 8u; i < dim; i += 8u) {
            bits = max(bits, magnitude_bits(row_value(row_at(local) + i)));
        }
        let amax = of_8(PEAKS, local, vec2<u32>(bits, 0u)).x;
        if local % 8u == 0u {
            is_sound[local / 8u] = u32(amax < bitcast<u32>(65504.0));
        }
        workgroupBarrier();
        for (var row = 0u; row < min(run.end - first, ROWS); row++) {
            if is_sound[row] != 0u && counted < 65535u {
                counted++;
                for (var i = local; i < dim; i += THREADS) {
                    row_mean[i] += row_value(row * ROW_WORDS + i);
                }
            }
        }
    }
    let factor = 1.0 / f32(max(counted, 1u));
    for (var i = local; i < dim; i += THREADS) {
        row_mean[i] = f16_decode(f16_saturated(row_mean[i] * factor));
    }
}

fn stored_half(at: u32) -> u32 {
    return (atomicLoad(&plane[at >> 2u]) >> ((at & 2u) * 8u)) & 0xffffu;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let p = params.plane;
    let dim = p.head_dim;
    let unit = group.x + group.y * groups.x;
    if unit / p.num_kv_heads >= params.num_runs {
        return;
    }
    let run = coded_run_of(unit / p.num_kv_heads);
    let head = unit % p.num_kv_heads;
    let s = sequence_of(params.plan, run.entry);
    let block = lists[params.plan.tables + s.table + place_of(p, run.begin).index];
    if !is_here(p, block) {
        return;
    }
    let constant = head_of(p, head, params.has_constants != 0u);
    let block_at = block_begin(p, block);
    // An invocation always handles the same channels of the mean.
    let mean_at = block_at + p.mean_begin + head * dim * 2u;
    if p.block_means != 0u {
        if run.is_whole != 0u {
            take_mean(run, s, head, constant, local);
            for (var i = local; i < dim; i += THREADS) {
                plane_put_half(mean_at + 2u * i, f16_bits(row_mean[i]));
            }
        } else {
            for (var i = local; i < dim; i += THREADS) {
                row_mean[i] = f16_decode(stored_half(mean_at + 2u * i));
            }
        }
    }
    for (var first = run.begin; first < run.end; first += ROWS) {
        workgroupBarrier();  // the mean is stored, and reads of the rows before are done
        let position = min(first + local / 8u, run.end - 1u);
        read_row(run, s, position, head, constant, local);
        if p.block_means != 0u {
            for (var i = local % 8u; i < dim; i += 8u) {
                let at = row_at(local) + i;
                row_bits[at] = bitcast<u32>(row_value(at) - row_mean[i]);
            }
        }
        let written = block_at + row_begin(p, place_of(p, position), head);
        let is_mine = first + local / 8u == position;
//! if CODES
        encode_codes(false, constant.inv_scale, dim, local);
        workgroupBarrier();
        if is_mine {
            plane_put_coded(p, written, false, local);
        }
//! else
        workgroupBarrier();
        if is_mine {
            for (var i = 2u * (local % 8u); i < dim; i += 16u) {
                let at = row_at(local) + i;
                plane_store_pair(p.format, written, i, row_value(at), row_value(at + 1u));
            }
        }
//! end
    }
}
