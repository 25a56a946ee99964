// The general attention kernel: every shape, stored format and option, for the calls that no faster
// kernel supports.
//
// A work item is some query rows of one kv head (a row is one head of one query) against one KV
// split. It processes tiles of 32 tokens that begin at multiples of 32, so that the order of a sum
// depends on positions alone. For each tile it decodes K into shared memory, scores it with one
// token per lane, applies the online softmax, decodes V and accumulates it with some columns per
// lane. If a sequence has at most R rows, each warp processes its own tiles for all of them, and
// the warps are merged at the end; otherwise the warps share every tile and divide the rows. KV
// splits leave partial results, which the last thread block to finish merges in the order of the
// splits: equal plans give equal bits.
//
// Launch, with R = 4 for `attend_rows` and R = 1 for `attend_rows_large`, which takes head_dims for
// which the former lacks shared memory. Choose by head_dim alone: results differ in the last bits.
//   grid x: floor(total_q * group / (4 R)) + sequences; y: kv heads; z: the most KV splits of a
//           sequence, at least 1; fewer are correct but slower
//   threads: 128
//   shared bytes: 43008 + 16 R (up(dim_k) + up(dim_v) + 72) + 16; up rounds to a multiple of 64
//   partial_rows: f32 [partial results][q heads][dim_v]; partial_stats: pairs (maximum, sum):
//           row (partial_index[sequence] + split * q_len + query) * q heads + head
//   counters: u32 [grid x][kv heads]; takes entries with q_len_min..=q_len_max queries
// Rows that belong to no query are not written.
#include "attend.h"

// Returns which of a block's rows the `j`-th row of a warp is, in `running` and `sums`.
template <bool SHARED, u32 R> KV_DEV u32 kv_own_row(u32 warp, u32 j) {
  return SHARED ? j * KV_WARPS + warp : warp * R + j;
}
template <bool SHARED> KV_DEV u32 kv_query_row(u32 warp, u32 j) { return SHARED ? j * KV_WARPS + warp : j; }

// Synchronises the threads that share a tile.
template <bool SHARED> KV_DEV void kv_sync_warps() {
  if (SHARED) kv_sync(); else kv_syncwarp();
}

// Accumulates dot products of `N` query rows and the staged values of a lane's token, in four
// partial sums per row.
template <u32 N, u32 R>
KV_DEV void kv_score(KvFloat4 (&dots)[R], const float* q, u32 row_stride, const float* stage, u32 chunks, u32 lane) {
  for (u32 chunk = 0; chunk < chunks; chunk++) {
    const KvFloat4* k = (const KvFloat4*)(stage + chunk * KV_STAGE + lane * KV_STRIDE);
#pragma unroll 4
    for (u32 i = 0; i < KV_CHUNK / 4; i++) {
      const KvFloat4 key = k[i];
#pragma unroll
      for (u32 j = 0; j < N; j++) {
        const KvFloat4 query = *(const KvFloat4*)(q + j * row_stride + chunk * KV_CHUNK + 4 * i);
        dots[j].x = kv_fma(query.x, key.x, dots[j].x);
        dots[j].y = kv_fma(query.y, key.y, dots[j].y);
        dots[j].z = kv_fma(query.z, key.z, dots[j].z);
        dots[j].w = kv_fma(query.w, key.w, dots[j].w);
      }
    }
  }
}

// Accumulates the weighted values of a staged tile in `N` rows: two values of each chunk per lane.
// A token that is masked for a row is skipped, whatever its values are.
template <u32 N, u32 R>
KV_DEV void kv_sum(float* sums, u32 row_stride, const float (&factors)[R], const u32 (&visible)[R],
                   const float* weights, const float* stage, u32 chunks, u32 lane) {
  u32 all = KV_NONE, any = 0;
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    all &= visible[j];
    any |= visible[j];
  }
  for (u32 chunk = 0; chunk < chunks; chunk++) {
    const float* v = stage + chunk * KV_STAGE + lane;
    float low[N] = {}, high[N] = {};
    if (all == KV_NONE) {
#pragma unroll 4
      for (u32 token = 0; token < KV_TILE; token++) {
        const float a = v[token * KV_STRIDE], b = v[token * KV_STRIDE + 32];
#pragma unroll
        for (u32 j = 0; j < N; j++) {
          low[j] = kv_fma(weights[token * R + j], a, low[j]);
          high[j] = kv_fma(weights[token * R + j], b, high[j]);
        }
      }
    } else {
      for (u32 token = 0; token < KV_TILE; token++) {
        if ((any >> token & 1) == 0) continue;
        const float a = v[token * KV_STRIDE], b = v[token * KV_STRIDE + 32];
#pragma unroll
        for (u32 j = 0; j < N; j++) {
          if ((visible[j] >> token & 1) == 0) continue;
          low[j] = kv_fma(weights[token * R + j], a, low[j]);
          high[j] = kv_fma(weights[token * R + j], b, high[j]);
        }
      }
    }
#pragma unroll
    for (u32 j = 0; j < N; j++) {
      float* to = sums + j * row_stride + chunk * KV_CHUNK + lane;
      to[0] = to[0] * factors[j] + low[j];
      to[32] = to[32] * factors[j] + high[j];
    }
  }
}

