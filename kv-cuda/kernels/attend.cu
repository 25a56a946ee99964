// Attention over cached rows, for every shape, stored format and option: what takes the calls that no
// other kernel does.
//
// A unit is some rows of one kv head (a row is one head of one query) against one part of a context.
// It meets the context in tiles of 32 tokens at multiples of 32, so that the order of a sum depends
// on positions alone: decodes a tile of K into shared memory, scores it with one token a lane, weighs
// it (online softmax), decodes V and sums it with some values of a row a lane. A sequence of at most R
// rows has each warp walk tiles of its own, joined at the end; of more, the warps share every tile and
// each has some of the rows. Parts of a context leave partial results, which the block that is done
// last joins in the order of the parts, so that the same plan gives the same bits.
//
// Launch, with R = 4 for `attend_rows` and 1 for `attend_rows_large` (for heads of so many values
// that the former lacks shared memory; choose by head_dim alone, as results differ in the last bits):
//   grid x: floor(total_q * group / (4 R)) + sequences; y: kv heads; z: the most splits of a sequence,
//           at least 1; fewer are right and slower
//   threads: 128
//   shared bytes: 43008 + 16 R (up(dim_k) + up(dim_v) + 72) + 16, with up(n) = n rounded up to a multiple of 64
//   part_rows: f32 [num_parts][q heads][dim_v]; part_stats: pairs [num_parts][q heads] (maximum, sum):
//           row (part_index[sequence] + split * q_len + query) * q heads + head
//   counters: u32 [grid x][kv heads]; takes entries with q_len_min..=q_len_max queries
// Rows that no query owns are not touched.
#include "attend.h"

// Which of a block's rows the `j`-th of a warp is, in `running` and `sums`.
template <bool SHARED, u32 R> KV_DEV u32 kv_own_row(u32 warp, u32 j) {
  return SHARED ? j * KV_WARPS + warp : warp * R + j;
}
template <bool SHARED> KV_DEV u32 kv_query_row(u32 warp, u32 j) { return SHARED ? j * KV_WARPS + warp : j; }

// Waits for all who stage and use a tile together.
template <bool SHARED> KV_DEV void kv_wait() {
  if (SHARED) kv_sync(); else kv_syncwarp();
}

// Adds products of `N` query rows with the staged values of a lane's token, four sums a row.
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

