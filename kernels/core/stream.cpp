#include "core/stream.h"

#include <atomic>
#include <cstring>

#include "core/cpu.h"
#include "core/target.h"

namespace spike {
namespace {

#if defined(__x86_64__)
SPIKE_TARGET_BEGIN(SPIKE_AVX512)
constexpr int kChains = 16;  // sums that don't wait for each other: more than latency x rate

int32_t multiply(int64_t rounds) {
  __m512i sums[kChains], codes = _mm512_set1_epi8(3), four = _mm512_set1_epi8(5);
  // All different, or one would do for all; and operands that the compiler doesn't know.
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_epi32(i);
  for (int64_t round = 0; round < rounds; ++round) {
    __asm__ volatile("" : "+v"(codes), "+v"(four));
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], codes, four);
  }
  for (int i = 1; i < kChains; ++i) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
  return _mm512_reduce_add_epi32(sums[0]);
}
SPIKE_TARGET_END
#endif

typedef uint64_t Words __attribute__((vector_size(64)));

}  // namespace

uint64_t stream_read(const Parallel& parallel, const uint8_t* data, size_t bytes) {
  std::atomic<uint64_t> total{0};
  const int64_t words = static_cast<int64_t>(bytes / 8), tasks = parallel.threads * 4;
  parallel(tasks, [&](int64_t task) {
    // Four places at once: hardware prefetchers follow several streams better than one.
    Words sums[4] = {};
    const int64_t first = words * task / tasks, last = words * (task + 1) / tasks;
    const int64_t quarter = (last - first) / 4;
    for (int64_t i = first; i + 8 <= first + quarter; i += 8)
      for (int place = 0; place < 4; ++place) {
        Words line;
        std::memcpy(&line, data + 8 * (i + place * quarter), sizeof line);
        sums[place] += line;
      }
    const Words all = sums[0] + sums[1] + sums[2] + sums[3];
    uint64_t sum = 0;
    for (int j = 0; j < 8; ++j) sum += all[j];
    total += sum;
  });
  return total;
}

int64_t vnni_run(const Parallel& parallel, int64_t rounds) {
#if defined(__x86_64__)
  if (cpu_tier() < CpuTier::avx512) return 0;
  constexpr int64_t kTasks = 8;  // per thread, so that a late one doesn't count
  std::atomic<int32_t> total{0};
  const int64_t each = rounds / kTasks, tasks = parallel.threads * kTasks;
  parallel(tasks, [&](int64_t) { total += multiply(each); });
  return tasks * each * kChains * 64 * 2;
#else
  return 0;
#endif
}

}  // namespace spike
