// What CUDA supplies to a rendered kernel, for g++: qualifiers, indices, arithmetic with one rounding, and
// declarations of the primitives that stand between #ifdef __CUDACC__ and #endif in the source. epilogue.h
// defines them, behind the source, where the kernel's own constants are known.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__

struct Index3 {
  unsigned x, y, z;
};
static Index3 threadIdx, blockIdx, blockDim, gridDim;

static inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// Not from <cmath>, which takes longer to read than a kernel takes to compile, and whose fmaxf makes a signalling
// NaN a quiet one: the GPU's gives the other operand for either kind.
static inline float fabsf(float value) { return __uint_as_float(__float_as_uint(value) & 0x7FFFFFFFu); }
static inline float fmaxf(float a, float b) { return a != a ? b : b != b ? a : a > b ? a : b; }

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }

void load_words8(const void* address, unsigned* words);
void load_words4(const void* address, unsigned* words);
void load_words2(const void* address, unsigned* words);
void load_words1(const void* address, unsigned* words);
unsigned short load_element(const unsigned short* address);
long long load_index(const int* address);
long long load_index(const long long* address);
float load_float(const float* address);
void store_words4(void* address, const unsigned* words);
void store_words2(void* address, const unsigned* words);
void store_words1(void* address, const unsigned* words);
void store_half_word(void* address, unsigned word);
void wait_for_predecessors(const unsigned short*& source, unsigned char*& target);
void release_dependents();

float element_to_float(unsigned short bits);
unsigned float_to_e4m3x4(float a, float b, float c, float d);
unsigned float_to_elements(float low, float high);
float tile_max(float value);
