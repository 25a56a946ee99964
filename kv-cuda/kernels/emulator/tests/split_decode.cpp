// Runs the test kernel of split_decode.cu and compares it with attention in f64.
//
// `split_decode MISTAKE SEED`: the outcome is the program's exit code. 0: right; 1: wrong values; 2: the emulator
// reported an error. A sanitizer ends the program in its own way.
#include "split_decode.h"

#include <algorithm>
#include <cstdlib>

#include "check.h"

using test::address;

namespace {

constexpr u32 DIM = KV_DECODE_DIM;

struct Case { u32 block_size, heads, group, part; std::vector<u32> lens; };

// The whole problem in host memory, with arrays of exact length.
struct Problem {
  Case shape;
  u32 table_stride;
  std::vector<u32> tables, counters;
  std::vector<u16> q, k, v;
  std::vector<KvWork> work;
  std::vector<float> parts, out;

  explicit Problem(const Case& of) : shape(of) {
    test::Random random;
    const u32 entries = u32(of.lens.size()), longest = *std::max_element(of.lens.begin(), of.lens.end());
    table_stride = (longest + of.block_size - 1) / of.block_size;
    u32 blocks = 0;
    for (u32 len : of.lens) blocks += (len + of.block_size - 1) / of.block_size;
    std::vector<u32> order(blocks);
    for (u32 i = 0; i < blocks; i++) order[i] = i;
    for (u32 i = blocks; i > 1; i--) std::swap(order[i - 1], order[random.below(i)]);
    tables.assign(entries * table_stride, 0xffffffffu);  // not a valid block
    counters.assign(entries * of.heads, 0);
    u32 used = 0;
    for (u32 entry = 0; entry < entries; entry++) {
      const u32 len = of.lens[entry];
      for (u32 i = 0; i * of.block_size < len; i++) tables[entry * table_stride + i] = order[used++];
      for (u32 head = 0; head < of.heads; head++) {
        const u32 first = u32(work.size()), count = (len + of.part - 1) / of.part;
        for (u32 i = 0; i < count; i++) {
          work.push_back({entry, head, i * of.part, std::min(len, (i + 1) * of.part), first, count});
        }
      }
    }
    const auto fill = [&](std::vector<u16>& list, size_t count) {
      list.resize(count);
      for (u16& value : list) value = kvemu::float_to_half(random.normal());
    };
    fill(q, size_t(entries) * of.heads * of.group * DIM);
    fill(k, size_t(blocks) * of.block_size * of.heads * DIM);
    fill(v, k.size());
    parts.resize(work.size() * of.group * DIM * 3);
    out.assign(q.size(), NAN);
  }

  std::string run(u32 mistake, u32 seed) {
    const float scale = 1.44269504f / std::sqrt(float(DIM));
    const KvDecodeParams params = {address(q), address(k), address(v), address(tables), address(work), address(parts),
                                   address(out), address(counters), table_stride, shape.block_size, shape.heads,
                                   shape.group, scale, mistake};
    return test::launch("test_split_decode", u32(work.size()), KV_DECODE_WARPS * 32, KV_DECODE_SHARED_BYTES, params,
                        seed);
  }

  double at(const std::vector<u16>& plane, u32 entry, u32 token, u32 head, u32 d) const {
    const size_t block = tables[entry * table_stride + token / shape.block_size];
    const size_t row = (block * shape.block_size + token % shape.block_size) * shape.heads + head;
    return kvemu::half_to_float(plane[row * DIM + d]);
  }

  // Returns the largest difference from attention in f64; infinity for a NaN, or a counter that is
  // not 0 again.
  double error() const {
    double worst = 0;
    const u32 rows = shape.heads * shape.group;
    for (u32 entry = 0; entry < shape.lens.size(); entry++) {
      const u32 len = shape.lens[entry];
      std::vector<double> weights(len);
      for (u32 row = 0; row < rows; row++) {
        const u32 head = row / shape.group;
        const size_t begin = (size_t(entry) * rows + row) * DIM;
        double max = -INFINITY, sum = 0;
        for (u32 token = 0; token < len; token++) {
          double dot = 0;
          for (u32 d = 0; d < DIM; d++) dot += kvemu::half_to_float(q[begin + d]) * at(k, entry, token, head, d);
          weights[token] = dot / std::sqrt(double(DIM));
          max = std::max(max, weights[token]);
        }
        for (double& weight : weights) sum += weight = std::exp(weight - max);
        for (u32 d = 0; d < DIM; d++) {
          double value = 0;
          for (u32 token = 0; token < len; token++) value += weights[token] / sum * at(v, entry, token, head, d);
          const double difference = std::fabs(value - out[begin + d]);
          worst = difference <= worst ? worst : std::isnan(difference) ? INFINITY : difference;
        }
      }
    }
    for (u32 counter : counters) worst = counter == 0 ? worst : INFINITY;
    return worst;
  }
};

}  // namespace

int main(int count, char** args) {
  const u32 mistake = count > 1 ? u32(std::atoi(args[1])) : 0, seed = count > 2 ? u32(std::atoi(args[2])) : 0;
  const Case cases[] = {
      {16, 2, 8, 128, {300, 1, 77}},
      {1, 1, 1, 1 << 20, {65, 130}},
      {32, 1, 16, 96, {213, 400}},
  };
  for (const Case& of : cases) {
    Problem problem(of);
    const std::string said = problem.run(mistake, seed);
    if (!said.empty()) {
      printf("reported: %s\n", said.c_str());
      return 2;
    }
    // Weights are rounded to f16: 2^-11 of values up to 6, and less for the sum of many.
    const double error = problem.error();
    if (!(error < 2e-3)) {
      printf("wrong: the largest error is %g\n", error);
      return 1;
    }
  }
  printf("right\n");
  return test::failures == 0 ? 0 : 1;
}
