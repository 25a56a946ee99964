// Decode attention: a few queries against long contexts, on tensor cores. Flash-decoding (Dao et
// al., "Flash-Decoding for long-context inference") with a persistent grid over a paged KV cache.
//
// A query tile is 16 rows of one kv head: queries one after another, and within each the heads of
// its group, so that all of them share the reads of K and V. Every thread block runs the work items
// that plan.cu assigned to its slot. In a work item, the warps take subtiles of 32 tokens
// round-robin. Each warp has a ring buffer of its own in shared memory, which cp.async fills ahead,
// so warps do not wait for each other before the end of the item. If a query tile is split, its
// work items leave partial results, and the last one to finish merges them in the order of the
// splits. Rows of the output that belong to no query are filled first (decode_fill.h).
//
// Supported calls, which the host checks:
// - K and V: the same format and head_dim, one of 64, 80, 96, 128, 192, 256; no block means, no
//   full-precision prefix, no tail; segments and block_bytes are multiples of 16 bytes; any
//   block_size.
// - f16 or bf16 with queries of the same type, and one-byte codes with a calibrated scale and f16
//   or bf16 queries: not transformed; token_stride and head_stride are multiples of 16 bytes.
// - One-byte codes with a scale per row, and l4 except with a head_dim of 80, with f16 or bf16
//   queries: transformed or not; token_stride and head_stride are multiples of 2 bytes.
// - q and out: the same type, rows at multiples of 4 bytes; any q_len and group.
//
// Launch: `slots` blocks of 32 * warps threads; 4 warps, from a head_dim of 192 on 2.
//   shared bytes = queries + max(stages * stage, merge), where
//   queries = head_dim * 64 with a scale per row, otherwise head_dim * 32 from a head_dim of 192
//             on, else 0,
//   stage   = warps * 32 * row_stride: 32 tokens of K or of V for each warp; row_stride is
//             row_bytes, with a scale per row the bytes of the codes plus 16,
//   merge   = warps * 16 * (head_dim + 4) * 4 + warps * 16 * 8 + 16 + warps * 16 * 16 * 4,
//   stages  = 2 to 8: as many as let two thread blocks share a multiprocessor; if those are fewer
//             than 2, as many as one block can have.
//
// Rows of V that are masked for a query never affect it, even if they are NaN and visible to
// another query of the same query tile.
#pragma once
#include "decode_rows.h"
#include "decode_plan.h"

constexpr u32 KV_DECODE_STAGES_MAX = 8;
constexpr float KV_LOG2_E = 1.44269504088896340736f, KV_LN_2 = 0.69314718055994530942f;
KV_DEV float kv_minus_inf() { return kv_as_f(0xff800000u); }  // score of a masked key

template <int N> KV_DEV void kv_decode_wait_for(u32 groups) {
  if (groups == (u32)N) kv_cp_wait<N>();
  else if constexpr (N > 0) kv_decode_wait_for<N - 1>(groups);
}

KV_DEV u64 kv_decode_shfl(u64 v, u32 lane) {
  return (u64)kv_shfl((u32)v, lane) | ((u64)kv_shfl((u32)(v >> 32), lane) << 32);
}

// A work item, with what is derived from it.
struct KvDecodeWork {
  const KvDecodeParams& p;
  KvWorkItem item;
  const KvWorkItem& sequence;  // the item in memory, read again where its entry's lengths are needed
  KvDecodeReach reach;
  u32 rows;      // query rows of the item that exist
  u32 subtiles;  // of all warps together
  u32 lane, warp;

  // Returns the first position of a subtile.
  KV_DEV u32 position(u32 subtile) const {
    const u32 nth = item.tile_begin * 2 + subtile, sink_subtiles = reach.sink_tiles * 2;
    return nth < sink_subtiles ? nth * 32 : (nth - sink_subtiles) * 32 + reach.first * KV_DECODE_TILE;
  }
  // Only evaluated for partly masked subtiles: keeping it in a register would cost more.
  KV_DEV bool has_several_queries() const {
    const u32 group = p.attend.group;
    return item.row / group != (item.row + rows - 1) / group;
  }
  // Returns whether some query may see one of `count` tokens, or each of them.
  KV_DEV bool reaches(u32 position, u32 count = 1) const {
    return position < reach.sink_end || (position + count > reach.begin && position < reach.end);
  }
  KV_DEV bool reaches_all(u32 position, u32 count) const {
    // Without branches.
    return (position + count <= reach.sink_end) | ((position >= reach.begin) & (position + count <= reach.end));
  }
};

