// Attention of few query rows over one part of a context: what attend_merge.wgsl joins. See
// attend_unit.wgsl for rows and tiles.
//
// Four neighbours read a key, straight into their products with all rows; then every invocation has
// four values of the output of all rows, and every few tokens of a tile. So a tile has two barriers,
// three where neighbours do not exchange values in a subgroup.
//! include attend_unit.wgsl

var<workgroup> scores: array<f32, 256>;     // [row][token]
var<workgroup> weights: array<f32, 256>;    // [row / 4][token][row % 4]
//! if SUBGROUPS
//! else
var<workgroup> products: array<f32, 1024>;  // [row][token], in four parts
//! end

fn weight_at(row: u32, token: u32) -> u32 {
    return row / 4u * 128u + token * 4u + row % 4u;
}

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
        products[(row * TILE + token) * 4u + part] = dots[row];
    }
    workgroupBarrier();
    for (var i = local; i < ROWS * TILE; i += THREADS) {
        let p = i * 4u;
        let product = (products[p] + products[p + 1u]) + (products[p + 2u] + products[p + 3u]);
        scores[i] = score_of(i / TILE, tile, turn, i % TILE, product);
    }
    //! end
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
    let k_scale = k_scale_of(u);
    let v_scale = v_scale_of(u);
    let token = local % TILE;
    // Rows of which this invocation weighs one token: every fourth.
    var most = vec2<f32>(EMPTY);
    var sum = vec2<f32>(0.0);
    // Values of the output: four, of every `parts_of_v`th token.
    let fours = params.v.head_dim / 4u;
    let parts_of_v = THREADS / fours;
    let piece = local % fours;
    let part = local / fours;
    var acc: array<vec4<f32>, 8>;
    for (var i = 0u; i < ROWS; i++) {
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
            weights[weight_at(row, token)] = weight;
            if token == 0u {
                factors[row] = factor;
            }
        }
        workgroupBarrier();
        for (var row = 0u; row < ROWS; row++) {
            acc[row] *= factors[row];
        }
        if part < parts_of_v {
            for (var i = part; i < TILE; i += parts_of_v) {
                let t = turn * TILE + i;
                if how[t] != ABSENT {
                    let value = v_values(t, piece * 4u, v_factor_of(t, v_scale), v_scale);
                    for (var row = 0u; row < ROWS; row++) {
                        let weight = weights[weight_at(row, i)];
                        if weight != NO_WEIGHT {
                            acc[row] += weight * value;
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
    let unit = part_of(u, group, groups);
    // Queries are done with: their memory takes the parts of four rows at a time.
    for (var four = 0u; four < ROWS; four += 4u) {
        workgroupBarrier();
        if part < parts_of_v {
            for (var j = 0u; j < 4u; j++) {
                q_rows[(j * parts_of_v + part) * fours + piece] = acc[four + j];
            }
        }
        workgroupBarrier();
        for (var i = local; i < 4u * fours; i += THREADS) {
            let row = i / fours;
            var value = vec4<f32>(0.0);
            for (var j = 0u; j < parts_of_v; j++) {
                value += q_rows[(row * parts_of_v + j) * fours + i % fours];
            }
            let at = (unit * ROWS + four + row) * params.v.head_dim + i % fours * 4u;
            parts[at] = value.x;
            parts[at + 1u] = value.y;
            parts[at + 2u] = value.z;
            parts[at + 3u] = value.w;
        }
    }
    put_stats(unit, vec4<f32>(most, 0.0, 0.0), vec4<f32>(sum, 0.0, 0.0), local);
}