// Processes the tiles of a work item. Leaves each warp's results for its rows in `sums` and
// `running`.
template <bool SHARED, u32 R>
KV_DEV void kv_attend_tiles(const KvAttendParams& p, const KvAttendItem& item, const KvShared& s) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 thread = SHARED ? threadIdx.x : lane, threads = SHARED ? KV_THREADS : 32;
  const u32 stripe = SHARED ? 0 : warp, stripes = SHARED ? 1 : KV_WARPS;
  // Values staged at a time: what fits the buffer of one warp, or of all warps together.
  const u32 pass = SHARED ? KV_CHUNK * KV_WARPS : KV_CHUNK;
  const u32 own_rows = SHARED ? (item.rows > warp ? (item.rows - warp + KV_WARPS - 1) / KV_WARPS : 0) : item.rows;
  float* stage = s.stage + stripe * KV_STAGE;
  KvTokenRows* tokens = s.tokens + stripe * 2 * KV_TILE;
  float* scores = s.scores + warp * R * KV_TILE;
  float* weights = s.weights + warp * R * KV_TILE;
  const float* q = s.q + kv_query_row<SHARED>(warp, 0) * s.stride_q;
  float* sums = s.sums + kv_own_row<SHARED, R>(warp, 0) * s.stride_v;
  const u32 between = SHARED ? KV_WARPS : 1;  // distance between two rows of a warp
  float max[R], sum[R];
#pragma unroll
  for (u32 j = 0; j < R; j++) {
    max[j] = -kv_infinity();
    sum[j] = 0.f;
    for (u32 d = lane; d < s.stride_v; d += 32) sums[j * between * s.stride_v + d] = 0.f;
  }

  auto look_up = [&](u32 tile, u32 buffer) {
    if (tile == KV_NONE || thread >= KV_TILE) return;
    if ((kv_reach_bits(item.reach, tile * KV_TILE) >> thread & 1) != 0)
      tokens[buffer * KV_TILE + thread] = kv_token_rows(p, item.sequence, item.kv_head, tile * KV_TILE + thread);
  };
  u32 tile = kv_next_tile_of(item.reach, 0, stripe, stripes), buffer = 0;
  look_up(tile, buffer);
  kv_sync_warps<SHARED>();
  while (tile != KV_NONE) {
    const u32 start = tile * KV_TILE, needed = kv_reach_bits(item.reach, start);
    const u32 split_bits = kv_bits(item.begin, item.end, start);
    const KvTokenRows* found = tokens + buffer * KV_TILE;
    u32 visible[R];
    KvFloat4 dots[R];
#pragma unroll
    for (u32 j = 0; j < R; j++) {
      visible[j] = j < own_rows ? kv_visible_bits(s.visible[kv_query_row<SHARED>(warp, j)], start) & split_bits : 0;
      dots[j] = {0.f, 0.f, 0.f, 0.f};
    }
    for (u32 d = 0; d < s.stride_q; d += pass) {
      const u32 chunks = (s.stride_q - d < pass ? s.stride_q - d : pass) / KV_CHUNK;
      if (d > 0) kv_sync_warps<SHARED>();
      kv_stage(item.k_rows, true, found, needed, d, chunks, stage, thread, threads);
      kv_sync_warps<SHARED>();
      const u32 stride = between * s.stride_q;
      if (R == 1 || own_rows == 1) kv_score<1>(dots, q + d, stride, stage, chunks, lane);
      else if (own_rows == 2) kv_score<R < 2 ? R : 2>(dots, q + d, stride, stage, chunks, lane);
      else if (own_rows > 2) kv_score<R>(dots, q + d, stride, stage, chunks, lane);
    }
    float score[R], factors[R];
#pragma unroll
    for (u32 j = 0; j < R; j++) {
      const float bias = j < own_rows ? s.bias[kv_query_row<SHARED>(warp, j)] : 0.f;
      float value = ((dots[j].x + dots[j].y) + (dots[j].z + dots[j].w) + bias) * p.scale;
      if (p.soft_cap > 0.f) value = p.soft_cap * kv_tanh(value / p.soft_cap);
      // Masking: whatever was staged for a token that no row sees ends here.
      score[j] = (visible[j] >> lane & 1) != 0 ? value : -kv_infinity();
      scores[j * KV_TILE + lane] = score[j];
    }
    kv_sync_warps<SHARED>();
#pragma unroll
    for (u32 j = 0; j < R; j++) {
      float next = max[j];
#pragma unroll
      for (u32 i = 0; i < KV_TILE / 4; i++) {
        const KvFloat4 four = *(const KvFloat4*)(scores + j * KV_TILE + 4 * i);
        next = kv_max(next, kv_max(kv_max(four.x, four.y), kv_max(four.z, four.w)));
      }
      // Relative to 0 while every score is minus infinity, since the difference of two infinities
      // is NaN.
      const float base = next == -kv_infinity() ? 0.f : next;
      const float weight = kv_exp(score[j] - base);
      factors[j] = kv_exp(max[j] - base);
      sum[j] = sum[j] * factors[j] + weight;
      max[j] = next;
      weights[lane * R + j] = weight;
    }
    const u32 after = kv_next_tile_of(item.reach, tile + 1, stripe, stripes);
    look_up(after, buffer ^ 1);
    for (u32 d = 0; d < s.stride_v; d += pass) {
      const u32 chunks = (s.stride_v - d < pass ? s.stride_v - d : pass) / KV_CHUNK;
      if (d > 0) kv_sync_warps<SHARED>();
      kv_stage(item.v_rows, false, found, needed, d, chunks, stage, thread, threads);
      kv_sync_warps<SHARED>();
      const u32 stride = between * s.stride_v;
      if (R == 1 || own_rows == 1) kv_sum<1>(sums + d, stride, factors, visible, weights, stage, chunks, lane);
      else if (own_rows == 2) kv_sum<R < 2 ? R : 2>(sums + d, stride, factors, visible, weights, stage, chunks, lane);
      else if (own_rows > 2) kv_sum<R>(sums + d, stride, factors, visible, weights, stage, chunks, lane);
    }
    kv_sync_warps<SHARED>();
    tile = after;
    buffer ^= 1;
  }

  // Every lane has the sum of its own tokens.
