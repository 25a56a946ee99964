// Shared memory of the general attention kernel, and staging of K and V tiles in it.
#pragma once
#include "token_rows.h"
#include "format.h"
#include "transform.h"
#include "visible.h"

constexpr u32 KV_WARPS = 4, KV_THREADS = 32 * KV_WARPS;
constexpr u32 KV_CHUNK = 64;              // values of a row that are staged side by side
constexpr u32 KV_STRIDE = KV_CHUNK + 4;   // of a staged row, padded: lanes that read one row each have no bank conflict
constexpr u32 KV_STAGE = KV_TILE * KV_STRIDE;

// The state of an online softmax: a running maximum, and the sum of weights relative to it.
struct KvSoftmax { float max, sum; };

struct KvShared {
  KvTokenRows* tokens;  // [warp][2][token]
  float* stage;         // [warp][token][KV_STRIDE]
  float* q;             // [row][stride_q], padded with zeros
  float* sums;          // [row][stride_v], relative to the maximum of the row
  float* scores;        // [warp][row of the warp][token]
  float* weights;       // [warp][token][row of the warp]
  KvSoftmax* running;   // [row]
  KvSoftmax* total;     // [row]
  KvVisible* visible;   // [row]
  float* bias;          // [row], added to every score
  u32* last;            // whether this block is the last to finish for its rows
  u32 stride_q, stride_v;
};

KV_DEV u32 kv_whole_chunks(u32 dim) { return (dim + KV_CHUNK - 1) / KV_CHUNK * KV_CHUNK; }

// Lays out shared memory for `rows` query rows; attend.cu gives the size.
KV_DEV KvShared kv_shared(u8* memory, u32 rows, u32 dim_k, u32 dim_v) {
  KvShared s;
  s.stride_q = kv_whole_chunks(dim_k);
  s.stride_v = kv_whole_chunks(dim_v);
  s.tokens = (KvTokenRows*)memory;
  s.stage = (float*)(s.tokens + KV_WARPS * 2 * KV_TILE);
  s.q = s.stage + KV_WARPS * KV_STAGE;
  s.sums = s.q + rows * s.stride_q;
  s.scores = s.sums + rows * s.stride_v;
  s.weights = s.scores + rows * KV_TILE;
  s.running = (KvSoftmax*)(s.weights + rows * KV_TILE);
  s.total = s.running + rows;
  s.visible = (KvVisible*)(s.total + rows);
  s.bias = (float*)(s.visible + rows);
  s.last = (u32*)(s.bias + rows);
  return s;
}

// How to decode the rows of one head of a plane.
struct KvRowFormat { u32 format, dim, scales_begin; float scale; };
KV_DEV KvRowFormat kv_row_format(const KvPlane& plane, float scale) {
  return {plane.format, plane.head_dim, plane.scales_begin, scale};
}

// A work item: query rows of one kv head against one KV split. A row is one head of one query; the
// rows of a sequence are numbered query by query, `group` per query.
struct KvAttendItem {
  KvSequence sequence;
  u32 entry, kv_head;
  u32 first, rows;        // of the sequence's rows
  u32 split, num_splits;     // which KV split, and how many there are
  u32 begin, end;         // positions of the split
  KvReach reach;          // keys of it that some row sees
  KvRowFormat k_rows, v_rows;
};

// Returns the factor that rescales a sum relative to `from` to one relative to `to`.
KV_DEV float kv_rescale(float from, float to) {
  return from == to || to == -kv_infinity() ? 1.f : kv_exp(from - to);
}

// Decodes `chunks` chunks of values, from `begin` on, of the tokens of a tile that are in `needed`;
// zero past the end of a row. Other tokens are left as they are and are not used. Not inlined,
// since it contains every stored format.
KV_DEV_CALL void kv_stage(KvRowFormat rows, bool is_k, const KvTokenRows* tokens, u32 needed, u32 begin, u32 chunks,
                          float* stage, u32 thread, u32 threads) {
  constexpr u32 RUNS = KV_CHUNK / 8;
#pragma unroll 1
  for (u32 i = thread; i < chunks * KV_TILE * RUNS; i += threads) {
    const u32 chunk = i / (KV_TILE * RUNS), token = i / RUNS % KV_TILE, run = i % RUNS;
    if ((needed >> token & 1) == 0) continue;
    const u32 at = begin + chunk * KV_CHUNK + run * 8;
    float out[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (at < rows.dim) {
      const KvTokenRows& found = tokens[token];
      const bool wide = found.wide != 0;
      const u32 format = wide && rows.format > KV_FMT_BF16 ? (u32)KV_FMT_F16 : rows.format;
      const u8* row = (const u8*)(is_k ? found.k : found.v);
      kv_values<8>(format, row, rows.scales_begin, rows.dim, wide ? 1.f : rows.scale, at, out);
      if (is_k && found.mean != 0) {
        const u16* mean = (const u16*)found.mean + at;
#pragma unroll
        for (u32 j = 0; j < 8; j++)
          if (at + j < rows.dim) out[j] += kv_f16_f(mean[j]);
      }
    }
    KvFloat4* to = (KvFloat4*)(stage + chunk * KV_STAGE + token * KV_STRIDE + run * 8);
    to[0] = {out[0], out[1], out[2], out[3]};
    to[1] = {out[4], out[5], out[6], out[7]};
  }
}
