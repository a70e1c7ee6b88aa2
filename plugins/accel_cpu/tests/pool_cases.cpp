// Compiled and run by test_pool.py: every piece of every stage is worked on once, and no stage begins
// before the one before it is over, however late a member comes.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "pool.h"
#include "scratch.h"

extern "C" void di_set_threads(int32_t count);

namespace {

using Pieces = std::vector<int>;  // times a piece was worked on; written without locks on purpose

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

void doze(int microseconds) {
  std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

// `late(stage)` microseconds pass before the last member takes part in a stage.
template <typename F>
void stages_in_order(int threads, size_t stages, size_t pieces, F&& late) {
  di::Call call;
  const Pieces none(pieces), once(pieces, 1);
  std::vector<Pieces> done(stages, none);
  di::together([&](di::Team& team) {
    for (size_t stage = 0; stage < stages; stage++) {
      if (team.rank == threads - 1) doze(late(stage));
      for (size_t i = size_t(team.next()); i < pieces; i = size_t(team.next())) {
        if (stage) expect(done[stage - 1] == once, "begun too early");
        done[stage][i]++;
      }
      team.barrier();
    }
  });
  for (const Pieces& counts : done) expect(counts == once, "not all once");
}

// Members prepare for themselves what they need in a stage: it is there while they are in it.
void preparations(int threads) {
  di::Call call;
  int input = 0;
  std::vector<int> mine(size_t(threads), -1);
  di::together([&](di::Team& team) {
    for (int stage = 0; stage < 200; stage++) {
      if (team.join()) mine[size_t(team.rank)] = input;
      for (int64_t i = team.next(); i < 3; i = team.next())
        expect(mine[size_t(team.rank)] == stage, "prepared from another stage");
      team.barrier();
      for (int64_t i = team.next(); i < 1; i = team.next()) input++;
      team.barrier();
    }
  });
}

}  // namespace

int main() {
  for (int threads : {1, 2, 3, 8}) {
    di_set_threads(threads);
    for (int repeat = 0; repeat < 50; repeat++) {
      stages_in_order(threads, 30, 5, [](size_t) { return 0; });
      stages_in_order(threads, 10, 3, [](size_t stage) { return stage == 2 ? 300 : 0; });
      stages_in_order(threads, 1, 7, [](size_t) { return 100; });
      preparations(threads);
    }
  }
  di_set_threads(1);
  std::puts("done");
}
