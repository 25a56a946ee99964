// Attention of a few queries over long contexts, on tensor cores: 16 query rows of one kv head meet K and V tile by
// tile (Dao et al., "Flash-Decoding for long-context inference"; the layout of one kernel is our own).
//
// Rows are queries one after another, the heads of the group within each, so that all of them share what is read of K
// and V. Thread blocks stay: each works through the pieces that plan.cu gave its slot. In a piece, every warp takes
// subtiles of 32 tokens in turn and has a ring of its own in shared memory, which cp.async fills ahead; no warp waits
// for another before the piece ends. Pieces of the same rows leave partial results, and the last to end joins them in
// the order of parts.
//
// What a launch may be (the host checks it):
// - K and V: one format, one head_dim of 64, 80, 96, 128, 192, 256; no means of blocks, sinks or tails in 16 bits;
//   segments at multiples of 16 bytes, and so is block_bytes; any block_size. Of formats:
//   - f16 or bf16 with queries of that type; a byte a value with a given scale, with queries of either. No transforms;
//     token_stride and head_stride are multiples of 16 bytes.
//   - a byte a value with a scale a row, and l4 but for a head_dim of 80, with queries of either; transformed or not;
//     token_stride and head_stride are multiples of 2 bytes.
// - q and out: the same type, rows at multiples of 4 bytes; any q_len and group, but 16 rows are the work of one.
// Launch: slots blocks of 32 * warps threads, warps = 4, or 2 from head_dim 192 on;
//   shared bytes = queries + max(units * unit, merge), where
//   queries = head_dim * 32 from head_dim 192 on, else 0; with a scale a row head_dim * 32 more,
//   unit    = warps * 32 * room: 32 tokens of K or of V for every warp; the room of a row is row_bytes, with a scale a
//             row 16 more than those of its codes,
//   merge   = warps * 16 * (head_dim + 4) * 4 + warps * 16 * 8 + 16,
//   units   = 2 to 8: as many as let two blocks share a multiprocessor, if that is at least 2, else one.
// What a query does not see never reaches its rows, be it NaN and seen by another query of the piece.
#pragma once
#include "decode_rows.h"
#include "pieces.h"

constexpr u32 KV_DECODE_UNITS_MAX = 8;
// Of rows with scales: a unit is at least the least, and products of weights and scales are up to so many units.
constexpr float KV_DECODE_UNIT_MIN = 8.673617379884035e-19f, KV_DECODE_UNIT_MAX = 1.152921504606847e18f;  // 2^-60, 2^60
constexpr float KV_DECODE_UNITS_OF_WEIGHT = 1024.f;
constexpr float KV_LOG2_E = 1.44269504088896340736f, KV_LN_2 = 0.69314718055994530942f;
KV_DEV float kv_decode_none() { return kv_as_f(0xff800000u); }  // logit of a key that is not seen

template <int N> KV_DEV void kv_decode_wait_for(u32 groups) {
  if (groups == (u32)N) kv_cp_wait<N>();
  else if constexpr (N > 0) kv_decode_wait_for<N - 1>(groups);
}

KV_DEV u64 kv_decode_shfl(u64 v, u32 lane) {
  return (u64)kv_shfl((u32)v, lane) | ((u64)kv_shfl((u32)(v >> 32), lane) << 32);
}

// What a piece needs again and again.
struct KvDecodeWork {
  const KvDecodeParams& p;
  KvPiece piece;
  const KvSequence& sequence;
  KvDecodeReach reach;
  u32 rows;      // of the piece that are queries
  u32 subtiles;  // of all warps
  u32 lane, warp;

  // Where a subtile of the piece begins.
  KV_DEV u32 position(u32 subtile) const {
    const u32 nth = piece.tile_begin * 2 + subtile, sinks = reach.sink_tiles * 2;
    return nth < sinks ? nth * 32 : (nth - sinks) * 32 + reach.first * KV_DECODE_TILE;
  }
  KV_DEV bool reaches(u32 position) const {
    return position < reach.sinks || (position >= reach.begin && position < reach.end);
  }
};

