// Copies past the caches: what is written here is read once, and not soon.
#include "level.h"

namespace {

#if DI_AVX2
#ifdef __AVX512F__
typedef __m512i piece;  // a line of the caches
inline void put(char* to, const char* from) {
  _mm512_stream_si512((piece*)to, _mm512_loadu_si512(from));
}
#else
typedef __m256i piece;
inline void put(char* to, const char* from) {
  _mm256_stream_si256((piece*)to, _mm256_loadu_si256((const piece*)from));
}
#endif

void copy(char* to, const char* from, int64_t bytes) {
  constexpr int64_t STEP = sizeof(piece);
  int64_t at = 0;
  if (uintptr_t(to) % STEP == 0)
    for (; at + STEP <= bytes; at += STEP) put(to + at, from + at);
  std::memcpy(to + at, from + at, size_t(bytes - at));
}

void finish() { _mm_sfence(); }  // others may read now
#else
void copy(char* to, const char* from, int64_t bytes) { std::memcpy(to, from, size_t(bytes)); }

void finish() {}
#endif

}  // namespace

// `count` pieces of some bytes, each `to_stride` and `from_stride` bytes after the one before. Any
// thread may call this, several at a time.
DI_EXPORT void di_copy(char* to, int64_t to_stride, const char* from, int64_t from_stride,
                       int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; i++) copy(to + i * to_stride, from + i * from_stride, bytes);
  finish();
}
