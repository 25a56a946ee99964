// Decode attention over 16-bit blocks, as a test of the emulator: it uses everything that a fast
// kernel uses (a ring of tiles copied ahead, matrix operations, reused shared memory, a last block
// that merges) and can make a mistake on request. Heads of 64 values, groups of up to 16 query
// heads, 4 warps with their own tiles of 16 tokens.
#include "split_decode.h"

constexpr u32 ROW = KV_DECODE_DIM * 2, CHUNKS = ROW / 16;  // bytes of a row, and its copies of 16
constexpr u32 STAGES = 3, TILE = 16, TILE_BYTES = TILE * ROW;
constexpr u32 STEP = KV_DECODE_WARPS * TILE;  // tokens of a round of all warps
constexpr u32 OUT_STRIDE = KV_DECODE_DIM + 4;

// Returns where chunk `chunk` of row `row` lies in a tile: swizzled, so that 8 rows of one chunk
// hit 8 different banks.
KV_DEV u32 kv_at(u32 row, u32 chunk) { return row * ROW + (chunk ^ (row & 7)) * 16; }

// A warp's state of online softmax: its lanes have the rows and columns of a matrix fragment each.
struct KvSoftmax {
  float max[2], sum[2];              // of two rows
  float out[KV_DECODE_DIM / 8][4];
};

KV_DEV void kv_copy_tile(const KvDecodeParams& p, const KvWork& w, u8* tile, u32 begin, u32 lane) {
  for (u32 pass = 0; pass < TILE / 4; pass++) {
    const u32 row = pass * 4 + lane / CHUNKS, chunk = lane % CHUNKS;
    u32 token = begin + row;
    const bool is_there = token < w.end || p.mistake == KV_UNCLAMPED_BLOCK;
    if (!is_there) token = w.begin;
    const u32 block = kv_ldg((const u32*)p.tables + (u64)w.entry * p.table_stride + token / p.block_size);
    const u64 from = ((u64)block * p.block_size + token % p.block_size) * p.heads * ROW + w.head * ROW + chunk * 16;
    kv_cp_async16(tile + kv_at(row, chunk), (const u8*)p.k + from, is_there);
    kv_cp_async16(tile + TILE_BYTES + kv_at(row, chunk), (const u8*)p.v + from, is_there);
  }
}

// Computes the scores of 16 tokens for 16 rows: two halves of 8 tokens.
KV_DEV void kv_scores(const u32 (&q)[KV_DECODE_DIM / 16][4], const u8* tile, u32 lane, float (&scores)[2][4]) {
  for (u32 k = 0; k < KV_DECODE_DIM / 16; k++) {
    u32 keys[4];
    kv_ldsm4(keys, tile + kv_at(lane / 16 * 8 + lane % 8, k * 2 + lane / 8 % 2));
    kv_mma(KvF16(), scores[0], q[k], keys[0], keys[1]);
    kv_mma(KvF16(), scores[1], q[k], keys[2], keys[3]);
  }
}

KV_DEV void kv_row_max(float (&max)[2]) {
  for (u32 h = 0; h < 2; h++) max[h] = kv_max(max[h], kv_shfl_xorf(max[h], 1));
  for (u32 h = 0; h < 2; h++) max[h] = kv_max(max[h], kv_shfl_xorf(max[h], 2));
}

KV_DEV void kv_attend_tile(const KvDecodeParams& p, const KvWork& w, const u32 (&q)[KV_DECODE_DIM / 16][4],
                           const u8* tile, u32 begin, u32 lane, KvSoftmax& s) {
  float scores[2][4] = {};
  kv_scores(q, tile, lane, scores);
  float max[2] = {s.max[0], s.max[1]};
  for (u32 n = 0; n < 2; n++) {
    for (u32 j = 0; j < 4; j++) {
      const u32 token = begin + n * 8 + lane % 4 * 2 + j % 2;
      scores[n][j] = token < w.end ? scores[n][j] * p.scale : -kv_infinity();
      max[j / 2] = kv_max(max[j / 2], scores[n][j]);
    }
  }
  if (p.mistake != KV_DIVERGENT_LANES || begin + lane / 4 < w.end) kv_row_max(max);
  float factors[2];
  for (u32 h = 0; h < 2; h++) {
    const float base = max[h] == -kv_infinity() ? 0.f : max[h];
    factors[h] = kv_exp2(s.max[h] - base);
    s.max[h] = max[h];
    s.sum[h] *= factors[h];
    for (u32 n = 0; n < 2; n++) {
      for (u32 j = 2 * h; j < 2 * h + 2; j++) {
        scores[n][j] = kv_exp2(scores[n][j] - base);
        s.sum[h] += scores[n][j];
      }
    }
  }
  const u32 weights[4] = {kv_pack(KvF16(), scores[0][0], scores[0][1]), kv_pack(KvF16(), scores[0][2], scores[0][3]),
                          kv_pack(KvF16(), scores[1][0], scores[1][1]), kv_pack(KvF16(), scores[1][2], scores[1][3])};
  for (u32 d = 0; d < KV_DECODE_DIM / 8; d += 2) {
    for (u32 j = 0; j < 8; j++) s.out[d + j / 4][j % 4] *= factors[j % 4 / 2];
    u32 values[4];
    kv_ldsm4t(values, tile + TILE_BYTES + kv_at(lane / 8 % 2 * 8 + lane % 8, d + lane / 16));
    kv_mma(KvF16(), s.out[d], weights, values[0], values[1]);
    kv_mma(KvF16(), s.out[d + 1], weights, values[2], values[3]);
  }
}