// The ring of one warp: K and V of its subtiles in turn, 32 rows each.
template <class F, int DIM> struct KvDecodeRing {
  static constexpr u32 WARPS = DIM >= 192 ? 2 : 4;
  static constexpr u32 ROW = F::template room<DIM>(), CHUNKS = ROW / 16, UNIT = 32 * ROW;

  u8* memory;
  u32 put = 0, take = 0;
  // Of the row of this lane in the subtile that is fetched next.
  u32 block = 0, inside = 0;
  bool ok = false;
  u32 ok_rows = 0;  // of the subtile that is fetched, by lane
  u64 v_row = 0;    // where its V is
  // Of rows that lie on 2 bytes: where the row of this lane begins in its first chunk, in pairs of bytes; in four bits
  // for every unit of the ring, and for the one that was taken last.
  u32 leads = 0, lead = 0;

  // Looks the block of the next subtile up: early, for it takes as long as a read of memory.
  KV_DEV void look_up(const KvDecodeWork& w, u32 nth) {
    const u32 subtile = nth * WARPS + w.warp, position = w.position(subtile) + w.lane;
    const u32 block_size = w.p.attend.k_plane.block_size;
    ok = subtile < w.subtiles && w.reaches(position);
    block = 0;
    inside = position % block_size;
    const u32* table = (const u32*)w.p.attend.plan.tables + w.sequence.table;
#ifdef KV_BUG_OOB
    ok = subtile < w.subtiles;
    if (ok) block = table[position / block_size];
#else
    if (ok) block = kv_ldg(table + position / block_size);
#endif
  }
  KV_DEV u64 row_of(const KvPlane& plane, u32 head) const {
    return (u64)kv_block(plane, block) + (u64)inside * plane.token_stride + (u64)head * plane.head_stride;
  }
  // Starts the copy of K or V of a subtile: unit 2 * nth or 2 * nth + 1. Rows beyond what is seen become zeros.
  KV_DEV void fetch(const KvDecodeWork& w, u32 unit) {
    const bool is_v = (unit & 1) != 0;
    u64 row = v_row;
    if (!is_v) {
      row = row_of(w.p.attend.k_plane, w.piece.head);
      v_row = row_of(w.p.attend.v_plane, w.piece.head);
      ok_rows = kv_ballot(ok);
      look_up(w, unit / 2 + 1);
    }
    u8* to = memory + put * UNIT;
    if constexpr (F::SCALED) {
      leads = (leads & ~(15u << put * 4)) | ((u32)row >> 1 & 7) << put * 4;
      row &= ~15ull;
    }
    put = put + 1 == w.p.units ? 0 : put + 1;
    // Out of a shuffle, so that the compiler does not keep the places of all chunks in registers, which are short.
    const u32 lane = DIM == 192 ? kv_shfl(w.lane, w.lane) : w.lane;
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i++) {
      const u32 nth = i * 32 + lane, token = nth / CHUNKS, chunk = nth % CHUNKS;
      const u64 from = kv_decode_shfl(row, token) + chunk * 16;
      kv_cp_async16(to + token * ROW + F::template place<DIM>(is_v, token, chunk) * 16, (const void*)from,
                    (ok_rows >> token & 1) != 0);
    }
  }
  KV_DEV u8* next(u32 units) {
    u8* from = memory + take * UNIT;
    if constexpr (F::SCALED) lead = leads >> take * 4 & 7;
    take = take + 1 == units ? 0 : take + 1;
    return from;
  }
};

// Query rows g and g + 8 of a lane: what each sees, and its factor.
struct KvDecodeRows {
  KvVisible seen[2];
  float factor[2];  // makes a product of codes a score times log2 e, or, with a soft cap, the argument of its tangent
  float max[2], sum[2];
  float bias[2], unit[2];  // of rows with scales: what is added to scores, and in what the output is added up

  // `sinks` of a row's own are as many as there are, as far as its window does not see them anyway.
  KV_DEV bool sees(u32 h, u32 position, u32 sink_tokens) const {
    return position < seen[h].end && (position >= seen[h].begin || position < sink_tokens);
  }
};

