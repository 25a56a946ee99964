// Attention of few query rows over one KV split. attend_merge.wgsl merges the partial results;
// attend_item.wgsl describes rows and tiles.
//
// Four neighbours read a key and multiply it with all rows at once. Then every invocation computes
// four output values of all rows, for a subset of the tile's tokens. A tile takes two barriers,
// three without subgroups.
//! include attend_item.wgsl

var<workgroup> scores: array<f32, 256>;     // [row][token]
var<workgroup> weights: array<f32, 256>;    // [row / 4][token][row % 4]
//! if SUBGROUPS
//! else
var<workgroup> products: array<f32, 1024>;  // [row][token], in four sums
//! end

fn weight_at(row: u32, token: u32) -> u32 {
    return row / 4u * 128u + token * 4u + row % 4u;
}

// Computes the scores of a tile: four invocations per token, each with 8 of every 32 values.
fn score(tile: u32, buffer: u32, local: u32, scale: f32) {
    let token = local / 4u;
    let part = local % 4u;
    let t = buffer * TILE + token;
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
            scores[row * TILE + token] = score_of(row, tile, buffer, token, product);
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
        scores[i] = score_of(i / TILE, tile, buffer, i % TILE, product);
    }
    //! end
}

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(num_workgroups) groups: vec3<u32>,
        @builtin(local_invocation_index) local: u32) {
    let u = work_item_of(group);
    if !u.exists {
        return;
    }
    fill_books(local);
    load_queries(u, local);
    let k_scale = k_scale_of(u);
    let v_scale = v_scale_of(u);
    let token = local % TILE;
    // This invocation computes the softmax weight of one token in every fourth row.
    var most = vec2<f32>(EMPTY);
    var sum = vec2<f32>(0.0);
    // And four output values, summed over every `parts_of_v`th token.
    let fours = params.v.head_dim / 4u;
    let parts_of_v = THREADS / fours;
    let column = local % fours;
    let part = local / fours;
    var acc: array<vec4<f32>, 8>;
    for (var i = 0u; i < ROWS; i++) {
        acc[i] = vec4<f32>(0.0);
    }
    let w = walk_of(u, workgroupUniformLoad(&seen[0]), workgroupUniformLoad(&seen[u.rows - 1u]));
    var tile = tile_from(w, u.begin / TILE);
    var buffer = 0u;
    find(u, w, tile, buffer, local);
    workgroupBarrier();
    while tile != NO_TILE {
        score(tile, buffer, local, k_scale);
        workgroupBarrier();
        let next = tile_from(w, tile + 1u);
        find(u, w, next, 1u - buffer, local);
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
                let t = buffer * TILE + i;
                if how[t] != ABSENT {
                    let value = v_values(t, column * 4u, v_factor_of(t, v_scale), v_scale);
                    for (var row = 0u; row < ROWS; row++) {
                        let weight = weights[weight_at(row, i)];
                        if weight != NO_WEIGHT {
                            acc[row] += weight * value;
                        }
                    }
                }
            }
        }
        // The next tile may overwrite `scores`: all reads were before the last barrier. `how` and
        // the arrays beside it are double-buffered.
        tile = next;
        buffer = 1u - buffer;
    }
    let partial = partial_of(u, group, groups);
    // Queries are no longer needed: their memory takes the partial sums of four rows at a time.
    for (var four = 0u; four < ROWS; four += 4u) {
        workgroupBarrier();
        if part < parts_of_v {
            for (var j = 0u; j < 4u; j++) {
                q_rows[(j * parts_of_v + part) * fours + column] = acc[four + j];
            }
        }
        workgroupBarrier();
        for (var i = local; i < 4u * fours; i += THREADS) {
            let row = i / fours;
            var value = vec4<f32>(0.0);
            for (var j = 0u; j < parts_of_v; j++) {
                value += q_rows[(row * parts_of_v + j) * fours + i % fours];
            }
            let at = (partial * ROWS + four + row) * params.v.head_dim + i % fours * 4u;
            partials[at] = value.x;
            partials[at + 1u] = value.y;
            partials[at + 2u] = value.z;
            partials[at + 3u] = value.w;
        }
    }
    put_stats(partial, vec4<f32>(most, 0.0, 0.0), vec4<f32>(sum, 0.0, 0.0), local);
}
