#include "core/thread_pool.h"

#include <algorithm>

#if defined(__linux__)
#include <sched.h>
#endif

namespace spike {
namespace {

// Kernels run in bursts: a worker looks for the next round this often before it sleeps.
constexpr int kSpins = 20000;

int usable_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  if (threads <= 0) threads = usable_cpus();
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    ++round_;
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

Parallel ThreadPool::parallel() {
  const auto run = [](void* pool, int64_t tasks, Task task, void* arg) {
    static_cast<ThreadPool*>(pool)->run(tasks, task, arg);
  };
  return {static_cast<int>(workers_.size()) + 1, this, run};
}

void ThreadPool::run(int64_t tasks, Task task, void* arg) {
  {
    const std::lock_guard lock(mutex_);
    tasks_ = tasks;
    task_ = task;
    arg_ = arg;
    next_ = 0;
    busy_ = static_cast<int>(workers_.size());
    ++round_;
  }
  wake_.notify_all();
  take_tasks();
  while (busy_.load(std::memory_order_acquire) != 0) relax();
}

void ThreadPool::take_tasks() {
  for (int64_t i = next_++; i < tasks_; i = next_++) task_(arg_, i);
}

void ThreadPool::work() {
  for (uint64_t seen = 0;;) {
    for (int i = 0; i < kSpins && round_.load(std::memory_order_acquire) == seen; ++i) relax();
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [&] { return round_ != seen; });
      seen = round_;
      if (stop_) return;
    }
    take_tasks();
    busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace spike
