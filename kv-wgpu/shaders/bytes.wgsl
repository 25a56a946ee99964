// Copies bytes from one buffer to another, or writes zeros, at any byte: WebGPU's commands copy and
// clear whole words only.
//
// An invocation writes one word of the target. Without the flag COPY there is no source.
//! include params.wgsl
//! include numbers.wgsl

struct Params {
    src_begin: u32,
    dst_begin: u32,
    len: u32,
    pad: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read_write> dst: array<atomic<u32>>;
//! if COPY
@group(0) @binding(2) var<storage, read> src: array<u32>;
//! include reader.wgsl name=src aligned=false
//! end
//! include writer.wgsl name=dst

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let nth = (group.x + group.y * groups.x) * 64u + local;
    let word = params.dst_begin / 4u + nth;
    var bits = 0u;
    var mask = 0u;
    for (var b = 0u; b < 4u; b++) {
        let at = word * 4u + b;
        if at < params.dst_begin || at - params.dst_begin >= params.len {
            continue;
        }
        mask |= 0xffu << (b * 8u);
        //! if COPY
        bits |= src_byte(params.src_begin + (at - params.dst_begin)) << (b * 8u);
        //! end
    }
    dst_put_masked(word, mask, bits);
}