// Adds the weighted staged values of a tile to `N` rows: two values of each chunk a lane. A token
// that a row does not see never meets it, whatever its values are.
template <u32 N, u32 R>
KV_DEV void kv_sum(float* sums, u32 row_stride, const float (&factors)[R], const u32 (&seen)[R], const float* weights,
                   const float* stage, u32 chunks, u32 lane) {
  u32 all = KV_NONE, any = 0;
#pragma unroll
  for (u32 j = 0; j < N; j++) {
    all &= seen[j];
    any |= seen[j];
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
          if ((seen[j] >> token & 1) == 0) continue;
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

// Walks the tiles of a unit. Leaves in `sums` and `running` what each warp has of its rows.
template <bool SHARED, u32 R> KV_DEV void kv_walk(const KvAttendParams& p, const KvUnit& u, const KvShared& s) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u32 thread = SHARED ? threadIdx.x : lane, threads = SHARED ? KV_THREADS : 32;
  const u32 stripe = SHARED ? 0 : warp, stripes = SHARED ? 1 : KV_WARPS;
  // Values staged at once: what a warp has room for, or all warps together.
  const u32 pass = SHARED ? KV_CHUNK * KV_WARPS : KV_CHUNK;
  const u32 mine = SHARED ? (u.rows > warp ? (u.rows - warp + KV_WARPS - 1) / KV_WARPS : 0) : u.rows;
  float* stage = s.stage + stripe * KV_STAGE;
  KvTokenAt* tokens = s.tokens + stripe * 2 * KV_TILE;
  float* scores = s.scores + warp * R * KV_TILE;
  float* weights = s.weights + warp * R * KV_TILE;
  const float* q = s.q + kv_query_row<SHARED>(warp, 0) * s.stride_q;
  float* sums = s.sums + kv_own_row<SHARED, R>(warp, 0) * s.stride_v;
  const u32 between = SHARED ? KV_WARPS : 1;  // rows from one of a warp to the next
  float max[R], sum[R];
#pragma unroll
  for (u32 j = 0; j < R; j++) {
    max[j] = -kv_infinity();
    sum[j] = 0.f;
    for (u32 d = lane; d < s.stride_v; d += 32) sums[j * between * s.stride_v + d] = 0.f;
  }

  auto find = [&](u32 tile, u32 buffer) {
    if (tile == KV_NONE || thread >= KV_TILE) return;
    if ((kv_reach_bits(u.reach, tile * KV_TILE) >> thread & 1) != 0)
      tokens[buffer * KV_TILE + thread] = kv_find(p, u.sequence, u.kv_head, tile * KV_TILE + thread);
  };
  u32 tile = kv_next_tile_of(u.reach, 0, stripe, stripes), buffer = 0;
  find(tile, buffer);
  kv_wait<SHARED>();
  while (tile != KV_NONE) {
    const u32 start = tile * KV_TILE, needed = kv_reach_bits(u.reach, start);
    const u32 part = kv_bits(u.begin, u.end, start);
    const KvTokenAt* found = tokens + buffer * KV_TILE;
    u32 seen[R];
    KvFloat4 dots[R];
#pragma unroll
    for (u32 j = 0; j < R; j++) {
      seen[j] = j < mine ? kv_visible_bits(s.seen[kv_query_row<SHARED>(warp, j)], start) & part : 0;
      dots[j] = {0.f, 0.f, 0.f, 0.f};
    }
    for (u32 d = 0; d < s.stride_q; d += pass) {
      const u32 chunks = (s.stride_q - d < pass ? s.stride_q - d : pass) / KV_CHUNK;
      if (d > 0) kv_wait<SHARED>();
      kv_stage(u.k_rows, true, found, needed, d, chunks, stage, thread, threads);
      kv_wait<SHARED>();
      const u32 stride = between * s.stride_q;
      if (R == 1 || mine == 1) kv_score<1>(dots, q + d, stride, stage, chunks, lane);
      else if (mine == 2) kv_score<R < 2 ? R : 2>(dots, q + d, stride, stage, chunks, lane);
      else if (mine > 2) kv_score<R>(dots, q + d, stride, stage, chunks, lane);
    }
    float score[R], factors[R];
#pragma unroll
    for (u32 j = 0; j < R; j++) {
      const float bias = j < mine ? s.bias[kv_query_row<SHARED>(warp, j)] : 0.f;
      float value = ((dots[j].x + dots[j].y) + (dots[j].z + dots[j].w) + bias) * p.scale;
      if (p.soft_cap > 0.f) value = p.soft_cap * kv_tanh(value / p.soft_cap);
      // The one place where what was staged for a token nobody sees ends.
      score[j] = (seen[j] >> lane & 1) != 0 ? value : -kv_infinity();
      scores[j * KV_TILE + lane] = score[j];
    }
    kv_wait<SHARED>();
#pragma unroll
    for (u32 j = 0; j < R; j++) {
      float next = max[j];
#pragma unroll
      for (u32 i = 0; i < KV_TILE / 4; i++) {
        const KvFloat4 four = *(const KvFloat4*)(scores + j * KV_TILE + 4 * i);
        next = kv_max(next, kv_max(kv_max(four.x, four.y), kv_max(four.z, four.w)));
      }
      // Relative to 0 as long as every score is minus infinity: the difference of two is NaN.
      const float base = next == -kv_infinity() ? 0.f : next;
      const float weight = kv_exp(score[j] - base);
      factors[j] = kv_exp(max[j] - base);
      sum[j] = sum[j] * factors[j] + weight;
      max[j] = next;
      weights[lane * R + j] = weight;
    }
    const u32 after = kv_next_tile_of(u.reach, tile + 1, stripe, stripes);
    find(after, buffer ^ 1);
    for (u32 d = 0; d < s.stride_v; d += pass) {
      const u32 chunks = (s.stride_v - d < pass ? s.stride_v - d : pass) / KV_CHUNK;
      if (d > 0) kv_wait<SHARED>();
      kv_stage(u.v_rows, false, found, needed, d, chunks, stage, thread, threads);
      kv_wait<SHARED>();
      const u32 stride = between * s.stride_v;
      if (R == 1 || mine == 1) kv_sum<1>(sums + d, stride, factors, seen, weights, stage, chunks, lane);
      else if (mine == 2) kv_sum<R < 2 ? R : 2>(sums + d, stride, factors, seen, weights, stage, chunks, lane);
      else if (mine > 2) kv_sum<R>(sums + d, stride, factors, seen, weights, stage, chunks, lane);
    }
    kv_wait<SHARED>();
    tile = after;
    buffer ^= 1;
  }

  // Every lane has the sum of its own tokens.
#pragma unroll
  for (u32 j = 0; j < R; j++) scores[j * KV_TILE + lane] = sum[j];
  kv_syncwarp();
#pragma unroll
  for (u32 j = 0; j < R; j++) {
    if (lane != j || j >= mine) continue;
    float four[4] = {0.f, 0.f, 0.f, 0.f};
    for (u32 i = 0; i < KV_TILE; i++) four[i % 4] += scores[j * KV_TILE + i];
    s.running[kv_own_row<SHARED, R>(warp, j)] = {max[j], (four[0] + four[1]) + (four[2] + four[3])};
  }
  kv_sync();
}

// Decodes the query rows of a unit, transforms them where rows of K are, and notes what each sees.
// The mean that transformed keys lack becomes a bias of their scores.
KV_DEV void kv_load_queries(const KvAttendParams& p, const KvUnit& u, const KvShared& s, u32 rows) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = p.q.dim;
  const bool transform = p.k_plane.transforms != 0;
  const KvConstants constants = kv_constants(p.k_plane, u.kv_head);
  for (u32 row = warp; row < rows; row += KV_WARPS) {
    float* to = s.q + row * s.stride_q;
    float bias = 0.f;
    KvVisible seen = {0, 0, 0};
    if (row < u.rows) {
      const u32 query = (u.first + row) / p.group, head = u.kv_head * p.group + (u.first + row) % p.group;
      const u8* from = kv_head_row(p.q, u.entry, u.sequence.q_start, query, head);
      seen = kv_visible(p, u.sequence, query);
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
    if (lane == 0) s.seen[row] = seen, s.bias[row] = bias;
  }
  kv_sync();
}

// Joins what the warps have of each row: its maximum and sum in `total`, its values in its own place.
template <bool SHARED, u32 R> KV_DEV void kv_join_warps(const KvUnit& u, const KvShared& s, u32 dim) {
  if (threadIdx.x < u.rows) {
    KvRunning total = s.running[threadIdx.x];
    if (!SHARED) {
      for (u32 w = 1; w < KV_WARPS; w++) total.max = kv_max(total.max, s.running[w * R + threadIdx.x].max);
      total.sum = 0.f;
      for (u32 w = 0; w < KV_WARPS; w++) {
        const KvRunning part = s.running[w * R + threadIdx.x];
        total.sum += part.sum * kv_weight(part.max, total.max);
      }
    }
    s.total[threadIdx.x] = total;
  }
  kv_sync();
  for (u32 row = 0; !SHARED && row < u.rows; row++) {
    float weights[KV_WARPS];
    for (u32 w = 0; w < KV_WARPS; w++) weights[w] = kv_weight(s.running[w * R + row].max, s.total[row].max);
    for (u32 d = threadIdx.x; d < dim; d += KV_THREADS) {
      float value = 0.f;
      for (u32 w = 0; w < KV_WARPS; w++)
        if (s.running[w * R + row].sum != 0.f) value += s.sums[(w * R + row) * s.stride_v + d] * weights[w];
      // Nobody else looks at this place before the next barrier.
      s.sums[row * s.stride_v + d] = value;
    }
  }
  kv_sync();
}

// Partial result of a row of the unit in part `split`.
KV_DEV u64 kv_partial(const KvAttendParams& p, const KvUnit& u, u32 split, u32 row) {
  const u32 query = (u.first + row) / p.group, head = u.kv_head * p.group + (u.first + row) % p.group;
  const u64 first = ((const u32*)p.part_index)[u.entry];
  return (first + (u64)split * u.sequence.q_len + query) * p.q.heads + head;
}

// Leaves the unit's rows to the block that is done last, and says whether this is it; then all parts
// are joined here, in their order.
KV_DEV bool kv_join_parts(const KvAttendParams& p, const KvUnit& u, const KvShared& s, u32* counter) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = p.v_plane.head_dim;
  float* rows = (float*)p.part_rows;
  float* stats = (float*)p.part_stats;
  for (u32 row = warp; row < u.rows; row += KV_WARPS) {
    const u64 at = kv_partial(p, u, u.split, row);
    for (u32 d = lane; d < dim; d += 32) rows[at * dim + d] = s.sums[row * s.stride_v + d];
    if (lane == 0) {
      stats[2 * at] = s.total[row].max;
      stats[2 * at + 1] = s.total[row].sum;
    }
  }
  kv_fence();
  kv_sync();
  if (threadIdx.x == 0) *s.last = kv_atomic_inc(counter, u.splits - 1) == u.splits - 1;
  kv_sync();
  if (*s.last == 0) return false;
  kv_fence();
  for (u32 row = warp; row < u.rows; row += KV_WARPS) {
    const u64 first = kv_partial(p, u, 0, row), step = (u64)u.sequence.q_len * p.q.heads;
    float max = -kv_infinity(), sum = 0.f;
    for (u32 split = 0; split < u.splits; split++) max = kv_max(max, kv_ldcg(stats + 2 * (first + split * step)));
    for (u32 split = 0; split < u.splits; split++) {
      const float* part = stats + 2 * (first + split * step);
      sum += kv_ldcg(part + 1) * kv_weight(kv_ldcg(part), max);
    }
    for (u32 d = lane; d < dim; d += 32) {
      float value = 0.f;
      for (u32 split = 0; split < u.splits; split++) {
        const u64 at = first + split * step;
        if (kv_ldcg(stats + 2 * at + 1) != 0.f)
          value += kv_ldcg(rows + at * dim + d) * kv_weight(kv_ldcg(stats + 2 * at), max);
      }
      s.sums[row * s.stride_v + d] = value;
    }
    if (lane == 0) s.total[row] = {max, sum};
  }
  kv_sync();
  return true;
}

