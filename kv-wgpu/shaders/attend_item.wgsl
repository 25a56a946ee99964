// Common part of attend.wgsl and attend_few.wgsl: query rows, lookup of keys, softmax weights.
//
// A row is one head of one query. Rows of a sequence are numbered query by query, and within a
// query by the heads of a group, so that K and V are read once for all these heads. A workgroup has
// ROWS rows, one kv head and one split. It walks the split's tokens in tiles of 32 that begin at
// multiples of 32, so that the order of a sum depends on positions alone. Tokens in other segments
// of the planes belong to other dispatches.
//
// workgroups: x: tiles of rows, from tile `first_tile` on; a sequence's first is
//             floor(q_start * group / ROWS) + entry; y: kv heads; z: splits, as many as the sequence with the most has
// partials: f32 [partial][ROWS][dim_v], followed by pairs [partial][ROWS] (maximum, sum), where
//        partial = ((x * kv heads + y) * slices + slice), slice = segment * splits + z
// A key that a query does not see never affects its row, even if it is NaN and another query of the
// tile sees it.
//! include params.wgsl
//! include numbers.wgsl

struct Params {
    plan: Plan,
    q: Tensor,
    k: Plane,
    v: Plane,
    mask: MaskOptions,
    scale: f32,
    soft_cap: f32,  // 0 without a cap
    group: u32,
    first_tile: u32,
    splits: u32,    // of a sequence, at most
    slices: u32,    // partial results of a row
    segment: u32,
    stats: u32,     // word of `partials` at which the pairs begin
    k_constants: u32,
    v_constants: u32,
    pad0: u32,
    pad1: u32,
}

// Specialisation of the loops: formats of K and V, and rows of a workgroup.
override K_FORMAT: u32 = 0u;
override V_FORMAT: u32 = 0u;
override ROWS: u32 = 8u;
// Whether four values that are read together always begin at a whole word.
override K_ALIGNED: bool = false;
override V_ALIGNED: bool = false;
// Whether planes have transforms, block means, or 16-bit rows among codes.
override HAS_EXTRAS: bool = true;

const THREADS: u32 = 128u;
const TILE: u32 = 32u;
const EMPTY: f32 = -3.0e38;   // the maximum of no scores
const UNSEEN: f32 = -3.4028234663852886e38;  // the score of a key that is not seen
const NO_WEIGHT: f32 = -1.0;  // its weight
const NO_TILE: u32 = 0xffffffffu;

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read> queries: array<u32>;
@group(0) @binding(3) var<storage, read> k: array<u32>;
@group(0) @binding(4) var<storage, read> v: array<u32>;
@group(0) @binding(5) var<storage, read> constants: array<u32>;
@group(0) @binding(6) var<storage, read> constants_v: array<u32>;
@group(0) @binding(7) var<storage, read_write> partials: array<f32>;
//! include reader.wgsl name=queries aligned=false
//! include reader.wgsl name=k aligned=K_ALIGNED
//! include reader.wgsl name=v aligned=V_ALIGNED
//! include rows.wgsl
//! include codes.wgsl
//! include format.wgsl name=k
//! include format.wgsl name=v
//! include head.wgsl
//! include visible.wgsl
//! include tiles.wgsl

var<workgroup> q_rows: array<vec4<f32>, 512>;  // [row][q_width()], 512 at most
// `scores`, [row][token], is declared by the including file, which knows the number of rows.
var<workgroup> biases: array<f32, 16>;
var<workgroup> factors: array<f32, 16>;
var<workgroup> seen: array<Visible, 16>;
// Where the rows of the tokens of two tiles lie: double-buffered.
var<workgroup> k_at: array<u32, 64>;
var<workgroup> v_at: array<u32, 64>;
var<workgroup> mean_at: array<u32, 64>;
// How they are stored: ABSENT if they are in another segment, or not seen.
var<workgroup> how: array<u32, 64>;
var<workgroup> bias_parts: array<f32, 64>;

const ABSENT: u32 = 0u;
const STORED: u32 = 1u;
const WIDE: u32 = 2u;  // in 16 bits among codes

struct WorkItem {
    s: Sequence,
    entry: u32,
    head: u32,   // kv head
    first: u32,  // row
    rows: u32,
    split: u32,
    begin: u32,
    end: u32,
    exists: bool,
}

// Returns the workgroup's work item; the same for all its invocations.
fn work_item_of(group: vec3<u32>) -> WorkItem {
    var u: WorkItem;
    let x = params.first_tile + group.x;
    if params.plan.num_sequences == 0u {
        return u;
    }
    u.entry = owner_of(x, ROWS);
    u.s = sequence_of(params.plan, u.entry);
    u.head = group.y;
    u.split = group.z;
    let all = u.s.q_len * params.group;
    u.first = (x - start_of(u.entry, ROWS)) * ROWS;
    if u.first >= all || u.split >= max(u.s.num_splits, 1u) {
        return u;
    }
    u.exists = true;
    u.rows = min(all - u.first, ROWS);
    if u.s.num_splits > 0u {
        let at = params.plan.splits + (u.s.split_start + u.split) * 4u;
        u.begin = lists[at + 1u];
        u.end = lists[at + 2u];
    }
    return u;
}

