// Threads that compute together. One call into the library starts one *team*: every member runs the
// same function, shares work out through `next`, and waits for the others at `barrier`, which spins.
// Between calls the helpers spin for a moment, then sleep.
#pragma once

#include <atomic>

#include "level.h"

namespace di {

struct Shared {
  std::atomic<int> arrived{0};
  std::atomic<int> round{0};
  std::atomic<int64_t> taken[2] = {{0}, {0}};
};

class Team {
 public:
  Team(Shared* shared, int rank, int size) : rank(rank), size(size), shared_(shared) {}

  const int rank;
  const int size;

  // The next piece of work nobody took since the last barrier, counted from 0.
  int64_t next() {
    if (size == 1) return local_++;
    return shared_->taken[phase_].fetch_add(1, std::memory_order_relaxed);
  }

  // Wait until everybody is here; counting of pieces begins anew.
  void barrier();

 private:
  Shared* shared_;
  int phase_ = 0;
  int64_t local_ = 0;
};

// Run `work(context, team)` on every thread of the pool, this one included, and wait for all. Only
// within a `Call` (scratch.h), which keeps other Python threads out.
void run_team(void (*work)(void*, Team&), void* context);

// The same for a callable.
template <typename F>
void together(F&& work) {
  run_team([](void* context, Team& team) { (*static_cast<F*>(context))(team); }, &work);
}

int num_threads();

}  // namespace di
