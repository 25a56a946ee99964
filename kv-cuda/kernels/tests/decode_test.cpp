// Decoding in the emulator compared with attention in f64: random batches, formats, masks, layouts
// and ring sizes.
//
// Keys that no query sees are NaN, and table entries of blocks in which no query sees a key are
// invalid, so a kernel that reads there fails. Outputs have rows for more queries than there are,
// which must be filled. The plan is the device's, and is checked too. A case is its seed:
// `decode_test SEED` runs one and describes it; `decode_test FIRST COUNT` runs several.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../format.h"
#undef threadIdx
#undef blockIdx
#undef blockDim
#undef gridDim

extern "C" int kv_emu_launch(const char* name, const u32 grid[3], u32 threads, u32 shared_bytes, const void* params,
                             u32 params_bytes, u32 seed, char* error, u32 error_bytes);

namespace {

// The first choices of a case are the digits of its seed, so that consecutive seeds cover all
// formats and dims; the others are random.
struct Random {
  std::mt19937 bits;
  u32 digits = 0;
  u32 below(u32 n) {
    if (digits == 0) return bits() % n;
    const u32 digit = digits % n;
    digits /= n;
    return digit;
  }
  template <class T, size_t N> T pick(const T (&list)[N]) { return list[below(N)]; }
  bool flip(u32 one_in) { return below(one_in) == 0; }
  float normal() { return std::normal_distribution<float>()(bits); }
};

constexpr u32 SHARED_MAX = 232448;  // bytes of a block, at most

struct Case {
  u32 format, dtype, dim, kv_heads, group, block_size, slots, stages, axes;
  bool hnd, segments, full, has_sink_logits, invariant, wants_lse, transforms, wild, apart, aligned;
  u32 window_left, sink_tokens;
  float scale, soft_cap, k_scale, v_scale, spread;
  std::vector<u32> q_lens, kv_lens;
  u32 spare;  // entries and tokens of the output beyond those of the batch
};

bool is_codes(u32 format) { return format > KV_FMT_BF16; }
// Returns whether rows have scales of their own.
bool is_scaled(u32 format) {
  return format == KV_FMT_L4 || format == KV_FMT_E4M3_ROW || format == KV_FMT_E5M2_ROW || format == KV_FMT_INT8_ROW;
}
bool has_given_scale(u32 format) { return is_codes(format) && !is_scaled(format); }
u32 code_bytes(const Case& c) {
  if (!is_codes(c.format)) return c.dim * 2;
  return c.format == KV_FMT_L4 ? c.dim / 2 : c.dim;
}
u32 row_bytes(const Case& c) { return code_bytes(c) + (is_scaled(c.format) ? 2 : 0); }
// Returns the bytes of a row in shared memory.
u32 row_stride(const Case& c) { return code_bytes(c) + (is_scaled(c.format) ? 16 : 0); }
const char* name_of(u32 format) {
  switch (format) {
    case KV_FMT_F16: return "f16";
    case KV_FMT_BF16: return "bf16";
    case KV_FMT_E4M3: return "e4m3";
    case KV_FMT_E5M2: return "e5m2";
    case KV_FMT_INT8: return "int8";
    case KV_FMT_E4M3_ROW: return "e4m3_row";
    case KV_FMT_E5M2_ROW: return "e5m2_row";
    case KV_FMT_INT8_ROW: return "int8_row";
    default: return "l4";
  }
}

Case random_case(Random& r) {
  Case c;
  c.format = r.pick({(u32)KV_FMT_F16, (u32)KV_FMT_BF16, (u32)KV_FMT_E4M3, (u32)KV_FMT_E5M2, (u32)KV_FMT_INT8,
                     (u32)KV_FMT_E4M3_ROW, (u32)KV_FMT_E5M2_ROW, (u32)KV_FMT_INT8_ROW, (u32)KV_FMT_INT8_ROW,
                     (u32)KV_FMT_L4, (u32)KV_FMT_L4});
  c.dtype = c.format == KV_FMT_F16 ? KV_F16 : c.format == KV_FMT_BF16 ? KV_BF16 : r.flip(2) ? KV_F16 : KV_BF16;
  c.dim = r.pick({64u, 80u, 96u, 128u, 192u, 256u});
  if (c.format == KV_FMT_L4 && c.dim == 80) c.dim = 96;
  if (c.format == KV_FMT_E4M3_ROW && c.dim == 256) c.dim = 192;
  c.kv_heads = 1 + r.below(3);
  c.group = r.pick({1u, 1u, 2u, 3u, 4u, 7u, 8u, 16u, 20u});
  c.block_size = r.pick({1u, 3u, 8u, 16u, 16u, 24u, 48u, 64u, 256u});
  c.slots = r.pick({1u, 2u, 5u, 12u});
  const u32 stage_bytes = (c.dim >= 192 ? 64 : 128) * row_stride(c);
  c.stages = 2 + r.below(std::min(7u, (SHARED_MAX - c.dim * 64) / stage_bytes - 1));
  c.axes = r.below(3);
  c.hnd = r.flip(2), c.segments = r.flip(3), c.full = r.flip(4), c.has_sink_logits = r.flip(3);
  c.invariant = r.flip(4), c.wants_lse = !r.flip(4);
  c.window_left = r.flip(2) ? 0xffffffffu : r.pick({0u, 1u, 5u, 63u, 100u, 300u});
  c.sink_tokens = r.flip(2) ? 0 : r.pick({1u, 4u, 33u, 64u, 130u});
  c.scale = 1.f / std::sqrt((float)c.dim);
  c.soft_cap = r.flip(3) ? 5.f : 0.f;
  c.k_scale = is_codes(c.format) ? 0.75f : 1.f;
  c.v_scale = is_codes(c.format) ? 1.5f : 1.f;
  c.spread = r.flip(5) ? 8.f : 1.f;
  c.transforms = is_scaled(c.format) && r.flip(2), c.wild = is_scaled(c.format) && r.flip(2);
  // Heads that begin at no multiple of 16 bytes, and queries that all do.
  c.apart = c.hnd && is_scaled(c.format) && r.flip(4), c.aligned = r.flip(2);
  const u32 sequences = r.flip(8) ? 40 : 1 + r.below(4);
  for (u32 i = 0; i < sequences; i++) {
    const u32 limit = sequences > 8 ? 70 : r.flip(12) ? 3000 : 600;
    c.q_lens.push_back(r.pick({0u, 1u, 1u, 1u, 1u, 2u, 3u, 5u}));
    c.kv_lens.push_back(r.flip(4) ? r.pick({0u, 1u, 2u, 15u, 16u, 17u, 31u, 32u, 33u, 64u, 65u, 127u, 128u, 129u}) : r.below(limit));
  }
  if (r.flip(40)) {  // more splits than a warp holds weights of
    c.kv_heads = 1, c.slots = 80, c.window_left = 0xffffffffu, c.invariant = false;
    c.q_lens = {1}, c.kv_lens = {20000};
  }
  c.spare = r.pick({0u, 0u, 1u, 3u, 70u});
  return c;
}

std::string describe(const Case& c) {
  char text[512];
  snprintf(text, sizeof text,
           "%s q %s dim %u heads %u x %u block %u slots %u stages %u axes %u%s%s%s%s%s%s%s%s%s window %d+%u cap %g "
           "spread %g:",
           name_of(c.format), c.dtype == KV_F16 ? "f16" : "bf16", c.dim, c.kv_heads, c.group, c.block_size, c.slots,
           c.stages, c.axes, c.hnd ? " hnd" : "", c.segments ? " segments" : "", c.full ? " full" : "",
           c.has_sink_logits ? " sink_logits" : "", c.invariant ? " invariant" : "",
           c.transforms ? " transforms" : "", c.wild ? " wild" : "",
           c.apart ? " apart" : "", c.aligned ? " aligned" : "", (int)c.window_left, c.sink_tokens, c.soft_cap,
           c.spread);
  std::string all = text;
  for (size_t i = 0; i < c.q_lens.size(); i++) {
    all += " " + std::to_string(c.q_lens[i]) + "/" + std::to_string(c.kv_lens[i]);
  }
  return all;
}

u16 to16(u32 dtype, float x) { return dtype == KV_F16 ? kvemu::float_to_half(x) : kvemu::float_to_bf16(x); }
float from16(u32 dtype, u16 x) { return dtype == KV_F16 ? kvemu::half_to_float(x) : kvemu::bf16_to_float(x); }

// Writes a random code and returns its value.
float put_value(const Case& c, Random& r, u8* to) {
  const float x = r.normal();
  if (!is_codes(c.format)) {
    const u16 bits = to16(c.dtype, x);
    std::memcpy(to, &bits, 2);
    return from16(c.dtype, bits);
  }
  if (c.format == KV_FMT_INT8 || c.format == KV_FMT_INT8_ROW) {
    const int code = std::max(-128, std::min(127, (int)std::lrint(x * 40)));
    *to = (u8)(i8)code;
    return (float)code;
  }
  // E5M2 is the upper byte of f16, truncated here; E4M3 likewise with a bit moved, where it is
  // normal.
  const u16 half = kvemu::float_to_half(x);
  if (c.format == KV_FMT_E5M2 || c.format == KV_FMT_E5M2_ROW) {
    *to = (u8)(half >> 8);
    return kvemu::half_to_float((u16)(*to << 8));
  }
  const float cut = std::fabs(x) < 0.02f ? std::copysign(0.02f, x) : x;
  const u32 bits = kvemu::as_bits(cut);
  *to = (u8)((bits >> 24 & 0x80) | ((bits >> 20 & 0x7ff) - (120 << 3)));
  return kvemu::e4m3_to_float(*to);
}

// Multiplies blocks of powers of two, largest first, with the Hadamard matrix.
void rotate(double* x, u32 dim) {
  for (u32 block = 256; block > 1; block /= 2) {
    if ((dim & block) == 0) continue;
    for (u32 step = 1; step < block; step *= 2) {
      for (u32 i = 0; i < block; i++) {
        if ((i & step) != 0) continue;
        const double a = x[i], b = x[i + step];
        x[i] = a + b, x[i + step] = a - b;
      }
    }
    for (u32 i = 0; i < block; i++) x[i] /= std::sqrt((double)block);
    x += block;
  }
}

// Writes a random row with a scale of its own, and its values.
void put_scaled(const Case& c, Random& r, bool is_v, u8* row, double* values) {
  const u32 codes = code_bytes(c);
  if (c.format == KV_FMT_L4) {
    for (u32 i = 0; i < codes; i++) row[i] = (u8)r.below(256);
    for (u32 d = 0; d < c.dim; d++) values[d] = kv_lloyd_level<4>(row, c.dim, d);
  } else {
    for (u32 d = 0; d < c.dim; d++) values[d] = put_value(c, r, row + d);
  }
  float scale = (is_v ? c.v_scale : c.k_scale) * std::exp2(r.normal() * 0.5f);
  if (c.format == KV_FMT_INT8_ROW) scale *= 0.025f;
  if (c.wild && is_v) scale *= std::exp2(-(float)r.below(24));
  const u16 bits = r.flip(40) ? 0 : kvemu::float_to_half(scale);
  std::memcpy(row + codes, &bits, 2);
  for (u32 d = 0; d < c.dim; d++) values[d] *= kvemu::half_to_float(bits);
}

constexpr u32 HOLE = 0x3fffffff;  // not a valid block

struct Plane {
  std::vector<std::vector<u8>> memory;  // segments, to the byte; the host's allocator aligns them to 16
  std::vector<u64> bases;
  KvPlane params;
  std::vector<float> constants;
};

struct Fixture {
  const Case& c;
  Random r;
  Plane k, v;
  std::vector<u32> tables;
  std::vector<KvSequence> sequences;
  std::vector<double> k_values, v_values;  // [table slot][kv head][dim] by sequence
  std::vector<size_t> first_row;
  std::vector<u32> poison;  // a key of each sequence, or HOLE: a NaN for queries that see it, and for no others
  u32 num_blocks = 2;

