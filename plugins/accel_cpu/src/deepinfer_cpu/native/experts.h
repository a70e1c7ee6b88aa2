// Feed-forward experts, each row through its own. Plain structs: Python fills them with ctypes, so
// every change here is a change in `deepinfer_cpu.structs`.
#pragma once

#include "linear.h"

namespace di {

struct Experts {
  const Linear* const* gate_up;  // [count]: 2 * intermediate outputs, gates first
  const Linear* const* down;     // [count]: hidden outputs
  int64_t count;
  int64_t hidden;
  int64_t intermediate;
  float alpha;  // act = g sigmoid(alpha g) (u + offset), g and u limited
  float limit;
  float offset;
  int32_t reserved;
};

}  // namespace di