#pragma unroll
  for (u32 j = 0; j < R; j++) scores[j * KV_TILE + lane] = sum[j];
  kv_syncwarp();
#pragma unroll
  for (u32 j = 0; j < R; j++) {
    if (lane != j || j >= own_rows) continue;
    float four[4] = {0.f, 0.f, 0.f, 0.f};
    for (u32 i = 0; i < KV_TILE; i++) four[i % 4] += scores[j * KV_TILE + i];
    s.running[kv_own_row<SHARED, R>(warp, j)] = {max[j], (four[0] + four[1]) + (four[2] + four[3])};
  }
  kv_sync();
}

// Loads and, if K is transformed, transforms the query rows of a work item, and stores the keys
// that each row sees. The mean that was subtracted from keys becomes a bias of their scores.
KV_DEV void kv_load_queries(const KvAttendParams& p, const KvAttendItem& item, const KvShared& s, u32 rows) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = p.q.dim;
  const bool transform = p.k_plane.transforms != 0;
  const KvConstants constants = kv_constants(p.k_plane, item.kv_head);
  for (u32 row = warp; row < rows; row += KV_WARPS) {
    float* to = s.q + row * s.stride_q;
    float bias = 0.f;
    KvVisible visible = {0, 0, 0};
    if (row < item.rows) {
      const u32 query = (item.first + row) / p.group, head = item.kv_head * p.group + (item.first + row) % p.group;
      const u8* from = kv_head_row(p.q, item.entry, item.sequence.q_start, query, head);
      visible = kv_visible(p, item.sequence, query);
      for (u32 d = lane; d < s.stride_q; d += 32) {
        to[d] = d < dim ? kv_load(p.q.dtype, from, d) : 0.f;
        if (transform && d < dim) bias += to[d] * constants.mean[d];
      }
      if (transform) {
        for (int mask = 16; mask > 0; mask /= 2) bias += kv_shfl_xorf(bias, mask);
        kv_transform_query(to, constants.back, dim, lane);
      }
    } else {
      for (u32 d = lane; d < s.stride_q; d += 32) to[d] = 0.f;
    }
    if (lane == 0) s.visible[row] = visible, s.bias[row] = bias;
  }
  kv_sync();
}

