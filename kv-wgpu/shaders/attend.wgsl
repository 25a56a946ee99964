// Attention of some query rows over one part of a context: what attend_merge.wgsl joins.
//
// A row is one head of one query. Rows of a sequence are numbered query by query, the heads of the
// group within each, so that K and V are read once for all heads. A workgroup has ROWS of them, one kv
// head and one split, and walks its tokens in tiles of 32 at multiples of 32, so that the order of a
// sum depends on positions alone: stages some values of K, scores them, weighs them (online softmax),
// stages V and sums it. A token's rows in another segment of the planes are not seen here; another
// dispatch has them.
//
// workgroups: x: tiles of rows, from tile `first_tile` on, floor(q_start * group / ROWS) + entry being
//             a sequence's first; y: kv heads; z: splits of a sequence, as many as any has
// parts: f32 [unit][ROWS][dim_v], and behind them pairs [unit][ROWS] (maximum, sum), where unit =
//        ((x * kv heads + y) * slices + slice), slice = segment * splits + z
// What a query does not see never reaches its row, be it NaN and seen by another query of the tile.
//! include params.wgsl
//! include numbers.wgsl

struct Params {
    plan: Plan,
    q: Tensor,
    k: Plane,
    v: Plane,
    sight: Sight,
    scale: f32,
    soft_cap: f32,  // 0 without
    group: u32,
    first_tile: u32,
    splits: u32,    // of a sequence, at most
    slices: u32,    // partial results of a row
    segment: u32,
    stats: u32,     // word of `parts` at which they begin
    k_constants: u32,
    v_constants: u32,
    pad0: u32,
    pad1: u32,
}

// Formats of K and V, `head_dim`s, and rows of a workgroup: 16, or 8 for long rows.
override K_FORMAT: u32 = 0u;
override V_FORMAT: u32 = 0u;
override K_CHUNKS: u32 = 4u;  // of 32 values, the last perhaps in part
override V_CHUNKS: u32 = 4u;

const THREADS: u32 = 128u;
const TILE: u32 = 32u;
const CHUNK: u32 = 32u;
const STRIDE: u32 = 33u;  // lanes that read a column meet no bank twice
const ROWS_MAX: u32 = 16u;
const EACH: u32 = 4u;     // rows of an invocation
const EMPTY: f32 = -3.0e38;  // a maximum of nothing
const UNSEEN: f32 = -1.0;    // the weight of a key that is not seen

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> lists: array<u32>;
@group(0) @binding(2) var<storage, read> queries: array<u32>;
@group(0) @binding(3) var<storage, read> k: array<u32>;
@group(0) @binding(4) var<storage, read> v: array<u32>;
@group(0) @binding(5) var<storage, read> constants: array<u32>;
@group(0) @binding(6) var<storage, read> constants_v: array<u32>;
@group(0) @binding(7) var<storage, read_write> parts: array<f32>;
//! include reader.wgsl name=queries
//! include reader.wgsl name=k
//! include reader.wgsl name=v
//! include rows.wgsl
//! include codes.wgsl
//! include format.wgsl name=k
//! include format.wgsl name=v
//! include transform.wgsl
//! include visible.wgsl
//! include tiles.wgsl

var<workgroup> q_rows: array<f32, 2048>;  // [row][up to 128 or 256 values]
var<workgroup> stage: array<f32, 1056>;   // [token][STRIDE]
var<workgroup> scores: array<f32, 512>;   // [row][token], then weights
var<workgroup> biases: array<f32, 16>;
var<workgroup> factors: array<f32, 16>;
var<workgroup> maxima: array<f32, 16>;
var<workgroup> sums: array<f32, 16>;
var<workgroup> seen: array<Visible, 16>;
// Where the rows of a tile's tokens lie, and whether they are here at all.
var<workgroup> k_at: array<u32, 32>;
var<workgroup> v_at: array<u32, 32>;
var<workgroup> mean_at: array<u32, 32>;
var<workgroup> wide: array<u32, 32>;
var<workgroup> here: array<u32, 32>;

struct Unit {
    s: Sequence,
    entry: u32,
    head: u32,   // kv head
    first: u32,  // row
    rows: u32,
    split: u32,
    begin: u32,
    end: u32,
}

// Rows of a workgroup.
fn rows_of() -> u32 {
    return select(ROWS_MAX, 8u, K_CHUNKS > 4u || V_CHUNKS > 4u);
}

//! include stage.wgsl name=k format=K_FORMAT mean=mean_at[token]
//! include stage.wgsl name=v format=V_FORMAT mean=0u

