// Attention of many query rows over one KV split. attend_merge.wgsl merges the partial results;
// attend_item.wgsl describes rows and tiles.
//
// A workgroup stages 32 values of each key of a tile, multiplies them with all rows, and goes on to
// the next 32; then the same for V.
//! include attend_item.wgsl

override V_CHUNKS: u32 = 4u;  // chunks of 32 values that cover a row of V

var<workgroup> stage: array<vec4<f32>, 256>;  // [token][8], swizzled: see `staged`
var<workgroup> scores: array<f32, 512>;       // [row][token], then weights

// Returns where values `4 * at ..` of a token are staged: swizzled, so that neighbours that read a
// column hit different banks.
fn staged(token: u32, at: u32) -> u32 {
    return token * 8u + (at ^ (token % 8u));
}

// Stages 32 values of the tokens of a tile, from value `begin` on; four invocations per token.
//! include stage.wgsl name=k
//! include stage.wgsl name=v

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
    // An invocation computes the products of one token with four rows, the weights of one token in
    // every fourth row, and four output values of every chunk of one row.
    let token = local % TILE;
    let first = local / TILE * 4u;
    let row = local / 8u;
    let column = local % 8u;
    let k_chunks = chunks_of(params.k.head_dim);
    var most = vec4<f32>(EMPTY);
    var sum = vec4<f32>(0.0);
    var acc: array<vec4<f32>, 8>;
    for (var i = 0u; i < V_CHUNKS; i++) {
        acc[i] = vec4<f32>(0.0);
    }
    let w = walk_of(u, workgroupUniformLoad(&seen[0]), workgroupUniformLoad(&seen[u.rows - 1u]));
    var tile = tile_from(w, u.begin / TILE);
    var buffer = 0u;
    find(u, w, tile, buffer, local);
    workgroupBarrier();
    while tile != NO_TILE {
        let next = tile_from(w, tile + 1u);
        var dots = vec4<f32>(0.0);
        for (var chunk = 0u; chunk < k_chunks; chunk++) {
            stage_k(buffer, chunk * 32u, local, k_scale);
            workgroupBarrier();
            if first < ROWS {
                for (var at = 0u; at < 8u; at++) {
                    let key = stage[staged(token, at)];
                    for (var j = 0u; j < 4u; j++) {
                        dots[j] += dot(q_rows[((first + j) * k_chunks + chunk) * 8u + at], key);
                    }
                }
            }
            workgroupBarrier();
        }
        if first < ROWS {
            for (var j = 0u; j < 4u; j++) {
                scores[(first + j) * TILE + token] = score_of(first + j, tile, buffer, token, dots[j]);
            }
        }
        find(u, w, next, 1u - buffer, local);
        workgroupBarrier();
        let before = most;
        for (var j = 0u; j < ROWS / 4u; j++) {
            most[j] = largest(local / TILE + 4u * j, local, most[j]);
        }
        workgroupBarrier();
        for (var j = 0u; j < ROWS / 4u; j++) {
            let scored = local / TILE + 4u * j;
            let factor = rescaled(before[j], most[j]);
            let weight = weight_of(scores[scored * TILE + token], most[j]);
            sum[j] = sum[j] * factor + select(weight, 0.0, weight == NO_WEIGHT);
            scores[scored * TILE + token] = weight;
            if token == 0u {
                factors[scored] = factor;
            }
        }
        workgroupBarrier();
        // V_CHUNKS is constant, so that the compiler unrolls the loop and keeps `acc` in registers.
        for (var chunk = 0u; chunk < V_CHUNKS; chunk++) {
            if chunk * 32u >= params.v.head_dim {
                break;
            }
            stage_v(buffer, chunk * 32u, local, v_scale);
            workgroupBarrier();
            if row < ROWS {
                acc[chunk] *= factors[row];
                for (var i = 0u; i < TILE; i++) {
                    let weight = scores[row * TILE + i];
                    if weight != NO_WEIGHT {
                        acc[chunk] += weight * stage[staged(i, column)];
                    }
                }
            }
            workgroupBarrier();
        }
        tile = next;
        buffer = 1u - buffer;
    }
    let partial = partial_of(u, group, groups);
    let dim_v = params.v.head_dim;
    if row < ROWS {
        for (var chunk = 0u; chunk < V_CHUNKS; chunk++) {
            let d = chunk * 32u + column * 4u;
            for (var j = 0u; j < 4u && d < dim_v; j++) {
                partials[(partial * ROWS + row) * dim_v + d + j] = acc[chunk][j];
            }
        }
    }
    put_stats(partial, most, sum, local);
}
