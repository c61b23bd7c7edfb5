// The team: its leader shares out tasks, the other threads watch for them.

#include "parallel.h"

#include <sched.h>

namespace {

// Looks that a thread takes before it lets others run between two of them: some tens of
// microseconds, far more than the serial parts of a step last.
constexpr int MOST_LOOKS = 1 << 14;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Condition>
void wait_until(const Condition& is_met) {
  for (int looks = 0; !is_met(); looks++) {
    if (looks < MOST_LOOKS) {
      relax();
    } else {
      sched_yield();
    }
  }
}

thread_local Team* current_team = nullptr;

}  // namespace

std::atomic<RunParallel> run_parallel{nullptr};

Team* Team::current() { return current_team; }

void Team::run_on(int64_t threads) {
  leader_ = &current_team;
  const auto enter = [](void* data) {
    Team& team = *static_cast<Team*>(data);
    if (team.leader_ == &current_team) {
      team.lead();
    } else {
      team.follow();
    }
  };
  run_parallel.load(std::memory_order_relaxed)(enter, this, static_cast<unsigned>(threads), 0);
}

void Team::lead() {
  current_team = this;
  call_(function_);
  current_team = nullptr;
  round_.store(-1, std::memory_order_release);
}

// Fewer threads may come than were asked for, or late, so the leader waits for none but those that
// said that they are busy. A follower says so before it looks for tasks, and the leader takes the
// tasks away before it looks for busy followers; both in one order that all threads see: so either
// the leader sees the follower, or the follower sees no tasks, or those of a later round.
void Team::share(SharedTasks& tasks) {
  tasks_.store(&tasks);
  round_.fetch_add(1);
  tasks.take(0);
  tasks_.store(nullptr);
  wait_until([&] { return busy_.load() == 0; });
}

void Team::follow() {
  const int64_t thread = next_thread_.fetch_add(1, std::memory_order_relaxed);
  for (int64_t seen = 0, round = 0;; seen = round) {
    wait_until([&] { return (round = round_.load(std::memory_order_acquire)) != seen; });
    if (round < 0) return;
    busy_.fetch_add(1);
    if (SharedTasks* tasks = tasks_.load()) tasks->take(thread);
    busy_.fetch_sub(1);
  }
}
