// Prefill attention: many queries over a paged KV cache, on tensor cores. FlashAttention-2 (Dao,
// 2023) over blocks.
//
// A work item is R rows of one kv head. A row is one head of one query; the rows of a sequence are
// numbered query by query, so that the heads of a group share the reads of K and V. Each of four
// warps has a quarter of the rows. Up to D = 128 that is two 16-row mma tiles, R = 128: each
// fragment of K and V that a warp loads from shared memory is used for both, otherwise these loads
// would take longer than the products. Above, registers have room for one, R = 64.
//
// All warps share tiles of K and V. A source brings them to shared memory as T = f16 or bf16:
// KvPrefillPlain, below, copies rows of the queries' own type by cp.async, a whole tile while the
// previous one is processed, with one barrier per tile. prefill_staged.h has the source
// for codes of the usual formats, prefill_coded.h that for all others.
// Long contexts are split where there are too few work items otherwise: prefill_plan.h.
//
// Calls that KvPrefillPlain supports; for both planes:
//   - q, out and stored rows are of type T; head_dim of K and V is D: 64, 80, 96, 128, 192 or 256;
//   - no transforms, no full-precision prefix, no tail, no block means;
//   - every address (of q, out, planes, segments) and every stride (of q and out; of tokens, heads
//     and blocks) is a multiple of 16 bytes.
// It takes the entries of its schedule, which plan_prefill.cu makes for query tiles of R rows.
//
// Launch of `prefill_{f16,bf16}_{D}`:
//   grid x: at least the work items of a head in the schedule; y: kv heads; z: 1
//   threads: 128
//   shared bytes: 2 D (R + 4 N) + 32 N + 32, N = 64 tokens up to D = 128, 32 above
// Rows that belong to no query are not written.
#pragma once
#include "prefill_split.h"

// 16-row mma tiles per warp.
KV_DEV constexpr u32 kv_prefill_matrices(u32 dim) { return dim <= 128 ? 2 : 1; }

