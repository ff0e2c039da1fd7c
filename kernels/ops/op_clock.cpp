#include "ops/op_clock.h"

namespace spike::ops {
namespace {

OpClock* first = nullptr;

}  // namespace

std::atomic<bool> OpClock::counting = false;

OpClock::OpClock(const char* name) : name_(name), next_(first) { first = this; }

void OpClock::restart(bool count) {
  counting = count;
  for (OpClock* clock = first; clock != nullptr; clock = clock->next_)
    clock->calls_ = clock->nanoseconds_ = 0;
}

const OpClock* OpClock::next(const OpClock* clock) {
  return clock == nullptr ? first : clock->next_;
}

}  // namespace spike::ops

extern "C" {

/// For benchmarks, while no session runs: begins or ends counting, from zero.
__attribute__((visibility("default"))) void SpikeTimeOps(int count) {
  spike::ops::OpClock::restart(count != 0);
}

/// The kind, calls and nanoseconds behind a cursor that begins as null; 0 when there is none left.
__attribute__((visibility("default"))) int SpikeOpTime(const void** cursor, const char** name,
                                                       int64_t* calls, int64_t* nanoseconds) {
  using spike::ops::OpClock;
  const OpClock* clock = OpClock::next(static_cast<const OpClock*>(*cursor));
  if (clock == nullptr) return 0;
  *cursor = clock;
  *name = clock->name();
  *calls = clock->calls();
  *nanoseconds = clock->nanoseconds();
  return 1;
}

}  // extern "C"