KV_DEV KvDecodeWork kv_decode_work(const KvDecodeParams& p, const KvWorkItem& item, u32 lane, u32 warp) {
  const KvAttendParams& a = p.attend;
  const u64 left = (u64)item.q_len * a.group - item.row;
  return {p, item, item, kv_decode_reach(a, item, a.group, item.row),
          left < KV_DECODE_ROWS ? (u32)left : KV_DECODE_ROWS, (item.tile_end - item.tile_begin) * 2, lane, warp};
}

template <class F, int DIM> KV_DEV void kv_decode_zero(u8* rows, u32 lane, bool is_masked);

// The ring buffer of one warp. A stage holds 32 rows: K and V of the warp's subtiles alternate.
template <class F, int DIM> struct KvDecodeRing {
  static constexpr u32 WARPS = DIM >= 192 ? 2 : 4;
  static constexpr u32 ROW = F::template row_stride<DIM>(), CHUNKS = ROW / 16, STAGE_BYTES = 32 * ROW;

  // Whether 32 lanes copy whole rows at a time, so that all addresses follow from those of the
  // first copy.
  static constexpr bool WHOLE = !F::SCALED && 32 % CHUNKS == 0;

  u8* memory;
  u32 address;            // of `memory`, in the shared window
  u32 current = 0;        // next stage to read
  u32 table = 0;          // index of the sequence's first block in the block tables
  bool is_whole = false;  // runs of 16 tokens never cross a block
  // And the tokens of a head are contiguous in a block; those of rows with scales are then copied
  // 16 at a time, by 16 lanes.
  u32 is_dense = 0;
  // The row of this lane in the subtile that is fetched next.
  u32 block = 0, inside = 0;
  bool ok = false;
  u32 ok_rows = 0;  // a bit per lane: rows of the subtile being fetched that some query sees
  u64 v_row = 0;    // its row of V
  // For rows with scales that are not dense: the offset of this lane's row in its first 16-byte
  // chunk, in units of 2 bytes; four bits for each stage of the ring, and that of the stage read last.
  u32 row_offsets = 0, row_offset = 0;

  KV_DEV void begin(const KvDecodeWork& w, u8* smem) {
    const KvPlane &k = w.p.attend.k_plane, &v = w.p.attend.v_plane;
    memory = smem + w.warp * w.p.stages * STAGE_BYTES;
    address = kv_smem_addr(memory);
    table = w.sequence.table;
    is_whole = k.block_size % 16 == 0;
    is_dense = is_whole && is_contiguous(k) && is_contiguous(v);
    look_up(w, 0);
  }
  // Returns whether the rows of a head are one run in a block. Blocks begin at multiples of 16 bytes;
  // where heads do too, so does every run of 16 rows with scales.
  static KV_DEV bool is_contiguous(const KvPlane& plane) {
    if constexpr (F::SCALED) {
      return plane.token_stride == F::template row_bytes<DIM>() && plane.head_stride % 16 == 0;
    } else {
      return plane.token_stride == ROW;
    }
  }
  // Looks up the block of a subtile in the block table, one subtile ahead to hide the latency.
  KV_DEV void look_up(const KvDecodeWork& w, u32 nth) {
    const bool by_run = F::SCALED && is_dense != 0;
    const u32 subtile = nth * WARPS + w.warp, position = w.position(subtile) + (by_run ? w.lane & 16 : w.lane);
    const u32 block_size = w.p.attend.k_plane.block_size, shift = w.p.block_shift;
    ok = subtile < w.subtiles && w.reaches(position, by_run ? 16 : 1);
    block = 0;
    const u32 index = shift != 0 ? position >> shift : position / block_size;
    inside = position - index * block_size;
    const u32* const tables = (const u32*)w.p.attend.plan.tables;
#ifdef KV_BUG_OOB
    ok = subtile < w.subtiles;
    if (ok) block = tables[table + index];
#else
    if (ok) block = kv_ldg(tables + table + index);
#endif
  }
  KV_DEV u64 row_of(const KvPlane& plane, u32 head) const {
    return (u64)kv_block(plane, block) + (u64)inside * plane.token_stride + (u64)head * plane.head_stride;
  }
  // Copies a fully visible subtile, 16 tokens of a block at a time, so that two row addresses and
  // constant offsets suffice. `row` is the row of this lane, `stride` the distance between rows.
  template <bool DENSE> KV_DEV void fetch_whole(u32 to, u64 row, u64 stride, bool is_v, u32 lane) const {
    constexpr u32 ROWS = WHOLE ? 32 / CHUNKS : 1, HALF = CHUNKS / 2;  // rows per copy of 32 lanes; copies per 16 rows
    const u32 token = lane / CHUNKS, chunk = lane % CHUNKS;
    const u64 own = DENSE ? lane * 16 : token * stride + chunk * 16, step = DENSE ? ROWS * ROW : ROWS * stride;
    u64 from[2] = {kv_decode_shfl(row, 0) + own, kv_decode_shfl(row, 16) + own};
    const u32 at = to + token * ROW + F::template place<DIM>(is_v, token, chunk) * 16;
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i++) {
      // Stages begin at multiples of 128 bytes, so the swizzle is an XOR of address bits.
      const u32 swizzle = F::template swizzle<DIM>(is_v, i * ROWS) * 16;
      kv_cp_async16_at((at ^ swizzle) + i * ROWS * ROW, (const void*)(from[i / HALF] + i % HALF * step));
    }
  }
  // Copies the runs of 16 rows with scales that some query sees, each by half of the lanes. Masked
  // rows are zeroed when the stage is read.
  KV_DEV void fetch_runs(u32 to, u64 row, bool is_reached, u32 lane) const {
    constexpr u32 RUN = F::template row_bytes<DIM>() * 16, COPIES = RUN / 16;
    const u32 own = lane & 15, at = to + (lane >> 4) * RUN + own * 16;
    const u64 from = row + own * 16;
    if (!is_reached) return;
#pragma unroll
    for (u32 i = 0; i < COPIES; i += 16) {
      if (i + 16 <= COPIES || own < COPIES - i) kv_cp_async16_at(at + i * 16, (const void*)(from + i * 16));
    }
  }
  // Starts copy `load` into stage `stage`: K of the warp's subtile load / 2 if even, its V if odd.
  // Masked rows become zeros.
  KV_DEV void fetch(const KvDecodeWork& w, u32 load, u32 stage) {
    const bool is_v = (load & 1) != 0;
    u64 row = v_row;
    if (!is_v) {
      row = row_of(w.p.attend.k_plane, w.item.head);
      v_row = row_of(w.p.attend.v_plane, w.item.head);
      ok_rows = kv_ballot(ok);
      look_up(w, load / 2 + 1);
    }
    const u32 begin = stage * STAGE_BYTES;
    if constexpr (F::SCALED) {
      if (is_dense != 0) {
        fetch_runs(address + begin, row, (ok_rows >> w.lane & 1) != 0, w.lane);
        return;
      }
      row_offsets = (row_offsets & ~(15u << stage * 4)) | ((u32)row >> 1 & 7) << stage * 4;
      row &= ~15ull;
    }
    if constexpr (WHOLE) {
      if (is_whole && ok_rows == 0xffffffffu) {
        const u64 stride = is_v ? w.p.attend.v_plane.token_stride : w.p.attend.k_plane.token_stride;
        if (is_dense != 0) fetch_whole<true>(address + begin, row, ROW, is_v, w.lane);
        else fetch_whole<false>(address + begin, row, stride, is_v, w.lane);
        return;
      }
    }
    u8* const to = memory + begin;
    // The shuffle keeps the compiler from holding the addresses of all chunks in registers, which
    // would spill.
    const u32 lane = DIM == 192 ? kv_shfl(w.lane, w.lane) : w.lane;
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i++) {
      const u32 nth = i * 32 + lane, token = nth / CHUNKS, chunk = nth % CHUNKS;
      const u64 from = kv_decode_shfl(row, token) + chunk * 16;
      kv_cp_async16(to + token * ROW + F::template place<DIM>(is_v, token, chunk) * 16, (const void*)from,
                    (ok_rows >> token & 1) != 0);
    }
  }
  // Returns where the stage at offset `at` is. The shuffle keeps the compiler from computing generic
  // pointers, which only rare paths use, outside of them.
  KV_DEV u8* rows_at(u32 at, u32 lane) const { return memory + kv_shfl(at, lane); }
  // For rows with scales: makes the subtile of the stage that is read dense, with zeros for rows
  // that no query sees.
  KV_DEV void settle(const KvDecodeWork& w, u32 at, u32 base) const {
    if (is_dense == 0) {
      F::template close_up<DIM>(rows_at(at, w.lane), row_offset, w.lane);
    } else if (!w.reaches_all(base, 32)) {
      kv_decode_zero<F, DIM>(rows_at(at, w.lane), w.lane, !w.reaches(base + w.lane));
    }
  }
  // Returns the stage that was read last.
  KV_DEV u32 used(u32 stages) const { return current == 0 ? stages - 1 : current - 1; }
  // Advances to the next stage and returns its offset in `memory`.
  KV_DEV u32 next(u32 stages) {
    const u32 from = current * STAGE_BYTES;
    if constexpr (F::SCALED) row_offset = row_offsets >> current * 4 & 7;
    current = current + 1 == stages ? 0 : current + 1;
    return from;
  }
};