// Ends the rows of a unit: joins the sink logit, divides by the sum, turns the mean of stored rows of
// V into that of the rows themselves, writes rows and log-sum-exp.
KV_DEV void kv_finish(const KvAttendParams& p, const KvUnit& u, const KvShared& s) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, dim = p.v_plane.head_dim;
  const KvConstants constants = kv_constants(p.v_plane, u.kv_head);
  for (u32 row = warp; row < u.rows; row += KV_WARPS) {
    const u32 query = (u.first + row) / p.group, head = u.kv_head * p.group + (u.first + row) % p.group;
    const KvRunning running = s.total[row];
    KvRunning total = running;
    if (p.sink_logits != 0) {
      const float sink = ((const float*)p.sink_logits)[head];
      total.max = kv_max(running.max, sink);
      const float own = sink == -kv_infinity() ? 0.f : kv_weight(sink, total.max);
      total.sum = running.sum * kv_weight(running.max, total.max) + own;
    }
    const bool empty = running.sum == 0.f;
    // Divided rather than multiplied with a reciprocal: a rounding less.
    const float weight = empty ? 0.f : kv_weight(running.max, total.max), sum = empty ? 1.f : total.sum;
    float* values = s.sums + row * s.stride_v;
    for (u32 d = lane; d < dim; d += 32) values[d] = values[d] * weight / sum;
    if (p.v_plane.transforms != 0 && !empty) {
      kv_syncwarp();
      kv_transform_output(values, constants.back, dim, lane);
    }
    u8* out = kv_head_row(p.out, u.entry, u.sequence.q_start, query, head);
    for (u32 d = lane; d < dim; d += 32) kv_store(p.out.dtype, out, d, empty ? 0.f : values[d]);
    if (p.lse.data != 0 && lane == 0) {
      const float lse = total.sum == 0.f ? -kv_infinity() : total.max + kv_log(total.sum);
      *(float*)kv_head_row(p.lse, u.entry, u.sequence.q_start, query, head) = lse;
    }
  }
}

