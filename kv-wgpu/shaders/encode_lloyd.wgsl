// Lloyd-Max rows: kv-quant's lloyd_max.rs, planes.rs and sums.rs. See encode.wgsl.

const E4M3_NAN: u32 = 0x7fu;
// Larger magnitudes count as 2^40.
const LLOYD_LIMIT: u32 = 0x53800000u;
// Neighbours of the likely scale of a group that are tried, itself included.
const TRIED: u32 = 5u;

// Where the magnitudes in `books` part: halfway between neighbours.
var<workgroup> bounds: array<f32, 43>;

fn limited(x: f32) -> f32 {
    return bitcast<f32>(min(magnitude_bits(x), LLOYD_LIMIT));
}

fn is_lloyd(format: u32) -> bool {
    return format >= FMT_L6 && format <= FMT_L3_G32;
}
fn lloyd_bits(format: u32) -> u32 {
    if format >= FMT_L3 {
        return 3u;
    }
    return select(6u, 4u, format >= FMT_L4);
}

// Fills `books` and `bounds`.
fn fill_bounds(local: u32) {
    fill_books(local);
    for (var i = local; i < 43u; i += THREADS) {
        bounds[i] = (books[i] + books[i + 1u]) * 0.5;
    }
    workgroupBarrier();
}

// Index of the magnitude nearest to `x`, which is not negative; halfway the smaller.
fn lloyd_index(bits: u32, x: f32) -> u32 {
    let begin = book_begin(bits);
    var below = 0u;
    for (var step = 1u << (bits - 2u); step > 0u; step >>= 1u) {
        if x > bounds[begin + below + step - 1u] {
            below += step;
        }
    }
    return below;
}
fn lloyd_nearest(bits: u32, x: f32) -> f32 {
    return books[book_begin(bits) + lloyd_index(bits, x)];
}
fn lloyd_code(bits: u32, x: f32, inverse: f32) -> u32 {
    return lloyd_index(bits, limited(x) * inverse) | bitcast<u32>(x) >> 31u << (bits - 1u);
}

// The scale that is likely the best is a combination of rms and largest magnitude: lloyd.rs.
fn near_scale(bits: u32, rms: f32, amax: f32) -> f32 {
    switch bits {
        case 3u: { return 0.462 * rms + 0.190 * amax; }
        case 4u: { return 0.086 * rms + 0.310 * amax; }
        default: { return 0.515 * rms + 0.124 * amax; }
    }
}
fn near_group_scale(bits: u32, rms: f32, amax: f32) -> f32 {
    switch bits {
        case 3u: { return 0.057 * rms + 0.390 * amax; }
        case 4u: { return 0.064 * rms + 0.337 * amax; }
        default: { return 0.535 * rms + 0.111 * amax; }
    }
}

// The `i`th of the scales tried around the likely one, as multiples of it: itself first.
fn tried_factor(bits: u32, i: u32) -> f32 {
    if bits == 6u {
        return select(select(1.06, 0.94, i == 1u), 1.0, i == 0u);
    }
    switch i {
        case 0u: { return 1.0; }
        case 1u: { return 0.9; }
        case 2u: { return 0.95; }
        case 3u: { return 1.05; }
        default: { return 1.1; }
    }
}

// Own values' projection on the levels they take at a scale, and the levels' energy: of all the row.
fn row_sums(bits: u32, dim: u32, inverse: f32, local: u32) -> vec2<f32> {
    let own = row_at(local) + local % 8u;
    let groups = filled(dim) / 32u;
    for (var group = 0u; group < groups; group++) {
        var sums = vec2<f32>(0.0);
        for (var j = 0u; j < 4u; j++) {
            let i = group * 32u + 8u * j;
            let x = limited(row_value(own + i));
            let level = lloyd_nearest(bits, x * inverse);
            sums += select(vec2<f32>(0.0), vec2<f32>(x * level, level * level), i + local % 8u < dim);
        }
        give_sums(local, group, sums);
    }
    return total_sums(local, groups);
}

// A row with one f16 scale. Barriers are met whatever the values are.
fn encode_lloyd(bits: u32, dim: u32, local: u32) {
    let own = row_at(local) + local % 8u;
    var part = 0.0;
    var peak = 0u;
    for (var i = 0u; i < filled(dim); i += 8u) {
        let x = row_value(own + i);
        peak = max(peak, magnitude_bits(x));
        part += limited(x) * limited(x);
    }
    let all = of_8(PEAK_AND_SUM, local, vec2<u32>(peak, bitcast<u32>(part)));
    let amax = all.x;
    let energy = bitcast<f32>(all.y);
    let rms = sqrt(energy / f32(dim));
    let near = near_scale(bits, rms, limited(bitcast<f32>(amax)));
    var inverse = 0.0;
    var best = vec2<f32>(0.0);
    var best_score = 0.0;
    let last = select(5u, 3u, bits == 6u);
    for (var i = 0u; i <= last; i++) {
        // The last is the one that fits the best codes.
        let tried = 1.0 / select(near * tried_factor(bits, i), best.x / best.y, i == last);
        let sums = row_sums(bits, dim, tried, local);
        let score = sums.x * (sums.x / sums.y);
        if i == 0u || score > best_score {
            inverse = tried;
            best = sums;
            best_score = score;
        }
    }
    let unbiased = energy / best.x;
    var stored = f16_saturated(unbiased);
    let scale = f16_decode(stored);
    // Where f16 could not hold the scale, other codes are nearer.
    if !(abs(scale - unbiased) <= unbiased * 0.001) {
        inverse = 1.0 / scale;
    }
    let has_codes = amax <= INFINITY && energy > 0.0 && stored > 0u;
    stored = select(0u, stored, has_codes);
    if local % 8u == 0u {
        keep_scale(local, 0u, select(stored, 0x7e00u, amax > INFINITY));
    }
    for (var i = local % 8u; i < dim; i += 8u) {
        let code = lloyd_code(bits, row_value(row_at(local) + i), inverse);
        keep_code(local, i, select(0u, code, has_codes));
    }
}

