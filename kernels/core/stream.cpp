#include "core/stream.h"

#include <atomic>
#include <cstring>

namespace spike {

uint64_t stream_read(const Parallel& parallel, const uint8_t* data, size_t bytes) {
  std::atomic<uint64_t> total{0};
  const int64_t words = static_cast<int64_t>(bytes / 8), tasks = parallel.threads * 4;
  parallel(tasks, [&](int64_t task) {
    uint64_t lanes[16] = {};
    const int64_t first = words * task / tasks, last = words * (task + 1) / tasks;
    for (int64_t i = first; i + 16 <= last; i += 16) {
      __builtin_prefetch(data + 8 * i + 4096);
      __builtin_prefetch(data + 8 * i + 4160);
      uint64_t line[16];
      std::memcpy(line, data + 8 * i, sizeof line);
      for (int j = 0; j < 16; ++j) lanes[j] += line[j];
    }
    uint64_t sum = 0;
    for (const uint64_t lane : lanes) sum += lane;
    total += sum;
  });
  return total;
}

}  // namespace spike
