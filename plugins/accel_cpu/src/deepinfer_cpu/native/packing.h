// Single rows of packed weights, for embeddings.
#pragma once

#include "linear.h"

namespace di {

// The weights of one output, [k]; NaN for one that does not exist.
void unpack_row(const Linear& linear, int64_t output, float* out);

}  // namespace di
