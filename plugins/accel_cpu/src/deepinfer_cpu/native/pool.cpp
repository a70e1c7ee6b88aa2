#include "pool.h"

#include "scratch.h"

#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__unix__)
#include <pthread.h>
#endif

#if defined(__x86_64__)
#define DI_PAUSE() __builtin_ia32_pause()
#else
#define DI_PAUSE() std::atomic_signal_fence(std::memory_order_seq_cst)
#endif

namespace di {
namespace {

constexpr int SPINS_IDLE = 4000;     // some 50 us between two calls of one step
constexpr int SPINS_BARRIER = 500;  // then yield: somebody else, maybe a helper, needs the core

struct Job {
  void (*work)(void*, Team&) = nullptr;
  void* context = nullptr;
  Shared* shared = nullptr;
};

class Pool {
 public:
  explicit Pool(int size) : size_(size) {
    for (int rank = 1; rank < size; rank++) helpers_.emplace_back([this, rank] { serve(rank); });
  }

  ~Pool() {
    {
      std::lock_guard<std::mutex> hold(lock_);
      ending_ = true;
      number_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& helper : helpers_) helper.join();
  }

  int size() const { return size_; }

  void run(void (*work)(void*, Team&), void* context) {
    Shared shared;
    job_ = {work, context, &shared};
    left_.store(size_ - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> hold(lock_);
      number_.fetch_add(1, std::memory_order_release);
    }
    if (asleep_.load(std::memory_order_seq_cst)) wake_.notify_all();
    Team team(&shared, 0, size_);
    work(context, team);
    for (int spins = 0; left_.load(std::memory_order_acquire); spins++) {
      if (spins < SPINS_BARRIER)
        DI_PAUSE();
      else
        std::this_thread::yield();
    }
  }

 private:
  void serve(int rank) {
    uint64_t seen = 0;
    for (;;) {
      for (int spins = 0; number_.load(std::memory_order_acquire) == seen && spins < SPINS_IDLE;
           spins++)
        DI_PAUSE();
      if (number_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> hold(lock_);
        asleep_.fetch_add(1);
        wake_.wait(hold, [&] { return number_.load(std::memory_order_acquire) != seen; });
        asleep_.fetch_sub(1);
      }
      seen++;
      if (ending_) return;
      Team team(job_.shared, rank, size_);
      job_.work(job_.context, team);
      left_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  const int size_;
  std::vector<std::thread> helpers_;
  std::mutex lock_;
  std::condition_variable wake_;
  std::atomic<uint64_t> number_{0};
  std::atomic<int> left_{0};
  std::atomic<int> asleep_{0};
  bool ending_ = false;
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

void Team::barrier() {
  if (size == 1) {
    local_ = 0;
    return;
  }
  const int round = shared_->round.load(std::memory_order_relaxed);
  if (shared_->arrived.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
    shared_->arrived.store(0, std::memory_order_relaxed);
    shared_->taken[1 - phase_].store(0, std::memory_order_relaxed);
    shared_->round.store(round + 1, std::memory_order_release);
  } else {
    for (int spins = 0; shared_->round.load(std::memory_order_acquire) == round; spins++) {
      if (spins < SPINS_BARRIER)
        DI_PAUSE();
      else
        std::this_thread::yield();
    }
  }
  phase_ = 1 - phase_;
}

void run_team(void (*work)(void*, Team&), void* context) {
  if (!pool || pool->size() == 1) {
    Shared shared;
    Team team(&shared, 0, 1);
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
DI_EXPORT void di_set_threads(int32_t count) {
  std::lock_guard<std::mutex> hold(di::entrance);
  if (count < 1) count = 1;
#if defined(__unix__)
  static const int registered = pthread_atfork(nullptr, nullptr, di::after_fork);
  static_cast<void>(registered);
#endif
  if (di::pool && di::pool->size() == count) return;
  di::pool.reset();
  di::pool = std::make_unique<di::Pool>(count);
}

DI_EXPORT int32_t di_num_threads() { return di::num_threads(); }
