// Encoding of Lloyd-Max rows: kv-quant's lloyd_max.rs, planes.rs and sums.rs. See encode.wgsl.
//! include nearest.wgsl

const E4M3_NAN: u32 = 0x7fu;
// Larger magnitudes count as 2^40.
const LLOYD_LIMIT: u32 = 0x53800000u;
// Scales that are tried for a group: the likely one and its neighbours.
const TRIED: u32 = 5u;

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

// Returns an invocation's four values of a group of 32; zeros past the row's end.
fn own_4(local: u32, group: u32) -> vec4<f32> {
    let at = row_at(local) + local % 8u + 32u * group;
    return vec4<f32>(row_value(at), row_value(at + 8u), row_value(at + 16u), row_value(at + 24u));
}
// Returns which of them are in the row.
fn in_row(local: u32, group: u32, dim: u32) -> vec4<bool> {
    return vec4<u32>(0u, 8u, 16u, 24u) + (32u * group + local % 8u) < vec4<u32>(dim);
}
// Returns the largest magnitude, as bits, and the sum of squares.
fn own_peak_and_sum(x: vec4<f32>, before: vec2<u32>) -> vec2<u32> {
    var peak = before.x;
    var sum = bitcast<f32>(before.y);
    for (var j = 0u; j < 4u; j++) {
        peak = max(peak, magnitude_bits(x[j]));
        sum += limited(x[j]) * limited(x[j]);
    }
    return vec2<u32>(peak, bitcast<u32>(sum));
}
fn limited_4(x: vec4<f32>) -> vec4<f32> {
    return bitcast<vec4<f32>>(min(bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu), vec4<u32>(LLOYD_LIMIT)));
}
// Sums the terms that are in the row, in the order of values.
fn add_4(first: vec4<f32>, second: vec4<f32>, are_in: vec4<bool>) -> vec2<f32> {
    let a = select(vec4<f32>(0.0), first, are_in);
    let b = select(vec4<f32>(0.0), second, are_in);
    return vec2<f32>(a.x + a.y + a.z + a.w, b.x + b.y + b.z + b.w);
}
// Stores the codes of an invocation's values in a group, given the reciprocal of the scale.
fn keep_lloyd(bits: u32, x: vec4<f32>, inverse: f32, has_codes: bool, local: u32, group: u32) {
    let found = lloyd_nearest(bits, limited_4(x) * inverse);
    for (var j = 0u; j < 4u; j++) {
        let code = found.indices[j] | ((bitcast<u32>(x[j]) >> 31u) << (bits - 1u));
        keep_code(local, group * 32u + 8u * j + local % 8u, x[j], select(0u, code, has_codes));
    }
}

// Estimates the best scale by a combination of rms and largest magnitude: lloyd.rs.
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

// Returns the `i`th scale to try, as a multiple of the likely one, which comes first.
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

// Returns the projection of a group on its levels at a scale, and the energy of the levels.
fn group_sums(bits: u32, x: vec4<f32>, are_in: vec4<bool>, inverse: f32, local: u32) -> vec2<f32> {
    let levels = lloyd_nearest(bits, x * inverse).levels;
    return sums_of_8(local, add_4(x * levels, levels * levels, are_in));
}

// A candidate scale's reciprocal, and the sums and the score of its codes.
struct Search {
    inverse: f32,
    sums: vec2<f32>,
    score: f32,
}
fn better(best: Search, inverse: f32, sums: vec2<f32>, is_first: bool) -> Search {
    let score = sums.x * (sums.x / sums.y);
    if is_first || score > best.score {
        return Search(inverse, sums, score);
    }
    return best;
}

// Finds the scale whose codes have the largest cosine with the row. Neighbour `i` sums over
// candidate `i`.
fn search_scale(bits: u32, near: f32, dim: u32, local: u32) -> Search {
    let tries = select(5u, 3u, bits == 6u);
    var mine = vec2<f32>(0.0);
    for (var group = 0u; group * 32u < dim; group++) {
        let x = limited_4(own_4(local, group));
        let are_in = in_row(local, group, dim);
        for (var i = 0u; i < tries; i++) {
            let sums = group_sums(bits, x, are_in, 1.0 / (near * tried_factor(bits, i)), local);
            mine += select(vec2<f32>(0.0), sums, local % 8u == i);
        }
    }
    share(local, bitcast<vec2<u32>>(mine));
    var best = Search(0.0, vec2<f32>(0.0), 0.0);
    for (var i = 0u; i < tries; i++) {
        let sums = bitcast<vec2<f32>>(shared_by(local, i));
        best = better(best, 1.0 / (near * tried_factor(bits, i)), sums, i == 0u);
    }
    // The last candidate is the least-squares scale of the best codes.
    let last = 1.0 / (best.sums.x / best.sums.y);
    mine = vec2<f32>(0.0);
    for (var group = 0u; group * 32u < dim; group++) {
        let x = limited_4(own_4(local, group));
        mine += group_sums(bits, x, in_row(local, group, dim), last, local);
    }
    return better(best, last, mine, false);
}

