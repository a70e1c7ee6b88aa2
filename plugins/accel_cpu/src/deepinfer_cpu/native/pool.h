// Threads that compute together. One call into the library starts one *team*: every member runs the
// same function, in which barriers part one *stage* of work from the next, and takes pieces of work
// one by one, so that who has more time does more.
//
// A stage is over once nothing is left to take and nobody is at work in it. A member that the
// operating system keeps from running therefore holds up nobody unless it has joined the stage;
// back again, it finds the stages that went by closed and skips them. So a function does everything
// after `join` or within pieces from `next`, and its path must not depend on what it computes.
//
// Who waits spins for a moment, then sleeps in the kernel. It never yields: a thread that yields
// to a busy neighbour on its core gets the core back after some milliseconds.
#pragma once

#include <atomic>

#include "level.h"

namespace di {

// A number that threads wait on.
class Signal {
 public:
  std::atomic<uint32_t> value{0};

  // Return once `done(value)`, which is looked at whenever the number changes.
  template <typename F>
  uint32_t wait(F&& done) {
    uint32_t now = value.load(std::memory_order_acquire);
    for (Spin spin; !done(now) && spin.again();) now = value.load(std::memory_order_acquire);
    while (!done(now)) now = sleep(now);
    return now;
  }

  // To be called after each change that may end somebody's waiting.
  void wake() {
    if (sleepers_.load(std::memory_order_seq_cst)) wake_all();
  }

 private:
  class Spin {
   public:
    bool again();

   private:
    int64_t spins_ = 0, since_ = 0;
  };

  // Sleep while the number is `seen`; returns what it is then.
  uint32_t sleep(uint32_t seen);
  void wake_all();

  std::atomic<uint32_t> sleepers_{0};
};

// The stage in progress: its number, how many members are at work in it, which pieces are taken.
struct Stages {
  alignas(64) Signal state;  // number * ONE | members at work
  alignas(64) std::atomic<int64_t> taken[2] = {{0}, {0}};  // of stages with even and odd numbers

  static constexpr uint32_t ONE = 1 << 12;
};

class Team {
 public:
  static constexpr int64_t NONE = int64_t(1) << 40;  // more pieces than any stage has

  Team(Stages* stages, int rank, int size) : rank(rank), size(size), stages_(stages) {}
  ~Team() { leave(); }

  const int rank;
  const int size;

  // Be at work in this stage until the barrier; false: it is over.
  bool join();

  // The next piece of this stage that nobody took, counted from 0; NONE if the stage is over.
  int64_t next() {
    if (size == 1) return local_++;
    if (!join()) return NONE;
    return stages_->taken[stage_ & 1].fetch_add(1, std::memory_order_relaxed);
  }

  // Begin the next stage as soon as this one is over.
  void barrier();

 private:
  void leave();

  Stages* stages_;
  uint32_t stage_ = 0;
  bool joined_ = false;
  int64_t local_ = 0;
};

// Run `work(context, team)` on this thread and on every other of the pool that gets there in time;
// returns when all is done. Only within a `Call` (scratch.h), which keeps other Python threads out.
void run_team(void (*work)(void*, Team&), void* context);

// The same for a callable.
template <typename F>
void together(F&& work) {
  run_team([](void* context, Team& team) { (*static_cast<F*>(context))(team); }, &work);
}

int num_threads();

}  // namespace di
