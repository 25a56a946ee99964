// Attention of a few queries over long contexts, on tensor cores: 16 query rows of one kv head meet K and V tile by
// tile (Dao et al., "Flash-Decoding for long-context inference"; the layout of one kernel is our own).
//
// Rows are queries one after another, the heads of the group within each, so that all of them share what is read of K
// and V. Thread blocks stay: each works through the pieces that plan.cu gave its slot. In a piece, every warp takes
// subtiles of 32 tokens in turn and has a ring of its own in shared memory, which cp.async fills ahead; no warp waits
// for another before the piece ends. Pieces of the same rows leave partial results, and the last to end joins them in
// an order that follows from their number.
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
//   merge   = warps * 16 * (head_dim + 4) * 4 + warps * 16 * 8 + 16 + warps * 16 * 16 * 4,
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
  // Asked where masks cut something: it is not worth a register of the loop.
  KV_DEV bool has_several_queries() const {
    const u32 group = p.attend.group;
    return piece.row / group != (piece.row + rows - 1) / group;
  }
  KV_DEV bool reaches(u32 position) const {
    return position < reach.sinks || (position >= reach.begin && position < reach.end);
  }
};

KV_DEV KvDecodeWork kv_decode_work(const KvDecodeParams& p, const KvPiece& piece, u32 lane, u32 warp) {
  const KvAttendParams& a = p.attend;
  const KvSequence& sequence = ((const KvSequence*)a.plan.sequences)[piece.sequence];
  const u64 left = (u64)sequence.q_len * a.group - piece.row;
  return {p, piece, sequence, kv_decode_reach(a, sequence, a.group, piece.row),
          left < KV_DECODE_ROWS ? (u32)left : KV_DECODE_ROWS, (piece.tile_end - piece.tile_begin) * 2, lane, warp};
}

