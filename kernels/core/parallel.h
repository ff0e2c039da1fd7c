// How a kernel runs its tasks on somebody else's threads.
#pragma once

#include <cstdint>
#include <type_traits>

namespace spike {

/// A thread pool as the kernels see it. ONNX Runtime's pool in a session; our own in tests.
/// Tasks need not run at the same time, so a task must never wait for another one.
struct Parallel {
  int threads = 1;       ///< tasks worth creating for full use of the machine
  void* pool = nullptr;  ///< passed back to run
  void (*run)(void* pool, int64_t tasks, void (*task)(void* arg, int64_t index),
              void* arg) = nullptr;  ///< null: run serially

  /// Calls body(index) for every index in [0, tasks); returns when all are done.
  template <class Body>
  void operator()(int64_t tasks, Body&& body) const {
    if (run == nullptr || threads <= 1 || tasks <= 1) {
      for (int64_t i = 0; i < tasks; ++i) body(i);
      return;
    }
    using Held = std::remove_reference_t<Body>;
    run(
        pool, tasks, [](void* arg, int64_t index) { (*static_cast<Held*>(arg))(index); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }
};

}  // namespace spike