// Merges the warps' results of each row: softmax state into `total`, values into the row's own
// place.
template <bool SHARED, u32 R> KV_DEV void kv_merge_warps(const KvAttendItem& item, const KvShared& s, u32 dim) {
  if (threadIdx.x < item.rows) {
    KvSoftmax total = s.running[threadIdx.x];
    if (!SHARED) {
      for (u32 w = 1; w < KV_WARPS; w++) total.max = kv_max(total.max, s.running[w * R + threadIdx.x].max);
      total.sum = 0.f;
      for (u32 w = 0; w < KV_WARPS; w++) {
        const KvSoftmax state = s.running[w * R + threadIdx.x];
        total.sum += state.sum * kv_rescale(state.max, total.max);
      }
    }
    s.total[threadIdx.x] = total;
  }
  kv_sync();
  for (u32 row = 0; !SHARED && row < item.rows; row++) {
    float weights[KV_WARPS];
    for (u32 w = 0; w < KV_WARPS; w++) weights[w] = kv_rescale(s.running[w * R + row].max, s.total[row].max);
    for (u32 d = threadIdx.x; d < dim; d += KV_THREADS) {
      float value = 0.f;
      for (u32 w = 0; w < KV_WARPS; w++)
        if (s.running[w * R + row].sum != 0.f) value += s.sums[(w * R + row) * s.stride_v + d] * weights[w];
      // No other thread reads this place before the next barrier.
      s.sums[row * s.stride_v + d] = value;
    }
  }
  kv_sync();
}

// Returns the index of a row's partial result in split `split`.
KV_DEV u64 kv_partial(const KvAttendParams& p, const KvAttendItem& item, u32 split, u32 row) {
  const u32 query = (item.first + row) / p.group, head = item.kv_head * p.group + (item.first + row) % p.group;
  const u64 first = ((const u32*)p.partial_index)[item.entry];
  return (first + (u64)split * item.sequence.q_len + query) * p.q.heads + head;
}

// Writes the partial result of the work item. Returns whether this thread block is the last to
// finish; then it has merged all splits, in order.
KV_DEV bool kv_merge_splits(const KvAttendParams& p, const KvAttendItem& item, const KvShared& s, u32* counter) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = p.v_plane.head_dim;
  float* rows = (float*)p.partial_rows;
  float* stats = (float*)p.partial_stats;
  for (u32 row = warp; row < item.rows; row += KV_WARPS) {
    const u64 at = kv_partial(p, item, item.split, row);
    for (u32 d = lane; d < dim; d += 32) rows[at * dim + d] = s.sums[row * s.stride_v + d];
    if (lane == 0) {
      stats[2 * at] = s.total[row].max;
      stats[2 * at + 1] = s.total[row].sum;
    }
  }
  kv_fence();
  kv_sync();
  if (threadIdx.x == 0) *s.last = kv_atomic_inc(counter, item.num_splits - 1) == item.num_splits - 1;
  kv_sync();
  if (*s.last == 0) return false;
  kv_fence();
  for (u32 row = warp; row < item.rows; row += KV_WARPS) {
    const u64 first = kv_partial(p, item, 0, row), step = (u64)item.sequence.q_len * p.q.heads;
    float max = -kv_infinity(), sum = 0.f;
    for (u32 split = 0; split < item.num_splits; split++)
      max = kv_max(max, kv_ldcg(stats + 2 * (first + split * step)));
    for (u32 split = 0; split < item.num_splits; split++) {
      const float* stat = stats + 2 * (first + split * step);
      sum += kv_ldcg(stat + 1) * kv_rescale(kv_ldcg(stat), max);
    }
    for (u32 d = lane; d < dim; d += 32) {
      float value = 0.f;
      for (u32 split = 0; split < item.num_splits; split++) {
        const u64 at = first + split * step;
        if (kv_ldcg(stats + 2 * at + 1) != 0.f)
          value += kv_ldcg(rows + at * dim + d) * kv_rescale(kv_ldcg(stats + 2 * at), max);
      }
      s.sums[row * s.stride_v + d] = value;
    }
    if (lane == 0) s.total[row] = {max, sum};
  }
  kv_sync();
  return true;
}