// Copies rows that are stored as T.
template <class T, u32 D> struct KvPrefillPlain {
  typedef KvPrefillItem<T, D, kv_prefill_matrices(D), 2> Item;
  static constexpr u32 M = Item::M, TOKENS = Item::TOKENS, CHUNKS = Item::CHUNKS;
  // What a source does. SCALES: K and V are codes, so that outputs are scaled and may be transformed.
  // WEIGHS: it makes weights itself and multiplies them by the factors of V. BIASES: it makes
  // exponents, which include the logarithm of the token's factor of V, and divides weights by that
  // factor where it adds them to the sum. FOLDS: each row of scores has one positive factor.
  static constexpr bool SCALES = false, WEIGHS = false, BIASES = false, FOLDS = false;
  // Addresses of a token's rows; 0 for a token that no row of the work item sees.
  struct alignas(16) TokenRows { u64 k, v; };
  static constexpr u32 BYTES = 2 * TOKENS * sizeof(TokenRows);

  const Item& item;
  TokenRows* tokens;  // [2][TOKENS]
  u32 block;          // of the token that this thread has looked up

  KV_DEV KvPrefillPlain(const Item& item, u8* memory) : item(item), tokens((TokenRows*)memory) {}

  // Looks up one token of a tile per thread: first its block, which takes the latency of a global
  // load, later its rows.
  KV_DEV bool looks_up(u32 tile) const {
    return tile != KV_NONE && item.thread < TOKENS && item.reaches(tile * TOKENS + item.thread);
  }
  KV_DEV void look_up(u32 tile) {
    if (!looks_up(tile)) return;
    const u32 index = (tile * TOKENS + item.thread) / item.p.k_plane.block_size;
    block = ((const u32*)item.p.plan.tables)[(u64)item.sequence().table + index];
  }
  KV_DEV void store_addresses(u32 tile, u32 buffer) const {
    const KvAttendParams& p = item.p;
    if (item.thread >= TOKENS) return;
    TokenRows at = {0, 0};
    if (looks_up(tile)) {
      const KvPlace place = {0, (tile * TOKENS + item.thread) % p.k_plane.block_size, false};
      at.k = (u64)kv_block(p.k_plane, block) + kv_row_begin(p.k_plane, place, item.kv_head);
      at.v = (u64)kv_block(p.v_plane, block) + kv_row_begin(p.v_plane, place, item.kv_head);
    }
    tokens[buffer * TOKENS + item.thread] = at;
  }

  // The copies of a thread: of every STEP-th row, starting with its own, each chunk with its index
  // modulo the swizzle period.
  static constexpr u32 STEP = KV_PREFILL_THREADS / Item::PERIOD;
  KV_DEV u32 row() const { return item.thread / Item::PERIOD; }
  KV_DEV u32 chunk() const { return item.thread % Item::PERIOD; }
  // Returns whether a value of V that this thread copied is not finite.
  KV_DEV bool has_non_finite(u32 buffer) const {
    bool found = false;
    for (u32 i = row(); i < TOKENS; i += STEP)
      for (u32 c = chunk(); c < CHUNKS; c += Item::PERIOD) found = found || item.is_non_finite(buffer, i, c);
    return found;
  }
  // Starts the copy of a tile; zeros for a token that no row sees, whose memory is not read.
  KV_DEV void copy(u32 tile, u32 buffer) const {
    if (item.reaches_all(tile * TOKENS, (tile + 1) * TOKENS)) copy_rows<true>(buffer);
    else copy_rows<false>(buffer);
    kv_cp_commit();
  }
  template <bool ALL> KV_DEV void copy_rows(u32 buffer) const {
    const u32 to = buffer * Item::TILE_BYTES + Item::at(row(), chunk());
    const TokenRows* from = tokens + buffer * TOKENS + row();
    const u32 k = item.shared + Item::K + to, v = item.shared + Item::V + to;
#pragma unroll
    for (u32 i = 0; i < TOKENS; i += STEP) {
      const TokenRows at = from[i];
      const u8 *k_row = (const u8*)at.k + chunk() * 16, *v_row = (const u8*)at.v + chunk() * 16;
#pragma unroll
      for (u32 c = 0; c < CHUNKS; c += Item::PERIOD) {
        const u32 there = i * Item::ROW_BYTES + c * 16;
        if (ALL) {
          kv_cp_async16_at(k + there, k_row + c * 16);
          kv_cp_async16_at(v + there, v_row + c * 16);
        } else {
          kv_cp_async16(item.k + to + there, k_row + c * 16, at.k != 0);
          kv_cp_async16(item.v + to + there, v_row + c * 16, at.k != 0);
        }
      }
    }
  }

  // Prepares the first tile and starts its copy. The queries are a group of their own: without a
  // tile, no other group follows, and `end` must still wait for them.
  KV_DEV void begin(u32 tile) {
    item.copy_queries();
    kv_cp_commit();
    look_up(tile);
    store_addresses(tile, 0);
    const u32 after = item.after(tile);
    look_up(after);
    kv_sync();
    if (tile != KV_NONE) copy(tile, 0);
    store_addresses(after, 1);
  }
  // Waits, with all threads, until K and V of a tile have arrived. The previous tile is not read
  // any more, so the copy of the next one starts.
  KV_DEV void wait_for(u32 tile, u32 after, u32 buffer, bool whole) {
    kv_cp_wait<0>();
    if (!whole && has_non_finite(buffer)) kv_atomic_max(item.state.non_finite + buffer, tile + 1);
    kv_sync();
    if (after == KV_NONE) return;
    copy(after, buffer ^ 1);
    look_up(item.after(after));
  }
  // Stores the addresses of the tile after next, once the scores are computed.
  KV_DEV void prepare_next(u32 after, u32 buffer) const { store_addresses(item.after(after), buffer); }
  // Waits for the queries of an item without tiles: the output is staged in their memory.
  KV_DEV void end() { kv_cp_wait<0>(); }

  // Gives the sums of all splits of a query tile the same scale.
  KV_DEV void unify(float (&)[M][Item::COLUMNS][4]) const {}
  KV_DEV float factor(u32, u32) const { return 1.f; }
  KV_DEV float score_scale(u32, u32) const { return 1.f; }
};