// The host's first choice of stages (src/decode/mod.rs) on the cards that this is compiled for.
template <class F, int DIM> constexpr u32 kv_decode_stages() {
  typedef KvDecodeRing<F, DIM> Ring;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ == 1200)
  constexpr u32 most = 99 * 1024;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
  constexpr u32 most = 163 * 1024;
#else
  constexpr u32 most = 227 * 1024;
#endif
  constexpr u32 queries = F::SCALED ? DIM * 64 : DIM >= 192 ? DIM * 32 : 0;
  constexpr u32 stage_bytes = Ring::WARPS * Ring::STAGE_BYTES;
  constexpr u32 halved = ((most - 1024) / 2 - queries) / stage_bytes, alone = (most - queries) / stage_bytes;
  constexpr u32 stages = halved >= 2 ? halved : alone;
  return stages < 2 ? 2 : stages < KV_DECODE_STAGES_MAX ? stages : KV_DECODE_STAGES_MAX;
}

// State of query rows g and g + 8 of a lane.
struct KvDecodeRows {
  KvVisible visible[2];
  float factor[2];  // scales scores to log2 units; with a soft cap, to arguments of its tanh
  // The maximum so far, and the sum of weights relative to 2^max. For rows with scales `max` is not the
  // maximum but any integer (decode_scaled.h), and `bias` is added to scores.
  float max[2], sum[2], bias[2];

