// Time spent inside ops, by kind, while a benchmark counts. ONNX Runtime's own profiler costs several
// microseconds a node, which is more than most nodes of a small model take.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace spike::ops {

/// Calls and nanoseconds of one kind of op. Written by the thread that runs a session.
class OpClock {
 public:
  /// `name` must live for ever.
  explicit OpClock(const char* name);

  /// Counts the time until its end, if anybody counts.
  class Span {
   public:
    explicit Span(OpClock& clock) : clock_(counting.load(std::memory_order_relaxed) ? &clock : nullptr) {
      if (clock_ != nullptr) start_ = std::chrono::steady_clock::now();
    }
    ~Span() {
      if (clock_ == nullptr) return;
      clock_->nanoseconds_ += (std::chrono::steady_clock::now() - start_).count();
      ++clock_->calls_;
    }
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    OpClock* clock_;
    std::chrono::steady_clock::time_point start_;
  };

  /// Sets every clock to zero; counts from now on, or no more.
  static void restart(bool count);
  /// The clock after this one, or the first.
  static const OpClock* next(const OpClock* clock);

  const char* name() const { return name_; }
  int64_t calls() const { return calls_; }
  int64_t nanoseconds() const { return nanoseconds_; }

 private:
  static std::atomic<bool> counting;

  const char* name_;
  int64_t calls_ = 0;
  int64_t nanoseconds_ = 0;
  OpClock* next_;
};

}  // namespace spike::ops
