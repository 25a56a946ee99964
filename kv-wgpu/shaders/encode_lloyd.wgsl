// Lloyd-Max rows: kv-quant's lloyd_max.rs, planes.rs and sums.rs. See encode.wgsl.

const E4M3_NAN: u32 = 0x7fu;
// Larger magnitudes count as 2^40.
const LLOYD_LIMIT: u32 = 0x53800000u;
// Neighbours of the likely scale of a group that are tried, itself included.
const TRIED: u32 = 5u;

// What invocations exchange.
var<workgroup> sum_parts: array<vec2<f32>, 64>;
var<workgroup> max_parts: array<vec2<u32>, 64>;
var<workgroup> group_sums: array<vec2<f32>, 8>;
// Code of the likely scale of a group, and its energy: 0 where there is nothing to scale.
var<workgroup> group_near: array<u32, 8>;
var<workgroup> group_energy: array<f32, 8>;
// Squared error and projection of every scale tried.
var<workgroup> group_tried: array<vec2<f32>, 40>;
// Where the magnitudes in `books` part: halfway between neighbours.
var<workgroup> bounds: array<f32, 43>;

// Of floats without sign the order of the bits is that of the values, NaN behind infinity.
fn magnitude_bits(x: f32) -> u32 {
    return bitcast<u32>(x) & 0x7fffffffu;
}
fn limited(x: f32) -> f32 {
    return bitcast<f32>(min(magnitude_bits(x), LLOYD_LIMIT));
}

// The first of the four values of an invocation, which are 8 apart.
fn own_first(local: u32) -> u32 {
    return local / 8u * 32u + local % 8u;
}

// The largest among `width` neighbours. What was written before is seen behind it.
fn max_of(local: u32, width: u32, bits: vec2<u32>) -> vec2<u32> {
    workgroupBarrier();
    max_parts[local] = bits;
    workgroupBarrier();
    var most = vec2<u32>(0u);
    for (var i = 0u; i < width; i++) {
        most = max(most, max_parts[local / width * width + i]);
    }
    return most;
}

