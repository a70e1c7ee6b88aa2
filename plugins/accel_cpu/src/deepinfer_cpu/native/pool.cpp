#include "pool.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "scratch.h"

#if defined(__unix__)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <climits>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__)
#define DI_PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define DI_PAUSE() __asm__ volatile("yield")
#else
#define DI_PAUSE() std::atomic_signal_fence(std::memory_order_seq_cst)
#endif

namespace di {
namespace {

constexpr int64_t SPIN_NS = 20000;  // longer than most waits within a step, and than to fall asleep
constexpr int64_t SPINS_A_LOOK = 32;  // at the clock

int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// Keep a helper on a processor of its own, as far as the process has that many.
void pin(std::thread& helper, int rank) {
#if defined(__linux__)
  cpu_set_t allowed, one;
  if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
  int left = rank % std::max(1, CPU_COUNT(&allowed));
  for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
    if (!CPU_ISSET(cpu, &allowed) || left--) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_setaffinity_np(helper.native_handle(), sizeof one, &one);
    return;
  }
#else
  static_cast<void>(helper), static_cast<void>(rank);
#endif
}

struct Job {
  void (*work)(void*, Team&) = nullptr;
  void* context = nullptr;
  Stages* stages = nullptr;
};

class Pool {
 public:
  Pool(int size, bool pinned) : size_(size), pinned_(pinned) {
    inside_.value = CLOSED;
    for (int rank = 1; rank < size; rank++) {
      helpers_.emplace_back([this, rank] { serve(rank); });
      if (pinned) pin(helpers_.back(), rank);
    }
  }

  ~Pool() {
    ending_.store(true);
    announce();
    for (auto& helper : helpers_) helper.join();
  }

  int size() const { return size_; }
  bool pinned() const { return pinned_; }

  void run(void (*work)(void*, Team&), void* context) {
    Stages stages;
    job_ = {work, context, &stages};
    inside_.value.store(0, std::memory_order_release);
    announce();
    {
      Team team(&stages, 0, size_);
      work(context, team);
      team.barrier();
    }
    inside_.value.fetch_or(CLOSED, std::memory_order_acq_rel);
    inside_.wait([](uint32_t members) { return members == CLOSED; });
  }

 private:
  static constexpr uint32_t CLOSED = uint32_t(1) << 31;

  void announce() {
    number_.value.fetch_add(1, std::memory_order_seq_cst);
    number_.wake();
  }

  void serve(int rank) {
    uint32_t seen = 0;
    for (;;) {
      seen = number_.wait([&](uint32_t number) { return number != seen; });
      if (ending_.load()) return;
      if (!enter()) continue;
      {
        Team team(job_.stages, rank, size_);
        job_.work(job_.context, team);
      }
      if (inside_.value.fetch_sub(1, std::memory_order_seq_cst) == (CLOSED | 1)) inside_.wake();
    }
  }

  // Whether the job still takes members; its memory stays as long as one is inside.
  bool enter() {
    uint32_t members = inside_.value.load(std::memory_order_relaxed);
    while (!(members & CLOSED))
      if (inside_.value.compare_exchange_weak(members, members + 1, std::memory_order_acquire))
        return true;
    return false;
  }

  const int size_;
  const bool pinned_;
  std::vector<std::thread> helpers_;
  std::atomic<bool> ending_{false};
  alignas(64) Signal number_;  // of the last job
  alignas(64) Signal inside_;  // helpers in the job, and whether it is closed
  Job job_;
};

std::mutex entrance;
std::unique_ptr<Pool> pool;

struct Slot {
  void* memory = nullptr;
  int64_t bytes = 0;
};
std::vector<Slot> slots;

// A forked process has none of the threads: its calls run alone until it sets threads itself.
void after_fork() {
  new (&entrance) std::mutex;
  static_cast<void>(pool.release());
}

}  // namespace

bool Signal::Spin::again() {
  DI_PAUSE();
  if (++spins_ % SPINS_A_LOOK) return true;
  const int64_t time = now();
  if (!since_) since_ = time;
  return time - since_ < SPIN_NS;
}

#if defined(__linux__)
uint32_t Signal::sleep(uint32_t seen) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  if (value.load(std::memory_order_seq_cst) == seen)
    syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
  return value.load(std::memory_order_acquire);
}

void Signal::wake_all() {
  syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}
#else
uint32_t Signal::sleep(uint32_t) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(SPIN_NS));
  return value.load(std::memory_order_acquire);
}

void Signal::wake_all() {}
#endif

bool Team::join() {
  if (joined_ || size == 1) return true;
  auto& state = stages_->state.value;
  uint32_t now = state.load(std::memory_order_acquire);
  while (now / Stages::ONE == stage_)
    if (state.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) return joined_ = true;
  return false;
}

// The last one out closes the stage. Nobody else looks at the next one's pieces before that.
void Team::leave() {
  if (!joined_) return;
  joined_ = false;
  auto& state = stages_->state.value;
  uint32_t now = state.load(std::memory_order_relaxed), then;
  do {
    const bool last = now % Stages::ONE == 1;
    if (last) stages_->taken[(stage_ + 1) & 1].store(0, std::memory_order_relaxed);
    then = last ? (stage_ + 1) * Stages::ONE : now - 1;
  } while (!state.compare_exchange_weak(now, then, std::memory_order_seq_cst));
  if (then % Stages::ONE == 0) stages_->state.wake();
}

void Team::barrier() {
  if (size == 1) {
    local_ = 0;
    return;
  }
  join();
  leave();
  stages_->state.wait([this](uint32_t now) { return now / Stages::ONE != stage_; });
  stage_ = (stage_ + 1) % (uint32_t(1) << 20);
}

void run_team(void (*work)(void*, Team&), void* context) {
  if (!pool || pool->size() == 1) {
    Team team(nullptr, 0, 1);
    work(context, team);
    return;
  }
  pool->run(work, context);
}

Call::Call() { entrance.lock(); }
Call::~Call() { entrance.unlock(); }

void* Call::bytes(int64_t count) {
  if (next_ == slots.size()) slots.emplace_back();
  Slot& slot = slots[next_++];
  if (slot.bytes < count) {
    std::free(slot.memory);
    slot = {};
    const int64_t rounded = (count + count / 4 + 63) / 64 * 64;
    slot.memory = std::aligned_alloc(64, size_t(rounded));
    if (!slot.memory) throw std::bad_alloc();
    slot.bytes = rounded;
  }
  return slot.memory;
}

int num_threads() { return pool ? pool->size() : 1; }

}  // namespace di

// Make the pool that all later calls use; the threads of the one before end.
static void set_pool(int32_t count, bool pinned) {
  count = std::min(std::max(count, 1), int32_t(di::Stages::ONE - 1));
#if defined(__unix__)
  static const int registered = pthread_atfork(nullptr, nullptr, di::after_fork);
  static_cast<void>(registered);
#endif
  if (di::pool && di::pool->size() == count && di::pool->pinned() == pinned) return;
  di::pool.reset();
  di::pool = std::make_unique<di::Pool>(count, pinned);
}

DI_EXPORT void di_set_threads(int32_t count) {
  std::lock_guard<std::mutex> hold(di::entrance);
  set_pool(count, di::pool && di::pool->pinned());
}

// Whether helpers are kept on processors of their own. The thread that calls is left alone: what it
// starts would inherit its place.
DI_EXPORT void di_set_pinned(int32_t pinned) {
  std::lock_guard<std::mutex> hold(di::entrance);
  set_pool(di::num_threads(), pinned);
}

DI_EXPORT int32_t di_num_threads() { return di::num_threads(); }