// The rows, and all parts of their context that are this block's.
template <u32 R> KV_DEV void kv_attend(const KvAttendParams& p) {
  KV_DYN_SMEM(memory);
  constexpr u32 ROWS = KV_WARPS * R;
  const KvCounts& counts = *(const KvCounts*)p.plan.counts;
  const KvSequence* sequences = (const KvSequence*)p.plan.sequences;
  if (counts.sequences == 0) return;
  // Tiles of a sequence come behind a place that no earlier sequence's reach.
  auto start = [&](u32 entry) { return (u32)((u64)sequences[entry].q_start * p.group / ROWS) + entry; };
  KvUnit u;
  u.entry = kv_entry_of(counts.sequences, blockIdx.x, start);
  u.sequence = sequences[u.entry];
  if (u.sequence.q_len < p.q_len_min || u.sequence.q_len > p.q_len_max) return;
  u.kv_head = blockIdx.y;
  const u32 rows = u.sequence.q_len * p.group, tiles = (rows + ROWS - 1) / ROWS;
  const u32 nth = blockIdx.x - start(u.entry);
  if (nth >= tiles) return;
  // Late queries see most keys, so they come first.
  u.first = (tiles - 1 - nth) * ROWS;
  u.rows = rows - u.first < ROWS ? rows - u.first : ROWS;
  // A sequence without keys has no parts, and rows all the same.
  u.splits = u.sequence.num_splits > 1 ? u.sequence.num_splits : 1;
  u.k_rows = kv_rows(p.k_plane, kv_constants(p.k_plane, u.kv_head).scale);
  u.v_rows = kv_rows(p.v_plane, kv_constants(p.v_plane, u.kv_head).scale);
  const KvShared s = kv_shared(memory, ROWS, p.k_plane.head_dim, p.v_plane.head_dim);
  if (blockIdx.z >= u.splits) return;
  kv_load_queries(p, u, s, ROWS);
  const KvVisible first = s.seen[0], last = s.seen[u.rows - 1];
  u32* counter = (u32*)p.counters + (u64)blockIdx.x * gridDim.y + u.kv_head;
  for (u.split = blockIdx.z; u.split < u.splits; u.split += gridDim.z) {
    u.begin = u.end = 0;
    if (u.sequence.num_splits > 0) {
      const KvSplit& split = ((const KvSplit*)p.plan.splits)[(u64)u.sequence.split_start + u.split];
      u.begin = split.begin, u.end = split.end;
    }
    u.reach = kv_reach(first, last, u.begin, u.end);
    if (rows <= R) {
      kv_walk<false, R>(p, u, s);
      kv_join_warps<false, R>(u, s, p.v_plane.head_dim);
    } else {
      kv_walk<true, R>(p, u, s);
      kv_join_warps<true, R>(u, s, p.v_plane.head_dim);
    }
    if (u.splits == 1 || kv_join_parts(p, u, s, counter)) kv_finish(p, u, s);
    kv_sync();
  }
}

KV_KERNEL(attend_rows, KvAttendParams, 128, 2, kv_attend<4>)
KV_KERNEL(attend_rows_large, KvAttendParams, 128, 1, kv_attend<1>)
