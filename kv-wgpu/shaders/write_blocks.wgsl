// Blocks that a step fills become codes: kv-cpu's write/tail.rs. A workgroup writes one head of a piece:
// rows of one block that get codes in this step, eight at a time. They come from the step's input, or from
// the tail there was, which stage_tail.wgsl has laid aside.
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
//! include head.wgsl
//! include butterflies.wgsl
//! include new_row.wgsl
//! include codes.wgsl
//! include exchange.wgsl
//! include pieces.wgsl
//! if CODES
//! include encode.wgsl
//! include pack.wgsl name=plane
//! end

var<workgroup> row_mean: array<f32, 256>;
// Whether a row counts for the mean.
var<workgroup> is_sound: array<u32, 8>;

// An invocation's row as it is stored, before it is encoded. What all had of rows before was read.
fn read_row(piece: Piece, s: Sequence, position: u32, head: u32, constant: Head, local: u32) {
    let p = params.plane;
    let dim = p.head_dim;
    let cached = s.kv_len - s.new_len;
    let is_new = position >= cached;
    if !is_new {
        let read = staged_begin(p, piece, position, head);
        for (var i = local % 8u; i < filled(dim); i += 8u) {
            var bits = 0u;
            if i < dim {
                bits = staged[read + i];
            }
            row_bits[row_at(local) + i] = bits;
        }
    }
    let read = head_begin(params.rows, piece.entry, s.new_start, position - cached, head);
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

// The mean of rows that are all there will be in their block. One with a value that is not finite, or
// that saturated, does not count.
fn take_mean(piece: Piece, s: Sequence, head: u32, constant: Head, local: u32) {
    let dim = params.plane.head_dim;
    for (var i = local; i < dim; i += THREADS) {
        row_mean[i] = 0.0;
    }
    var counted = 0u;
    for (var first = piece.begin; first < piece.end; first += ROWS) {
        workgroupBarrier();  // the rows before were read
        read_row(piece, s, min(first + local / 8u, piece.end - 1u), head, constant, local);
        var bits = 0u;
        for (var i = local % 8u; i < dim; i += 8u) {
            bits = max(bits, magnitude_bits(row_value(row_at(local) + i)));
        }
        let amax = of_8(PEAKS, local, vec2<u32>(bits, 0u)).x;
        if local % 8u == 0u {
            is_sound[local / 8u] = u32(amax < bitcast<u32>(65504.0));
        }
        workgroupBarrier();
        for (var row = 0u; row < min(piece.end - first, ROWS); row++) {
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
    for (var first = piece.begin; first < piece.end; first += ROWS) {
        workgroupBarrier();  // the mean is there, and the rows before were read
        let position = min(first + local / 8u, piece.end - 1u);
        read_row(piece, s, position, head, constant, local);
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