  // Each row's sink tokens are those of the call that precede its window.
  KV_DEV bool is_visible(u32 h, u32 position, u32 sink_tokens) const {
    return position < visible[h].end && (position >= visible[h].begin || position < sink_tokens);
  }
};

// Returns whether some row does not see the whole subtile.
KV_DEV bool kv_decode_is_masked(const KvDecodeRows& rows, u32 base) {
  const u32 low = rows.visible[0].begin > rows.visible[1].begin ? rows.visible[0].begin : rows.visible[1].begin;
  const u32 high = rows.visible[0].end < rows.visible[1].end ? rows.visible[0].end : rows.visible[1].end;
  return kv_any(base < low || base + 32 > high);
}
// Caps the scores of a subtile, and masks those of keys that a row does not see.
template <class F>
KV_DEV void kv_decode_cap_and_mask(const KvDecodeWork& w, u32 base, const KvDecodeRows& rows, bool masked,
                                   float (&s)[4][4]) {
  const KvAttendParams& a = w.p.attend;
#pragma unroll
  for (u32 n = 0; n < 4; n++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      // Not 1 - 2 / (exp(2 x) + 1), which cancels for small x: the exponential is then near 1 and
      // approximate, with an error of 2^-22.
      if (a.soft_cap > 0.f) s[n][j] = a.soft_cap * KV_LOG2_E * kv_tanh(s[n][j]);
      const u32 position = base + (w.lane & 3) * 2 + F::token(n, j);
      if (masked && !rows.is_visible(j >> 1, position, a.sink_tokens)) s[n][j] = kv_minus_inf();
    }
}

