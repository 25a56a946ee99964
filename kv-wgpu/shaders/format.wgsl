// Decoding of stored rows: kv-quant's row.rs. The plane is the binding `$name`.
//
// A value is a level times the row's factor. The factor is the scale of rows with one scale, and 1
// if 16 or 32 values share a scale: levels contain it then. Levels are read four at a time, from an
// index that is a multiple of 4.

// Reads four codes of `w` bits from a plane of `n` codes, from code `at` on: docs/formats.md.
fn $name_plane_bits(plane: u32, n: u32, at: u32, w: u32) -> vec4<u32> {
    let per_byte = 8u / w;
    let m = (n + per_byte - 1u) / per_byte;
    let mask = (1u << w) - 1u;
    if m % 4u == 0u {
        return bytes_of($name_bytes(plane + at % m) >> (at / m * w)) & vec4<u32>(mask);
    }
    // The last group is short.
    var codes = vec4<u32>(0u);
    for (var j = 0u; j < 4u; j++) {
        let i = at + j;
        codes[j] = ($name_byte(plane + i % m) >> (i / m * w)) & mask;
    }
    return codes;
}

fn $name_lloyd_levels(bits: u32, row: u32, dim: u32, i: u32) -> vec4<f32> {
    let nth = i / 32u;
    let at = i % 32u;
    let n = min(dim - nth * 32u, 32u);
    let group = row + nth * group_bytes(bits);
    var codes: vec4<u32>;
    if bits == 3u {
        codes = $name_plane_bits(group, n, at, 2u)
            | ($name_plane_bits(group + (n + 3u) / 4u, n, at, 1u) << vec4<u32>(2u));
    } else {
        codes = $name_plane_bits(group, n, at, 4u);
        if bits == 6u {
            codes |= $name_plane_bits(group + (n + 1u) / 2u, n, at, 2u) << vec4<u32>(4u);
        }
    }
    return lloyd_levels(bits, codes);
}

// Returns levels `i..i + 4` of a row. `scale` is the given scale of plane and head.
fn $name_levels(format: u32, row: u32, scales_begin: u32, dim: u32, scale: f32, i: u32) -> vec4<f32> {
    let scales = row + scales_begin;
    switch format {
        case FMT_F32: { return $name_four_f32(row + 4u * i); }
        case FMT_F16: { return $name_four_f16(row + 2u * i); }
        case FMT_BF16: { return $name_four_bf16(row + 2u * i); }
        case FMT_E4M3, FMT_E4M3_HEAD, FMT_E4M3_ROW: { return e4m3_decode_four($name_bytes(row + i)); }
        case FMT_E5M2, FMT_E5M2_HEAD, FMT_E5M2_ROW: {
            return f16_decode_four(bytes_of($name_bytes(row + i)) << vec4<u32>(8u));
        }
        case FMT_INT8, FMT_INT8_HEAD, FMT_INT8_ROW: { return int8_decode_four($name_bytes(row + i)); }
        case FMT_L6, FMT_L6_G32: {
            let levels = $name_lloyd_levels(6u, row, dim, i);
            if format == FMT_L6 { return levels; }
            return levels * e4m3_decode($name_byte(scales + i / 32u));
        }
        case FMT_L4, FMT_L4_G32: {
            let levels = $name_lloyd_levels(4u, row, dim, i);
            if format == FMT_L4 { return levels; }
            return levels * e4m3_decode($name_byte(scales + i / 32u));
        }
        case FMT_L3, FMT_L3_G32: {
            let levels = $name_lloyd_levels(3u, row, dim, i);
            if format == FMT_L3 { return levels; }
            return levels * e4m3_decode($name_byte(scales + i / 32u));
        }
        case FMT_Q8_0: {
            let block = row + i / 32u * 34u;
            return int8_decode_four($name_bytes(block + 2u + i % 32u)) * f16_decode($name_half(block));
        }
        case FMT_Q4_0: {
            let block = row + i / 32u * 18u;
            let codes = bytes_of($name_bytes(block + 2u + i % 16u) >> (i / 16u % 2u * 4u)) & vec4<u32>(15u);
            return (vec4<f32>(codes) - 8.0) * f16_decode($name_half(block));
        }
        case FMT_NVFP4: {
            let bits = $name_half(row + i / 2u);
            let codes = vec4<u32>(bits, bits >> 4u, bits >> 8u, bits >> 12u) & vec4<u32>(15u);
            return e2m1_decode_four(codes) * (e4m3_decode($name_byte(scales + i / 16u)) * scale);
        }
        default: { return unknown_format(); }
    }
}

fn $name_factor(format: u32, row: u32, scales_begin: u32, scale: f32) -> f32 {
    switch format {
        case FMT_E4M3, FMT_E4M3_HEAD, FMT_E5M2, FMT_E5M2_HEAD, FMT_INT8, FMT_INT8_HEAD: { return scale; }
        case FMT_E4M3_ROW, FMT_E5M2_ROW, FMT_INT8_ROW, FMT_L6, FMT_L4, FMT_L3: {
            return f16_decode($name_half(row + scales_begin));
        }
        default: { return 1.0; }
    }
}
