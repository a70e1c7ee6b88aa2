// One call into the library: it has the pool and the scratch memory to itself.
#pragma once

#include <cstddef>

#include "level.h"

namespace di {

// Lives as long as an entry point runs; another Python thread waits meanwhile. Memory stays for
// the calls that follow.
class Call {
 public:
  Call();
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Room for some values, aligned to 64 bytes; content undefined. Take it before the team starts.
  template <typename T>
  T* take(int64_t count) {
    return static_cast<T*>(bytes(count * int64_t(sizeof(T))));
  }

 private:
  void* bytes(int64_t count);
  size_t next_ = 0;
};

}  // namespace di
