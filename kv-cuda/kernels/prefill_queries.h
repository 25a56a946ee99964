// Queries for K that is stored as codes: f16 in shared memory, as levels are. Part of
// prefill_coded.h and prefill_staged.h.
//
// Queries in bf16, and queries that are transformed because K is, are scaled to f16 by a power of
// two per row; bf16 values exactly. If K is transformed, every score of a row lacks the same bias:
// the product of the query and the mean of K.
#pragma once
#include "minifloat.h"
#include "prefill_item.h"
#include "transform.h"

template <u32 D, class Item> struct KvPrefillQueries {
  static constexpr u32 ROWS = Item::ROWS, WARP_ROWS = Item::WARP_ROWS;
  static constexpr u32 BYTES = 2 * ROWS * 4;

  const Item& item;
  float* rows;  // [ROWS] scales, [ROWS] biases; written if `converts`

  KV_DEV bool converts() const { return item.p.k_plane.transforms != 0 || item.p.q.dtype != KV_F16; }
  // Returns the factor of scores, and their bias, for row `half` of mma tile `m`.
  KV_DEV float scale(u32 m, u32 half) const { return converts() ? rows[item.own_row(m, half)] : 1.f; }
  KV_DEV float bias(u32 m, u32 half) const { return converts() ? rows[ROWS + item.own_row(m, half)] : 0.f; }

  // Converts or starts to copy the rows of each warp. The memory of K's tile is free.
  KV_DEV void begin() const {
    if (!converts()) {
      item.copy_queries();
      kv_cp_commit();
      return;
    }
    const KvConstants constants = kv_constants(item.p.k_plane, item.kv_head);
    float* row = (float*)item.k + item.warp * D;
#pragma unroll 1
    for (u32 i = item.warp * WARP_ROWS; i < (item.warp + 1) * WARP_ROWS; i++) convert(i, row, constants);
    kv_syncwarp();
  }

  // Converts query row `i` of the item with all lanes of a warp; `row` is scratch memory.
  KV_DEV void convert(u32 i, float* row, const KvConstants& constants) const {
    const bool transforms = item.p.k_plane.transforms != 0;
    float mean = 0.f, large = 0.f, into = 1.f, back = 1.f;
    const bool is_there = i < item.rows();
    const u8* from = item.row_of(item.p.q, is_there ? i : 0);
    for (u32 d = item.lane; d < D; d += 32) {
      row[d] = is_there ? kv_load(item.p.q.dtype, from, d) : 0.f;
      if (transforms) mean += row[d] * constants.mean[d];
    }
    if (transforms) kv_transform_query(row, constants.back, D, item.lane);
    kv_syncwarp();
    for (u32 d = item.lane; d < D; d += 32) large = kv_max(large, kv_abs(row[d]));
    mean = kv_warp_sum(mean);
    large = kv_warp_max(large);
    // Scales the largest to between 256 and 512, unless it is almost zero or infinite.
    const u32 exponent = kv_as_u(large) >> 23;
    if (exponent >= 9 && exponent < 255) {
      into = kv_as_f((262 - exponent) << 23);
      back = kv_as_f((exponent - 8) << 23);
    }
    for (u32 d = item.lane; d < D / 2; d += 32)
      *(u32*)(item.q + Item::at(i, d / 4) + d % 4 * 4) = kv_pack(KvF16(), row[2 * d] * into, row[2 * d + 1] * into);
    if (item.lane == 0) rows[i] = back, rows[ROWS + i] = mean;
    kv_syncwarp();
  }

  // Transforms an output row back with all lanes of a warp, if V is transformed.
  KV_DEV void transform_output(float* row) const {
    const KvPlane& v = item.p.v_plane;
    if (v.transforms != 0) kv_transform_output(row, kv_constants(v, item.kv_head).back, D, item.lane);
  }
};