// Finishes the rows of a work item: applies the sink logit, divides by the sum, applies the inverse
// transform of V, and writes rows and log-sum-exp.
KV_DEV void kv_finish(const KvAttendParams& p, const KvAttendItem& item, const KvShared& s) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = p.v_plane.head_dim;
  const KvConstants constants = kv_constants(p.v_plane, item.kv_head);
  for (u32 row = warp; row < item.rows; row += KV_WARPS) {
    const u32 query = (item.first + row) / p.group, head = item.kv_head * p.group + (item.first + row) % p.group;
    const KvSoftmax running = s.total[row];
    KvSoftmax total = running;
    if (p.sink_logits != 0) {
      const float sink = ((const float*)p.sink_logits)[head];
      total.max = kv_max(running.max, sink);
      const float own = sink == -kv_infinity() ? 0.f : kv_rescale(sink, total.max);
      total.sum = running.sum * kv_rescale(running.max, total.max) + own;
    }
    const bool empty = running.sum == 0.f;
    // Divides instead of multiplying by a reciprocal: one rounding less.
    const float weight = empty ? 0.f : kv_rescale(running.max, total.max), sum = empty ? 1.f : total.sum;
    float* values = s.sums + row * s.stride_v;
    for (u32 d = lane; d < dim; d += 32) values[d] = values[d] * weight / sum;
    if (p.v_plane.transforms != 0 && !empty) {
      kv_syncwarp();
      kv_transform_output(values, constants.back, dim, lane);
    }
    u8* out = kv_head_row(p.out, item.entry, item.sequence.q_start, query, head);
    for (u32 d = lane; d < dim; d += 32) kv_store(p.out.dtype, out, d, empty ? 0.f : values[d]);
    if (p.lse.data != 0 && lane == 0) {
      const float lse = total.sum == 0.f ? -kv_infinity() : total.max + kv_log(total.sum);
      *(float*)kv_head_row(p.lse, item.entry, item.sequence.q_start, query, head) = lse;
    }
  }
}

// Runs all KV splits of the query rows that belong to this thread block.
template <u32 R> KV_DEV void kv_attend(const KvAttendParams& p) {
  KV_DYN_SMEM(memory);
  constexpr u32 ROWS = KV_WARPS * R;
  const KvCounts& counts = *(const KvCounts*)p.plan.counts;
  const KvSequence* sequences = (const KvSequence*)p.plan.sequences;
  if (counts.sequences == 0) return;
  // Row tiles of a sequence begin after those of all earlier sequences.
  auto start = [&](u32 entry) { return (u32)((u64)sequences[entry].q_start * p.group / ROWS) + entry; };
  KvAttendItem item;
  item.entry = kv_entry_of(counts.sequences, blockIdx.x, start);
  item.sequence = sequences[item.entry];
  if (item.sequence.q_len < p.q_len_min || item.sequence.q_len > p.q_len_max) return;
  item.kv_head = blockIdx.y;
  const u32 rows = item.sequence.q_len * p.group, tiles = (rows + ROWS - 1) / ROWS;
  const u32 nth = blockIdx.x - start(item.entry);
  if (nth >= tiles) return;
  // Late queries see most keys, so they are scheduled first.
  item.first = (tiles - 1 - nth) * ROWS;
  item.rows = rows - item.first < ROWS ? rows - item.first : ROWS;
  // A sequence without keys has no splits, but its rows must be written.
  item.num_splits = item.sequence.num_splits > 1 ? item.sequence.num_splits : 1;
  item.k_rows = kv_row_format(p.k_plane, kv_constants(p.k_plane, item.kv_head).scale);
  item.v_rows = kv_row_format(p.v_plane, kv_constants(p.v_plane, item.kv_head).scale);
  const KvShared s = kv_shared(memory, ROWS, p.k_plane.head_dim, p.v_plane.head_dim);
  if (blockIdx.z >= item.num_splits) return;
  kv_load_queries(p, item, s, ROWS);
  const KvVisible first = s.visible[0], last = s.visible[item.rows - 1];
  u32* counter = (u32*)p.counters + (u64)blockIdx.x * gridDim.y + item.kv_head;
  for (item.split = blockIdx.z; item.split < item.num_splits; item.split += gridDim.z) {
    item.begin = item.end = 0;
    if (item.sequence.num_splits > 0) {
      const KvSplit& split = ((const KvSplit*)p.plan.splits)[(u64)item.sequence.split_start + item.split];
      item.begin = split.begin, item.end = split.end;
    }
    item.reach = kv_reach(first, last, item.begin, item.end);
    if (rows <= R) {
      kv_attend_tiles<false, R>(p, item, s);
      kv_merge_warps<false, R>(item, s, p.v_plane.head_dim);
    } else {
      kv_attend_tiles<true, R>(p, item, s);
      kv_merge_warps<true, R>(item, s, p.v_plane.head_dim);
    }
    if (item.num_splits == 1 || kv_merge_splits(p, item, s, counter)) kv_finish(p, item, s);
    kv_sync();
  }
}

KV_KERNEL(attend_rows, KvAttendParams, 128, 2, kv_attend<4>)
KV_KERNEL(attend_rows_large, KvAttendParams, 128, 1, kv_attend<1>)