// One step of the online softmax: masks the scores of a subtile, updates the running maximum,
// rescales, and packs weights for the product with V. Returns whether some row does not see the
// whole subtile.
template <class F, int DIM>
KV_DEV bool kv_decode_softmax(const KvDecodeWork& w, u32 base, KvDecodeRows& rows, float (&s)[4][4],
                              typename F::Weights& weights, float (&o)[DIM / 8][4]) {
  const bool masked = kv_decode_is_masked(rows, base);
  float max[2] = {rows.max[0], rows.max[1]};
#pragma unroll
  for (u32 n = 0; n < 4; n++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) s[n][j] *= rows.factor[j >> 1];
  if (masked || w.p.attend.soft_cap > 0.f) {  // rare, so outside the unmasked path
    kv_decode_cap_and_mask<F>(w, base, rows, masked, s);
  }
#pragma unroll
  for (u32 n = 0; n < 4; n++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) max[j >> 1] = kv_max(max[j >> 1], s[n][j]);
#ifdef KV_BUG_DIVERGE
  if (base + (w.lane >> 2) < w.reach.end)
#endif
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      max[h] = kv_max(max[h], kv_shfl_xorf(max[h], 1));
      max[h] = kv_max(max[h], kv_shfl_xorf(max[h], 2));
    }
  if (kv_any(max[0] > rows.max[0] || max[1] > rows.max[1])) {
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const float shrink = max[h] == rows.max[h] ? 1.f : kv_exp2(rows.max[h] - max[h]);
      rows.max[h] = max[h];
      rows.sum[h] *= shrink;
#pragma unroll
      for (u32 d = 0; d < DIM / 8; d++) {
        o[d][h * 2] *= shrink;
        o[d][h * 2 + 1] *= shrink;
      }
    }
  }
  const float minus_inf = kv_minus_inf();
  const float from[2] = {rows.max[0] == minus_inf ? 0.f : rows.max[0], rows.max[1] == minus_inf ? 0.f : rows.max[1]};
#pragma unroll
  for (u32 n = 0; n < 4; n++) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      s[n][j] = kv_exp2(s[n][j] - from[j >> 1]);
      rows.sum[j >> 1] += s[n][j];
    }
    weights[n / 2][n % 2 * 2] = kv_pack(typename F::Math(), s[n][0], s[n][1]);
    weights[n / 2][n % 2 * 2 + 1] = kv_pack(typename F::Math(), s[n][2], s[n][3]);
  }
  return masked;
}

// Returns the tokens of a subtile that some query rows of the item see and others do not, as bits.
KV_DEV u32 kv_decode_partly_visible(const KvDecodeWork& w, u32 base) {
  const KvAttendParams& a = w.p.attend;
  const KvVisible first = kv_visible(a, w.sequence, w.item.row / a.group);
  const KvVisible last = kv_visible(a, w.sequence, (w.item.row + w.rows - 1) / a.group);
  // Bounds never decrease from a query to the next: what the first and the last see, all see.
  const u32 some = kv_bits(0, w.reach.sink_end, base) | kv_bits(w.reach.begin, w.reach.end, base);
  return some & ~(kv_visible_bits(first, base) & kv_visible_bits(last, base));
}

// Adds the rows of V that only some query rows see, row by row, and replaces them by zeros. The mma
// would multiply them by zero for the other query rows, which gives NaN if they are not finite.
template <class F, int DIM>
KV_DEV void kv_decode_sum_masked(const KvDecodeWork& w, u32 base, const KvDecodeRows& rows, const u32 (&weights)[2][4],
                                 u8* v_rows, float (&o)[DIM / 8][4]) {
  const KvAttendParams& a = w.p.attend;
  const u32 lane = w.lane;
  u32 partly_visible = kv_decode_partly_visible(w, base);
  while (partly_visible != 0) {
    const u32 token = 31 - kv_clz(partly_visible), from = (lane & ~3u) + (token >> 1 & 3);
    partly_visible &= ~(1u << token);
    // The shuffle keeps the compiler from holding values derived from the lane for the whole
    // kernel.
    const u32 t = kv_shfl(lane & 3, lane);
    float weight[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 low = token & 8 ? weights[0][h + 2] : weights[0][h];
      const u32 high = token & 8 ? weights[1][h + 2] : weights[1][h];
      weight[h] = F::weight(kv_shfl(token & 16 ? high : low, from) >> (token & 1) * 16);
    }
    const bool visible[2] = {rows.is_visible(0, base + token, a.sink_tokens),
                             rows.is_visible(1, base + token, a.sink_tokens)};
#pragma unroll
    for (u32 d = 0; d < DIM / 8; d++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        const float x = F::template value<DIM>(v_rows, token, F::template column<DIM>(d, j, t));
        if (visible[j >> 1]) o[d][j] += weight[j >> 1] * x;
      }
    kv_syncwarp();
    uint4* const row = (uint4*)(v_rows + token * F::template row_stride<DIM>());
    for (u32 i = lane; i < F::template row_stride<DIM>() / 16; i += 32) row[i] = make_uint4(0, 0, 0, 0);
  }
  kv_syncwarp();
}

#include "decode_scaled.h"
#include "decode_query.h"
#include "decode_merge.h"
#include "decode_fill.h"