// Query rows of a unit, transformed where rows of K are, and what each sees. The mean that transformed
// keys lack becomes a bias of their scores.
fn load_queries(u: Unit, rows: u32, local: u32) {
    let dim = params.q.dim;
    let has_constants = params.k_constants != 0u;
    let head = head_of(params.k, u.head, has_constants);
    for (var row = 0u; row < rows; row++) {
        let is_one = row < u.rows;
        let query = (u.first + row) / params.group;
        let at = head_begin(params.q, u.entry, u.s.q_start, query,
                            u.head * params.group + (u.first + row) % params.group);
        for (var d = local; d < K_CHUNKS * CHUNK; d += THREADS) {
            var x = 0.0;
            if is_one && d < dim {
                x = queries_load(params.q.dtype, at, d);
            }
            row_values[d] = x;
        }
        workgroupBarrier();
        if params.k.transforms != 0u {
            if local == 0u {
                var bias = 0.0;
                for (var d = 0u; d < dim; d++) {
                    bias += row_values[d] * bitcast<f32>(constants[head.mean + d]);
                }
                biases[row] = bias;
            }
            workgroupBarrier();
            for (var d = local; d < dim; d += THREADS) {
                row_values[d] *= bitcast<f32>(constants[head.back + d]);
            }
            workgroupBarrier();
            rotate_row(dim, local);
        } else if local == 0u {
            biases[row] = 0.0;
        }
        for (var d = local; d < K_CHUNKS * CHUNK; d += THREADS) {
            q_rows[row * K_CHUNKS * CHUNK + d] = row_values[d];
        }
        if local == 0u {
            maxima[row] = EMPTY;
            sums[row] = 0.0;
            if is_one {
                seen[row] = visible(params.sight, u.s, query);
            } else {
                seen[row] = Visible(0u, 0u, 0u);
            }
        }
        workgroupBarrier();
    }
}

// Looks up the tokens of a tile.
fn find(u: Unit, rows: u32, tile: u32, local: u32) {
    if local < TILE {
        let position = tile * TILE + local;
        let lowest = seen[0];
        let highest = seen[u.rows - 1u];
        // Bounds never fall, and windows of neighbours touch: the first and the last tell the union.
        let sinks = min(highest.sinks, lowest.begin);
        let wanted = position >= u.begin && position < u.end
            && (position < sinks || position < lowest.sinks || (position >= lowest.begin && position < highest.end));
        here[local] = 0u;
        if wanted {
            let place = place_in(params.k, position, u.s.coded);
            let block = lists[params.plan.tables + u.s.table + place.index];
            if is_here(params.k, block) {
                here[local] = 1u;
                let k_block = block_begin(params.k, block);
                k_at[local] = k_block + row_begin(params.k, place, u.head);
                v_at[local] = block_begin(params.v, block) + row_begin(params.v, place, u.head);
                wide[local] = select(0u, 1u, place.wide);
                let has_mean = params.k.block_means != 0u && !place.wide;
                // One more than it is, as 0 is none.
                let mean = k_block + params.k.mean_begin + u.head * params.k.head_dim * 2u + 1u;
                mean_at[local] = select(0u, mean, has_mean);
            }
        }
    }
    workgroupBarrier();
}

fn capped(x: f32) -> f32 {
    if params.soft_cap == 0.0 {
        return x;
    }
    let y = x / params.soft_cap;
    let m = abs(y);
    var t = 1.0 - 2.0 / (exp(2.0 * min(m, 20.0)) + 1.0);
    if m < 0.25 {
        // Where the difference would lose what it is of: the series of tanh.
        let z = m * m;
        t = m * (1.0 + z * (-0.33333334 + z * (0.13333334 + z * (-0.053968254 + z * (0.021869488 - z * 0.0088632355)))));
    }
    return params.soft_cap * select(t, -t, y < 0.0);
}