// Tokens that the rows see: sink tokens, and those from `begin` on.
struct Walk {
    sink_tokens_end: u32,
    begin: u32,
    end: u32,
}
fn walk_of(u: WorkItem, lowest: Visible, highest: Visible) -> Walk {
    // Bounds never fall and neighbouring windows overlap or touch, so the first and the last give
    // the union.
    let sink_tokens = max(lowest.sink_tokens, min(highest.sink_tokens, lowest.begin));
    return Walk(min(sink_tokens, u.end), max(lowest.begin, u.begin), min(highest.end, u.end));
}
// Returns the first tile from `tile` on that contains a seen token.
fn tile_from(w: Walk, tile: u32) -> u32 {
    var next = tile;
    if next * TILE >= w.sink_tokens_end && next * TILE + TILE <= w.begin {
        next = w.begin / TILE;
    }
    let is_end = next * TILE >= max(w.end, w.sink_tokens_end)
        || (next * TILE >= w.sink_tokens_end && w.begin >= w.end);
    return select(next, NO_TILE, is_end);
}

// Returns the number of chunks of 32 values in a row; the last may be partial.
fn chunks_of(dim: u32) -> u32 {
    return (dim + 31u) / 32u;
}
// Returns the number of vec4s in a query row.
fn q_width() -> u32 {
    return chunks_of(params.k.head_dim) * 8u;
}

fn constants_four(at: u32) -> vec4<f32> {
    return bitcast<vec4<f32>>(vec4<u32>(constants[at], constants[at + 1u], constants[at + 2u],
                                        constants[at + 3u]));
}

// Rotates all query rows at once, as rotate_row of transform.wgsl does for one.
fn rotate_queries(dim: u32, local: u32) {
    let width = q_width();
    var begin = 0u;
    // The trip count is unknown to the compiler, so that it does not unroll the loop.
    for (var bit = firstLeadingBit(dim); bit >= 2u; bit--) {
        let block = 1u << bit;
        if (dim & block) == 0u {
            continue;
        }
        let halved = power_of_two(-i32(bit / 2u));
        let norm = select(halved, halved * 0.70710678118654752440, bit % 2u == 1u);
        let fours = block / 4u;
        for (var i = local; i < ROWS * fours; i += THREADS) {
            let at = i / fours * width + begin + i % fours;
            let x = q_rows[at];
            let y = vec4<f32>(x.x + x.y, x.x - x.y, x.z + x.w, x.z - x.w);
            q_rows[at] = vec4<f32>(y.x + y.z, y.y + y.w, y.x - y.z, y.y - y.w) * norm;
        }
        workgroupBarrier();
        for (var s = 0u; s + 2u < bit; s++) {
            let pairs = fours / 2u;
            for (var i = local; i < ROWS * pairs; i += THREADS) {
                let pair = i % pairs;
                let inside = ((pair >> s) << (s + 1u)) | (pair & ((1u << s) - 1u));
                let at = i / pairs * width + begin + inside;
                let a = q_rows[at];
                let b = q_rows[at + (1u << s)];
                q_rows[at] = a + b;
                q_rows[at + (1u << s)] = a - b;
            }
            workgroupBarrier();
        }
        begin += fours;
    }
}

// Loads the query rows of a work item, transforms them if rows of K are transformed, and computes
// what each row sees. The mean that transformed keys lack becomes a bias of their scores.
fn load_queries(u: WorkItem, local: u32) {
    let dim = params.q.dim;
    let width = q_width();
    for (var i = local; i < ROWS * width; i += THREADS) {
        let row = i / width;
        let d = i % width * 4u;
        var x = vec4<f32>(0.0);
        if row < u.rows && d < dim {
            let query = (u.first + row) / params.group;
            let head = u.head * params.group + (u.first + row) % params.group;
            let at = head_begin(params.q, u.entry, u.s.q_start, query, head);
            x = queries_four(params.q.dtype, at + d * dtype_bytes(params.q.dtype));
        }
        q_rows[i] = x;
    }
    if local < ROWS {
        biases[local] = 0.0;
        if local < u.rows {
            seen[local] = visible(params.mask, u.s, (u.first + local) / params.group);
        } else {
            seen[local] = Visible(0u, 0u, 0u);
        }
    }
    workgroupBarrier();
    if !HAS_EXTRAS || params.k.transforms == 0u {
        return;
    }
    let head = head_of(params.k, u.head, params.k_constants != 0u);
    if local / 4u < ROWS {
        var sum = 0.0;
        for (var d = local % 4u; d < dim / 4u; d += 4u) {
            sum += dot(q_rows[local / 4u * width + d], constants_four(head.mean + 4u * d));
        }
        bias_parts[local] = sum;
    }
    workgroupBarrier();
    if local < ROWS {
        var sum = 0.0;
        for (var i = 0u; i < 4u; i++) {
            sum += bias_parts[local * 4u + i];
        }
        biases[local] = sum;
    }
    for (var i = local; i < ROWS * width; i += THREADS) {
        let d = i % width;
        if d < dim / 4u {
            q_rows[i] *= constants_four(head.back + 4u * d);
        }
    }
    workgroupBarrier();
    rotate_queries(dim, local);
}