  Fixture(const Case& c, u32 seed) : c(c), r{std::mt19937(seed)} {
    u32 rows = 0, blocks = 0;
    size_t tokens = 0;
    for (size_t i = 0; i < c.q_lens.size(); i++) {
      const u32 own = (c.kv_lens[i] + c.block_size - 1) / c.block_size;
      KvSequence s{};
      s.q_start = rows, s.q_len = c.q_lens[i], s.kv_len = c.kv_lens[i], s.coded = s.kv_len, s.table = blocks;
      sequences.push_back(s);
      const bool poisoned = c.format != KV_FMT_INT8 && s.kv_len > 0 && r.flip(4);
      poison.push_back(poisoned ? s.kv_len - 1 - r.below(std::min(s.kv_len, 8u)) : HOLE);
      first_row.push_back(tokens);
      rows += s.q_len, blocks += own, tokens += s.kv_len;
    }
    num_blocks += blocks;
    std::vector<u32> order(num_blocks);
    for (u32 i = 0; i < num_blocks; i++) order[i] = i;
    std::shuffle(order.begin(), order.end(), r.bits);
    tables.assign(order.begin(), order.begin() + blocks);
    make(k, c.k_scale), make(v, c.v_scale);
    k_values.resize(tokens * c.kv_heads * c.dim), v_values.resize(k_values.size());
    for (size_t i = 0; i < sequences.size(); i++) fill(i);
  }