// Weights of a tile out of its scores: one invocation a row.
fn weigh(local: u32, rows: u32, tile: u32) {
    if local < rows {
        let row = seen[local];
        let before = maxima[local];
        var most = before;
        var any = false;
        for (var t = 0u; t < TILE; t++) {
            let at = local * TILE + t;
            if here[t] == 0u || !sees(row, tile * TILE + t) {
                continue;
            }
            any = true;
            let score = capped((scores[at] + biases[local]) * params.scale);
            scores[at] = score;
            most = max(most, score);
        }
        let factor = select(exp(before - most), 1.0, before == most);
        var sum = 0.0;
        for (var t = 0u; t < TILE; t++) {
            let at = local * TILE + t;
            if here[t] == 0u || !sees(row, tile * TILE + t) {
                scores[at] = UNSEEN;
                continue;
            }
            // A score of minus infinity leaves the maximum where it was.
            let weight = exp(scores[at] - most);
            scores[at] = weight;
            sum += weight;
        }
        factors[local] = factor;
        maxima[local] = most;
        sums[local] = sums[local] * factor + sum;
    }
    workgroupBarrier();
}

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let rows = rows_of();
    var u: Unit;
    let x = params.first_tile + group.x;
    if params.plan.num_sequences == 0u {
        return;
    }
    u.entry = owner_of(x, rows);
    u.s = sequence_of(params.plan, u.entry);
    u.head = group.y;
    u.split = group.z;
    let all = u.s.q_len * params.group;
    u.first = (x - start_of(u.entry, rows)) * rows;
    if u.first >= all || u.split >= max(u.s.num_splits, 1u) {
        return;
    }
    u.rows = min(all - u.first, rows);
    if u.s.num_splits > 0u {
        let at = params.plan.splits + (u.s.split_start + u.split) * 4u;
        u.begin = lists[at + 1u];
        u.end = lists[at + 2u];
    }
    fill_books(local);
    load_queries(u, rows, local);
    let k_scale = head_of(params.k, u.head, params.k_constants != 0u).scale;
    var v_scale = 1.0;
    if params.v_constants != 0u {
        v_scale = bitcast<f32>(constants_v[u.head]);
    }
    let column = local % 32u;
    let mine = local / 32u * EACH;  // first of this invocation's rows
    // [chunk][row]
    var acc: array<f32, 32>;
    for (var i = 0u; i < 32u; i++) {
        acc[i] = 0.0;
    }
    // What the rows see: sinks, then from `begin` on.
    let lowest = workgroupUniformLoad(&seen[0]);
    let highest = workgroupUniformLoad(&seen[u.rows - 1u]);
    let sinks = max(lowest.sinks, min(highest.sinks, lowest.begin));
    let sinks_end = min(sinks, u.end);
    let begin = max(lowest.begin, u.begin);
    let end = min(highest.end, u.end);
    var tile = u.begin / TILE;
    loop {
        // On to the next tile in which something is seen.
        if tile * TILE >= sinks_end && tile * TILE + TILE <= begin {
            tile = begin / TILE;
        }
        if tile * TILE >= max(end, sinks_end) || (tile * TILE >= sinks_end && begin >= end) {
            break;
        }
        find(u, rows, tile, local);
        var dots = array<f32, 4>(0.0, 0.0, 0.0, 0.0);
        for (var chunk = 0u; chunk < K_CHUNKS; chunk++) {
            stage_k(params.k.head_dim, chunk * CHUNK, local, k_scale);
            workgroupBarrier();
            if mine < rows {
                for (var d = 0u; d < CHUNK; d++) {
                    let key = stage[column * STRIDE + d];
                    for (var j = 0u; j < EACH; j++) {
                        dots[j] += q_rows[(mine + j) * K_CHUNKS * CHUNK + chunk * CHUNK + d] * key;
                    }
                }
            }
            workgroupBarrier();
        }
        if mine < rows {
            for (var j = 0u; j < EACH; j++) {
                scores[(mine + j) * TILE + column] = dots[j];
            }
        }
        workgroupBarrier();
        weigh(local, rows, tile);
        for (var chunk = 0u; chunk < V_CHUNKS; chunk++) {
            stage_v(params.v.head_dim, chunk * CHUNK, local, v_scale);
            workgroupBarrier();
            if mine < rows {
                for (var j = 0u; j < EACH; j++) {
                    acc[chunk * EACH + j] *= factors[mine + j];
                }
                for (var t = 0u; t < TILE; t++) {
                    let value = stage[t * STRIDE + column];
                    for (var j = 0u; j < EACH; j++) {
                        let weight = scores[(mine + j) * TILE + t];
                        acc[chunk * EACH + j] += select(weight * value, 0.0, weight == UNSEEN);
                    }
                }
            }
            workgroupBarrier();
        }
        tile++;
    }
    let slice = params.segment * params.splits + u.split;
    let unit = (group.x * groups.y + group.y) * params.slices + slice;
    let dim_v = params.v.head_dim;
    if mine < rows {
        for (var chunk = 0u; chunk < V_CHUNKS; chunk++) {
            let d = chunk * CHUNK + column;
            for (var j = 0u; j < EACH && d < dim_v; j++) {
                parts[(unit * rows + mine + j) * dim_v + d] = acc[chunk * EACH + j];
            }
        }
    }
    if local < rows {
        let at = params.stats + 2u * (unit * rows + local);
        parts[at] = maxima[local];
        parts[at + 1u] = sums[local];
    }
}