// Scores of a subtile become weights: masked, relative to the running maximum, packed for the product with V. Whether
// some row of the warp does not see all of it.
template <class F, int DIM>
KV_DEV bool kv_decode_weigh(const KvDecodeWork& w, u32 base, KvDecodeRows& rows, float (&s)[4][4],
                            typename F::Weights& weights, float (&o)[DIM / 8][4]) {
  const u32 t = w.lane & 3;
  const KvAttendParams& a = w.p.attend;
  // Whether every row sees the whole subtile.
  u32 low = rows.seen[0].begin > rows.seen[1].begin ? rows.seen[0].begin : rows.seen[1].begin;
  u32 high = rows.seen[0].end < rows.seen[1].end ? rows.seen[0].end : rows.seen[1].end;
  const bool cut = kv_any(base < low || base + 32 > high);
  float max[2] = {rows.max[0], rows.max[1]};
#pragma unroll
  for (u32 n = 0; n < 4; n++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      float x = s[n][j] * rows.factor[j >> 1];
      if constexpr (F::SCALED) x += rows.bias[j >> 1];
      // 1 - 2 / (exp(2 x) + 1) would cancel: the approximate exponential has an error of 2^-22 of what is near 1.
      if (a.soft_cap > 0.f) x = a.soft_cap * KV_LOG2_E * kv_tanh(x);
      if (cut) {
        const u32 position = base + n * 8 + t * 2 + (j & 1);
        if (!rows.sees(j >> 1, position, a.sink_tokens)) x = kv_decode_none();
      }
      s[n][j] = x;
      max[j >> 1] = kv_max(max[j >> 1], x);
    }
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
      float shrink = max[h] == rows.max[h] ? 1.f : kv_exp2(rows.max[h] - max[h]);
      rows.max[h] = max[h];
      rows.sum[h] *= shrink;
      if constexpr (F::SCALED) {  // the unit shrinks; the output, what the unit cannot
        const float unit = rows.unit[h] * shrink;
        rows.unit[h] = kv_max(unit, KV_DECODE_UNIT_MIN);
        if (unit >= KV_DECODE_UNIT_MIN) continue;
        shrink = unit * KV_DECODE_UNIT_MAX;
      }
#pragma unroll
      for (u32 d = 0; d < DIM / 8; d++) {
        o[d][h * 2] *= shrink;
        o[d][h * 2 + 1] *= shrink;
      }
    }
  }
  const float none = kv_decode_none();
  const float from[2] = {rows.max[0] == none ? 0.f : rows.max[0], rows.max[1] == none ? 0.f : rows.max[1]};
#pragma unroll
  for (u32 n = 0; n < 4; n++) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      s[n][j] = kv_exp2(s[n][j] - from[j >> 1]);
      rows.sum[j >> 1] += s[n][j];
    }
    if constexpr (F::SCALED) {
#pragma unroll
      for (u32 j = 0; j < 4; j++) weights[n][j] = s[n][j];
    } else {
      weights[n / 2][n % 2 * 2] = kv_pack(typename F::Math(), s[n][0], s[n][1]);
      weights[n / 2][n % 2 * 2 + 1] = kv_pack(typename F::Math(), s[n][2], s[n][3]);
    }
  }
  return cut;
}

// Tokens of a subtile that some queries of the piece see and others do not.
KV_DEV u32 kv_decode_apart(const KvDecodeWork& w, u32 base) {
  const KvAttendParams& a = w.p.attend;
  const KvVisible first = kv_visible(a, w.sequence, w.piece.row / a.group);
  const KvVisible last = kv_visible(a, w.sequence, (w.piece.row + w.rows - 1) / a.group);
  // Bounds never fall from one query to the next: what the first and the last see, all do.
  const u32 some = kv_bits(0, w.reach.sinks, base) | kv_bits(w.reach.begin, w.reach.end, base);
  return some & ~(kv_visible_bits(first, base) & kv_visible_bits(last, base));
}

// Adds the weighted rows of V that some queries of the piece see and others do not, row by row, and leaves zeros in
// their place: a matrix product would multiply them by zero for the others, and they may be NaN.
template <class F, int DIM>
KV_DEV void kv_decode_sum_apart(const KvDecodeWork& w, u32 base, const KvDecodeRows& rows, const u32 (&weights)[2][4],
                                u8* v_rows, float (&o)[DIM / 8][4]) {
  const KvAttendParams& a = w.p.attend;
  const u32 lane = w.lane;
  u32 apart = kv_decode_apart(w, base);
  while (apart != 0) {
    const u32 token = 31 - kv_clz(apart), from = (lane & ~3u) + (token >> 1 & 3);
    apart &= ~(1u << token);
    // Out of a shuffle, so that the compiler does not keep what follows from it in registers for the whole kernel.
    const u32 t = kv_shfl(lane & 3, lane);
    float weight[2];
#pragma unroll
    for (u32 h = 0; h < 2; h++) {
      const u32 low = token & 8 ? weights[0][h + 2] : weights[0][h];
      const u32 high = token & 8 ? weights[1][h + 2] : weights[1][h];
      weight[h] = F::weight(kv_shfl(token & 16 ? high : low, from) >> (token & 1) * 16);
    }
    const bool sees[2] = {rows.sees(0, base + token, a.sink_tokens), rows.sees(1, base + token, a.sink_tokens)};
#pragma unroll
    for (u32 d = 0; d < DIM / 8; d++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        const float x = F::template value<DIM>(v_rows, token, F::template column<DIM>(d, j, t));
        if (sees[j >> 1]) o[d][j] += weight[j >> 1] * x;
      }
    kv_syncwarp();
    uint4* const row = (uint4*)(v_rows + token * F::template room<DIM>());
    for (u32 i = lane; i < F::template room<DIM>() / 16; i += 32) row[i] = make_uint4(0, 0, 0, 0);
  }
  kv_syncwarp();
}

