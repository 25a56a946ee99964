// Tests of the functions of dev.h on the emulator, and of its error reports: kernels of device.cu
// and mistakes.cu.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "check.h"

using test::address;
using test::launch;

namespace {

struct Params { u64 in, out; u32 count, argument; };

void warp(u32 seed) {
  constexpr u32 BLOCKS = 3, THREADS = 64, COUNT = BLOCKS * THREADS;
  test::Random random;
  std::vector<u32> in(COUNT), out(COUNT * 16);
  for (u32& v : in) v = random.below(1000);
  const std::string error = launch("test_warp", BLOCKS, THREADS, 0, Params{address(in), address(out), COUNT, 0}, seed);
  KV_CHECK(error.empty(), "%s", error.c_str());
  for (u32 i = 0; i < COUNT; i++) {
    const u32 begin = i / 32 * 32, lane = i % 32, eighth = i / 8 * 8, quarter = i / 4 * 4;
    u32 votes = 0, sum = 0, max8 = 0, any = 0, least = 1000;
    for (u32 j = 0; j < 32; j++) {
      votes |= u32(in[begin + j] % 3 == 0) << j;
      sum += in[begin + j];
      any |= in[begin + j] == in[i / 64 * 64];
    }
    for (u32 j = 0; j < 8; j++) max8 = std::max(max8, in[eighth + j]);
    for (u32 j = 0; j < 4; j++) least = std::min(least, in[quarter + j]);
    // Element (row, column) of the 16-bit matrix is in lane 4 * row + column / 2.
    u32 turned = 0;
    for (u32 half = 0; half < 2; half++) {
      const u32 row = 2 * (lane % 4) + half, column = lane / 4;
      const u32 v = in[begin + 4 * row + column / 2] * 0x10001u + 0x8000u;
      turned |= (v >> (16 * (column % 2)) & 0xffffu) << (16 * half);
    }
    const u32 want[16] = {in[begin + 31 - lane], lane + 3 < 32 ? in[i + 3] : in[i], in[begin + (lane ^ 5)], votes,
                          any, 1, sum, max8, kvemu::as_bits(float(sum)), kvemu::as_bits(-float(least)),
                          kvemu::as_bits(float(in[begin + 7])),
                          kvemu::as_bits(float(lane + 16 < 32 ? in[i + 16] : in[i])), turned, i / 64, BLOCKS, i % 64};
    for (u32 j = 0; j < 16; j++) {
      KV_CHECK(out[16 * i + j] == want[j], "thread %u result %u: %u, not %u", i, j, out[16 * i + j], want[j]);
    }
  }
}

void numbers() {
  const float infinity = kv_infinity();
  const std::vector<float> in = {1.5f,  2.25f,  -2.5f, 3.0f,  0.5f,      -0.0f,    65519.9f, 65520.0f, 1e-8f, 6.0e-8f,
                                 3e9f,  -3e9f,  1.0f,  1e30f, -infinity, infinity, 1.0f,     3.0f,     448.f, 1e-30f,
                                 -0.1f, 2049.f, 0.0f,  7.0f,  3.3895e38f, 1.00390625f};
  const u32 count = u32(in.size() / 2);
  std::vector<float> copy = in, out(count * 24);
  KV_CHECK(launch("test_numbers", 1, 32, 0, Params{address(copy), address(out), count, 0}, 0).empty(), "failed");
  for (u32 i = 0; i < count; i++) {
    const float a = in[2 * i], b = in[2 * i + 1];
    const float* row = &out[24 * i];
    const i64 whole = a >= 2147483648.f ? 0x7fffffff : a < -2147483648.f ? -0x80000000ll : i64(std::nearbyint(a));
    const float want[] = {std::max(a, b), std::min(a, b), std::exp(a), std::nearbyint(a), std::floor(a),
                          std::fma(a, b, a), a + b, a - b, a * b, a / b, std::sqrt(a * a), float(i32(whole))};
    for (u32 j = 0; j < sizeof want / sizeof *want; j++) {
      const bool same = row[j] == want[j] || (std::isnan(row[j]) && std::isnan(want[j]));
      KV_CHECK(same, "pair %u result %u: %g, not %g", i, j, double(row[j]), double(want[j]));
    }
    // Halves are rounded to nearest, ties to even: compared with a search of all neighbouring
    // values.
    for (u32 side = 0; side < 2; side++) {
      const double value = side == 0 ? a : b;
      for (u32 kind = 0; kind < 2; kind++) {
        const double got = row[15 + 2 * kind + side];
        const int digits = kind == 0 ? 11 : 8, lowest = kind == 0 ? -24 : -133;
        int exponent = 0;
        std::frexp(value, &exponent);
        const double unit = std::ldexp(1.0, std::max(exponent - digits, lowest));
        const double largest = kind == 0 ? 65520.0 : std::ldexp(2.0 - std::ldexp(1.0, -8), 127);
        const double nearest = std::fabs(value) >= largest ? std::copysign(INFINITY, value)
                                                           : std::nearbyint(value / unit) * unit;
        KV_CHECK(got == nearest || std::isinf(value), "%g rounds to %g, not %g", value, nearest, got);
      }
    }
    KV_CHECK(row[19] == kvemu::e4m3_to_float(u8(i)) && row[20] == 0, "code %u: %g %g", i, double(row[19]),
             double(row[20]));
    const float approximate[] = {kvemu::ex2_approx(a), kvemu::lg2_approx(a * a), kvemu::rcp_approx(b)};
    for (u32 j = 0; j < 3; j++) {
      KV_CHECK(std::memcmp(&approximate[j], row + 12 + j, 4) == 0 || std::isnan(approximate[j]),
               "pair %u approximation %u: %g, not %g", i, j, double(row[12 + j]), double(approximate[j]));
    }
    const u32 bits_a = kvemu::as_bits(a), bits_b = kvemu::as_bits(b);
    const u32 mixed = (bits_a & 0xff) | (bits_b & 0xff) << 8 | (bits_a >> 8 & 0xff) << 16 | (bits_b >> 8 & 0xff) << 24;
    KV_CHECK(kvemu::as_bits(row[22]) == mixed, "pair %u: prmt %08x, not %08x", i, kvemu::as_bits(row[22]), mixed);
    KV_CHECK(kvemu::as_bits(row[23]) == bits_a, "pair %u: %g", i, double(row[23]));
    const int zeros = bits_b == 0 ? 32 : __builtin_clz(bits_b);
    KV_CHECK(row[21] == float(__builtin_popcount(bits_a) * 64 + zeros), "pair %u: %g", i, double(row[21]));
  }
}

// Checks an approximation at many arguments, positive ones or all: never beyond its bound, off
// nearly everywhere by more than rounding explains, in both directions, and never subnormal.
template <class Bound>
void approximation(const char* name, float (*f)(float), double (*exact)(double), Bound bound, bool is_positive) {
  test::Random random;
  u32 count = 0, rounded = 0, above = 0;
  double worst = 0;
  for (u32 i = 0; i < 200000; i++) {
    u32 bits = u32(random.next() >> 32);
    if (is_positive) bits &= 0x7fffffffu;
    if (i % 2 == 0) bits = (bits & 0x81ffffffu) | 0x3e000000u;  // magnitudes from 2^-3 to 2
    const float x = kvemu::as_float(bits), y = f(x);
    const double want = exact(double(kvemu::flush(x)));
    KV_CHECK(y == 0.f || std::fabs(y) >= 0x1p-126f || std::isnan(y), "%s(%a) is subnormal: %a", name, x, y);
    if (std::isnan(want) || !(std::fabs(want) < 0x1.fffffcp127)) {
      KV_CHECK(std::isnan(want) ? std::isnan(y) : std::fabs(y) >= 0x1.fffff8p127f, "%s(%a) is %a", name, x, y);
      continue;
    }
    const double error = double(y) - want, most = bound(double(x), want);
    // Flushed results are off by their whole value.
    if (std::fabs(want) < 0x1.00001p-126) {
      KV_CHECK(std::fabs(error) <= 0x1.00001p-126, "%s(%a) is %a, not %a", name, x, y, want);
      continue;
    }
    KV_CHECK(std::fabs(error) <= most, "%s(%a) is %a, not %a", name, x, y, want);
    KV_CHECK(std::memcmp(&y, std::vector<float>{f(x)}.data(), 4) == 0, "%s(%a) differs from itself", name, x);
    count++;
    rounded += y == float(want);
    above += error > 0;
    worst = std::fmax(worst, std::fabs(error) / most);
  }
  KV_CHECK(count > 90000 && rounded < count * 9 / 10, "%s: %u of %u exact", name, rounded, count);
  KV_CHECK(above > count * 4 / 10 && above < count * 6 / 10, "%s: %u of %u too large", name, above, count);
  KV_CHECK(worst > 0.95, "%s: the worst error is %g of its bound", name, worst);
}

void approximations() {
  const auto relative = [](double bound) { return [bound](double, double want) { return bound * std::fabs(want); }; };
  approximation("ex2", kvemu::ex2_approx, std::exp2, relative(0x1p-22), false);
  approximation("lg2", kvemu::lg2_approx, std::log2, [](double x, double want) {
    return x > 0.5 && x < 2 ? 0x1p-22 : 0x1p-22 * std::fabs(want);
  }, true);
  approximation("rcp", kvemu::rcp_approx, [](double x) { return 1 / x; }, relative(0x1p-23), false);
  const float infinity = kv_infinity(), subnormal = 0x1p-127f;
  struct Case { const char* name; float (*f)(float); float x, want; };
  const Case cases[] = {
      {"ex2", kvemu::ex2_approx, 0.f, 1.f},           {"ex2", kvemu::ex2_approx, -0.f, 1.f},
      {"ex2", kvemu::ex2_approx, subnormal, 1.f},     {"ex2", kvemu::ex2_approx, -infinity, 0.f},
      {"ex2", kvemu::ex2_approx, infinity, infinity}, {"ex2", kvemu::ex2_approx, 128.f, infinity},
      {"ex2", kvemu::ex2_approx, -126.5f, 0.f},       {"lg2", kvemu::lg2_approx, 0.f, -infinity},
      {"lg2", kvemu::lg2_approx, -0.f, -infinity},    {"lg2", kvemu::lg2_approx, subnormal, -infinity},
      {"lg2", kvemu::lg2_approx, -1.f, NAN},          {"lg2", kvemu::lg2_approx, infinity, infinity},
      {"rcp", kvemu::rcp_approx, 0.f, infinity},      {"rcp", kvemu::rcp_approx, -0.f, -infinity},
      {"rcp", kvemu::rcp_approx, subnormal, infinity}, {"rcp", kvemu::rcp_approx, -subnormal, -infinity},
      {"rcp", kvemu::rcp_approx, infinity, 0.f},      {"rcp", kvemu::rcp_approx, -infinity, -0.f},
      {"rcp", kvemu::rcp_approx, -0x1.8p126f, -0.f},
  };
  for (const Case& of : cases) {
    const float got = of.f(of.x);
    const bool same = kvemu::as_bits(got) == kvemu::as_bits(of.want) || (std::isnan(got) && std::isnan(of.want));
    KV_CHECK(same, "%s(%a) is %a, not %a", of.name, double(of.x), double(got), double(of.want));
  }
}

// Checks what sums of tensor cores keep and lose: truncation one bit below the f32 precision of the
// largest term.
void tensor_sums() {
  const auto sum = [](std::initializer_list<double> list) {
    double terms[17] = {};
    std::copy(list.begin(), list.end(), terms);
    return kvemu::tensor_sum(terms);
  };
  struct Case { float got, want; };
  const float infinity = kv_infinity();
  const Case cases[] = {
      {sum({}), 0.f},
      {sum({1.0, 2.0, -0.5}), 2.5f},
      {sum({1.0, 0x1p-23}), 1.f + 0x1p-23f},
      // Half a unit is kept while terms are added, and truncated at the end.
      {sum({1.0, 0x1p-24}), 1.f},
      {sum({1.0, 0x1p-24, 0x1p-24}), 1.f + 0x1p-23f},
      // A quarter is truncated before, term by term: rounded to nearest it would be 1 + 2^-23.
      {sum({1.0, 0x1p-25, 0x1p-25, 0x1p-25, 0x1p-25}), 1.f},
      {sum({1.0, 0x1.fp-24, 0x1.fp-24}), 1.f + 0x1p-23f},
      {sum({-1.0, -0x1.8p-24}), -1.f},
      // Truncated towards zero, where the nearest is beyond.
      {sum({1.0, 0x1p-23, 0x1p-24}), 1.f + 0x1p-23f},
      {sum({16777216.0, 1.0, 1.0, 1.0}), 16777218.f},
      // Cancellation leaves what was not truncated.
      {sum({1.0, -1.0, 0x1p-26}), 0.f},
      {sum({1.0, -1.0, 0x1p-24}), 0x1p-24f},
      {sum({0x1p-140, 0x1p-140}), 0x1p-139f},
      {sum({0x1.fffffep127, 0x1p103}), 0x1.fffffep127f},
      {sum({0x1.fffffep127, 0x1.fffffep127}), infinity},
      {sum({double(infinity), 1.0}), infinity},
      {sum({double(infinity), -double(infinity)}), NAN},
      {sum({NAN, 1.0}), NAN},
  };
  for (u32 i = 0; i < sizeof cases / sizeof *cases; i++) {
    const Case& of = cases[i];
    const bool same = kvemu::as_bits(of.got) == kvemu::as_bits(of.want) || (std::isnan(of.got) && std::isnan(of.want));
    KV_CHECK(same, "sum %u is %a, not %a", i, double(of.got), double(of.want));
  }
  // Never further from zero than the exact sum if all terms have its sign, and within a unit of
  // each term.
  test::Random random;
  u32 below = 0;
  for (u32 i = 0; i < 20000; i++) {
    double terms[17], exact = 0, largest = 0;
    for (double& term : terms) {
      term = double(kvemu::bf16_to_float(kvemu::float_to_bf16(random.normal()))) * std::fabs(random.normal());
      if (i % 2 == 0) term = std::fabs(term);
      exact += term, largest = std::fmax(largest, std::fabs(term));
    }
    const double got = kvemu::tensor_sum(terms), most = (17 * 0x1p-24 + 16 * 0x1p-23) * largest;
    KV_CHECK(std::fabs(got - exact) <= most, "%a, not %a", got, exact);
    KV_CHECK(i % 2 != 0 || got <= exact, "%a is more than %a", got, exact);
    below += i % 2 == 0 && got < exact;
  }
  KV_CHECK(below > 9000, "%u of 10000 sums are cut off", below);
}

void atomics(u32 seed) {
  constexpr u32 BLOCKS = 5, COUNT = BLOCKS * 64, WRAP = 6;
  std::vector<u32> in(COUNT), out(3 + WRAP + 1);
  for (u32 i = 0; i < COUNT; i++) in[i] = i * 37 % 311;
  const Params params = {address(in), address(out), COUNT, WRAP};
  KV_CHECK(launch("test_atomics", BLOCKS, 64, 0, params, seed).empty(), "failed");
  KV_CHECK(out[0] == COUNT && out[1] == 310 && out[2] == COUNT % (WRAP + 1), "%u %u %u", out[0], out[1], out[2]);
  for (u32 k = 0; k <= WRAP; k++) {
    KV_CHECK(out[3 + k] == (COUNT + WRAP - k) / (WRAP + 1), "%u came %u times", k, out[3 + k]);
  }
}

void multiply(bool is_bf16, u32 seed) {
  test::Random random;
  std::vector<u16> in(24 * 16);
  const auto code = [&](float v) { return is_bf16 ? kvemu::float_to_bf16(v) : kvemu::float_to_half(v); };
  const auto value = [&](u16 v) { return is_bf16 ? kvemu::bf16_to_float(v) : kvemu::half_to_float(v); };
  for (u16& v : in) v = code(random.normal());
  std::vector<float> out(16 * 8 + 32 * 4);
  for (u32 i = 0; i < 128; i++) out[i] = random.normal();
  const std::vector<float> before = out;
  const char* name = is_bf16 ? "test_multiply_bf16" : "test_multiply_f16";
  // 512 bytes of A and 256 of B, in an allocation aligned for cp.async's 16 bytes.
  void* aligned = aligned_alloc(16, in.size() * 2);
  std::memcpy(aligned, in.data(), in.size() * 2);
  const Params params = {u64(reinterpret_cast<uintptr_t>(aligned)), address(out), 0, 0};
  const std::string error = launch(name, 1, 32, 768, params, seed);
  free(aligned);
  KV_CHECK(error.empty(), "%s", error.c_str());
  for (u32 i = 0; i < 16; i++) {
    for (u32 j = 0; j < 8; j++) {
      double sum = before[8 * i + j];
      for (u32 k = 0; k < 16; k++) sum += double(value(in[16 * i + k])) * double(value(in[256 + 16 * j + k]));
      KV_CHECK(std::fabs(sum - out[8 * i + j]) < 1e-5, "(%u, %u): %g, not %g", i, j, double(out[8 * i + j]), sum);
    }
  }
  // Transposing in the load and by movmatrix gives equal results.
  for (u32 i = 128; i < out.size(); i++) KV_CHECK(kvemu::as_bits(out[i]) == 0, "lane %u", (i - 128) / 4);
}

void last_block(u32 seed) {
  constexpr u32 BLOCKS = 9, COUNT = BLOCKS * 128;
  std::vector<u32> in(COUNT), out(COUNT + BLOCKS + 2);
  for (u32 i = 0; i < COUNT; i++) in[i] = i * 7919 % 10007;
  for (u32 turn = 0; turn < 2; turn++) {  // the counter is as it was
    const Params params = {address(in), address(out), COUNT, 0};
    const std::string error = launch("test_last_block", BLOCKS, 128, 512, params, seed);
    KV_CHECK(error.empty(), "%s", error.c_str());
  }
  u32 sum = 0;
  for (u32 block = 0; block < BLOCKS; block++) {
    for (u32 i = 0; i < 128; i++) KV_CHECK(out[128 * block + i] == in[128 * block + 127 - i], "block %u", block);
    sum += in[128 * block + 127];
  }
  KV_CHECK(out[COUNT + BLOCKS] == sum && out[COUNT + BLOCKS + 1] == 0, "%u, not %u", out[COUNT + BLOCKS], sum);
}

// Returns whether a sanitizer ends a process that does this.
template <class F> bool ends_the_program(F f) {
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    close(STDERR_FILENO);
    f();
    _exit(0);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && status != 0;
}

// The same kernel with and without each mistake, and the expected reports.
void mistakes() {
  // A mistake may also be reported by AddressSanitizer, which ends the program.
  enum Build { EVERY, PLAIN, NOT_THREAD };
  struct Mistake { const char* said; Build reported = EVERY; };
  const char* const in_flight = "which is in flight";
  const char* const written = "were written while it was in flight";
  const Mistake all[] = {
      {"divergent barrier"}, {"deadlock"}, {"divergent warp"}, {"deadlock"}, {"divergent warp"},
      {"past its 1024 bytes of shared memory", PLAIN}, {"kv_cp_async16"}, {"kv_ldsm4"}, {"", PLAIN},
      {in_flight, NOT_THREAD}, {in_flight, NOT_THREAD}, {written, PLAIN}, {written, PLAIN}, {in_flight},
      {"is not in the 1024 bytes of shared memory"}, {"no kv_cp_commit follows it"}, {"was not waited for"}, {""},
  };
  alignas(16) static u8 in[16] = {1, 2, 3, 4};
  for (u32 seed = 0; seed < 8; seed++) {
    for (u32 mistake = 0; mistake < sizeof all / sizeof *all; mistake++) {
      std::vector<u32> out(64);
      const Params params = {u64(reinterpret_cast<uintptr_t>(in)), address(out), 1023, mistake};
      const auto run = [&] { return launch("test_mistake", 1, 64, 1024, params, seed); };
      const char* said = all[mistake].said;
#if defined(__SANITIZE_ADDRESS__)
      if (all[mistake].reported == PLAIN) {
        KV_CHECK(seed > 0 || ends_the_program(run), "mistake %u passes", mistake);
        continue;
      }
#elif defined(KV_EMU_TSAN)
      if (all[mistake].reported != EVERY) continue;  // ends the program, if it is a race
#endif
      const std::string error = run();
      KV_CHECK(said[0] == 0 ? error.empty() : error.find(said) != std::string::npos, "mistake %u: %s", mistake,
               error.c_str());
      const bool has_place = error.find("mistakes.cu:") != std::string::npos || mistake == 5;
      KV_CHECK(error.empty() || (has_place && error.find("block (0, 0, 0)") != std::string::npos), "%s", error.c_str());
      if (mistake == 8 && seed == 0) KV_CHECK(out[3] == 0xffffffffu, "read %08x before it was there", out[3]);
    }
  }
}

// A copy is carried out at any barrier between its issue and the wait that covers it; without a
// seed, by that wait.
void arrivals() {
#if !defined(__SANITIZE_ADDRESS__)  // it reports the reads, as it should
  constexpr u32 BARRIERS = 20;
  alignas(16) static u8 in[16] = {1, 2, 3, 4};
  for (u32 is_late = 0; is_late < 2; is_late++) {
    u32 times[BARRIERS + 1] = {};
    for (u32 seed = 0; seed < 40; seed++) {
      std::vector<u32> out(64);
      const Params params = {u64(reinterpret_cast<uintptr_t>(in)), address(out), BARRIERS, is_late};
      const std::string error = launch("test_arrival", 1, 64, 1024, params, seed);
      KV_CHECK(error.empty(), "%s", error.c_str());
      for (u32 early : out) {
        KV_CHECK(early <= BARRIERS && (seed > 0 || early == BARRIERS), "seed %u: %u", seed, early);
        times[early <= BARRIERS ? early : 0]++;
      }
    }
    for (u32 i = is_late == 0; i <= BARRIERS; i++) KV_CHECK(times[i] > 0, "never at barrier %u", i);
  }
#endif
}

// Kernels that begin before the one before has run: what they do before their wait is seen, and
// nothing else.
void dependent_launches() {
  constexpr u32 BLOCKS = 3, COUNT = BLOCKS * 64;
  enum { WAITS, READS_EARLY, WRITES_EARLY, NEVER_WAITS };
  for (u32 seed = 0; seed < 8; seed++) {
    for (u32 last : {WAITS, READS_EARLY, WRITES_EARLY, NEVER_WAITS}) {
      // From the first list to the second, to the third, and back to the first.
      std::vector<u32> lists[3];
      for (std::vector<u32>& list : lists) list.assign(COUNT, 5);
      Params params[3];
      test::EmulatedLaunch launches[3];
      for (u32 i = 0; i < 3; i++) {
        params[i] = {address(lists[i]), address(lists[(i + 1) % 3]), 10, i == 2 ? last : u32(WAITS)};
        launches[i] = {"test_dependent", &params[i], {BLOCKS, 1, 1}, 64, 0, sizeof params[i], seed};
      }
      char error[256] = "";
      const auto run = [&] { return kv_emu_launch_chain(launches, 3, error, sizeof error); };
#if defined(KV_EMU_TSAN)
      if (last == READS_EARLY || last == WRITES_EARLY) {
        KV_CHECK(seed > 0 || ends_the_program(run), "%u is no race", last);
        continue;
      }
#endif
      const int code = run();
      if (last == NEVER_WAITS) {
        KV_CHECK(code != 0 && std::strstr(error, "ends without kv_grid_wait") != nullptr, "%s", error);
        continue;
      }
      KV_CHECK(code == 0, "%s", error);
      // One thread block was early: its threads read what was there, or wrote what another one reads.
      u32 early = 0;
      for (u32 i = 0; i < COUNT; i++) {
        const u32 got = lists[0][i], wrong = last == READS_EARLY ? 15 : 30;
        KV_CHECK(got == 35 || got == wrong, "number %u is %u", i, got);
        early += got == wrong;
      }
      KV_CHECK(early == (last == WAITS ? 0 : 64), "%u of %u are of an early block", early, last);
    }
  }
}

void refusals() {
  char error[64];
  const Params params = {};
  const u32 one[3] = {1, 1, 1}, none[3] = {1, 0, 1};
  const auto refused = [&](const char* name, const u32* grid, u32 threads, u32 shared, u32 bytes, const char* words) {
    error[0] = 0;
    const int code = kv_emu_launch(name, grid, threads, shared, &params, bytes, 0, error, sizeof error);
    KV_CHECK(code != 0 && std::strstr(error, words) != nullptr, "%s: %d %s", words, code, error);
  };
  refused("test_nothing", one, 64, 0, sizeof params, "no kernel is named");
  refused("test_warp", one, 32, 0, sizeof params, "has 64 threads");
  refused("test_warp", one, 64, 0, sizeof params - 1, "bytes of parameters");
  refused("test_warp", one, 64, 1 << 20, sizeof params, "bytes of shared memory");
  refused("test_warp", none, 64, 0, sizeof params, "no grid");
}

}  // namespace

int main() {
  for (u32 seed = 0; seed < 4; seed++) {
    warp(seed);
    atomics(seed);
    multiply(false, seed);
    multiply(true, seed);
    last_block(seed);
  }
  numbers();
  approximations();
  tensor_sums();
  refusals();
  mistakes();
  arrivals();
  dependent_launches();
  std::vector<std::thread> threads;  // a launch on each of several at once
  for (u32 i = 0; i < 4; i++) threads.emplace_back([i] { last_block(i); });
  for (std::thread& thread : threads) thread.join();
  printf("%d failures\n", test::failures);
  return test::failures == 0 ? 0 : 1;
}
