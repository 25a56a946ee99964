// Decodes stored rows into plain rows: kv-cpu's gather.rs. A workgroup reads one row of one head.
// pad.wgsl fills the rows of `out` that belong to no range.
//! include params.wgsl
//! include numbers.wgsl

struct Params {
    plane: Plane,
    out: Tensor,
    ranges: u32,
    tables: u32,
    num_ranges: u32,
    total: u32,
    has_constants: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

// Specialisation: see attend_item.wgsl.
override FORMAT: u32 = 0u;
override HAS_EXTRAS: bool = true;

const THREADS: u32 = 64u;
// Words of a range in `lists`: first row, rows, first token, coded tokens, table.
const RANGE_WORDS: u32 = 5u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read> plane: array<u32>;
@group(0) @binding(3) var<storage, read> constants: array<u32>;
@group(0) @binding(4) var<storage, read_write> out: array<atomic<u32>>;
//! include reader.wgsl name=plane aligned=false
//! include writer.wgsl name=out
//! include entries.wgsl
//! include rows.wgsl
//! include codes.wgsl
//! include format.wgsl name=plane
//! include transform.wgsl

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let p = params.plane;
    let dim = p.head_dim;
    let item = group.x + group.y * groups.x;
    let row = item / p.num_kv_heads;
    let head = item % p.num_kv_heads;
    if row >= params.total {
        return;
    }
    let entry = entry_of(params.ranges, RANGE_WORDS, params.num_ranges, row);
    let range = params.ranges + entry * RANGE_WORDS;
    let token = row - lists[range];
    let place = place_in(p, lists[range + 2u] + token, lists[range + 3u]);
    let block = lists[params.tables + lists[range + 4u] + place.index];
    if !is_here(p, block) {
        return;
    }
    fill_books(local);
    let block_at = block_begin(p, block);
    let read = block_at + row_begin(p, place, head);
    let constant = head_of(p, head, params.has_constants != 0u);
    let is_wide = HAS_EXTRAS && place.wide && FORMAT > FMT_BF16;
    let factor = plane_factor(FORMAT, read, p.scales_begin, constant.scale);
    for (var i = 4u * local; i < dim; i += 4u * THREADS) {
        var x: vec4<f32>;
        if is_wide {
            x = plane_four_f16(read + 2u * i);
        } else {
            x = plane_levels(FORMAT, read, p.scales_begin, dim, constant.scale, i);
            // Not for plain formats: devices may flush subnormal products to 0.
            if FORMAT > FMT_BF16 {
                x *= factor;
            }
        }
        if HAS_EXTRAS && p.block_means != 0u && !place.wide {
            x += plane_four_f16(block_at + p.mean_begin + (head * dim + i) * 2u);
        }
        for (var j = 0u; j < 4u; j++) {
            row_values[i + j] = x[j];
        }
    }
    workgroupBarrier();
    if HAS_EXTRAS && p.transforms != 0u {
        rotate_row(dim, local);
    }
    let written = head_begin(params.out, entry, lists[range], token, head);
    // Two values at a time, so that one invocation writes both halves of a word.
    for (var i = 2u * local; i < dim; i += 2u * THREADS) {
        var low = row_values[i];
        var high = row_values[i + 1u];
        if HAS_EXTRAS && p.transforms != 0u {
            low = low * bitcast<f32>(constants[constant.back + i]) + bitcast<f32>(constants[constant.mean + i]);
            high = high * bitcast<f32>(constants[constant.back + i + 1u])
                + bitcast<f32>(constants[constant.mean + i + 1u]);
        }
        out_store_pair(params.out.dtype, written, i, low, high);
    }
}