// Encodes a row with one f16 scale. Control flow does not depend on values, because it contains
// barriers.
fn encode_lloyd(bits: u32, dim: u32, local: u32) {
    var all = vec2<u32>(0u);
    for (var group = 0u; group * 32u < dim; group++) {
        all = own_peak_and_sum(own_4(local, group), all);
    }
    all = of_8(PEAK_AND_SUM, local, all);
    let energy = bitcast<f32>(all.y);
    let near = near_scale(bits, sqrt(energy / f32(dim)), limited(bitcast<f32>(all.x)));
    let best = search_scale(bits, near, dim, local);
    var inverse = best.inverse;
    let unbiased = energy / best.sums.x;
    var stored = f16_saturated(unbiased);
    let scale = f16_decode(stored);
    // If f16 cannot represent the scale, encode with the stored one.
    if !(abs(scale - unbiased) <= unbiased * 0.001) {
        inverse = 1.0 / scale;
    }
    let has_codes = all.x <= INFINITY && energy > 0.0 && stored > 0u;
    stored = select(0u, stored, has_codes);
    if local % 8u == 0u {
        keep_scale(local, 0u, select(stored, 0x7e00u, all.x > INFINITY));
    }
    for (var group = 0u; group * 32u < dim; group++) {
        keep_lloyd(bits, own_4(local, group), inverse, has_codes, local, group);
    }
}

// Returns the E4M3 code of the `i`th scale to try around code `near`; 0 if there is none.
fn tried_code(near: u32, i: u32) -> u32 {
    let code = near + i;  // offset by 2, to avoid underflow
    return select(0u, code - 2u, code >= 3u && code <= 0x80u);
}

// The code of a group's scale, and the error of inner products that the groups so far accumulated.
struct Chosen {
    code: u32,
    owed: f32,
}
// Minimises the squared error plus a penalty for the accumulated error of inner products. Runs for
// all-zero groups too, so that control flow is uniform.
fn choose_scale(bits: u32, x: vec4<f32>, are_in: vec4<bool>, near: u32, energy: f32, owed: f32,
                local: u32) -> Chosen {
    let weight = select(4.0, 24.0, bits == 3u);
    let most = energy * 0.0625;
    let carried = min(max(owed, -most), most);
    var chosen = Chosen(0u, carried - energy);
    var best_cost = bitcast<f32>(LARGEST_F32);
    for (var i = 0u; i < TRIED; i++) {
        let code = tried_code(near, i);
        let scale = e4m3_decode(max(code, 1u));
        let decoded = lloyd_nearest(bits, x * (1.0 / scale)).levels * scale;
        let errors = x - decoded;
        let tried = sums_of_8(local, add_4(errors * errors, x * decoded, are_in));
        let owing = carried + tried.y - energy;
        let cost = tried.x + weight * owing * (owing / energy);
        if code > 0u && tried.x <= energy && cost <= best_cost {
            chosen = Chosen(code, owing);
            best_cost = cost;
        }
    }
    return chosen;
}

// Encodes a row with an E4M3 scale for every 32 values, chosen one after another.
fn encode_groups(bits: u32, dim: u32, local: u32) {
    var owed = 0.0;
    for (var group = 0u; group * 32u < dim; group++) {
        let x = own_4(local, group);
        let all = of_8(PEAK_AND_SUM, local, own_peak_and_sum(x, vec2<u32>(0u)));
        let energy = bitcast<f32>(all.y);
        let rms = sqrt(energy / f32(min(dim - group * 32u, 32u)));
        let near = e4m3_encode(near_group_scale(bits, rms, limited(bitcast<f32>(all.x))));
        let are_in = in_row(local, group, dim);
        let chosen = choose_scale(bits, limited_4(x), are_in, near, energy, owed, local);
        // A group of zeros adds no error.
        let is_live = all.x <= INFINITY && energy > 0.0;
        let code = select(0u, chosen.code, is_live);
        owed = select(owed, chosen.owed, is_live);
        keep_lloyd(bits, x, 1.0 / e4m3_decode(max(code, 1u)), code > 0u, local, group);
        if local % 8u == 0u {
            keep_scale(local, group, select(code, E4M3_NAN, all.x > INFINITY));
        }
    }
}
