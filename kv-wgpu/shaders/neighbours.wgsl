// Tests whether eight neighbouring invocations of a workgroup are neighbours in a subgroup too and
// exchange values: WebGPU does not guarantee it. Writes 1 for every invocation where this holds.

@group(0) @binding(0) var<storage, read_write> answers: array<u32>;

@compute @workgroup_size(128)
fn main(@builtin(local_invocation_index) local: u32,
        @builtin(subgroup_invocation_id) lane: u32,
        @builtin(subgroup_size) size: u32) {
    var is_same = size >= 8u && lane % 8u == local % 8u;
    is_same = is_same && subgroupShuffleXor(local, 1u) == (local ^ 1u);
    is_same = is_same && subgroupShuffleXor(local, 2u) == (local ^ 2u);
    is_same = is_same && subgroupShuffleXor(local, 4u) == (local ^ 4u);
    answers[local] = select(0u, 1u, is_same);
}
