// Search for the nearest Lloyd-Max level of magnitudes: kv-quant's lloyd.rs. Comparing with all
// levels is faster than a binary search.

struct Nearest {
    levels: vec4<f32>,
    indices: vec4<u32>,
}

// Takes `level` for magnitudes above `bound`, the midpoint between it and the level before. At the
// midpoint the smaller level stays.
fn at_least(n: Nearest, x: vec4<f32>, bound: f32, level: f32, index: u32) -> Nearest {
    let is_behind = x > vec4<f32>(bound);
    return Nearest(select(n.levels, vec4<f32>(level), is_behind),
                   select(n.indices, vec4<u32>(index), is_behind));
}

// Finds the nearest levels of four magnitudes, for codes of `bits` bits.
fn lloyd_nearest(bits: u32, x: vec4<f32>) -> Nearest {
    let least = select(select(0.033409506, 0.12839504, bits == 4u), 0.24509418, bits == 3u);
    var n = Nearest(vec4<f32>(least), vec4<u32>(0u));
    switch bits {
        case 3u: {
            n = at_least(n, x, 0.50054973, 0.7560053, 1u);
            n = at_least(n, x, 1.0499573, 1.3439093, 2u);
            n = at_least(n, x, 1.7479274, 2.1519456, 3u);
        }
        case 4u: {
            n = at_least(n, x, 0.25822166, 0.3880483, 1u);
            n = at_least(n, x, 0.5224037, 0.65675914, 2u);
            n = at_least(n, x, 0.7995498, 0.94234043, 3u);
            n = at_least(n, x, 1.0992858, 1.2562312, 4u);
            n = at_least(n, x, 1.4371388, 1.6180464, 5u);
            n = at_least(n, x, 1.8435318, 2.0690172, 6u);
            n = at_least(n, x, 2.4008033, 2.7325895, 7u);
        }
        default: {
            n = at_least(n, x, 0.0668439, 0.10027829, 1u);
            n = at_least(n, x, 0.1337876, 0.1672969, 2u);
            n = at_least(n, x, 0.20093194, 0.23456699, 3u);
            n = at_least(n, x, 0.26837993, 0.30219284, 4u);
            n = at_least(n, x, 0.33623773, 0.37028265, 5u);
            n = at_least(n, x, 0.40461618, 0.43894967, 6u);
            n = at_least(n, x, 0.47363174, 0.5083138, 7u);
            n = at_least(n, x, 0.5434084, 0.578503, 8u);
            n = at_least(n, x, 0.6140793, 0.6496556, 9u);
            n = at_least(n, x, 0.68578875, 0.7219219, 10u);
            n = at_least(n, x, 0.75869477, 0.7954677, 11u);
            n = at_least(n, x, 0.83297217, 0.8704766, 12u);
            n = at_least(n, x, 0.90881574, 0.94715494, 13u);
            n = at_least(n, x, 0.98644567, 1.0257363, 14u);
            n = at_least(n, x, 1.0661123, 1.1064882, 15u);
            n = at_least(n, x, 1.1481042, 1.1897202, 16u);
            n = at_least(n, x, 1.2327573, 1.2757945, 17u);
            n = at_least(n, x, 1.3204677, 1.365141, 18u);
            n = at_least(n, x, 1.4117087, 1.4582764, 19u);
            n = at_least(n, x, 1.5070539, 1.5558312, 20u);
            n = at_least(n, x, 1.60721, 1.6585889, 21u);
            n = at_least(n, x, 1.7130654, 1.7675419, 22u);
            n = at_least(n, x, 1.8257596, 1.8839773, 23u);
            n = at_least(n, x, 1.946794, 2.009611, 24u);
            n = at_least(n, x, 2.0782106, 2.1468103, 25u);
            n = at_least(n, x, 2.2228956, 2.2989812, 26u);
            n = at_least(n, x, 2.385143, 2.471305, 27u);
            n = at_least(n, x, 2.5717893, 2.6722739, 28u);
            n = at_least(n, x, 2.7948403, 2.9174068, 29u);
            n = at_least(n, x, 3.0789218, 3.240437, 30u);
            n = at_least(n, x, 3.492269, 3.7441013, 31u);
        }
    }
    return n;
}
