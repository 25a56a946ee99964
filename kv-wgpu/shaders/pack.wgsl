// Packing of encode.wgsl's results into the bytes of a row of the binding `$name`: docs/formats.md.
// The row's codes are at `codes`, its scales at `scales`.

// Returns a byte of a plane of codes: `w` bits from bit `low` on, of the `n` codes from `codes` on.
fn plane_bits_of(codes: u32, n: u32, byte: u32, low: u32, w: u32) -> u32 {
    let per_byte = 8u / w;
    let m = (n + per_byte - 1u) / per_byte;
    var bits = 0u;
    for (var j = 0u; j < per_byte; j++) {
        let at = byte + j * m;
        if at < n {
            bits |= ((row_bits[codes + at] >> low) & ((1u << w) - 1u)) << (j * w);
        }
    }
    return bits;
}

fn lloyd_byte(bits: u32, dim: u32, row: u32, at: u32) -> u32 {
    let whole = group_bytes(bits);
    let begin = at / whole * 32u;
    if begin >= dim {
        return 0u;  // between codes and scale
    }
    let codes = row + begin;
    let n = min(dim - begin, 32u);
    let byte = at % whole;
    let first = select((n + 1u) / 2u, (n + 3u) / 4u, bits == 3u);  // bytes of the first plane
    if bits == 3u {
        if byte < first {
            return plane_bits_of(codes, n, byte, 0u, 2u);
        }
        return select(0u, plane_bits_of(codes, n, byte - first, 2u, 1u), byte - first < (n + 7u) / 8u);
    }
    if byte < first {
        return plane_bits_of(codes, n, byte, 0u, 4u);
    }
    let has_more = bits == 6u && byte - first < (n + 3u) / 4u;
    return select(0u, plane_bits_of(codes, n, byte - first, 4u, 2u), has_more);
}

// Returns byte `at` of a row.
fn row_byte(p: Plane, codes: u32, scales: u32, at: u32) -> u32 {
    switch FORMAT {
        case FMT_Q8_0: {
            let i = at % 34u;
            if i < 2u {
                return (row_scales[scales + at / 34u] >> (8u * i)) & 0xffu;
            }
            return row_bits[codes + at / 34u * 32u + i - 2u];
        }
        case FMT_Q4_0: {
            let i = at % 18u;
            if i < 2u {
                return (row_scales[scales + at / 18u] >> (8u * i)) & 0xffu;
            }
            let code = codes + at / 18u * 32u + i - 2u;
            return row_bits[code] | (row_bits[code + 16u] << 4u);
        }
        default: {}
    }
    if at >= p.scales_begin {
        let i = at - p.scales_begin;
        // One byte per scale for groups, else the two bytes of the row's scale.
        let is_grouped = FORMAT == FMT_L6_G32 || FORMAT == FMT_L4_G32 || FORMAT == FMT_L3_G32;
        if is_grouped || FORMAT == FMT_NVFP4 {
            // The row may end with a padding byte.
            let count = select((p.head_dim + 31u) / 32u, (p.head_dim + 15u) / 16u, FORMAT == FMT_NVFP4);
            return select(0u, row_scales[scales + min(i, 15u)], i < count);
        }
        return (row_scales[scales] >> (8u * i)) & 0xffu;
    }
    if FORMAT == FMT_NVFP4 {
        return row_bits[codes + 2u * at] | (row_bits[codes + 2u * at + 1u] << 4u);
    }
    if is_lloyd(FORMAT) {
        return lloyd_byte(lloyd_bits(FORMAT), p.head_dim, codes, at);
    }
    return row_bits[codes + at];
}

// Stores an invocation's row at an even byte, after a barrier: its codes, or its values in 16 bits.
fn $name_put_coded(p: Plane, written: u32, wide: bool, local: u32) {
    let codes = row_at(local);
    if wide {
        for (var i = 2u * (local % 8u); i < p.head_dim; i += 16u) {
            $name_put_pair(written + 2u * i, row_bits[codes + i], row_bits[codes + i + 1u]);
        }
        return;
    }
    let skip = written & 2u;
    let end = skip + p.row_bytes;
    for (var first = 4u * (local % 8u); first < end; first += 32u) {
        var mask = 0u;
        var bits = 0u;
        for (var b = 0u; b < 4u; b++) {
            let at = first + b;
            if at >= skip && at < end {
                mask |= 0xffu << (8u * b);
                bits |= row_byte(p, codes, local / 8u * 16u, at - skip) << (8u * b);
            }
        }
        $name_put_masked((written + first) >> 2u, mask, bits);
    }
}
