// Attention of few query rows over one part of a context: what attend_merge.wgsl joins. See
// attend_unit.wgsl for rows and tiles.
//
// Four neighbours read a key, straight into their products with all rows; then every invocation has
// eight values of the output of all rows, and every few tokens of a tile. So a tile has two barriers,
// three where neighbours do not exchange values in a subgroup.
//! include attend_unit.wgsl

var<workgroup> scores: array<f32, 256>;   // [row][token]
var<workgroup> weights: array<f32, 256>;  // [row][token]
// Products of keys in four parts, [row][token]; at the end values of the output in parts, [part][piece].
var<workgroup> exchange: array<vec4<f32>, 256>;

// Scores of a tile: four invocations a token, each with 8 values of every 32.
fn score(tile: u32, turn: u32, local: u32, scale: f32) {
    let token = local / 4u;
    let part = local % 4u;
    let t = turn * TILE + token;
    let dim = params.k.head_dim;
    var dots: array<f32, 8>;
    for (var row = 0u; row < ROWS; row++) {
        dots[row] = 0.0;
    }
    if how[t] != ABSENT {
        let factor = k_factor_of(t, scale);
        let width = q_width();
        for (var chunk = 0u; chunk < width / 8u; chunk++) {
            for (var half = 0u; half < 2u; half++) {
                let d = chunk * 32u + part * 8u + half * 4u;
                if d < dim {
                    let key = k_values(t, d, factor, scale);
                    for (var row = 0u; row < ROWS; row++) {
                        dots[row] += dot(q_rows[row * width + d / 4u], key);
                    }
                }
            }
        }
    }
    //! if SUBGROUPS
    for (var row = 0u; row < ROWS; row++) {
        let pair = dots[row] + subgroupShuffleXor(dots[row], 1u);
        let product = pair + subgroupShuffleXor(pair, 2u);
        if row % 4u == part {
            scores[row * TILE + token] = score_of(row, tile, turn, token, product);
        }
    }
    //! else
    for (var row = 0u; row < ROWS; row++) {
        exchange[row * TILE + token][part] = dots[row];
    }
    workgroupBarrier();
    for (var i = local; i < ROWS * TILE; i += THREADS) {
        let p = exchange[i];
        scores[i] = score_of(i / TILE, tile, turn, i % TILE, (p.x + p.y) + (p.z + p.w));
    }
    //! end
}

// The largest of `most` and the 32 scores of a row.
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

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let u = unit_of(group);
    if !u.exists {
        return;
    }
    fill_books(local);
    load_queries(u, local);
    let k_scale = head_of(params.k, u.head, params.k_constants != 0u).scale;
    var v_scale = 1.0;
    if params.v_constants != 0u {
        v_scale = bitcast<f32>(constants_v[u.head]);
    }
    let token = local % TILE;
    // Rows of which this invocation weighs one token: every fourth.
    var most = vec2<f32>(EMPTY);
    var sum = vec2<f32>(0.0);
    // Values of the output: eight, of every `parts_of_v`th token.
    let pieces = chunks_of(params.v.head_dim) * 4u;
    let parts_of_v = THREADS / pieces;
    let piece = local % pieces;
    let part = local / pieces;
    var acc: array<vec4<f32>, 16>;
    for (var i = 0u; i < 2u * ROWS; i++) {
        acc[i] = vec4<f32>(0.0);
    }
    let w = walk_of(u, workgroupUniformLoad(&seen[0]), workgroupUniformLoad(&seen[u.rows - 1u]));
    var tile = tile_from(w, u.begin / TILE);
    var turn = 0u;
    find(u, w, tile, turn, local);
    workgroupBarrier();
    while tile != NO_TILE {
        score(tile, turn, local, k_scale);
        workgroupBarrier();
        let next = tile_from(w, tile + 1u);
        find(u, w, next, 1u - turn, local);
        for (var j = 0u; j < ROWS / 4u; j++) {
            let row = local / TILE + 4u * j;
            let before = most[j];
            most[j] = largest(row, local, before);
            let factor = rescaled(before, most[j]);
            let weight = weight_of(scores[row * TILE + token], most[j]);
            sum[j] = sum[j] * factor + select(weight, 0.0, weight == NO_WEIGHT);
            weights[row * TILE + token] = weight;
            if token == 0u {
                factors[row] = factor;
            }
        }
        workgroupBarrier();
        for (var row = 0u; row < ROWS; row++) {
            acc[2u * row] *= factors[row];
            acc[2u * row + 1u] *= factors[row];
        }
        if part < parts_of_v && piece * 8u < params.v.head_dim {
            for (var i = part; i < TILE; i += parts_of_v) {
                let t = turn * TILE + i;
                if how[t] != ABSENT {
                    let factor = v_factor_of(t, v_scale);
                    let low = v_values(t, piece * 8u, factor, v_scale);
                    var high = vec4<f32>(0.0);
                    if piece * 8u + 4u < params.v.head_dim {
                        high = v_values(t, piece * 8u + 4u, factor, v_scale);
                    }
                    for (var row = 0u; row < ROWS; row++) {
                        let weight = weights[row * TILE + i];
                        if weight != NO_WEIGHT {
                            acc[2u * row] += weight * low;
                            acc[2u * row + 1u] += weight * high;
                        }
                    }
                }
            }
        }
        // When `scores` are written next, all have read them: they were read before the last barrier.
        // The same goes for `how` and what is beside it, of which the next tile has the other half.
        tile = next;
        turn = 1u - turn;
    }
    let slice = params.segment * params.splits + u.split;
    let unit = (group.x * groups.y + group.y) * params.slices + slice;
    let fours = params.v.head_dim / 4u;
    for (var row = 0u; row < ROWS; row++) {
        workgroupBarrier();
        if part < parts_of_v {
            exchange[part * pieces * 2u + piece * 2u] = acc[2u * row];
            exchange[part * pieces * 2u + piece * 2u + 1u] = acc[2u * row + 1u];
        }
        if row % 4u == local / TILE {
            weights[local] = sum[row / 4u];
        }
        workgroupBarrier();
        if local < fours {
            var value = vec4<f32>(0.0);
            for (var i = 0u; i < parts_of_v; i++) {
                value += exchange[i * pieces * 2u + local];
            }
            let at = (unit * ROWS + row) * params.v.head_dim + 4u * local;
            for (var i = 0u; i < 4u; i++) {
                parts[at + i] = value[i];
            }
        }
        if row % 4u * TILE == local {
            var all = 0.0;
            for (var i = 0u; i < TILE; i++) {
                all += weights[local + i];
            }
            let at = params.stats + 2u * (unit * ROWS + row);
            parts[at] = most[row / 4u];
            parts[at + 1u] = all;
        }
    }
}
