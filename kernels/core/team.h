// Threads that somebody lends for a while: one leads, the others help with its loops.
//
// A kernel of a small model runs for microseconds, and asking a pool for threads at every loop costs
// as much. So the pool is asked once for many loops, and its threads stay in `help` in between.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

#include "core/parallel.h"

namespace spike {

/// One thread, the leader, runs loops and in the end dismisses the team; any number of others call
/// `help`, at any time. The leader waits for nobody but those who have taken a task: a helper that
/// comes late, or never, costs its help only. So a team needs no free core, and may be the leader
/// alone.
class Team {
 public:
  Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  /// For the leader: the team as kernels see it. A loop rethrows the first exception of its tasks;
  /// a task must not start a loop.
  Parallel parallel(int threads) { return {threads, this, run}; }

  /// For the others: takes tasks until the team is dismissed.
  void help() noexcept;

  /// For the leader: no loop comes any more.
  void dismiss() noexcept { dismissed_.store(true, std::memory_order_release); }

 private:
  using Task = void (*)(void* arg, int64_t index);

  static void run(void* team, int64_t tasks, Task task, void* arg);
  bool take() noexcept;
  void attempt(int64_t index) noexcept;

  // Written by the leader while no task is left, read by whoever has taken one.
  Task task_ = nullptr;
  void* arg_ = nullptr;
  int64_t tasks_ = 0;
  std::mutex mutex_;
  std::exception_ptr error_;
  alignas(64) std::atomic<int64_t> left_{0};  ///< tasks of this loop that nobody has taken
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<bool> dismissed_{false};
};

}  // namespace spike