// The ring of one warp: K and V of its subtiles in turn, 32 rows each.
template <class F, int DIM> struct KvDecodeRing {
  static constexpr u32 WARPS = DIM >= 192 ? 2 : 4;
  static constexpr u32 ROW = F::template room<DIM>(), CHUNKS = ROW / 16, UNIT = 32 * ROW;

  // Whether 32 lanes copy whole rows at a time, so that where they go follows from where the first ones go.
  static constexpr bool WHOLE = !F::SCALED && 32 % CHUNKS == 0;

  u8* memory;
  u32 address;  // of `memory`, among those of shared memory
  u32 take = 0;  // the unit that is used next
  u32 table = 0;  // where the blocks of the sequence begin
  bool is_whole = false;  // blocks are whole runs of 16 tokens
  bool is_dense = false;  // and a head's tokens lie one behind another in them
  // Of the row of this lane in the subtile that is fetched next.
  u32 block = 0, inside = 0;
  bool ok = false;
  u32 ok_rows = 0;  // of the subtile that is fetched, by lane
  u64 v_row = 0;    // where its V is
  // Of rows that lie on 2 bytes: where the row of this lane begins in its first chunk, in pairs of bytes; in four bits
  // for every unit of the ring, and for the one that was taken last.
  u32 leads = 0, lead = 0;

  KV_DEV void begin(const KvDecodeWork& w, u8* smem) {
    const KvPlane &k = w.p.attend.k_plane, &v = w.p.attend.v_plane;
    memory = smem + w.warp * w.p.units * UNIT;
    address = kv_smem_addr(memory);
    table = w.sequence.table;
    is_whole = k.block_size % 16 == 0;
    is_dense = is_whole && k.token_stride == ROW && v.token_stride == ROW;
    look_up(w, 0);
  }
  // Looks the block of the next subtile up: early, for it takes as long as a read of memory.
  KV_DEV void look_up(const KvDecodeWork& w, u32 nth) {
    const u32 subtile = nth * WARPS + w.warp, position = w.position(subtile) + w.lane;
    const u32 block_size = w.p.attend.k_plane.block_size, shift = w.p.block_shift;
    ok = subtile < w.subtiles && w.reaches(position);
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
  // Copies a subtile of which every row is seen, 16 tokens of a block at a time: from two addresses, and what is known
  // of the others. `row`: where the row of this lane is; `stride`: from a row to the next.
  template <bool DENSE> KV_DEV void fetch_whole(u32 to, u64 row, u64 stride, bool is_v, u32 lane) const {
    constexpr u32 ROWS = WHOLE ? 32 / CHUNKS : 1, HALF = CHUNKS / 2;  // rows that 32 lanes copy; copies of 16 rows
    const u32 token = lane / CHUNKS, chunk = lane % CHUNKS;
    const u64 own = DENSE ? lane * 16 : token * stride + chunk * 16, step = DENSE ? ROWS * ROW : ROWS * stride;
    u64 from[2] = {kv_decode_shfl(row, 0) + own, kv_decode_shfl(row, 16) + own};
    const u32 at = to + token * ROW + F::template place<DIM>(is_v, token, chunk) * 16;
#pragma unroll
    for (u32 i = 0; i < CHUNKS; i++) {
      // Units begin at multiples of 128 bytes, so the turn of a chunk is one of bits of its address.
      const u32 turn = F::template turn<DIM>(is_v, i * ROWS) * 16;
      kv_cp_async16_at((at ^ turn) + i * ROWS * ROW, (const void*)(from[i / HALF] + i % HALF * step));
    }
  }
  // Starts the copy of K or V of a subtile, unit 2 * nth or 2 * nth + 1, to unit `put` of the ring. Rows beyond what is
  // seen become zeros.
  KV_DEV void fetch(const KvDecodeWork& w, u32 unit, u32 put) {
    const bool is_v = (unit & 1) != 0;
    u64 row = v_row;
    if (!is_v) {
      row = row_of(w.p.attend.k_plane, w.piece.head);
      v_row = row_of(w.p.attend.v_plane, w.piece.head);
      ok_rows = kv_ballot(ok);
      look_up(w, unit / 2 + 1);
    }
    const u32 begin = put * UNIT;
    if constexpr (F::SCALED) {
      leads = (leads & ~(15u << put * 4)) | ((u32)row >> 1 & 7) << put * 4;
      row &= ~15ull;
    }
    if constexpr (WHOLE) {
      if (is_whole && ok_rows == 0xffffffffu) {
        const u64 stride = is_v ? w.p.attend.v_plane.token_stride : w.p.attend.k_plane.token_stride;
        if (is_dense) fetch_whole<true>(address + begin, row, ROW, is_v, w.lane);
        else fetch_whole<false>(address + begin, row, stride, is_v, w.lane);
        return;
      }
    }
    u8* const to = memory + begin;
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
  // The unit that was used last.
  KV_DEV u32 used(u32 units) const { return take == 0 ? units - 1 : take - 1; }
  // Where the next unit begins in `memory`.
  KV_DEV u32 next(u32 units) {
    const u32 from = take * UNIT;
    if constexpr (F::SCALED) lead = leads >> take * 4 & 7;
    take = take + 1 == units ? 0 : take + 1;
    return from;
  }
};

// How deep the host makes the ring on the cards that this is compiled for (src/decode/mod.rs): what is asked for first.
template <class F, int DIM> constexpr u32 kv_decode_units() {
  typedef KvDecodeRing<F, DIM> Ring;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ == 1200)
  constexpr u32 most = 99 * 1024;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
  constexpr u32 most = 163 * 1024;
#else
  constexpr u32 most = 227 * 1024;
#endif
  constexpr u32 queries = (DIM >= 192 ? DIM * 32 : 0) + (F::SCALED ? DIM * 32 : 0), unit = Ring::WARPS * Ring::UNIT;
  constexpr u32 shared = ((most - 1024) / 2 - queries) / unit, alone = (most - queries) / unit;
  constexpr u32 units = shared >= 2 ? shared : alone;
  return units < 2 ? 2 : units < KV_DECODE_UNITS_MAX ? units : KV_DECODE_UNITS_MAX;
}

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
      s[n][j] *= rows.factor[j >> 1];
      if constexpr (F::SCALED) s[n][j] += rows.bias[j >> 1];
    }
  if (cut || a.soft_cap > 0.f) {  // out of the way of all others
#pragma unroll
    for (u32 n = 0; n < 4; n++)
#pragma unroll
      for (u32 j = 0; j < 4; j++) {
        // 1 - 2 / (exp(2 x) + 1) would cancel: the approximate exponential has an error of 2^-22 of what is near 1.
        if (a.soft_cap > 0.f) s[n][j] = a.soft_cap * KV_LOG2_E * kv_tanh(s[n][j]);
        const u32 position = base + n * 8 + t * 2 + (j & 1);
        if (cut && !rows.sees(j >> 1, position, a.sink_tokens)) s[n][j] = kv_decode_none();
      }
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
template <class F, int DIM> KV_DEV void kv_decode_piece(const KvDecodeParams& p, const KvPiece& place, u8* smem) {
  typedef KvDecodeRing<F, DIM> Ring;
  const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const KvDecodeWork w = kv_decode_work(p, place, lane, warp);
  u8* const tail = smem + KvDecodeQuery<F, DIM>::SHARED;
  const u32 own = (w.subtiles + Ring::WARPS - 1 - warp) / Ring::WARPS * 2;  // units of this warp
  Ring ring;
  ring.begin(w, tail);
  for (u32 unit = 0; unit + 1 < p.units; unit++) {
    if (unit < own) ring.fetch(w, unit, unit);
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
  bool apart = false;
  for (u32 unit = 0; unit < own; unit++) {
#ifdef KV_BUG_WAIT
    kv_decode_wait_for<KV_DECODE_UNITS_MAX - 1>(p.units - 1);
#else
    constexpr u32 expected = kv_decode_units<F, DIM>();
    if (p.units == expected) kv_cp_wait<expected - 2>();
    else kv_decode_wait_for<KV_DECODE_UNITS_MAX - 2>(p.units - 2);
#endif
#ifndef KV_BUG_NO_SYNCWARP
    kv_syncwarp();  // what every lane copied is there, and every lane is done with what is fetched over below
#endif
    if (unit + p.units - 1 < own) ring.fetch(w, unit + p.units - 1, ring.used(p.units));
    kv_cp_commit();
    const u32 at = ring.next(p.units), base = w.position(unit / 2 * Ring::WARPS + warp);
    u8* const from = ring.memory + at;
    if ((unit & 1) == 0) {
      float s[4][4];
      if constexpr (F::SCALED) F::template scores<DIM>(query, from, ring.lead, lane, s);
      else F::template scores<DIM>(query, ring.address + at, lane, s);
      apart = kv_decode_weigh<F, DIM>(w, base, rows, s, weights, o) && w.has_several_queries();
    } else if constexpr (F::SCALED) {
      if (apart) kv_decode_sum_scaled_apart<F, DIM>(w, base, rows, weights, from, ring.lead, o);
      u32 packed[2][4];
      kv_decode_scale<F, DIM>(rows, weights, from, ring.lead, lane, packed, o);
      F::template sum<DIM>(packed, from, ring.lead, lane, o);
    } else {
      if (apart) kv_decode_sum_apart<F, DIM>(w, base, rows, weights, from, o);
      F::template sum<DIM>(weights, ring.address + at, lane, o);
    }
  }
  kv_cp_wait<0>();
#ifndef KV_BUG_NO_SYNC
  kv_sync();  // every warp is done with its ring: the merge uses the same memory
#endif
  // Read again what the loop has no registers for. Lane and warp are out of shuffles, so that the compiler does not
  // keep what follows from them in registers either.
  kv_decode_merge<F, DIM>(kv_decode_work(p, place, kv_shfl(lane, lane), kv_shfl(warp, lane)), rows, o, tail);
}

template <class F, int DIM> KV_DEV void kv_decode(const KvDecodeParams& p) {
  KV_DYN_SMEM(smem);
  const u32* starts = (const u32*)p.starts + blockIdx.x;
  for (u32 i = starts[0]; i < starts[1]; i++) {  // read again: it is not worth a register
    kv_decode_piece<F, DIM>(p, ((const KvPiece*)p.pieces)[i], smem);
    kv_sync();  // shared memory is free for the next piece
  }
}

// A kernel: 2 warps for long rows, else 4. Two blocks share a multiprocessor where their rings let them.
#define KV_DECODE(name, F, DIM) \
  KV_KERNEL(name, KvDecodeParams, (DIM >= 192 ? 64 : 128), 2, kv_decode<F, DIM>)
