// nvrtc: --fmad=false
// Stores new rows of K and V as one-byte codes: write.cu's write_rows for the usual shapes, with the
// same bits.
//
//   kernel           blocks (any number is correct)         threads  shared bytes
//   write_codes_DIM  [total_new * heads / rows] rounded up  128      4 * 512 / DIM * (DIM + 16)
//
// where rows = 2048 / DIM. K and V have `head_dim` DIM (64, 128 or 256) and one-byte codes, with
// given scales or a scale per row; no tail and no full-precision prefix. Input rows, and rows of
// codes with given scales, begin at multiples of 16 bytes. total_new * heads < 2^31.
//
// DIM / 16 lanes encode a row, 16 values each; K and V of a head one after the other, both loaded
// first. Rows with a scale of their own begin at any even address: they pass through shared memory,
// to be stored in units of 16 bytes.
#include "encode.h"
#include "new_token.h"
#include "row_lanes.h"

// Sixteen codes, in the order of KvRowLane's values.
struct KvCodes16 { u32 word[4]; };

// Returns x / scale, rounded as by a division, with `inverse` = 1 / scale rounded to nearest. Each
// step corrects the quotient by its exact remainder: after the first it is one of the two floats
// around the exact quotient, after the second the nearest (Markstein, IBM J. Res. Dev. 34(1), 1990).
// Quotients far below the smallest code may lose bits; those of zeros need the sign of `x`.
KV_DEV float kv_quotient(float x, float scale, float inverse) {
  float q = x * inverse;
#pragma unroll
  for (u32 step = 0; step < 2; step++) q = kv_fma(kv_fma(-q, scale, x), inverse, q);
  return kv_as_f((kv_as_u(q) & 0x7fffffffu) | (kv_as_u(x) & 0x80000000u));
}

// Encodes two values, the first in the low byte. The instructions round to nearest even, saturate
// and encode NaN like kv_e4m3_encode and kv_e5m2_encode.
#if !defined(KV_EMU) && __CUDA_ARCH__ >= 890
KV_DEV u32 kv_e4m3x2_encode(float low, float high) {
  u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(r) : "f"(high), "f"(low)); return r;
}
KV_DEV u32 kv_e5m2x2_encode(float low, float high) {
  u16 r; asm("cvt.rn.satfinite.e5m2x2.f32 %0,%1,%2;" : "=h"(r) : "f"(high), "f"(low)); return r;
}
#else
KV_DEV u32 kv_e4m3x2_encode(float low, float high) { return kv_e4m3_encode(low) | (u32)kv_e4m3_encode(high) << 8; }
KV_DEV u32 kv_e5m2x2_encode(float low, float high) { return kv_e5m2_encode(low) | (u32)kv_e5m2_encode(high) << 8; }
#endif

template <KvByte KIND> KV_DEV u32 kv_codes4(float a, float b, float c, float d) {
  if (KIND == KV_BYTE_E4M3) return kv_e4m3x2_encode(a, b) | kv_e4m3x2_encode(c, d) << 16;
  if (KIND == KV_BYTE_E5M2) return kv_e5m2x2_encode(a, b) | kv_e5m2x2_encode(c, d) << 16;
  const u32 low = kv_prmt(kv_int8_encode(a), kv_int8_encode(b), 0x0040);
  return kv_prmt(low, kv_prmt(kv_int8_encode(c), kv_int8_encode(d), 0x0040), 0x5410);
}
template <KvByte KIND> KV_DEV KvCodes16 kv_codes16(const float (&x)[16]) {
  KvCodes16 codes;
#pragma unroll
  for (u32 w = 0; w < 4; w++) codes.word[w] = kv_codes4<KIND>(x[w * 4], x[w * 4 + 1], x[w * 4 + 2], x[w * 4 + 3]);
  return codes;
}
KV_DEV KvCodes16 kv_codes16(KvByte kind, const float (&x)[16]) {
  if (kind == KV_BYTE_E4M3) return kv_codes16<KV_BYTE_E4M3>(x);
  return kind == KV_BYTE_E5M2 ? kv_codes16<KV_BYTE_E5M2>(x) : kv_codes16<KV_BYTE_INT8>(x);
}

KV_DEV KvByte kv_byte_of(u32 format) {
  switch (format) {
    case KV_FMT_E4M3: case KV_FMT_E4M3_HEAD: case KV_FMT_E4M3_ROW: return KV_BYTE_E4M3;
    case KV_FMT_E5M2: case KV_FMT_E5M2_HEAD: case KV_FMT_E5M2_ROW: return KV_BYTE_E5M2;
    default: return KV_BYTE_INT8;
  }
}
KV_DEV bool kv_has_row_scale(u32 format) {
  return format == KV_FMT_E4M3_ROW || format == KV_FMT_E5M2_ROW || format == KV_FMT_INT8_ROW;
}

