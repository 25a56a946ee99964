// What the threads of a block share while they attend, and how a tile gets there.
#pragma once
#include "find.h"
#include "format.h"
#include "transform.h"
#include "visible.h"

constexpr u32 KV_WARPS = 4, KV_THREADS = 32 * KV_WARPS;
constexpr u32 KV_CHUNK = 64;              // values of a row that are staged side by side
constexpr u32 KV_STRIDE = KV_CHUNK + 4;   // of a staged row: lanes that read one row each meet no bank twice
constexpr u32 KV_STAGE = KV_TILE * KV_STRIDE;

// A running maximum and a sum relative to it: kv-cpu's Running.
struct KvRunning { float max, sum; };

struct KvShared {
  KvTokenAt* tokens;  // [warp][2][token]
  float* stage;       // [warp][token][KV_STRIDE]
  float* q;           // [row][stride_q], zeros behind the last value
  float* sums;        // [row][stride_v], relative to the maximum of the row
  float* scores;      // [warp][row of the warp][token]
  float* weights;     // [warp][token][row of the warp]
  KvRunning* running; // [row]
  KvRunning* total;   // [row]
  KvVisible* seen;    // [row]
  float* bias;        // [row], added to every score
  u32* last;          // whether this block is the last one of its rows
  u32 stride_q, stride_v;
};

KV_DEV u32 kv_whole_chunks(u32 dim) { return (dim + KV_CHUNK - 1) / KV_CHUNK * KV_CHUNK; }

// Lays out `rows` rows of queries; see attend.cu for the bytes.
KV_DEV KvShared kv_shared(u8* memory, u32 rows, u32 dim_k, u32 dim_v) {
  KvShared s;
  s.stride_q = kv_whole_chunks(dim_k);
  s.stride_v = kv_whole_chunks(dim_v);
  s.tokens = (KvTokenAt*)memory;
  s.stage = (float*)(s.tokens + KV_WARPS * 2 * KV_TILE);
  s.q = s.stage + KV_WARPS * KV_STAGE;
  s.sums = s.q + rows * s.stride_q;
  s.scores = s.sums + rows * s.stride_v;
  s.weights = s.scores + rows * KV_TILE;
  s.running = (KvRunning*)(s.weights + rows * KV_TILE);
  s.total = s.running + rows;
  s.seen = (KvVisible*)(s.total + rows);
  s.bias = (float*)(s.seen + rows);
  s.last = (u32*)(s.bias + rows);
  return s;
}

// What a kernel has to know of a plane to decode its rows of one head.
struct KvRows { u32 format, dim, scales_begin; float scale; };
KV_DEV KvRows kv_rows(const KvPlane& plane, float scale) {
  return {plane.format, plane.head_dim, plane.scales_begin, scale};
}

// Queries of one kv head against one part of a context. A row is one head of one query; rows of a
// sequence are numbered query by query, `group` a query.
struct KvUnit {
  KvSequence sequence;
  u32 entry, kv_head;
  u32 first, rows;        // of the sequence's rows
  u32 split, splits;      // which part of how many
  u32 begin, end;         // positions of the part
  KvReach reach;          // what is seen in it
  KvRows k_rows, v_rows;
};

// What a row relative to `from` is multiplied with to be relative to `to`.
KV_DEV float kv_weight(float from, float to) {
  return from == to || to == -kv_infinity() ? 1.f : kv_exp(from - to);
}

// Decodes values from `begin` on of the tokens of a tile that are in `needed`, `chunks` chunks of
// them, zeros behind a row's last. Others are left as they are: nothing of theirs is used. A function
// of its own, since every stored format is in it.
KV_DEV_CALL void kv_stage(KvRows rows, bool is_k, const KvTokenAt* tokens, u32 needed, u32 begin, u32 chunks,
                          float* stage, u32 thread, u32 threads) {
  constexpr u32 RUNS = KV_CHUNK / 8;
#pragma unroll 1
  for (u32 i = thread; i < chunks * KV_TILE * RUNS; i += threads) {
    const u32 chunk = i / (KV_TILE * RUNS), token = i / RUNS % KV_TILE, run = i % RUNS;
    if ((needed >> token & 1) == 0) continue;
    const u32 at = begin + chunk * KV_CHUNK + run * 8;
    float out[8] = {0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f, 0.f};
    if (at < rows.dim) {
      const KvTokenAt& found = tokens[token];
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