// Runs one work item: the subtiles of every warp, then the merge.
template <class F, int DIM> KV_DEV void kv_decode_item(const KvDecodeParams& p, const KvWorkItem& item, u8* smem) {
  typedef KvDecodeRing<F, DIM> Ring;
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const KvDecodeWork w = kv_decode_work(p, item, lane, warp);
  u8* const tail = smem + KvDecodeQuery<F, DIM>::SHARED_BYTES;
  const u32 loads = (w.subtiles + Ring::WARPS - 1 - warp) / Ring::WARPS * 2;  // copies by this warp
  Ring ring;
  ring.begin(w, tail);
  for (u32 load = 0; load + 1 < p.stages; load++) {
    if (load < loads) ring.fetch(w, load, load);
    kv_cp_commit();
  }
  KvDecodeRows rows;
  KvDecodeQuery<F, DIM> query;
  if constexpr (F::CODES) query.load_codes(w, rows, smem, tail);
  else query.load(w, rows, smem);
  float o[DIM / 8][4];
#pragma unroll
  for (u32 d = 0; d < DIM / 8; d++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) o[d][j] = 0.f;
  typename F::Weights weights;
  bool partly_visible = false;
  u32 base = 0;
  for (u32 load = 0; load < loads; load++) {
#ifdef KV_BUG_WAIT
    kv_decode_wait_for<KV_DECODE_STAGES_MAX - 1>(p.stages - 1);
#else
    constexpr u32 expected = kv_decode_stages<F, DIM>();
    if (p.stages == expected) kv_cp_wait<expected - 2>();
    else kv_decode_wait_for<KV_DECODE_STAGES_MAX - 2>(p.stages - 2);
#endif
#ifndef KV_BUG_NO_SYNCWARP
    kv_syncwarp();  // copies of all lanes have arrived, and no lane still reads the stage that is refilled
#endif
    if (load + p.stages - 1 < loads) ring.fetch(w, load + p.stages - 1, ring.used(p.stages));
    kv_cp_commit();
    const u32 at = ring.next(p.stages);
    if ((load & 1) == 0) base = w.position(load / 2 * Ring::WARPS + warp);
    if constexpr (F::SCALED) ring.settle(w, at, base);
    if ((load & 1) == 0) {
      float s[4][4];
      F::template scores<DIM>(query, ring.address + at, lane, s);
      if constexpr (F::SCALED) partly_visible = kv_decode_softmax_scaled<F, DIM>(w, base, rows, s, weights, o);
      else partly_visible = kv_decode_softmax<F, DIM>(w, base, rows, s, weights, o);
      partly_visible = partly_visible && w.has_several_queries();
    } else if constexpr (F::SCALED) {
      if (partly_visible) {
        kv_decode_sum_scaled_masked<F, DIM>(w, base, rows, weights, ring.rows_at(at, lane), o);
      }
      u32 packed[2][4];
      kv_decode_scale<F, DIM>(rows, weights, ring.address + at, lane, packed, o);
      F::template sum<DIM>(packed, ring.address + at, lane, o);
    } else {
      if (partly_visible) kv_decode_sum_masked<F, DIM>(w, base, rows, weights, ring.memory + at, o);
      F::template sum<DIM>(weights, ring.address + at, lane, o);
    }
  }
  kv_cp_wait<0>();
#ifndef KV_BUG_NO_SYNC
  kv_sync();  // all warps have finished with their rings: the merge reuses the memory
#endif
  // Recomputes what the loop has no registers for. The shuffles keep the compiler from holding
  // values derived from lane and warp.
  kv_decode_merge<F, DIM>(kv_decode_work(p, item, kv_shfl(lane, lane), kv_shfl(warp, lane)), rows, o, tail);
}

template <class F, int DIM> KV_DEV void kv_decode(const KvDecodeParams& p) {
  KV_DYN_SMEM(smem);
  const u32* starts = (const u32*)p.starts + blockIdx.x;
  u32 i = starts[0];  // on its way while the counts are
  kv_decode_fill(p.attend);
  for (; i < starts[1]; i++) {  // read again: not worth a register
    kv_decode_item<F, DIM>(p, ((const KvWorkItem*)p.items)[i], smem);
    kv_sync();  // shared memory is free for the next item
  }
}

// Defines a kernel: 2 warps from a head_dim of 192 on, otherwise 4.
#define KV_DECODE(name, F, DIM) \
  KV_KERNEL(name, KvDecodeParams, (DIM >= 192 ? 64 : 128), 2, kv_decode<F, DIM>)
