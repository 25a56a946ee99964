// Writes new rows of K or V into their slots: kv-cpu's write.rs. A workgroup writes eight rows of
// one head each. It writes the rows that stay in a 16-bit tail; write_blocks.wgsl writes rows that
// are quantised with their block.
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
//! include head.wgsl
//! include butterflies.wgsl
//! include new_row.wgsl
//! if CODES
//! include codes.wgsl
//! include exchange.wgsl
//! include encode.wgsl
//! include pack.wgsl name=plane
//! end

// A token of the step.
struct Token {
    entry: u32,
    new_start: u32,
    token: u32,  // index among the sequence's new tokens
    block: u32,
    place: Place,
    // Whether its rows are written by this dispatch.
    is_mine: bool,
}

fn token_of(row: u32) -> Token {
    let p = params.plane;
    // The plan's slots give the place; the slot map says whether the row is in 16 bits.
    let slot = lists[params.plan.slots + row];
    let block = slot / p.block_size;
    let entry = entry_of(params.plan.sequences + 3u, SEQUENCE_WORDS, params.plan.num_sequences, row);
    let s = sequence_of(params.plan, entry);
    let token = row - s.new_start;
    let position = s.kv_len - s.new_len + token;
    let wide = position < p.full_precision_prefix || position >= tail_begin(p, s.kv_len, s.coded);
    let is_mine = is_here(p, block) && (p.has_tail == 0u || wide);
    return Token(entry, s.new_start, token, block, Place(0u, slot % p.block_size, wide), is_mine);
}

// Returns whether any of the rows `first..=last` is written by this dispatch: uniform in a
// workgroup.
fn has_any(first: u32, last: u32) -> bool {
    for (var row = first; row <= last; row++) {
        if token_of(row).is_mine {
            return true;
        }
    }
    return false;
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let p = params.plane;
    let items = params.plan.total_new * p.num_kv_heads;
    let first = (group.x + group.y * groups.x) * ROWS;
    if first >= items {
        return;
    }
    let last = min(first + ROWS, items) - 1u;
//! if CODES
    if !has_any(first / p.num_kv_heads, last / p.num_kv_heads) {
        return;
    }
//! end
    // All invocations must reach all barriers: those past the last row read that row too.
    let item = min(first + local / 8u, last);
    let head = item % p.num_kv_heads;
    let t = token_of(item / p.num_kv_heads);
    let is_mine = t.is_mine && first + local / 8u == item;
    let read = head_begin(params.rows, t.entry, t.new_start, t.token, head);
    let written = block_begin(p, t.block) + row_begin(p, t.place, head);
    let constant = head_of(p, head, params.has_constants != 0u);
//! if CODES
    load_new_row(read, constant, is_mine, local);
    if p.has_tail != 0u {
        keep_wide(p.head_dim, local);
    } else {
        encode_codes(t.place.wide, constant.inv_scale, p.head_dim, local);
    }
    workgroupBarrier();
    if is_mine {
        plane_put_coded(p, written, t.place.wide, local);
    }
//! else
    if p.transforms == 0u {
        if is_mine {
            for (var i = 2u * (local % 8u); i < p.head_dim; i += 16u) {
                let low = rows_load(params.rows.dtype, read, i);
                plane_store_pair(p.format, written, i, low, rows_load(params.rows.dtype, read, i + 1u));
            }
        }
        return;
    }
    load_new_row(read, constant, is_mine, local);
    workgroupBarrier();
    if is_mine {
        for (var i = 2u * (local % 8u); i < p.head_dim; i += 16u) {
            let at = row_at(local) + i;
            plane_store_pair(p.format, written, i, row_value(at), row_value(at + 1u));
        }
    }
//! end
}
