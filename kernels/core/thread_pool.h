// A small thread pool of our own for quantisation, tests and benchmarks; a session uses ORT's.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "core/parallel.h"

namespace spike {

class ThreadPool {
 public:
  /// `threads` counts the caller's own; 0 means one per CPU this process may use.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// The pool as kernels see it. Only one thread may use it at a time.
  Parallel parallel();

 private:
  using Task = void (*)(void* arg, int64_t index);

  void run(int64_t tasks, Task task, void* arg);
  void work();
  void take_tasks();

  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> round_{0};  ///< one more per run
  std::atomic<int> busy_{0};        ///< workers not yet through with this round
  std::atomic<int64_t> next_{0};
  int64_t tasks_ = 0;
  Task task_ = nullptr;
  void* arg_ = nullptr;
  bool stop_ = false;
};

}  // namespace spike
