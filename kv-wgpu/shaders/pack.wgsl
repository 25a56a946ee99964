// What encode.wgsl has made becomes the bytes of a row of the binding `$name`: docs/formats.md.

// A byte of a plane of codes: `w` bits from bit `low` on of each of the `n` codes from `codes` on.
fn plane_bits_of(codes: u32, n: u32, byte: u32, low: u32, w: u32) -> u32 {
    let per_byte = 8u / w;
    let m = (n + per_byte - 1u) / per_byte;
    var bits = 0u;
    for (var j = 0u; j < per_byte; j++) {
        let at = byte + j * m;
        if at < n {
            bits |= (row_codes[codes + at] >> low & ((1u << w) - 1u)) << (j * w);
        }
    }
    return bits;
}

fn lloyd_byte(bits: u32, dim: u32, at: u32) -> u32 {
    let whole = group_bytes(bits);
    let codes = at / whole * 32u;
    if codes >= dim {
        return 0u;  // between codes and scale
    }
    let n = min(dim - codes, 32u);
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

// Byte `at` of a row.
fn row_byte(p: Plane, at: u32) -> u32 {
    switch p.format {
        case FMT_Q8_0: {
            let i = at % 34u;
            if i < 2u {
                return row_scales[at / 34u] >> (8u * i) & 0xffu;
            }
            return row_codes[at / 34u * 32u + i - 2u];
        }
        case FMT_Q4_0: {
            let i = at % 18u;
            if i < 2u {
                return row_scales[at / 18u] >> (8u * i) & 0xffu;
            }
            let code = at / 18u * 32u + i - 2u;
            return row_codes[code] | row_codes[code + 16u] << 4u;
        }
        default: {}
    }
    if at >= p.scales_begin {
        let i = at - p.scales_begin;
        // A byte for each scale, or the two of one.
        let is_grouped = p.format == FMT_L6_G32 || p.format == FMT_L4_G32 || p.format == FMT_L3_G32;
        if is_grouped || p.format == FMT_NVFP4 {
            return row_scales[min(i, 15u)];
        }
        return row_scales[0] >> (8u * i) & 0xffu;
    }
    if p.format == FMT_NVFP4 {
        return row_codes[2u * at] | row_codes[2u * at + 1u] << 4u;
    }
    if is_lloyd(p.format) {
        return lloyd_byte(lloyd_bits(p.format), p.head_dim, at);
    }
    return row_codes[at];
}

// Stores the row at an even byte.
fn $name_put_codes(p: Plane, written: u32, local: u32) {
    let skip = written & 2u;
    let end = skip + p.row_bytes;
    for (var first = 4u * local; first < end; first += 4u * THREADS) {
        var mask = 0u;
        var bits = 0u;
        for (var b = 0u; b < 4u; b++) {
            let at = first + b;
            if at >= skip && at < end {
                mask |= 0xffu << (8u * b);
                bits |= row_byte(p, at - skip) << (8u * b);
            }
        }
        $name_put_masked((written + first) >> 2u, mask, bits);
    }
}

// Stores the row in `row_values`, as codes or as plain numbers: by all invocations, after a barrier.
fn $name_put_row(p: Plane, written: u32, wide: bool, inv_scale: f32, local: u32) {
    if p.format <= FMT_BF16 {
        for (var i = 2u * local; i < p.head_dim; i += 2u * THREADS) {
            $name_store_pair(p.format, written, i, row_values[i], row_values[i + 1u]);
        }
    } else if wide {
        for (var i = 2u * local; i < p.head_dim; i += 2u * THREADS) {
            $name_put_pair(written + 2u * i, f16_saturated(row_values[i]), f16_saturated(row_values[i + 1u]));
        }
    } else {
        encode_codes(p.format, inv_scale, p.head_dim, local);
        $name_put_codes(p, written, local);
    }
}
