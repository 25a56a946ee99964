// Reductions over eight neighbouring invocations. Each holds the values whose indices are equal
// modulo 8, and so one of the eight partial sums of kv-quant's sums.rs. Calls must be in uniform
// control flow.

// Reductions of two pairs of words. The order matters for SUMS only, which follows sums.rs.
const SUMS: u32 = 0u;          // two sums of f32
const PEAKS: u32 = 1u;         // two largest numbers
const PEAK_AND_SUM: u32 = 2u;  // one of each
const FIRST_PEAK: u32 = 3u;    // the pair with the larger `x`, of two equal the one with the larger `y`

// Words per row: two buffers of eight for `of_8`, and eight for `share`.
const PARTS: u32 = 24u;
const SHARED: u32 = 16u;

var<workgroup> parts: array<vec2<u32>, 192>;

fn parts_at(local: u32) -> u32 {
    return local / 8u * PARTS;
}

fn add_pairs(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return bitcast<vec2<u32>>(bitcast<vec2<f32>>(a) + bitcast<vec2<f32>>(b));
}

fn combine(how: u32, a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    switch how {
        case SUMS: { return add_pairs(a, b); }
        case PEAKS: { return max(a, b); }
        case PEAK_AND_SUM: { return vec2<u32>(max(a.x, b.x), add_pairs(a, b).y); }
        default: { return select(b, a, a.x > b.x || (a.x == b.x && a.y > b.y)); }
    }
}

// Shares one word of each neighbour with the other seven; overwrites what was shared before.
fn share(local: u32, mine: vec2<u32>) {
    parts[parts_at(local) + SHARED + local % 8u] = mine;
    workgroupBarrier();
}
fn shared_by(local: u32, neighbour: u32) -> vec2<u32> {
    return parts[parts_at(local) + SHARED + neighbour];
}

//! if SUBGROUPS
// Reduces the words of eight neighbours; all of them get the result.
fn of_8(how: u32, local: u32, mine: vec2<u32>) -> vec2<u32> {
    let four = combine(how, mine, subgroupShuffleXor(mine, 4u));
    let two = combine(how, four, subgroupShuffleXor(four, 2u));
    return combine(how, two, subgroupShuffleXor(two, 1u));
}
//! else
// Offset of the buffer to write next: while one is written, neighbours may still read the other.
var<private> buffer: u32;

// Reduces the words of eight neighbours; all of them get the result.
fn of_8(how: u32, local: u32, mine: vec2<u32>) -> vec2<u32> {
    let at = parts_at(local) + buffer;
    buffer = 8u - buffer;
    parts[at + local % 8u] = mine;
    workgroupBarrier();
    let even = combine(how, combine(how, parts[at], parts[at + 4u]),
        combine(how, parts[at + 2u], parts[at + 6u]));
    let odd = combine(how, combine(how, parts[at + 1u], parts[at + 5u]),
        combine(how, parts[at + 3u], parts[at + 7u]));
    return combine(how, even, odd);
}
//! end
fn sums_of_8(local: u32, mine: vec2<f32>) -> vec2<f32> {
    return bitcast<vec2<f32>>(of_8(SUMS, local, bitcast<vec2<u32>>(mine)));
}
