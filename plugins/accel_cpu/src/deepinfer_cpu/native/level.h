// What every unit includes first: the instruction level it is compiled for, and how entry points
// are exported. Each level is a library of its own, so symbols need no suffix, and no inline
// function of one level can be linked into another.
#pragma once

#include <cstdint>
#include <cstring>

#ifndef DI_LEVEL
#error "compile through deepinfer_cpu.build"
#endif

#define DI_EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define DI_AVX2 1
#include <immintrin.h>
#else
#define DI_AVX2 0
#endif

#ifndef DI_AVX512  // tests define it, and emulate the instructions
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#define DI_AVX512 1
#else
#define DI_AVX512 0
#endif
#endif

// On an ARM processor every level but "portable" is compiled with DI_WANT_NEON.
#if defined(DI_WANT_NEON) && defined(__ARM_NEON)
#define DI_NEON 1
#include <arm_neon.h>
#else
#define DI_NEON 0
#endif

#ifndef DI_AMX  // likewise
#if defined(__AMX_TILE__) && defined(__AMX_INT8__)
#define DI_AMX 1
#else
#define DI_AMX 0
#endif
#endif