// The end of sums.rs: eight sums side by side become one.
fn sum_of_8(local: u32, sums: vec2<f32>) -> vec2<f32> {
    workgroupBarrier();
    sum_parts[local] = sums;
    workgroupBarrier();
    let at = local / 8u * 8u;
    return ((sum_parts[at] + sum_parts[at + 4u]) + (sum_parts[at + 2u] + sum_parts[at + 6u]))
        + ((sum_parts[at + 1u] + sum_parts[at + 5u]) + (sum_parts[at + 3u] + sum_parts[at + 7u]));
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

// The four values of an invocation, limited, and how many there are.
struct Own {
    values: vec4<f32>,
    count: u32,
    amax: u32,
}
fn own_values(dim: u32, local: u32) -> Own {
    var own = Own(vec4<f32>(0.0), 0u, 0u);
    for (var j = 0u; j < 4u; j++) {
        let i = own_first(local) + 8u * j;
        if i < dim {
            own.values[j] = limited(row_values[i]);
            own.amax = max(own.amax, magnitude_bits(row_values[i]));
            own.count++;
        }
    }
    return own;
}

// Projection of a row on the levels it takes, and their energy; groups are added in their order.
fn row_sums(bits: u32, dim: u32, own: Own, inverse: f32, local: u32) -> vec2<f32> {
    var sums = vec2<f32>(0.0);
    for (var j = 0u; j < own.count; j++) {
        let level = lloyd_nearest(bits, own.values[j] * inverse);
        sums += vec2<f32>(own.values[j] * level, level * level);
    }
    sums = sum_of_8(local, sums);
    if local % 8u == 0u {
        group_sums[local / 8u] = sums;
    }
    workgroupBarrier();
    sums = vec2<f32>(0.0);
    for (var s = 0u; s * 32u < dim; s++) {
        sums += group_sums[s];
    }
    return sums;
}

// A row with one f16 scale. Barriers are met whatever the values are.
fn encode_lloyd(bits: u32, dim: u32, local: u32) {
    let own = own_values(dim, local);
    let amax = max_of(local, THREADS, vec2<u32>(own.amax, 0u)).x;
    var part = 0.0;
    for (var i = local % 8u; i < dim; i += 8u) {
        part += limited(row_values[i]) * limited(row_values[i]);
    }
    let energy = sum_of_8(local, vec2<f32>(part, 0.0)).x;
    let rms = sqrt(energy / f32(dim));
    let near = near_scale(bits, rms, limited(bitcast<f32>(amax)));
    var inverse = 0.0;
    var best = vec2<f32>(0.0);
    var best_score = 0.0;
    let last = select(5u, 3u, bits == 6u);
    for (var i = 0u; i <= last; i++) {
        // The last is the one that fits the best codes.
        let tried = 1.0 / select(near * tried_factor(bits, i), best.x / best.y, i == last);
        let sums = row_sums(bits, dim, own, tried, local);
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
    if local == 0u {
        row_scales[0] = select(stored, 0x7e00u, amax > INFINITY);
    }
    for (var i = local; i < dim; i += THREADS) {
        row_codes[i] = select(0u, lloyd_code(bits, row_values[i], inverse), has_codes);
    }
}

// The code of the `i`th scale tried around code `near`; 0 where there is none.
fn tried_code(near: u32, i: u32) -> u32 {
    let code = near + i;  // 2 more than it is
    return select(0u, code - 2u, code >= 3u && code <= 0x80u);
}

// Code of a group's scale, and what inner products owe behind it.
struct Chosen {
    code: u32,
    owed: f32,
}
// By squared error and what inner products owed before.
fn choose_scale(bits: u32, group: u32, owed: f32) -> Chosen {
    let weight = select(4.0, 24.0, bits == 3u);
    let energy = group_energy[group];
    let most = energy * 0.0625;
    let carried = min(max(owed, -most), most);
    var chosen = Chosen(0u, carried - energy);
    var best_cost = bitcast<f32>(LARGEST_F32);
    for (var i = 0u; i < TRIED; i++) {
        let code = tried_code(group_near[group], i);
        let tried = group_tried[group * TRIED + i];
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
    let own = own_values(dim, local);
    let group = local / 8u;
    let n = min(max(dim, group * 32u) - group * 32u, 32u);
    let amax = max_of(local, 8u, vec2<u32>(own.amax, 0u)).x;
    var part = 0.0;
    for (var j = 0u; j < own.count; j++) {
        part += own.values[j] * own.values[j];
    }
    let energy = sum_of_8(local, vec2<f32>(part, 0.0)).x;
    let rms = sqrt(energy / f32(max(n, 1u)));
    let near = e4m3_encode(near_group_scale(bits, rms, limited(bitcast<f32>(amax))));
    if local % 8u == 0u {
        group_near[group] = near;
        group_energy[group] = select(0.0, energy, amax <= INFINITY);
    }
    for (var t = 0u; t < TRIED; t++) {
        let code = tried_code(near, t);
        let scale = e4m3_decode(max(code, 1u));
        let inverse = 1.0 / scale;
        var sums = vec2<f32>(0.0);
        for (var j = 0u; j < own.count; j++) {
            let decoded = lloyd_nearest(bits, own.values[j] * inverse) * scale;
            let error = own.values[j] - decoded;
            sums += vec2<f32>(error * error, own.values[j] * decoded);
        }
        sums = sum_of_8(local, sums);
        if local % 8u == 0u {
            group_tried[group * TRIED + t] = sums;
        }
    }
    workgroupBarrier();
    var owed = 0.0;
    var code = 0u;
    for (var g = 0u; g * 32u < dim; g++) {
        if group_energy[g] > 0.0 {
            let chosen = choose_scale(bits, g, owed);
            owed = chosen.owed;
            code = select(code, chosen.code, g == group);
        }
    }
    let inverse = 1.0 / e4m3_decode(max(code, 1u));
    for (var j = 0u; j < own.count; j++) {
        let i = own_first(local) + 8u * j;
        row_codes[i] = select(0u, lloyd_code(bits, row_values[i], inverse), code > 0u);
    }
    if local % 8u == 0u && n > 0u {
        row_scales[group] = select(code, E4M3_NAN, amax > INFINITY);
    }
}