  void make(Plane& plane, float scale) {
    const u32 row = row_bytes(c), per_segment = c.segments ? 3 : num_blocks;
    const u32 head = row * c.block_size + (c.apart ? 6 : 0);
    const u64 gap = r.flip(2) ? 0 : 48;
    KvPlane& p = plane.params;
    p = KvPlane{};
    p.token_stride = c.hnd ? row : row * c.kv_heads;
    p.head_stride = c.hnd ? head : row;
    p.block_bytes = ((u64)head * c.kv_heads + 15) / 16 * 16 + gap;
    p.blocks_per_segment = per_segment, p.num_blocks = num_blocks, p.block_size = c.block_size;
    p.num_kv_heads = c.kv_heads, p.head_dim = c.dim, p.format = c.format, p.row_bytes = row;
    p.scales_begin = code_bytes(c), p.transforms = c.transforms;
    for (u32 i = 0; i < num_blocks; i += per_segment) {
      plane.memory.emplace_back(std::min(per_segment, num_blocks - i) * p.block_bytes, 0xff);
      plane.bases.push_back((u64)plane.memory.back().data());
    }
    p.base = plane.bases[0], p.segments = c.segments ? (u64)plane.bases.data() : 0;
    plane.constants.assign(2 * c.kv_heads + 3 * c.kv_heads * c.dim, 1.f);
    for (u32 h = 0; h < c.kv_heads; h++) plane.constants[h] = scale * (1.f + 0.25f * h);
    if (c.transforms) {
      float* const mean = plane.constants.data() + 2 * c.kv_heads;
      float* const back = mean + 2 * c.kv_heads * c.dim;
      for (u32 i = 0; i < c.kv_heads * c.dim; i++) {
        mean[i] = &plane == &k ? r.normal() * 0.3f : 0.f;
        back[i] = std::exp2(r.normal() * 0.5f) * (r.flip(2) ? 1.f : -1.f);
      }
    }
    p.constants = has_given_scale(c.format) || c.transforms ? (u64)plane.constants.data() : 0;
  }

