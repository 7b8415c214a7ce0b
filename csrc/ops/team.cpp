#include "team.h"

#include <exception>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastbert {
namespace {

constexpr uint64_t kEnd = ~uint64_t{0};
// Looks, some tens of microseconds, after which a thread that waits offers its core to others.
constexpr int kLooks = 1000;

template <typename Done>
void wait_until(const Done& done) {
  for (int looks = 0; !done(); ++looks) {
    if (looks >= kLooks) {
      std::this_thread::yield();
      continue;
    }
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
}

}  // namespace

Team*& Team::current() {
  static thread_local Team* team = nullptr;
  return team;
}

bool leads_team() { return Team::current() != nullptr; }

bool run_in_team(int64_t count, void (*f)(int64_t index, void* context), void* context) {
  Team* const team = Team::current();
  if (team == nullptr) return false;
  team->run(count, f, context);
  return true;
}

void Team::take_part() {
  try {
    for (int64_t i = next_.fetch_add(1); i < count_; i = next_.fetch_add(1)) function_(i, context_);
  } catch (...) {
    if (!has_failed_.exchange(true)) error_ = std::current_exception();
  }
}

void Team::run(int64_t count, Function f, void* context) {
  if (count <= 1) {
    if (count == 1) f(0, context);
    return;
  }
  function_ = f, context_ = context, count_ = count;
  next_ = 0;
  const uint64_t loop = loop_.load(std::memory_order_relaxed) + 1;
  open_ = loop;
  loop_ = loop;
  take_part();
  // From here on no thread joins: one that counted itself before has seen it open, and is waited for.
  open_ = 0;
  wait_until([&] { return taking_part_.load() == 0; });
  if (has_failed_) std::rethrow_exception(error_);
}

void Team::serve() {
  for (uint64_t seen = 0;;) {
    uint64_t loop = 0;
    wait_until([&] { return (loop = loop_.load()) != seen; });
    if (loop == kEnd) return;
    seen = loop;
    ++taking_part_;
    if (open_.load() == loop) take_part();
    --taking_part_;
  }
}

void Team::end() { loop_ = kEnd; }

}  // namespace fastbert