KV_DEV KvSoftmax kv_walk(const KvDecodeParams& p, const KvWork& w, u8* shared, u32 lane, u32 warp) {
  u8* ring = shared + warp * STAGES * 2 * TILE_BYTES;
  const u32 first = w.begin + warp * TILE, rounds = (w.end - w.begin + STEP - 1) / STEP;
  for (u32 i = 0; i < STAGES - 1; i++) {
    if (i < rounds) kv_copy_tile(p, w, ring + i * 2 * TILE_BYTES, first + i * STEP, lane);
    kv_cp_commit();
  }
  u32 q[KV_DECODE_DIM / 16][4];
  for (u32 k = 0; k < KV_DECODE_DIM / 16; k++) {
    for (u32 r = 0; r < 4; r++) {
      const u32 row = lane / 4 + r % 2 * 8, at = k * 16 + lane % 4 * 2 + r / 2 * 8;
      const u64 query = (u64)w.entry * p.heads * p.group + w.head * p.group + row;
      q[k][r] = row < p.group ? *(const u32*)(p.q + query * ROW + at * 2) : 0;
    }
  }
  KvSoftmax s = {{-kv_infinity(), -kv_infinity()}, {0.f, 0.f}, {}};
  for (u32 i = 0; i < rounds; i++) {
    if (p.mistake == KV_WAIT_OFF_BY_ONE) kv_cp_wait<STAGES - 1>();
    else
      kv_cp_wait<STAGES - 2>();
    // Each lane has waited for its own copies; the tile that is overwritten next is not read any
    // more.
    if (p.mistake != KV_NO_SYNCWARP) kv_syncwarp();
    const u32 next = i + STAGES - 1;
    if (next < rounds) kv_copy_tile(p, w, ring + next % STAGES * 2 * TILE_BYTES, first + next * STEP, lane);
    kv_cp_commit();
    kv_attend_tile(p, w, q, ring + i % STAGES * 2 * TILE_BYTES, first + i * STEP, lane, s);
  }
  for (u32 h = 0; h < 2; h++) s.sum[h] += kv_shfl_xorf(s.sum[h], 1);
  for (u32 h = 0; h < 2; h++) s.sum[h] += kv_shfl_xorf(s.sum[h], 2);
  kv_cp_wait<0>();
  return s;
}

// Merges `count` partial results of value `column` of a row: `at(i)` is the i-th one's maximum, sum
// and value.
struct KvPart { float max, sum, value; };
template <class At> KV_DEV KvPart kv_join(u32 count, At at) {
  KvPart all = {-kv_infinity(), 0.f, 0.f};
  for (u32 i = 0; i < count; i++) {
    const KvPart part = at(i);
    const float max = kv_max(all.max, part.max);
    if (max == -kv_infinity()) continue;
    const float a = kv_exp2(all.max - max), b = kv_exp2(part.max - max);
    all = {max, all.sum * a + part.sum * b, all.value * a + part.value * b};
  }
  return all;
}

KV_DEV void kv_split_decode(const KvDecodeParams& p) {
  KV_DYN_SMEM(shared);
  const KvWork w = ((const KvWork*)p.work)[blockIdx.x];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const KvSoftmax s = kv_walk(p, w, shared, lane, warp);
  if (p.mistake != KV_NO_SYNC) kv_sync();  // all warps are done with the tiles: the bytes are used again
  float* outs = (float*)shared;
  float* maxima = outs + KV_DECODE_WARPS * 16 * OUT_STRIDE;
  float* sums = maxima + KV_DECODE_WARPS * 16;
  for (u32 d = 0; d < KV_DECODE_DIM / 8; d++) {
    for (u32 j = 0; j < 4; j++) {
      const u32 row = lane / 4 + j / 2 * 8, column = d * 8 + lane % 4 * 2 + j % 2;
      outs[(warp * 16 + row) * OUT_STRIDE + column] = s.out[d][j];
    }
  }
  for (u32 h = 0; h < 2 && lane % 4 == 0; h++) {
    maxima[warp * 16 + lane / 4 + 8 * h] = s.max[h];
    sums[warp * 16 + lane / 4 + 8 * h] = s.sum[h];
  }
  kv_sync();
  KvPart* parts = (KvPart*)p.parts;
  const u32 values = p.group * KV_DECODE_DIM;
  for (u32 i = threadIdx.x; i < values; i += KV_DECODE_WARPS * 32) {
    const u32 row = i / KV_DECODE_DIM, column = i % KV_DECODE_DIM;
    parts[(u64)blockIdx.x * values + i] = kv_join(KV_DECODE_WARPS, [&](u32 of) {
      const u32 at = of * 16 + row;
      return KvPart{maxima[at], sums[at], outs[at * OUT_STRIDE + column]};
    });
  }
  // The block that finishes last merges the partial results of all.
  kv_fence();
  kv_sync();
  u32* flag = (u32*)(sums + KV_DECODE_WARPS * 16);
  if (threadIdx.x == 0) *flag = kv_atomic_inc((u32*)p.counters + w.entry * p.heads + w.head, w.num_parts - 1);
  if (p.mistake != KV_NO_FLAG_SYNC) kv_sync();
  if (*flag != w.num_parts - 1) return;
  kv_fence();
  for (u32 i = threadIdx.x; i < values; i += KV_DECODE_WARPS * 32) {
    const KvPart all = kv_join(w.num_parts, [&](u32 of) { return parts[(u64)(w.first_part + of) * values + i]; });
    ((float*)p.out)[((u64)w.entry * p.heads + w.head) * values + i] = all.sum > 0.f ? all.value / all.sum : 0.f;
  }
}

KV_KERNEL(test_split_decode, KvDecodeParams, KV_DECODE_WARPS * 32, 1, kv_split_decode)
