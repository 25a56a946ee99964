// Blocks that a step fills become codes: kv-cpu's write/tail.rs. A workgroup writes one head of a piece:
// rows of one block that get codes in this step. They come from the step's input, or from the tail
// there was, which stage_tail.wgsl has laid aside.
//! include params.wgsl
//! include numbers.wgsl
//! include write_params.wgsl

const THREADS: u32 = 64u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read> rows: array<u32>;
@group(0) @binding(3) var<storage, read> constants: array<u32>;
@group(0) @binding(4) var<storage, read_write> plane: array<atomic<u32>>;
@group(0) @binding(5) var<storage, read> pieces: array<u32>;
@group(0) @binding(6) var<storage, read> staged: array<u32>;
//! include reader.wgsl name=rows aligned=false
//! include writer.wgsl name=plane
//! include rows.wgsl
//! include transform.wgsl
//! include new_row.wgsl
//! include codes.wgsl
//! include encode.wgsl
//! include pack.wgsl name=plane
//! include pieces.wgsl

var<workgroup> row_mean: array<f32, 256>;

// A row as it is stored, before it is encoded. Barriers are before and behind.
fn read_row(piece: Piece, s: Sequence, position: u32, head: u32, constant: Head, local: u32) {
    let p = params.plane;
    let cached = s.kv_len - s.new_len;
    workgroupBarrier();  // the row before was read
    if position < cached {
        let read = staged_begin(p, piece, position, head);
        for (var i = local; i < 256u; i += THREADS) {
            var x = 0.0;
            if i < p.head_dim {
                x = bitcast<f32>(staged[read + i]);
            }
            row_values[i] = x;
        }
        workgroupBarrier();
        return;
    }
    load_new_row(head_begin(params.rows, piece.entry, s.new_start, position - cached, head), constant, local);
    if p.format > FMT_BF16 {
        for (var i = local; i < p.head_dim; i += THREADS) {
            row_values[i] = round_wide(row_values[i]);
        }
        workgroupBarrier();
    }
}

// The mean of rows that are all there will be in their block. One with a value that is not finite, or
// that saturated, does not count.
fn take_mean(piece: Piece, s: Sequence, head: u32, constant: Head, local: u32) {
    let dim = params.plane.head_dim;
    for (var i = local; i < dim; i += THREADS) {
        row_mean[i] = 0.0;
    }
    var counted = 0u;
    for (var position = piece.begin; position < piece.end; position++) {
        read_row(piece, s, position, head, constant, local);
        var bits = 0u;
        for (var i = local; i < dim; i += THREADS) {
            bits = max(bits, magnitude_bits(row_values[i]));
        }
        let amax = max_of(local, THREADS, vec2<u32>(bits, 0u)).x;
        if amax < bitcast<u32>(65504.0) && counted < 65535u {
            counted++;
            for (var i = local; i < dim; i += THREADS) {
                row_mean[i] += row_values[i];
            }
        }
    }
    let factor = 1.0 / f32(max(counted, 1u));
    for (var i = local; i < dim; i += THREADS) {
        row_mean[i] = round_wide(row_mean[i] * factor);
    }
}

fn stored_half(at: u32) -> u32 {
    return atomicLoad(&plane[at >> 2u]) >> ((at & 2u) * 8u) & 0xffffu;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let p = params.plane;
    let dim = p.head_dim;
    let unit = group.x + group.y * groups.x;
    if unit / p.num_kv_heads >= params.num_pieces {
        return;
    }
    let piece = piece_of(unit / p.num_kv_heads);
    let head = unit % p.num_kv_heads;
    let s = sequence_of(params.plan, piece.entry);
    let block = lists[params.plan.tables + s.table + place_of(p, piece.begin).index];
    if !is_here(p, block) {
        return;
    }
    let constant = head_of(p, head, params.has_constants != 0u);
    let block_at = block_begin(p, block);
    if is_lloyd(p.format) {
        fill_bounds(local);
    }
    // An invocation has the same channels of the mean all the time.
    let mean_at = block_at + p.mean_begin + head * dim * 2u;
    if p.block_means != 0u {
        if piece.is_whole != 0u {
            take_mean(piece, s, head, constant, local);
            for (var i = local; i < dim; i += THREADS) {
                plane_put_half(mean_at + 2u * i, f16_bits(row_mean[i]));
            }
        } else {
            for (var i = local; i < dim; i += THREADS) {
                row_mean[i] = f16_decode(stored_half(mean_at + 2u * i));
            }
        }
    }
    for (var position = piece.begin; position < piece.end; position++) {
        read_row(piece, s, position, head, constant, local);
        if p.block_means != 0u {
            for (var i = local; i < dim; i += THREADS) {
                row_values[i] -= row_mean[i];
            }
            workgroupBarrier();
        }
        let written = block_at + row_begin(p, place_of(p, position), head);
        plane_put_row(p, written, false, constant.inv_scale, local);
    }
}
