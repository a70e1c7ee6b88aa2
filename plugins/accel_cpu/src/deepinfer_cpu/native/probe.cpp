// Which levels this processor and operating system can run. Asked of the portable library, before
// any other is loaded.
#include "level.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

// The level this library was compiled for.
DI_EXPORT const char* di_level() { return DI_LEVEL; }

#if defined(__x86_64__)
namespace {

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

// Tile instructions are in leaf 7; Linux hands the tile registers out on request.
bool has_amx() {
#if defined(__linux__)
  uint32_t a = 7, b = 0, c = 0, d = 0;
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  const bool tiles = (d >> 24) & 1, int8 = (d >> 25) & 1;
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  return has_avx512() && tiles && int8 && syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
#else
  return false;
#endif
}

}  // namespace
#endif

// Bits: 1 portable, 2 avx2, 4 avx512, 8 amx, 16 neon, 32 dotprod.
DI_EXPORT int32_t di_levels() {
  int32_t levels = 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (has_avx2()) levels |= 2;
  if (has_avx512()) levels |= 4;
  if (has_amx()) levels |= 8;
#elif defined(__aarch64__)
  levels |= 16;
#if defined(__linux__)
  if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) levels |= 32;
#endif
#endif
  return levels;
}