  bool is_visible(const KvSequence& s, u32 query, u32 key) const {
    const i64 at = (i64)s.kv_len - s.q_len + query, k = key;
    if (!c.full && k > at) return false;
    return c.window_left == 0xffffffffu || k >= at - (i64)c.window_left || k < (i64)c.sink_tokens;
  }

  void fill(size_t index) {
    const KvSequence& s = sequences[index];
    const u32 step = is_codes(c.format) ? 1 : 2;
    std::vector<bool> used((s.kv_len + c.block_size - 1) / c.block_size);
    for (u32 key = 0; key < s.kv_len; key++) {
      bool seen = false;
      for (u32 i = 0; i < s.q_len; i++) seen |= is_visible(s, i, key);
      if (!seen) continue;
      used[key / c.block_size] = true;
      if (poison[index] == key) continue;  // the bytes that are there are NaN
      for (int is_v = 0; is_v < 2; is_v++) {
        Plane& plane = is_v ? v : k;
        const KvPlane& p = plane.params;
        const u32 block = tables[s.table + key / c.block_size];
        for (u32 h = 0; h < c.kv_heads; h++) {
          u8* row = (u8*)plane.bases[block / p.blocks_per_segment] + block % p.blocks_per_segment * p.block_bytes +
                    key % c.block_size * p.token_stride + h * p.head_stride;
          double* values = (is_v ? v_values : k_values).data() + ((first_row[index] + key) * c.kv_heads + h) * c.dim;
          if (is_scaled(c.format)) {
            put_scaled(c, r, is_v != 0, row, values);
            if (!c.transforms) continue;
            rotate(values, c.dim);
            const float* mean = plane.constants.data() + 2 * c.kv_heads + h * c.dim;
            const float* back = mean + 2 * c.kv_heads * c.dim;
            for (u32 d = 0; d < c.dim; d++) values[d] = values[d] * back[d] + mean[d];
            continue;
          }
          const double scale = is_codes(c.format) ? plane.constants[h] : 1.f;
          for (u32 d = 0; d < c.dim; d++) values[d] = put_value(c, r, row + d * step) * scale;
        }
      }
    }
    for (size_t i = 0; i < used.size(); i++) if (!used[i]) tables[s.table + i] = HOLE;
  }
};

// A tensor with unused space around its rows, filled with one value.
struct Rows {
  std::vector<u8> memory;
  KvTensor t{};
  Rows(const Fixture& w, u32 heads, u32 dim, u32 dtype, u8 byte) {
    const u32 bytes = dtype == KV_F32 ? 4 : 2, batch = (u32)w.sequences.size() + w.c.spare;
    u32 total = w.c.spare, longest = 1 + w.c.spare % 2;
    for (const KvSequence& s : w.sequences) total += s.q_len, longest = std::max(longest, s.q_len);
    const u64 token = (u64)heads * dim * bytes + (w.c.aligned ? 16 : 8);
    t.axes = w.c.axes, t.dtype = dtype, t.heads = heads, t.dim = dim;
    t.batch = t.axes == KV_THD ? 1 : batch, t.tokens = t.axes == KV_THD ? total : longest;
    t.token_stride = t.axes == KV_SBHD ? token * batch : token;
    t.batch_stride = t.axes == KV_THD ? 0 : t.axes == KV_SBHD ? token : token * longest;
    memory.assign(token * std::max<u64>(t.axes == KV_THD ? total : (u64)batch * longest, 1), byte);
    t.data = (u64)memory.data();
  }
  u8* row(const KvSequence& s, size_t entry, u32 i, u32 head) const {
    const u64 token = t.axes == KV_THD ? (s.q_start + i) * t.token_stride : entry * t.batch_stride + i * t.token_stride;
    return (u8*)t.data + token + (u64)head * t.dim * (t.dtype == KV_F32 ? 4 : 2);
  }
  // Returns whether every row without a query has only this value, and the bytes between rows are
  // as they were.
  bool is_filled(const Fixture& w, u32 value) const {
    const u32 bytes = t.heads * t.dim * (t.dtype == KV_F32 ? 4 : 2);
    u32 total = 0;
    for (const KvSequence& s : w.sequences) total += s.q_len;
    for (u32 entry = 0; entry < t.batch; entry++) {
      const u32 owned = t.axes == KV_THD ? total : entry < w.sequences.size() ? w.sequences[entry].q_len : 0;
      for (u32 i = 0; i < t.tokens; i++) {
        const u8* at = (const u8*)t.data + entry * t.batch_stride + i * t.token_stride;
        for (u32 byte = i < owned ? bytes : 0; byte < bytes + 8; byte++) {
          if (at[byte] != (byte < bytes ? (u8)(value >> byte % 4 * 8) : 0xff)) return false;
        }
      }
    }
    return true;
  }
};

int fail(const char* what) {
  printf("  %s\n", what);
  return 1;
}

int launch(const std::string& name, u32 blocks, u32 threads, u32 shared, const void* params, u32 bytes, u32 seed) {
  const u32 grid[3] = {blocks, 1, 1};
  char error[512] = "";
  if (kv_emu_launch(name.c_str(), grid, threads, shared, params, bytes, seed, error, sizeof error) == 0) return 0;
  return fail((name + ": " + error).c_str());
}

// Every query tile of every head must be split into consecutive work items, in slots that never
// decrease.
int check_plan(const Fixture& w, const std::vector<KvWorkItem>& items, const std::vector<u32>& starts) {
  const Case& c = w.c;
  if (starts[0] != 0 || !std::is_sorted(starts.begin(), starts.end()) || starts.back() > items.size()) {
    return fail("starts of slots decrease");
  }
  size_t at = 0;
  u32 partials = 0;
  for (size_t i = 0; i < w.sequences.size(); i++) {
    const u32 rows = w.sequences[i].q_len * c.group;
    for (u32 head = 0; head < c.kv_heads; head++) {
      for (u32 row = 0; row < rows; row += 16) {
        const u32 num_splits = at < starts.back() ? items[at].num_splits : 0;
        u32 tile = 0;
        if (num_splits == 0) return fail("a query tile has no work item");
        for (u32 split = 0; split < num_splits; split++, at++) {
          if (at >= starts.back()) return fail("splits are missing");
          const KvWorkItem& p = items[at];
          const bool right = p.sequence == i && p.head == head && p.row == row && p.split == split &&
                             p.num_splits == num_splits &&
                             p.tile_begin == tile && p.partial == (num_splits > 1 ? partials : 0) &&
                             (p.tile_end > tile || num_splits == 1) && p.kv_len == w.sequences[i].kv_len &&
                             p.q_len == w.sequences[i].q_len && p.q_start == w.sequences[i].q_start &&
                             p.table == w.sequences[i].table;
          if (!right) return fail("a work item is not the next one");
          tile = p.tile_end;
        }
        partials += num_splits > 1 ? num_splits : 0;
      }
    }
  }
  return at == starts.back() ? 0 : fail("more work items than work");
}

int compare(const Fixture& w, const Rows& q, const Rows& out, const Rows& lse, const std::vector<float>& sink_logits) {
  const Case& c = w.c;
  double worst = 0, worst_lse = 0;
  // Rounding unit of the type: relative, and its minimum.
  const double unit = c.dtype == KV_F16 ? 0x1p-10 : 0x1p-7, least = c.dtype == KV_F16 ? 0x1p-25 : 0;
  for (size_t i = 0; i < w.sequences.size(); i++) {
    const KvSequence& s = w.sequences[i];
    for (u32 query = 0; query < s.q_len; query++) {
      for (u32 head = 0; head < c.kv_heads * c.group; head++) {
        const u16* got = (const u16*)out.row(s, i, query, head);
        if (w.poison[i] != HOLE && w.is_visible(s, query, w.poison[i])) {
          for (u32 d = 0; d < c.dim; d++) if (!std::isnan(from16(c.dtype, got[d]))) worst = 2e9;
          continue;
        }
        const u16* q_row = (const u16*)q.row(s, i, query, head);
        const auto row = [&](const std::vector<double>& all, u32 key) {
          return all.data() + ((w.first_row[i] + key) * c.kv_heads + head / c.group) * c.dim;
        };
        std::vector<double> scores(s.kv_len, -INFINITY), expected(c.dim);
        double max = c.has_sink_logits ? sink_logits[head] : -INFINITY, sum = 0, largest = 0;
        for (u32 key = 0; key < s.kv_len; key++) {
          if (!w.is_visible(s, query, key)) continue;
          double x = 0;
          for (u32 d = 0; d < c.dim; d++) x += from16(c.dtype, q_row[d]) * row(w.k_values, key)[d];
          x *= c.scale;
          scores[key] = c.soft_cap > 0 ? c.soft_cap * std::tanh(x / c.soft_cap) : x;
          max = std::max(max, scores[key]);
        }
        for (u32 key = 0; key < s.kv_len; key++) {
          if (scores[key] == -INFINITY) continue;
          const double weight = std::exp(scores[key] - max);
          sum += weight;
          double most = 0;
          for (u32 d = 0; d < c.dim; d++) {
            expected[d] += weight * row(w.v_values, key)[d];
            most = std::max(most, std::fabs(row(w.v_values, key)[d]));
          }
          // In rows with scales, every token contributes its own error, by its weight.
          largest = is_scaled(c.format) ? largest + weight * most : std::max(largest, most);
        }
        if (c.has_sink_logits) sum += std::exp(sink_logits[head] - max);
        if (is_scaled(c.format) && sum > 0) largest /= sum;
        for (u32 d = 0; d < c.dim; d++) {
          const double right = sum > 0 ? expected[d] / sum : 0, x = from16(c.dtype, got[d]);
          const double off = std::fabs(x - right), beyond = off <= least ? 0 : off - least;
          const double error = largest > 0 ? (std::isnan(x) ? NAN : beyond) / (largest * unit) : x == 0 ? 0 : 1e9;
          if (!(error <= worst)) worst = std::isnan(error) ? 1e9 : error;
        }
        if (!c.wants_lse) continue;
        float x;
        std::memcpy(&x, lse.row(s, i, query, head), 4);
        const double right = sum > 0 ? std::log(sum) + max : -INFINITY;
        const double error = right == x ? 0 : std::fabs(right - x) / (1 + std::fabs(right));
        if (!(error <= worst_lse)) worst_lse = std::isnan(error) ? 1e9 : error;
      }
    }
  }
  // Levels of l4 are rounded to f16, which shows if scores are large.
  const double limit = c.format == KV_FMT_L4 && c.spread > 1 ? 12 : 1.5;
  if (worst < limit && worst_lse < 2e-3) return 0;
  printf("  error %g units, of lse %g\n", worst, worst_lse);
  return 1;
}

int run(u32 seed) {
  Random r{std::mt19937(seed), seed};
  const Case c = random_case(r);
  Fixture w(c, seed + 1);
  const u32 heads = c.kv_heads * c.group;
  Rows q(w, heads, c.dim, c.dtype, 0xff), out(w, heads, c.dim, c.dtype, 0xff), lse(w, heads, 1, KV_F32, 0xff);
  for (size_t i = 0; i < w.sequences.size(); i++) {
    for (u32 query = 0; query < w.sequences[i].q_len; query++) {
      u16* row = (u16*)q.row(w.sequences[i], i, query, 0);
      const float scale = c.spread * (c.format == KV_FMT_INT8 ? 0.025f : 1.f);
      for (u32 d = 0; d < heads * c.dim; d++) row[d] = to16(c.dtype, r.normal() * scale);
    }
  }
  std::vector<float> sink_logits(heads);
  for (float& x : sink_logits) x = r.flip(4) ? -INFINITY : r.normal() * 3;

  KvCounts counts{};
  counts.sequences = (u32)w.sequences.size();
  size_t query_tiles = 0, tiles = 0;
  for (const KvSequence& s : w.sequences) {
    const size_t own = (size_t)(s.q_len * c.group + 15) / 16 * c.kv_heads;
    query_tiles += own, tiles += own * (s.kv_len / (64 * 16) + 1), counts.total_q += s.q_len;
  }
  std::vector<KvWorkItem> items(c.invariant ? tiles : query_tiles + c.slots);
  const size_t partials = c.invariant ? tiles : 2 * c.slots;
  std::vector<u32> starts(c.slots + 1, 0x55555555), counters(partials);
  u32 q_len_max = 0;
  for (const KvSequence& s : w.sequences) q_len_max = std::max(q_len_max, s.q_len);
  const u32 pitch = std::min(q_len_max * c.group, 16u);
  std::vector<float> partial_rows(partials * pitch * c.dim, NAN), partial_stats(partials * pitch, NAN);
  const KvPlan plan = {(u64)&counts, (u64)w.sequences.data(), 0, 0, (u64)w.tables.data()};
  const u32 sink_tokens = c.sink_tokens;  // without a window they change nothing
  const KvDecodePlanParams planning = {plan,    (u64)items.data(), (u64)starts.data(), c.slots,     c.kv_heads,
                                       c.group, c.full,             c.window_left,      sink_tokens, c.invariant, ~0u};
  if (launch("plan_decode", 1, 512, 30912, &planning, sizeof planning, seed)) return 1;
  if (check_plan(w, items, starts)) return 1;

  KvDecodeParams p{};
  KvAttendParams& a = p.attend;
  a.plan = plan, a.q = q.t, a.out = out.t, a.k_plane = w.k.params, a.v_plane = w.v.params;
  if (c.wants_lse) a.lse = lse.t;
  if (c.has_sink_logits) a.sink_logits = (u64)sink_logits.data();
  a.partial_rows = (u64)partial_rows.data(), a.partial_stats = (u64)partial_stats.data();
  a.counters = (u64)counters.data();
  a.scale = c.scale, a.soft_cap = c.soft_cap, a.full = c.full, a.group = c.group;
  a.window_left = c.window_left, a.sink_tokens = sink_tokens, a.q_len_max = q_len_max;
  p.items = (u64)items.data(), p.starts = (u64)starts.data(), p.stages = c.stages;
  while ((1u << p.block_shift) < c.block_size) p.block_shift++;
  if (1u << p.block_shift != c.block_size) p.block_shift = 0;
  const std::string name = std::string("decode_") + name_of(c.format) + "_" + std::to_string(c.dim);
  const u32 warps = c.dim >= 192 ? 2 : 4, stage_bytes = warps * 32 * row_stride(c);
  const u32 merge = warps * 16 * (c.dim + 4) * 4 + warps * 16 * 8 + 16 + warps * 16 * 16 * 4;
  const u32 queries = is_scaled(c.format) ? c.dim * 64 : c.dim >= 192 ? c.dim * 32 : 0;
  const u32 shared = queries + std::max(c.stages * stage_bytes, merge);
  std::vector<u8> first;
  for (u32 order : {0u, seed * 2 + 1}) {
    std::fill(out.memory.begin(), out.memory.end(), 0xff);
    if (launch(name, c.slots, warps * 32, shared, &p, sizeof p, order)) return 1;
    if (std::count(counters.begin(), counters.end(), 0u) != (long)counters.size()) return fail("counters are not zero");
    if (!out.is_filled(w, 0)) return fail("rows of no query are not zero");
    if (c.wants_lse && !lse.is_filled(w, 0xff800000u)) return fail("log-sum-exps of no query are not minus infinity");
    if (first.empty()) first = out.memory;
    else if (first != out.memory) return fail("another order, other bits");
  }
  return compare(w, q, out, lse, sink_logits);
}

}  // namespace

int main(int argc, char** argv) {
  const u32 first = argc > 1 ? (u32)std::atoi(argv[1]) : 1, count = argc > 2 ? (u32)std::atoi(argv[2]) : 1;
  int bad = 0;
  for (u32 seed = first; seed < first + count; seed++) {
    Random r{std::mt19937(seed), seed};
    const Case c = random_case(r);
    if (count == 1) printf("%s\n", describe(c).c_str());
    const int failed = run(seed);
    if (failed != 0 && count > 1) printf("seed %u: %s\n", seed, describe(c).c_str());
    bad += failed;
  }
  printf("%u cases, %d failed\n", count, bad);
  return bad > 0 ? 1 : 0;
}