// Looks up the tokens of a tile, if there is one, and stores them in half `buffer` of `how` and the
// arrays beside it. Contains no barrier.
fn find(u: WorkItem, w: Walk, tile: u32, buffer: u32, local: u32) {
    if local >= TILE || tile == NO_TILE {
        return;
    }
    let position = tile * TILE + local;
    let t = buffer * TILE + local;
    let is_seen = position < w.sink_tokens_end || (position >= w.begin && position < w.end);
    how[t] = ABSENT;
    if is_seen && position >= u.begin && position < u.end {
        let place = place_in(params.k, position, u.s.coded);
        let block = lists[params.plan.tables + u.s.table + place.index];
        if is_here(params.k, block) {
            let k_block = block_begin(params.k, block);
            k_at[t] = k_block + row_begin(params.k, place, u.head);
            v_at[t] = block_begin(params.v, block) + row_begin(params.v, place, u.head);
            how[t] = select(STORED, WIDE, place.wide);
            if HAS_EXTRAS {
                // Stored plus one, as 0 means none.
                let mean = k_block + params.k.mean_begin + u.head * params.k.head_dim * 2u + 1u;
                mean_at[t] = select(0u, mean, params.k.block_means != 0u && !place.wide);
            }
        }
    }
}

//! include token.wgsl name=k format=K_FORMAT has_means=HAS_EXTRAS mean=mean_at[t]
//! include token.wgsl name=v format=V_FORMAT has_means=false mean=0u

fn capped(x: f32) -> f32 {
    if params.soft_cap == 0.0 {
        return x;
    }
    let y = x / params.soft_cap;
    let m = abs(y);
    let e = exponential(-2.0 * m);
    var t = (1.0 - e) / (1.0 + e);
    if m < 0.25 {
        // Near zero the quotient loses precision: use the series of tanh.
        let z = m * m;
        t = m * (1.0 + z * (-0.33333334 + z * (0.13333334 + z * (-0.053968254 + z * (0.021869488 - z * 0.0088632355)))));
    }
    return params.soft_cap * select(t, -t, y < 0.0);
}

// Returns the score of a key for a row, given their product.
fn score_of(row: u32, tile: u32, buffer: u32, token: u32, product: f32) -> f32 {
    if how[buffer * TILE + token] == ABSENT || !sees(seen[row], tile * TILE + token) {
        return UNSEEN;
    }
    return capped((product + biases[row]) * params.scale);
}

// Returns the softmax weight of a key, relative to the running maximum.
fn weight_of(score: f32, most: f32) -> f32 {
    return select(exponential(score - most), NO_WEIGHT, score == UNSEEN);
}

// Returns the largest of `most` and the 32 scores of a row.
fn largest(row: u32, local: u32, most: f32) -> f32 {
    var found = most;
    //! if SUBGROUPS
    for (var i = local % 8u; i < TILE; i += 8u) {
        found = max(found, scores[row * TILE + i]);
    }
    found = max(found, subgroupShuffleXor(found, 1u));
    found = max(found, subgroupShuffleXor(found, 2u));
    found = max(found, subgroupShuffleXor(found, 4u));
    //! else
    for (var i = 0u; i < TILE; i++) {
        found = max(found, scores[row * TILE + i]);
    }
    //! end
    return found;
}

// Returns the given scale of a head of K, or of V; 1 without one.
fn k_scale_of(u: WorkItem) -> f32 {
    return head_of(params.k, u.head, params.k_constants != 0u).scale;
}
fn v_scale_of(u: WorkItem) -> f32 {
    if params.v_constants == 0u {
        return 1.0;
    }
    return bitcast<f32>(constants_v[u.head]);
}

// Returns the index in `partials` of the workgroup's partial result.
fn partial_of(u: WorkItem, group: vec3<u32>, groups: vec3<u32>) -> u32 {
    let slice = params.segment * params.splits + u.split;
    return (group.x * groups.y + group.y) * params.slices + slice;
}

// Writes the maximum and the sum of each row. An invocation has them for one token of every fourth
// row. Overwrites `scores`.
fn put_stats(partial: u32, most: vec4<f32>, sum: vec4<f32>, local: u32) {
    for (var j = 0u; j < ROWS / 4u; j++) {
        scores[(local / TILE + 4u * j) * TILE + local % TILE] = sum[j];
    }
    workgroupBarrier();
    for (var j = 0u; j < ROWS / 4u && local % TILE == 0u; j++) {
        let row = local / TILE + 4u * j;
        var all = 0.0;
        for (var i = 0u; i < TILE; i++) {
            all += scores[row * TILE + i];
        }
        let at = params.stats + 2u * (partial * ROWS + row);
        partials[at] = most[j];
        partials[at + 1u] = all;
    }
}
