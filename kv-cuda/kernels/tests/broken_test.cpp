// Values of V that are not finite, in the emulator against attention in f64: they reach the queries
// that see their tokens and no others, though other queries of a tile meet the same memory. Runs the
// kernel for everything and prefill, over rows of f16 and, by the latter, over codes of a byte with a scale
// a row, for a few and for many queries.
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "../params.h"

extern "C" int kv_emu_launch(const char* name, const u32 grid[3], u32 threads, u32 shared_bytes, const void* params,
                             u32 params_bytes, u32 seed, char* error, u32 error_bytes);

namespace {

constexpr u32 DIM = 64, KV_HEADS = 2, GROUP = 3, BLOCK = 16, KV_LEN = 150, HEADS = KV_HEADS * GROUP;
constexpr u32 BROKEN = 120, INFINITE = 130;  // tokens
constexpr u32 ROW = DIM + 2;                 // bytes of codes and their scale

struct Memory {
  std::vector<u16> q, k, v, out;
  std::vector<u8> codes[2];
  std::vector<u32> tables, counters;
  KvSequence sequence = {};
  KvSplit split = {};
  KvCounts counts = {};
};

KvPlane plane(const std::vector<u16>& memory, u32 blocks) {
  KvPlane p = {};
  p.base = (u64)memory.data();
  p.token_stride = KV_HEADS * DIM * 2;
  p.head_stride = p.wide_head_stride = DIM * 2;
  p.block_bytes = BLOCK * p.token_stride;
  p.blocks_per_segment = p.num_blocks = blocks;
  p.block_size = BLOCK, p.num_kv_heads = KV_HEADS, p.head_dim = DIM, p.format = KV_FMT_F16;
  p.row_bytes = DIM * 2, p.wide_slots = 1, p.wide_per_block = BLOCK;
  return p;
}

// Makes codes of the rows of a plane, and the rows what the codes mean.
KvPlane coded(std::vector<u8>& codes, std::vector<u16>& memory, u32 blocks) {
  codes.assign(memory.size() / DIM * ROW, 0xff);
  for (u32 row = 0; row < memory.size() / DIM; row++) {
    u16 *values = &memory[row * DIM], scale = 0x2400;  // 2^-6
    u8* to = &codes[row * ROW];
    for (u32 i = 0; i < DIM; i++) {
      const float value = kv_f16_f(values[i]);
      if (!std::isfinite(value)) scale = values[i];
      to[i] = std::isfinite(value) ? (u8)(i8)std::lrint(std::fmin(std::fmax(value * 64, -127), 127)) : 1;
    }
    for (u32 i = 0; i < DIM; i++) values[i] = (u16)kv_pack(KvF16(), (float)(i8)to[i] * kv_f16_f(scale), 0.f);
    to[DIM] = (u8)scale, to[DIM + 1] = (u8)(scale >> 8);
  }
  KvPlane p = plane(memory, blocks);
  p.base = (u64)codes.data();
  p.token_stride = KV_HEADS * ROW, p.head_stride = ROW, p.block_bytes = BLOCK * p.token_stride;
  p.format = KV_FMT_INT8_ROW, p.row_bytes = ROW, p.scales_begin = DIM;
  return p;
}

KvTensor tensor(const std::vector<u16>& memory, u32 tokens) {
  return {(u64)memory.data(), 0, HEADS * DIM * 2, KV_THD, KV_F16, 1, tokens, HEADS, DIM};
}

// The value of one output by its definition.
double expected(const Memory& m, u32 q_len, u32 query, u32 head, u32 d) {
  auto row = [&](const std::vector<u16>& rows, u32 token) { return &rows[(token * KV_HEADS + head / GROUP) * DIM]; };
  double sum = 0, value = 0;
  for (u32 token = 0; token + q_len <= KV_LEN + query; token++) {
    double score = 0;
    for (u32 i = 0; i < DIM; i++)
      score += (double)kv_f16_f(m.q[(query * HEADS + head) * DIM + i]) * kv_f16_f(row(m.k, token)[i]);
    const double weight = std::exp(score / 8);
    sum += weight;
    value += weight * kv_f16_f(row(m.v, token)[d]);
  }
  return value / sum;
}

bool near(double got, double want) {
  if (std::isnan(want)) return std::isnan(got);
  return got == want || std::fabs(got - want) <= 2e-3;
}

u32 run(const std::string& kernel, u32 q_len, u32 rows, u32 shared_bytes, bool codes = false) {
  std::mt19937 bits(q_len);
  std::normal_distribution<float> normal;
  Memory m;
  const u32 blocks = (KV_LEN + BLOCK - 1) / BLOCK;
  auto fill = [&](std::vector<u16>& list, u32 length, u32 used) {
    list.assign(length, 0x7e00);
    for (u32 i = 0; i < used; i++) list[i] = (u16)kv_pack(KvF16(), normal(bits), 0.f);
  };
  fill(m.q, q_len * HEADS * DIM, q_len * HEADS * DIM);
  fill(m.k, blocks * BLOCK * KV_HEADS * DIM, KV_LEN * KV_HEADS * DIM);
  fill(m.v, blocks * BLOCK * KV_HEADS * DIM, KV_LEN * KV_HEADS * DIM);
  m.v[BROKEN * KV_HEADS * DIM + 5] = 0x7e00;               // head 0
  m.v[(INFINITE * KV_HEADS + 1) * DIM + 9] = 0x7c00;       // head 1
  m.out.assign(q_len * HEADS * DIM, 0x7e00);
  for (u32 i = 0; i < blocks; i++) m.tables.push_back(i);
  m.sequence.q_len = q_len, m.sequence.kv_len = m.sequence.coded = KV_LEN, m.sequence.num_splits = 1;
  m.split.end = KV_LEN;
  m.counts.sequences = m.counts.splits = 1, m.counts.total_q = m.counts.q_len_max = q_len;
  KvAttendParams p = {};
  p.plan = {(u64)&m.counts, (u64)&m.sequence, (u64)&m.split, 0, (u64)m.tables.data()};
  p.q = tensor(m.q, q_len), p.out = tensor(m.out, q_len);
  p.k_plane = plane(m.k, blocks), p.v_plane = plane(m.v, blocks);
  if (codes) p.k_plane = coded(m.codes[0], m.k, blocks), p.v_plane = coded(m.codes[1], m.v, blocks);
  p.scale = 0.125f, p.window_left = 0xffffffffu, p.group = GROUP, p.q_len_max = 0xffffffffu;
  const u32 grid[3] = {q_len * GROUP / rows + 1, KV_HEADS, 1};
  m.counters.assign(grid[0] * grid[1], 0);
  p.counters = (u64)m.counters.data();
  char error[256] = "";
  if (kv_emu_launch(kernel.c_str(), grid, 128, shared_bytes, &p, sizeof p, q_len, error, sizeof error) != 0) {
    printf("%s: %s\n", kernel.c_str(), error);
    return 1;
  }
  u32 wrong = 0, broken = 0;
  for (u32 i = 0; i < m.out.size(); i++) {
    const double got = kv_f16_f(m.out[i]), want = expected(m, q_len, i / DIM / HEADS, i / DIM % HEADS, i % DIM);
    broken += !std::isfinite(want);
    if (!near(got, want) && wrong++ == 0)
      printf("%s, %u queries: value %u is %g, expected %g\n", kernel.c_str(), q_len, i, got, want);
  }
  // Every query at or behind the token, for each head of the group.
  const u32 first = KV_LEN - q_len;
  const u32 see = (KV_LEN - (BROKEN > first ? BROKEN : first)) + (KV_LEN - (INFINITE > first ? INFINITE : first));
  if (codes) broken /= DIM;  // whole rows
  if (broken != see * GROUP) printf("%u values are not finite by definition, %u expected\n", broken, see * GROUP);
  return wrong + (broken != see * GROUP);
}

}  // namespace

int main() {
  u32 wrong = 0;
  for (u32 q_len : {1u, 5u, 40u, 90u}) {
    wrong += run("attend_rows", q_len, 16, 43008 + 16 * 4 * (64 + 64 + 72) + 16);
    wrong += run("attend_rows_large", q_len, 4, 43008 + 16 * (64 + 64 + 72) + 16);
    wrong += run("prefill_f16_64", q_len, 64, 2 * (64 + 2 * 64) * (64 + 8) + 32 * 64 + 16);
    for (bool codes : {false, true})
      wrong += run("prefill_coded_64", q_len, 64, 2 * (64 + 2 * 64) * (64 + 8) + 64 * 64 + 784, codes);
  }
  printf("%u wrong\n", wrong);
  return wrong != 0;
}
