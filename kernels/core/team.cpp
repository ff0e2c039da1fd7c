#include "core/team.h"

#include <thread>
#include <utility>

namespace spike {
namespace {

/// Waiting, first awake: the next loop is microseconds away. Then the core goes to whoever wants it,
/// perhaps to the thread that is waited for.
class Patience {
 public:
  void wait() {
    if (++spins_ > kSpins) return std::this_thread::yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

 private:
  static constexpr int kSpins = 4000;  // tens of microseconds
  int spins_ = 0;
};

}  // namespace

void Team::help() noexcept {
  for (Patience patience; !dismissed_.load(std::memory_order_acquire); patience.wait())
    if (take()) patience = {};
}

/// Takes one task, if any is left, and does it.
bool Team::take() noexcept {
  int64_t left = left_.load(std::memory_order_relaxed);
  do {
    if (left == 0) return false;
  } while (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acquire,
                                        std::memory_order_relaxed));
  // From here to its end no other loop begins: the leader waits for this task.
  attempt(tasks_ - left);
  done_.fetch_add(1, std::memory_order_release);
  return true;
}

void Team::attempt(int64_t index) noexcept {
  try {
    task_(arg_, index);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

void Team::run(void* self, int64_t tasks, Task task, void* arg) {
  auto& team = *static_cast<Team*>(self);
  team.task_ = task;
  team.arg_ = arg;
  team.tasks_ = tasks;
  team.done_.store(0, std::memory_order_relaxed);
  team.left_.store(tasks, std::memory_order_release);
  while (team.take()) {
  }
  for (Patience patience; team.done_.load(std::memory_order_acquire) != tasks;) patience.wait();
  if (team.error_) std::rethrow_exception(std::exchange(team.error_, nullptr));
}

}  // namespace spike