// The code of the `i`th scale tried around code `near`; 0 where there is none.
fn tried_code(near: u32, i: u32) -> u32 {
    let code = near + i;  // 2 more than it is
    return select(0u, code - 2u, code >= 3u && code <= 0x80u);
}

// Tries the `t`th scale around the likely one of every group; what that of a neighbour's comes to.
fn try_scales(bits: u32, t: u32, dim: u32, local: u32) -> vec2<f32> {
    let own = row_at(local) + local % 8u;
    for (var group = 0u; group * 32u < dim; group++) {
        let scale = e4m3_decode(max(tried_code(shared_by(local, group).x, t), 1u));
        let inverse = 1.0 / scale;
        var sums = vec2<f32>(0.0);
        for (var j = 0u; j < 4u; j++) {
            let i = group * 32u + 8u * j;
            let x = limited(row_value(own + i));
            let decoded = lloyd_nearest(bits, x * inverse) * scale;
            let error = x - decoded;
            let terms = vec2<f32>(error * error, x * decoded);
            sums += select(vec2<f32>(0.0), terms, i + local % 8u < dim);
        }
        give(SUMS, local, group, bitcast<vec2<u32>>(sums));
    }
    return bitcast<vec2<f32>>(take(SUMS, local));
}

// Code of a group's scale, and what inner products owe behind it.
struct Chosen {
    code: u32,
    owed: f32,
}
// By squared error and what inner products owed before. `at` is where the group's neighbour has left what
// scales come to: first energy and code of the likely one.
fn choose_scale(bits: u32, at: u32, owed: f32) -> Chosen {
    let weight = select(4.0, 24.0, bits == 3u);
    let energy = bitcast<f32>(parts[at].x);
    let most = energy * 0.0625;
    let carried = min(max(owed, -most), most);
    var chosen = Chosen(0u, carried - energy);
    var best_cost = bitcast<f32>(LARGEST_F32);
    for (var i = 0u; i < TRIED; i++) {
        let code = tried_code(parts[at].y, i);
        let tried = bitcast<vec2<f32>>(parts[at + 1u + i]);
        let owing = carried + tried.y - energy;
        let cost = tried.x + weight * owing * (owing / energy);
        if code > 0u && tried.x <= energy && cost <= best_cost {
            chosen = Chosen(code, owing);
            best_cost = cost;
        }
    }
    return chosen;
}

// A row with an E4M3 scale for every 32 values. What a scale costs does not depend on other groups,
// only which is taken: that follows one by one.
fn encode_groups(bits: u32, dim: u32, local: u32) {
    let own = row_at(local) + local % 8u;
    for (var group = 0u; group * 32u < dim; group++) {
        var part = 0.0;
        var peak = 0u;
        for (var j = 0u; j < 4u; j++) {
            let x = row_value(own + group * 32u + 8u * j);
            peak = max(peak, magnitude_bits(x));
            part += limited(x) * limited(x);
        }
        give(PEAK_AND_SUM, local, group, vec2<u32>(peak, bitcast<u32>(part)));
    }
    let all = take(PEAK_AND_SUM, local);
    let group_begin = local % 8u * 32u;
    let n = min(max(dim, group_begin) - group_begin, 32u);
    let is_broken = all.x > INFINITY;
    let rms = sqrt(bitcast<f32>(all.y) / f32(max(n, 1u)));
    let near = e4m3_encode(near_group_scale(bits, rms, limited(bitcast<f32>(all.x))));
    share(local, vec2<u32>(near, 0u));
    var tried = array<vec2<f32>, TRIED>();
    for (var t = 0u; t < TRIED; t++) {
        tried[t] = try_scales(bits, t, dim, local);
    }
    // Nothing is to be scaled where there is no energy.
    let mine = parts_at(local) + 8u * (local % 8u);
    parts[mine] = vec2<u32>(select(all.y, 0u, is_broken), near);
    for (var t = 0u; t < TRIED; t++) {
        parts[mine + 1u + t] = bitcast<vec2<u32>>(tried[t]);
    }
    workgroupBarrier();
    var owed = 0.0;
    for (var group = 0u; group * 32u < dim; group++) {
        let at = parts_at(local) + 8u * group;
        var code = 0u;
        if bitcast<f32>(parts[at].x) > 0.0 {
            let chosen = choose_scale(bits, at, owed);
            owed = chosen.owed;
            code = chosen.code;
        }
        let inverse = 1.0 / e4m3_decode(max(code, 1u));
        for (var j = 0u; j < 4u; j++) {
            let i = group * 32u + 8u * j;
            let found = lloyd_code(bits, row_value(own + i), inverse);
            keep_code(local, i + local % 8u, select(0u, found, code > 0u));
        }
        if local % 8u == group {
            keep_scale(local, group, select(code, E4M3_NAN, is_broken));
        }
    }
    if n == 0u {
        keep_scale(local, local % 8u, 0u);
    }
}
