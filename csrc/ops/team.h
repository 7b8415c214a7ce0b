// The threads of one operator that has many short loops, as a stack of layers has forty.
//
// Each of torch's parallel loops wakes its threads and waits until all of them have been there, also one that got no
// core. A team is one such loop around all of the operator's own: between them its threads look for the next one. Who
// starts a loop takes part in it, and waits only for those who have begun: a thread that the system has put aside, for
// another process maybe, delays no other.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#include "../cpu/gemm.h"
#include "array.h"

namespace fastbert {

class Team {
 public:
  using Function = void (*)(int64_t index, void* context);

  // That of the calling thread, if it leads one.
  static Team*& current();

  // f(index, context) for each index below `count`, by threads that have time. Throws what one of them has thrown, once
  // all have ended.
  void run(int64_t count, Function f, void* context);

  // What the other threads do, until end().
  void serve();
  void end();

 private:
  void take_part();

  Function function_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> has_failed_{false};
  // A line each: some are written while others are waited for.
  alignas(64) std::atomic<uint64_t> loop_{0};  // the number of the last loop that was begun
  alignas(64) std::atomic<uint64_t> open_{0};  // of the loop that may be joined; 0: none
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> taking_part_{0};
};

// f() with a team for the loops that it has (in_threads). Torch's products have loops of their own, which within one of
// torch's would run in one thread.
template <typename F>
void with_team(const F& f) {
  const int64_t threads = num_threads();
  if (threads <= 1 || !has_products() || Team::current() != nullptr) return f();
  Team team;
  std::exception_ptr error;  // torch's loop would lose its words
  in_torch_threads(threads, [&](int64_t thread) {
    if (thread > 0) return team.serve();
    Team::current() = &team;
    try {
      f();
    } catch (...) {
      error = std::current_exception();
    }
    Team::current() = nullptr;
    team.end();
  });
  if (error) std::rethrow_exception(error);
}

}  // namespace fastbert