template <class T, u32 D, class Source> struct KvPrefill {
  typedef typename Source::Item Item;
  static constexpr u32 M = Item::M, TOKENS = Item::TOKENS, TILES = Item::TILES, COLUMNS = Item::COLUMNS;
  typedef float Scores[M][TILES][4];
  typedef float Sums[M][COLUMNS][4];

  const Item& item;
  Source source;
  Sums o;
  // For each row of the lane: the largest score in log2 units, initially the smallest finite number
  // so that differences are numbers; and this lane's part of the sum of weights relative to it.
  float most[M][2], total[M][2];
  // Scales a row's score to log2 units.
  float log2_scale[M][2];

  KV_DEV KvPrefill(const Item& item, u8* memory) : item(item), source(item, memory) {}

  KV_DEV void run() {
#pragma unroll
    for (u32 m = 0; m < M; m++) {
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) o[m][d][j] = 0.f;
#pragma unroll
      for (u32 h = 0; h < 2; h++) most[m][h] = kv_as_f(0xff7fffffu), total[m][h] = 0.f;
    }
    u32 tile = kv_next_tile<TOKENS>(item.reach, 0), buffer = 0;
    source.begin(tile);
    const float log2_scale = folds_scale() ? item.p.scale * KV_LOG2E : 1.f;
    while (tile != KV_NONE) {
      const u32 start = tile * TOKENS, after = item.after(tile);
      const bool whole = item.is_whole(tile);
      source.wait_for(tile, after, buffer, whole);
      Scores s;
      item.score(s, buffer);
      source.prepare_next(after, buffer);
      if constexpr (Source::BIASES) source.make_exponents(s, buffer);
      else if (!folds_scale()) make_exponents(s, buffer);
      if (!whole) mask_scores(s, start);
#pragma unroll
      for (u32 m = 0; m < M; m++)
#pragma unroll
        for (u32 h = 0; h < 2; h++) this->log2_scale[m][h] = Source::FOLDS ? source.score_scale(m, h) : log2_scale;
      rescale(s, buffer);
      const bool has_non_finite = !whole && item.state.non_finite[buffer] == tile + 1;
      if (has_non_finite) {
        u32 weights[M][TILES][2];
#pragma unroll
        for (u32 i = 0; i < TILES; i++) make_weights(s, weights, i, i, buffer);
        item.sum_visible(o, weights, start, buffer);
      } else {
#pragma unroll
        for (u32 i = 0; i < TILES; i += 2) {
          u32 pairs[M][2][2], a[M][4];
          make_weights(s, pairs, i, 0, buffer);
          make_weights(s, pairs, i + 1, 1, buffer);
#pragma unroll
          for (u32 m = 0; m < M; m++)
#pragma unroll
            for (u32 j = 0; j < 4; j++) a[m][j] = pairs[m][j / 2][j % 2];
          item.sum(o, a, i, buffer);
        }
      }
      tile = after;
      buffer ^= 1;
    }
    source.end();
    if (merge()) finish();
  }

  // Merges the splits of the query tile, if it has several; returns whether to write its rows.
  KV_DEV bool merge() {
    const u32 num_splits = item.work().num_splits;
    if (num_splits == 1) return true;
    source.unify(o);
    // The shuffle keeps the compiler from holding addresses derived from the thread for the whole
    // kernel.
    const KvPrefillSplit<Item> split = {item, item.work().partial * gridDim.y + item.kv_head * num_splits,
                                        kv_shfl(item.thread, item.lane)};
    return split.merge(item.work().split, num_splits, o, most, total);
  }

  // Returns whether the scale can be folded into the exponential: factors are positive and uniform,
  // so the largest product also has the largest score.
  KV_DEV bool folds_scale() const {
    return Source::FOLDS || (!Source::SCALES && item.p.soft_cap <= 0.f && item.p.scale > 0.f);
  }
  KV_DEV void make_exponents(Scores& s, u32 buffer) const {
    const float cap = item.p.soft_cap * KV_LOG2E;
    const float scale = cap > 0.f ? item.p.scale / item.p.soft_cap : item.p.scale * KV_LOG2E;
    if constexpr (Source::WEIGHS) source.scale(s, scale, buffer);
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 i = 0; i < TILES; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
          if (!Source::WEIGHS) s[m][i][j] *= scale;
          if (cap > 0.f) s[m][i][j] = cap * kv_tanh(s[m][i][j]);
        }
  }

  // Masks the scores of tokens that a row does not see.
  KV_DEV void mask_scores(Scores& s, u32 start) const {
    KvVisible visible[M][2];
    item.find_visible(visible);
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 i = 0; i < TILES; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++)
          if (!item.is_visible(visible[m][j / 2], start + i * 8 + item.lane % 4 * 2 + j % 2))
            s[m][i][j] = -kv_infinity();
  }

  // Updates the running maximum of each row with this tile and rescales its sums. If tokens have
  // factors, also turns scores into weights.
  KV_DEV void rescale(Scores& s, u32 buffer) {
    float factors[M][2];
    bool same = true;
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        float next = -kv_infinity();
#pragma unroll
        for (u32 i = 0; i < TILES; i++) next = kv_max(next, kv_max(s[m][i][2 * h], s[m][i][2 * h + 1]));
        next = kv_max(next, kv_shfl_xorf(next, 1));
        next = kv_max(next, kv_shfl_xorf(next, 2));
        next = kv_max(most[m][h], kv_mul_rn(next, log2_scale[m][h]));
        factors[m][h] = kv_exp2(kv_sub_rn(most[m][h], next));
        same = same && most[m][h] == next;
        most[m][h] = next;
        total[m][h] *= factors[m][h];
        // Here rather than in make_weights, for which it would take registers.
        if constexpr (Source::BIASES)
#pragma unroll
          for (u32 i = 0; i < TILES; i++) s[m][i][2 * h] -= next, s[m][i][2 * h + 1] -= next;
      }
    if constexpr (Source::WEIGHS) same = source.scale_weights(s, most, total, factors, buffer) && same;
    if (kv_all(same)) return;
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 d = 0; d < COLUMNS; d++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) o[m][d][j] *= factors[m][j / 2];
  }

  // Computes the weights of eight tokens and packs them in pairs.
  template <u32 N> KV_DEV void make_weights(Scores& s, u32 (&pairs)[M][N][2], u32 i, u32 to, u32 buffer) {
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        float &low = s[m][i][2 * h], &high = s[m][i][2 * h + 1];
        if constexpr (!Source::WEIGHS) {
          low = kv_exp2(Source::BIASES ? low : kv_fma(low, log2_scale[m][h], -most[m][h]));
          high = kv_exp2(Source::BIASES ? high : kv_fma(high, log2_scale[m][h], -most[m][h]));
          if constexpr (Source::BIASES) total[m][h] = source.add_weights(total[m][h], low, high, i, buffer);
          else total[m][h] += low + high;
        }
        pairs[m][to][h] = kv_pack(T(), low, high);
      }
  }

  KV_DEV void finish() const {
    const KvAttendParams& p = item.p;
    const u32 lane = item.lane, rows = item.rows();
    // Where sources scale, the rows of the warp in f32, over q, k and v; otherwise rows in place of q.
    float* staged = (float*)item.q + item.warp * Item::WARP_ROWS * D;
    if (Source::SCALES) kv_sync();
    kv_syncwarp();
#pragma unroll
    for (u32 m = 0; m < M; m++)
#pragma unroll
      for (u32 h = 0; h < 2; h++) {
        const u32 row = item.own_row(m, h);
        float sum = total[m][h], most = this->most[m][h];
        if constexpr (Source::SCALES) most += source.left_out(m, h);
        float largest = most;
        sum += kv_shfl_xorf(sum, 1);
        sum += kv_shfl_xorf(sum, 2);
        const bool empty = sum == 0.f;
        float own = 1.f;  // rescales values to a maximum that includes the sink logit
        if (p.sink_logits != 0 && row < rows) {
          const float sink = ((const float*)p.sink_logits)[item.head_of(row)] * KV_LOG2E;
          largest = kv_max(most, sink);
          own = kv_exp2(most - largest);
          sum = sum * own + kv_exp2(sink - largest);
        }
        const float factor = own / sum * source.factor(m, h);
#pragma unroll
        for (u32 d = 0; d < COLUMNS; d++) {
          const float low = empty ? 0.f : o[m][d][2 * h] * factor, high = empty ? 0.f : o[m][d][2 * h + 1] * factor;
          if constexpr (Source::SCALES) {
            float* to = staged + (row - item.warp * Item::WARP_ROWS) * D + d * 8 + lane % 4 * 2;
            to[0] = low, to[1] = high;
          } else {
            *(u32*)(item.q + Item::at(row, d) + lane % 4 * 4) = kv_pack(T(), low, high);
          }
        }
        if (p.lse.data != 0 && row < rows && lane % 4 == 0)
          *(float*)item.row_of(p.lse, row) = sum == 0.f ? -kv_infinity() : largest * KV_LN2 + kv_log(sum);
      }
    kv_syncwarp();
    if constexpr (!Source::SCALES) {
      item.store_rows();
    } else {
#pragma unroll 1
      for (u32 i = 0; i < Item::WARP_ROWS && item.warp * Item::WARP_ROWS + i < rows; i++) {
        float* values = staged + i * D;
        source.transform_output(values);
        u32* out = (u32*)item.row_of(p.out, item.warp * Item::WARP_ROWS + i);
        for (u32 d = lane; d < D / 2; d += 32) {
          const float low = values[2 * d], high = values[2 * d + 1];
          out[d] = p.out.dtype == KV_F16 ? kv_pack(KvF16(), low, high) : kv_pack(KvBf16(), low, high);
        }
      }
    }
  }
};

template <class T, u32 D, class Source> KV_DEV void kv_prefill_by(const KvPrefillParams& p) {
  KV_DYN_SMEM(memory);
  typedef typename Source::Item Item;
  Item item(p, memory);
  if (!item.find()) return;
  KvPrefill<T, D, Source> prefill(item, memory + Item::BYTES);
  prefill.run();
}

template <class T, u32 D> KV_DEV void kv_prefill(const KvPrefillParams& p) {
  kv_prefill_by<T, D, KvPrefillPlain<T, D>>(p);
}