// kv_encode_own: computes the scale of a row and its codes.
template <u32 DIM> KV_DEV KvCodes16 kv_encode_scaled(KvByte kind, KvRowLane<DIM>& row, u16& stored) {
  u32 amax = 0;
#pragma unroll
  for (u32 i = 0; i < 16; i++) amax = kv_amax_bits(amax, row.x[i]);
  amax = kv_max_of<KvRowLane<DIM>::LANES / 2>(amax);
  const float largest = kind == KV_BYTE_E4M3 ? 448.f : kind == KV_BYTE_E5M2 ? 57344.f : 127.f;
  stored = amax > KV_INFINITY ? KV_F16_NAN : kv_scale_from_amax(kv_as_f(amax), largest);
  const float scale = kv_f16_f(stored), inverse = kv_div_rn(1.f, scale);
  if (!(scale > 0.f)) return {};
  // The remainder of an infinite value would be NaN; the largest finite one saturates as well.
  const float most = kv_as_f(KV_INFINITY - 1);
#pragma unroll
  for (u32 i = 0; i < 16; i++) {
    const float finite = row.x[i] > most ? most : row.x[i] < -most ? -most : row.x[i];
    row.x[i] = kv_quotient(finite, scale, inverse);
  }
  return kv_codes16(kind, row.x);
}

// Stores a row of DIM codes and its scale at an even address. `staged` is memory of DIM + 16 bytes,
// at a multiple of 16, of these lanes.
template <u32 DIM>
KV_DEV void kv_store_scaled(u8* to, const KvCodes16& codes, u16 scale, u8* staged, u32 lane, bool exists) {
  // The row lies in shared memory as in the plane, modulo 16 bytes.
  u8* own = staged + ((u32)(u64)to & 15);
  kv_syncwarp();  // the previous row was read
#pragma unroll
  for (u32 half = 0; half < 2; half++)
#pragma unroll
    for (u32 i = 0; i < 4; i++)
      *(u16*)(own + KvRowLane<DIM>::first(lane, half) + 2 * i) = (u16)(codes.word[half * 2 + i / 2] >> (i % 2 * 16));
  if (lane == 0) *(u16*)(own + DIM) = scale;
  kv_syncwarp();
  if (exists) kv_store_staged<KvRowLane<DIM>::LANES>(to, own, DIM + 2, lane);
}

template <u32 DIM> KV_DEV void kv_write_codes(const KvWriteParams& p) {
  typedef KvRowLane<DIM> Row;
  constexpr u32 WARPS = 4;
  KV_DYN_SMEM(shared);
  const KvCounts& counts = *(const KvCounts*)p.plan.counts;
  const u32 lane = threadIdx.x % Row::LANES, heads = p.k_plane.num_kv_heads, items = counts.total_new * heads;
  const u32 nth = threadIdx.x % 32 / Row::LANES, warp = threadIdx.x / 32;
  u8* staged = shared + (warp * Row::ROWS + nth) * (DIM + 16);
  for (u32 first = (blockIdx.x * WARPS + warp) * Row::ROWS; first < items; first += gridDim.x * WARPS * Row::ROWS) {
    const bool exists = first + nth < items;
    const u32 item = exists ? first + nth : items - 1, token = item / heads, head = item - token * heads;
    const KvNew n = kv_new_token(p.plan, counts.sequences, p.k_plane, token);
    const KvRawLane raw[2] = {Row::read(p.k.dtype, kv_head_row(p.k, n.entry, n.start, n.token, head), lane),
                              Row::read(p.v.dtype, kv_head_row(p.v, n.entry, n.start, n.token, head), lane)};
#pragma unroll
    for (u32 is_v = 0; is_v < 2; is_v++) {
      const KvPlane& plane = is_v != 0 ? p.v_plane : p.k_plane;
      const KvConstants constants = kv_constants(plane, head);
      const KvByte kind = kv_byte_of(plane.format);
      u8* to = kv_block(plane, n.block) + kv_row_begin(plane, n.place, head);
      Row row;
      row.lane = lane;
      row.convert(is_v != 0 ? p.v.dtype : p.k.dtype, raw[is_v]);
      if (plane.transforms) row.transform_store(constants.mean, constants.into);
      if (kv_has_row_scale(plane.format)) {
        u16 scale;
        const KvCodes16 codes = kv_encode_scaled<DIM>(kind, row, scale);
        kv_store_scaled<DIM>(to, codes, scale, staged, lane, exists);
        continue;
      }
#pragma unroll
      for (u32 i = 0; i < 16; i++) row.x[i] *= constants.inv_scale;
      const KvCodes16 codes = kv_codes16(kind, row.x);
      if (!exists) continue;
#pragma unroll
      for (u32 half = 0; half < 2; half++)
        *(uint2*)(to + Row::first(lane, half)) = make_uint2(codes.word[half * 2], codes.word[half * 2 + 1]);
    }
  }
}

KV_KERNEL(write_codes_64, KvWriteParams, 128, 6, [](const KvWriteParams& p) { kv_write_codes<64>(p); })
KV_KERNEL(write_codes_128, KvWriteParams, 128, 6, [](const KvWriteParams& p) { kv_write_codes<128>(p); })
KV_KERNEL(write_codes_256, KvWriteParams, 128, 6, [](const KvWriteParams& p) { kv_write_codes<256>(p); })
