// Values of V that are not finite, in the emulator compared with attention in f64: they reach the
// queries that see their tokens and no others, although other queries of a tile read the same
// memory. Runs the general kernels and those for prefill, the latter also over one-byte codes with
// a scale per row or of the plane and over 4-bit codes, for few and for many queries. Further cases
// have more queries than keys, no keys, or random numbers of both: work items without a visible key
// give zeros. Prefill also runs over contexts that its schedule splits, with windows too. A case is its
// seed, which also shuffles blocks and threads: `broken_test` runs all, `broken_test FIRST COUNT` some.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "../lloyd.h"
#include "../prefill_plan.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

extern "C" int kv_emu_launch(const char* name, const u32 grid[3], u32 threads, u32 shared_bytes, const void* params,
                             u32 params_bytes, u32 seed, char* error, u32 error_bytes);

namespace {

constexpr u32 KV_HEADS = 2, GROUP = 3, BLOCK = 16, KV_LEN = 150, HEADS = KV_HEADS * GROUP;
constexpr u32 BROKEN = 120, INFINITE = 130;  // tokens

struct Case {
  std::string kernel;
  u32 dtype, dim, rows, shared_bytes, q_len;
  u32 format = KV_FMT_F32;  // of codes: int8 per row or per plane, or l4
  u32 kv_len = KV_LEN;
  u32 window_left = KV_NONE, sink_tokens = 0, slots = 4;
  bool invariant = false;
};

bool is_prefill(const Case& c) { return c.kernel.rfind("prefill", 0) == 0; }

std::vector<Case> cases() {
  const u32 q_lens[] = {1, 5, 40, 90};
  std::vector<Case> all;
  for (u32 q_len : q_lens) {
    all.push_back({"attend_rows", KV_F16, 64, 16, 43008 + 16 * 4 * (64 + 64 + 72) + 16, q_len});
    all.push_back({"attend_rows_large", KV_F16, 64, 4, 43008 + 16 * (64 + 64 + 72) + 16, q_len});
    // All of them, the smallest and the largest with every number of queries.
    for (u32 dim : {64u, 80u, 96u, 128u, 192u, 256u}) {
      if (q_len != 40 && dim != 64 && dim != 256) continue;
      const u32 tokens = dim <= 128 ? 64 : 32, rows = dim <= 128 ? 128 : 64;
      const u32 shared_bytes = 2 * dim * (rows + 4 * tokens) + 32 * tokens + 32;
      all.push_back({"prefill_f16_" + std::to_string(dim), KV_F16, dim, rows, shared_bytes, q_len});
      all.push_back({"prefill_bf16_" + std::to_string(dim), KV_BF16, dim, rows, shared_bytes, q_len});
      const u32 coded_bytes = 2 * dim * (64 + 2 * tokens) + 64 * tokens + 800;
      for (u32 format : {KV_FMT_F32, KV_FMT_INT8_ROW})
        all.push_back({"prefill_coded_" + std::to_string(dim), KV_F16, dim, 64, coded_bytes, q_len, format});
      if (dim != 64 && dim != 128) continue;
      for (u32 format : {KV_FMT_INT8, KV_FMT_INT8_ROW, KV_FMT_L4}) {
        const char* name = format == KV_FMT_INT8 ? "codes" : format == KV_FMT_L4 ? "l4" : "rows";
        const u32 code_bytes = format == KV_FMT_L4 ? dim / 2 : dim;
        const u32 n = 4096 / dim;
        const u32 staged_bytes = 2 * dim * (rows + 4 * n) + 2 * n * (code_bytes + 16) + 56 * n + 8 * rows + 32;
        all.push_back({"prefill_" + std::string(name) + "_" + std::to_string(dim), KV_F16, dim, rows, staged_bytes,
                       q_len, format});
      }
    }
  }
  const std::vector<Case> full = all;
  // First those that are split: into two or three, and in two levels for the smallest rows, last.
  all.clear();
  for (size_t i = full.size(); i-- > 0;) {
    Case c = full[i];
    if (c.q_len != 40 || !is_prefill(c)) continue;
    c.slots = 40, c.kv_len = 1290, c.q_len = 9;
    all.push_back(c);
    if (c.dim != 64) continue;
    c.window_left = 700, c.sink_tokens = 125, c.q_len = 50;
    all.push_back(c);
    c.kv_len = 2900, c.window_left = KV_NONE;
    all.push_back(c);
    c.kv_len = 4200, c.invariant = true;
    all.push_back(c);
  }
  all.insert(all.end(), full.begin(), full.end());
  for (u32 kv_len : {0u, 5u})
    for (Case c : full)
      if (c.kv_len = kv_len; c.q_len >= 40) all.push_back(c);
  std::mt19937 bits(1);
  for (u32 i = 0; i < 64; i++) {
    Case c = full[bits() % full.size()];
    c.q_len = 1 + bits() % 140, c.kv_len = bits() % 70;
    all.push_back(c);
  }
  return all;
}

struct Memory {
  std::vector<u16> q, k, v, out;
  std::vector<u8> codes[2];
  std::vector<u32> tables, counters;
  KvSequence sequence = {};
  KvSplit split = {};
  KvCounts counts = {};
};

KvPlane plane(const Case& c, const std::vector<u16>& memory, u32 blocks) {
  KvPlane p = {};
  p.base = (u64)memory.data();
  p.token_stride = KV_HEADS * c.dim * 2;
  p.head_stride = p.wide_head_stride = c.dim * 2;
  p.block_bytes = BLOCK * p.token_stride;
  p.blocks_per_segment = p.num_blocks = blocks;
  p.block_size = BLOCK, p.num_kv_heads = KV_HEADS, p.head_dim = c.dim;
  p.format = c.dtype == KV_F16 ? KV_FMT_F16 : KV_FMT_BF16;
  p.row_bytes = c.dim * 2, p.wide_slots = 1, p.wide_per_block = BLOCK;
  return p;
}

// Quantises the rows of a plane, and replaces the rows by their decoded values. Rows of a plane with
// one scale are finite.
KvPlane coded(const Case& c, std::vector<u8>& codes, std::vector<u16>& memory, u32 blocks, u64 constants) {
  const bool is_l4 = c.format == KV_FMT_L4, has_scale = c.format != KV_FMT_INT8;
  const u32 code_bytes = is_l4 ? c.dim / 2 : c.dim, row_bytes = code_bytes + (has_scale ? 2 : 0);
  const u32 rows = (u32)(memory.size() / c.dim);
  // Blocks begin at 16 bytes.
  codes.assign((size_t)rows * row_bytes + 16, 0xff);
  u8* const first = codes.data() + (-(u64)codes.data() & 15);
  for (u32 row = 0; row < rows; row++) {
    u16 *values = &memory[row * c.dim], scale = is_l4 ? 0x3400 : 0x2400;  // 2^-2, 2^-6
    u8* to = first + row * row_bytes;
    for (u32 i = 0; i < c.dim; i++) {
      const float value = kv_f16_f(values[i]);
      if (!std::isfinite(value)) scale = values[i];
      if (is_l4) {
        // The level of the code, not the nearest one.
        const u32 code = values[i] % 16, at = i / 32 * 16 + i % 16;
        to[at] = (u8)(i % 32 < 16 ? code : to[at] | code << 4);
        values[i] = (u16)kv_pack(KvF16(), kv_level<4>(code), 0.f);
      } else {
        to[i] = std::isfinite(value) ? (u8)(i8)std::lrint(std::fmin(std::fmax(value * 64, -127), 127)) : 1;
        values[i] = (u16)kv_pack(KvF16(), (float)(i8)to[i], 0.f);
      }
    }
    for (u32 i = 0; i < c.dim; i++)
      values[i] = (u16)kv_pack(KvF16(), kv_f16_f(values[i]) * kv_f16_f(scale), 0.f);
    if (has_scale) to[code_bytes] = (u8)scale, to[code_bytes + 1] = (u8)(scale >> 8);
  }
  KvPlane p = plane(c, memory, blocks);
  p.base = (u64)first;
  p.token_stride = KV_HEADS * row_bytes, p.head_stride = row_bytes, p.block_bytes = BLOCK * p.token_stride;
  p.format = c.format, p.row_bytes = row_bytes, p.scales_begin = code_bytes;
  if (!has_scale) p.constants = constants;
  return p;
}

KvTensor tensor(const Case& c, const std::vector<u16>& memory) {
  return {(u64)memory.data(), 0, HEADS * c.dim * 2, KV_THD, c.dtype, 1, c.q_len, HEADS, c.dim};
}

u16 pack(const Case& c, float x) {
  return (u16)(c.dtype == KV_F16 ? kv_pack(KvF16(), x, 0.f) : kv_pack(KvBf16(), x, 0.f));
}
double value(const Case& c, u16 bits) { return c.dtype == KV_F16 ? kv_f16_f(bits) : kv_bf16_f(bits); }

// Returns the row of one output by its definition.
std::vector<double> expected(const Case& c, const Memory& m, u32 query, u32 head, float scale) {
  auto row = [&](const std::vector<u16>& rows, u32 token) { return &rows[(token * KV_HEADS + head / GROUP) * c.dim]; };
  double sum = 0;
  std::vector<double> values(c.dim);
  for (u32 token = 0; token + c.q_len <= c.kv_len + query && token < c.kv_len; token++) {
    const u16 *q = &m.q[(query * HEADS + head) * c.dim], *k = row(m.k, token), *v = row(m.v, token);
    double score = 0;
    for (u32 i = 0; i < c.dim; i++) score += value(c, q[i]) * value(c, k[i]);
    const u32 at = c.kv_len + query - c.q_len;
    if (c.window_left != KV_NONE && token + c.window_left < at && token >= c.sink_tokens) continue;
    const double weight = std::exp(score * scale);
    sum += weight;
    for (u32 i = 0; i < c.dim; i++) values[i] += weight * value(c, v[i]);
  }
  for (double& x : values) x = sum == 0 ? 0 : x / sum;
  return values;
}

bool near(const Case& c, double got, double want) {
  if (std::isnan(want)) return std::isnan(got);
  return got == want || std::fabs(got - want) <= (c.dtype == KV_F16 ? 2e-3 : 1.6e-2);
}

bool launch(const std::string& name, const u32 (&grid)[3], u32 threads, u32 shared_bytes, const void* params,
            u32 bytes, u32 seed) {
  char error[256] = "";
  const bool failed = kv_emu_launch(name.c_str(), grid, threads, shared_bytes, params, bytes, seed, error, sizeof error);
  if (failed) printf("%s\n", error);
  return !failed;
}

// Each returns whether it failed.
bool run_general(const Case& c, Memory& m, KvAttendParams& p, u32 seed) {
  const u32 grid[3] = {c.q_len * GROUP / c.rows + 1, KV_HEADS, 1};
  m.counters.assign(grid[0] * grid[1], 0);
  p.counters = (u64)m.counters.data();
  return !launch(c.kernel, grid, 128, c.shared_bytes, &p, sizeof p, seed);
}

bool run_prefill(const Case& c, Memory& m, KvAttendParams& p, u32 seed) {
  const u32 query_tiles = (c.q_len * GROUP + c.rows - 1) / c.rows;
  const u32 partials = c.invariant ? query_tiles * (c.kv_len / 4096 + 1) : 2 * c.slots / KV_HEADS;
  std::vector<KvWorkItem> items(query_tiles + partials + 1);
  items.back().split = 99;
  u32 count = 0;
  const KvPrefillPlanParams planning = {{p.plan, (u64)items.data(), (u64)&count, c.slots, KV_HEADS, GROUP, 0,
                                         c.window_left, c.sink_tokens, c.invariant, 0}, c.rows, 0};
  if (!launch("plan_prefill", {1, 1, 1}, 512, 10560, &planning, sizeof planning, seed)) return true;
  const bool is_split = count > query_tiles;
  if (count >= items.size() || items.back().split != 99 || is_split != (c.slots > 4)) {
    printf("%u work items for %u query tiles, at most %u partial results\n", count, query_tiles, partials);
    return true;
  }
  m.counters.assign(partials * KV_HEADS, 0);
  std::vector<float> partial_rows((size_t)partials * KV_HEADS * (c.dim + 8) * c.rows, NAN);
  p.counters = (u64)m.counters.data(), p.partial_rows = (u64)partial_rows.data();
  const KvPrefillParams params = {p, (u64)items.data(), (u64)&count};
  const u32 grid[3] = {query_tiles + partials, KV_HEADS, 1};
  std::vector<u16> first;
  for (u32 order : {0u, seed * 2 + 1}) {
    if (!launch(c.kernel, grid, 128, c.shared_bytes, &params, sizeof params, order)) return true;
    for (u32 counter : m.counters) if (counter != 0) return printf("counters are not zero\n") > 0;
    if (first.empty()) first = m.out;
    else if (first != m.out) return printf("another order, other bits\n") > 0;
    if (!is_split || c.dim != 64) break;
    std::fill(m.out.begin(), m.out.end(), 0xffff);
  }
  m.out = first;
  return false;
}

u32 run(const Case& c, u32 seed) {
  std::mt19937 bits(seed);
  std::normal_distribution<float> normal;
  Memory m;
  const u32 blocks = (c.kv_len + BLOCK - 1) / BLOCK, row = KV_HEADS * c.dim;
  const bool has_broken = c.kv_len > INFINITE && c.format != KV_FMT_INT8;
  auto fill = [&](std::vector<u16>& list, u32 length, u32 used) {
    list.assign(length, 0xffff);
    for (u32 i = 0; i < used; i++) list[i] = pack(c, normal(bits));
  };
  fill(m.q, c.q_len * HEADS * c.dim, c.q_len * HEADS * c.dim);
  fill(m.k, blocks * BLOCK * row, c.kv_len * row);
  fill(m.v, blocks * BLOCK * row, c.kv_len * row);
  if (has_broken) {
    m.v[BROKEN * row + 5] = 0xffff;                        // head 0
    m.v[INFINITE * row + c.dim + 9] = pack(c, INFINITY);   // head 1
  }
  m.out.assign(c.q_len * HEADS * c.dim, 0xffff);
  for (u32 i = 0; i < blocks; i++) m.tables.push_back(i);
  m.sequence.q_len = c.q_len, m.sequence.kv_len = m.sequence.coded = c.kv_len;
  m.sequence.num_splits = c.kv_len > 0;
  m.split.end = c.kv_len;
  m.counts.sequences = 1, m.counts.splits = m.sequence.num_splits, m.counts.total_q = m.counts.q_len_max = c.q_len;
  KvAttendParams p = {};
  p.plan = {(u64)&m.counts, (u64)&m.sequence, (u64)&m.split, 0, (u64)m.tables.data()};
  p.q = tensor(c, m.q), p.out = tensor(c, m.out);
  p.k_plane = plane(c, m.k, blocks), p.v_plane = plane(c, m.v, blocks);
  // Scales and their inverses, of each head.
  const float constants[2 * KV_HEADS] = {0.015625f, 0.015625f, 64.f, 64.f};
  if (c.format != KV_FMT_F32) {
    p.k_plane = coded(c, m.codes[0], m.k, blocks, (u64)constants);
    p.v_plane = coded(c, m.codes[1], m.v, blocks, (u64)constants);
  }
  p.scale = 1.f / std::sqrt((float)c.dim), p.group = GROUP, p.q_len_max = 0xffffffffu;
  p.window_left = c.window_left, p.sink_tokens = c.sink_tokens;
  if (is_prefill(c) ? run_prefill(c, m, p, seed) : run_general(c, m, p, seed)) return 1;
  u32 wrong = 0, broken = 0;
  for (u32 i = 0; i < c.q_len * HEADS; i++) {
    const std::vector<double> want = expected(c, m, i / HEADS, i % HEADS, p.scale);
    for (u32 d = 0; d < c.dim; d++) {
      const double got = value(c, m.out[i * c.dim + d]);
      broken += !std::isfinite(want[d]);
      if (!near(c, got, want[d]) && wrong++ == 0)
        printf("query %u, head %u, value %u is %g, expected %g\n", i / HEADS, i % HEADS, d, got, want[d]);
    }
  }
  // Every query at or after the token, for each head of the group.
  u32 see = 0;
  for (u32 token : {BROKEN, INFINITE})
    if (const u32 first = c.kv_len - c.q_len; has_broken) see += c.kv_len - (token > first ? token : first);
  if (c.format != KV_FMT_F32) broken /= c.dim;  // whole rows
  if (c.window_left != KV_NONE) return wrong;
  if (broken != see * GROUP) printf("%u values are not finite by definition, %u expected\n", broken, see * GROUP);
  return wrong + (broken != see * GROUP);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<Case> all = cases();
  const u32 first = argc > 1 ? (u32)std::atoi(argv[1]) : 0;
  const u32 count = argc > 2 ? (u32)std::atoi(argv[2]) : argc > 1 ? 1 : (u32)all.size();
  u32 failed = 0;
  for (u32 seed = first; seed < first + count; seed++) {
    const Case& c = all[seed % all.size()];
    const u32 wrong = run(c, seed);
    if (wrong > 0)
      printf("seed %u: %s, %u queries, %u keys: %u wrong\n", seed, c.kernel.c_str(), c.q_len, c.kv_len, wrong);
    failed += wrong > 0;
  }
  printf("%u cases, %u failed\n", count, failed);
  return failed > 0;
}
