// Copies runs of bytes between blocks of a plane: within a segment, or with the flag APART from one
// segment to another. No block is both read and written, and none is written twice.
//! include params.wgsl
//! include numbers.wgsl

struct Params {
    // Bytes of the bindings before the segments.
    src_begin: u32,
    dst_begin: u32,
    runs: u32,
    // Workgroups that share a run, and the bytes that each copies.
    parts: u32,
    part_bytes: u32,
    pad0: u32,
    pad1: u32,
    pad2: u32,
}

// Words of a run in `lists`: its offsets in both segments, and its length.
const RUN_WORDS: u32 = 3u;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read_write> plane: array<atomic<u32>>;
//! include writer.wgsl name=plane
//! if APART
@group(0) @binding(3) var<storage, read> other: array<u32>;
fn read_word(index: u32) -> u32 {
    return other[index];
}
//! else
fn read_word(index: u32) -> u32 {
    return atomicLoad(&plane[index]);
}
//! end

// Reads four bytes at an even byte.
fn read_even(at: u32) -> u32 {
    let word = read_word(at >> 2u);
    if (at & 2u) == 0u {
        return word;
    }
    return (word >> 16u) | (read_word((at >> 2u) + 1u) << 16u);
}

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let item = group.x + group.y * groups.x;
    let run = item / params.parts;
    if run >= params.runs {
        return;
    }
    let at = run * RUN_WORDS;
    let skipped = item % params.parts * params.part_bytes;
    let len = lists[at + 2u];
    if skipped >= len {
        return;
    }
    let read = params.src_begin + lists[at] + skipped;
    let written = params.dst_begin + lists[at + 1u] + skipped;
    let end = written + min(len - skipped, params.part_bytes);
    // An invocation writes whole words, except for halves at the ends.
    for (var word = written / 4u + local; word * 4u < end; word += 64u) {
        let begin = max(word * 4u, written);
        let bytes = min(word * 4u + 4u, end) - begin;
        let source = read + (begin - written);
        if bytes == 4u {
            plane_put_word(begin, read_even(source));
        } else {
            plane_put_half(begin, (read_word(source >> 2u) >> ((source & 2u) * 8u)) & 0xffffu);
        }
    }
}