#include "decode_scaled.h"
#include "decode_query.h"
#include "decode_merge.h"

// One piece: every warp its subtiles, then the merge.
template <class F, int DIM> KV_DEV void kv_decode_piece(const KvDecodeParams& p, const KvPiece& piece, u8* smem) {
  typedef KvDecodeRing<F, DIM> Ring;
  const KvAttendParams& a = p.attend;
  const KvSequence& sequence = ((const KvSequence*)a.plan.sequences)[piece.sequence];
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tiles = piece.tile_end - piece.tile_begin;
  const u64 left = (u64)sequence.q_len * a.group - piece.row;
  const KvDecodeWork w = {p, piece, sequence, kv_decode_reach(a, sequence, a.group, piece.row),
                          left < KV_DECODE_ROWS ? (u32)left : KV_DECODE_ROWS, tiles * 2, lane, warp};
  u8* const tail = smem + KvDecodeQuery<F, DIM>::SHARED;
  const u32 own = (w.subtiles + Ring::WARPS - 1 - warp) / Ring::WARPS * 2;  // units of this warp
  Ring ring;
  ring.memory = tail + warp * p.units * Ring::UNIT;
  ring.look_up(w, 0);
  for (u32 unit = 0; unit + 1 < p.units; unit++) {
    if (unit < own) ring.fetch(w, unit);
    kv_cp_commit();
  }
  KvDecodeRows rows;
  KvDecodeQuery<F, DIM> query;
  if constexpr (F::SCALED) query.load_scaled(w, rows, smem);
  else query.load(w, rows, smem);
  float o[DIM / 8][4];
#pragma unroll
  for (u32 d = 0; d < DIM / 8; d++)
#pragma unroll
    for (u32 j = 0; j < 4; j++) o[d][j] = 0.f;
  typename F::Weights weights;
  const bool several = piece.row / a.group != (piece.row + w.rows - 1) / a.group;  // queries
  bool apart = false;
  for (u32 unit = 0; unit < own; unit++) {
#ifdef KV_BUG_WAIT
    kv_decode_wait_for<KV_DECODE_UNITS_MAX - 1>(p.units - 1);
#else
    kv_decode_wait_for<KV_DECODE_UNITS_MAX - 2>(p.units - 2);
#endif
#ifndef KV_BUG_NO_SYNCWARP
    kv_syncwarp();  // what every lane copied is there, and every lane is done with what is fetched over below
#endif
    u8* const from = ring.next(p.units);
    if (unit + p.units - 1 < own) ring.fetch(w, unit + p.units - 1);
    kv_cp_commit();
    const u32 base = w.position(unit / 2 * Ring::WARPS + warp);
    if ((unit & 1) == 0) {
      float s[4][4];
      if constexpr (F::SCALED) F::template scores<DIM>(query, from, ring.lead, lane, s);
      else F::template scores<DIM>(query, from, lane, s);
      apart = kv_decode_weigh<F, DIM>(w, base, rows, s, weights, o) && several;
    } else if constexpr (F::SCALED) {
      if (apart) kv_decode_sum_scaled_apart<F, DIM>(w, base, rows, weights, from, ring.lead, o);
      u32 packed[2][4];
      kv_decode_scale<F, DIM>(rows, weights, from, ring.lead, lane, packed, o);
      F::template sum<DIM>(packed, from, ring.lead, lane, o);
    } else {
      if (apart) kv_decode_sum_apart<F, DIM>(w, base, rows, weights, from, o);
      F::template sum<DIM>(weights, from, lane, o);
    }
  }
  kv_cp_wait<0>();
#ifndef KV_BUG_NO_SYNC
  kv_sync();  // every warp is done with its ring: the merge uses the same memory
#endif
  kv_decode_merge<F, DIM>(w, rows, o, tail);
}

template <class F, int DIM> KV_DEV void kv_decode(const KvDecodeParams& p) {
  KV_DYN_SMEM(smem);
  const u32* starts = (const u32*)p.starts + blockIdx.x;
  const u32 end = starts[1];
  for (u32 i = starts[0]; i < end; i++) {
    kv_decode_piece<F, DIM>(p, ((const KvPiece*)p.pieces)[i], smem);
    kv_sync();  // shared memory is free for the next piece
  }
}

// A kernel: 2 warps for long rows, else 4. Two blocks share a multiprocessor where their rings let them.
#define KV_DECODE(name, F, DIM) \
  KV_KERNEL(name, KvDecodeParams, (DIM >= 192 ? 64 : 128), 2, kv_decode<F, DIM>)
