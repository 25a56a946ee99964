// Matrix operations of a warp. The assignment of elements to lanes follows the PTX manual: "Matrix
// Fragments for mma.m16n8k16", "ldmatrix", "movmatrix". Below, a lane is 4 * group + pair.
#include "engine.h"
#include "sanitizer.h"

namespace kvemu {
namespace {

typedef u8 In[LANE_IN];
typedef u8 Out[LANE_OUT];

struct MmaIn { u32 a[4], b[2]; float c[4]; };
static_assert(sizeof(MmaIn) == LANE_IN, "a lane's part of three matrices");

// D = A B + C: A 16 x 16, B 16 x 8, C and D 16 x 8, summed like tensor cores.
template <float (*TO_FLOAT)(u16)> void multiply(const In* in, Out* out, u32) {
  float a[16][16], b[16][8], c[16][8];
  for (u32 lane = 0; lane < 32; lane++) {
    MmaIn part;
    copy_bytes(&part, in[lane], sizeof part);
    const u32 row = lane / 4, column = lane % 4 * 2;
    for (u32 half = 0; half < 2; half++) {
      const auto number = [half](u32 two) { return TO_FLOAT(u16(two >> (16 * half))); };
      a[row][column + half] = number(part.a[0]);
      a[row + 8][column + half] = number(part.a[1]);
      a[row][column + 8 + half] = number(part.a[2]);
      a[row + 8][column + 8 + half] = number(part.a[3]);
      b[column + half][row] = number(part.b[0]);
      b[column + 8 + half][row] = number(part.b[1]);
      c[row][column + half] = part.c[half];
      c[row + 8][column + half] = part.c[2 + half];
    }
  }
  for (u32 i = 0; i < 16; i++) {
    for (u32 j = 0; j < 8; j++) {
      double terms[17] = {double(c[i][j])};
      for (u32 k = 0; k < 16; k++) terms[1 + k] = double(a[i][k]) * double(b[k][j]);
      c[i][j] = tensor_sum(terms);
    }
  }
  for (u32 lane = 0; lane < 32; lane++) {
    const u32 row = lane / 4, column = lane % 4 * 2;
    const float part[4] = {c[row][column], c[row][column + 1], c[row + 8][column], c[row + 8][column + 1]};
    copy_bytes(out[lane], part, sizeof part);
  }
}

// Four 8 x 8 matrices of 16-bit elements; lane 8 m + r passed row r of matrix m.
void spread(const In* in, Out* out, u32) {
  for (u32 lane = 0; lane < 32; lane++) {
    for (u32 m = 0; m < 4; m++) copy_bytes(out[lane] + 4 * m, in[8 * m + lane / 4] + 4 * (lane % 4), 4);
  }
}
void spread_transposed(const In* in, Out* out, u32) {
  for (u32 lane = 0; lane < 32; lane++) {
    for (u32 m = 0; m < 4; m++) {
      for (u32 half = 0; half < 2; half++) {
        copy_bytes(out[lane] + 4 * m + 2 * half, in[8 * m + 2 * (lane % 4) + half] + 2 * (lane / 4), 2);
      }
    }
  }
}
void transpose(const In* in, Out* out, u32) {
  for (u32 lane = 0; lane < 32; lane++) {
    const u32 column = lane / 4;
    for (u32 half = 0; half < 2; half++) {
      const u32 row = 2 * (lane % 4) + half;
      copy_bytes(out[lane] + 2 * half, in[4 * row + column / 2] + 2 * (column % 2), 2);
    }
  }
}

void mma(const char* name, Combine combine, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Site site) {
  const MmaIn in = {{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  float out[4];
  collective({name, 0, combine}, site, &in, sizeof in, out, sizeof out);
  for (int i = 0; i < 4; i++) c[i] = out[i];
}

// Each lane reads its own row, so that sanitizers see the access in the thread that passed the
// address.
void load_matrices(const char* name, Combine combine, u32 (&r)[4], const void* row, Site site) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) {
    engine->fail("%s at %s:%d: %p is not a multiple of 16", name, site.file, site.line, row);
  }
  engine->require_readable(row, 16, name, site);
  reads(row, 16);
  u8 bytes[16];
  copy_bytes(bytes, row, 16);
  collective({name, 0, combine}, site, bytes, 16, r, 16);
}

}  // namespace
}  // namespace kvemu

void kv_mma(KvBf16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, kvemu::Site site) {
  kvemu::mma("kv_mma of bf16", kvemu::multiply<kvemu::bf16_to_float>, c, a, b0, b1, site);
}
void kv_mma(KvF16, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, kvemu::Site site) {
  kvemu::mma("kv_mma of f16", kvemu::multiply<kvemu::half_to_float>, c, a, b0, b1, site);
}
void kv_ldsm4(u32 (&r)[4], const void* row, u32 offset, kvemu::Site site) {
  kvemu::load_matrices("kv_ldsm4", kvemu::spread, r, (const u8*)row + offset, site);
}
void kv_ldsm4t(u32 (&r)[4], const void* row, u32 offset, kvemu::Site site) {
  kvemu::load_matrices("kv_ldsm4t", kvemu::spread_transposed, r, (const u8*)row + offset, site);
}
u32 kv_movmatrix(u32 v, kvemu::Site site) {
  u32 result;
  kvemu::collective({"kv_movmatrix", 0, kvemu::transpose}, site, &v, 4, &result, 4);
  return result;
}
