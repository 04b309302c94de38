// What CUDA supplies to a rendered kernel, for g++: qualifiers, indices, and declarations of the primitives
// that stand between #ifdef __CUDACC__ and #endif in the source. epilogue.h defines them, behind the source,
// where the kernel's own types are known.
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

struct Words4;
struct Words2;

Words4 load_words4(const void* address);
long long load_index(const int* address);
long long load_index(const long long* address);
float load_float(const float* address);
void store_words2(void* address, Words2 words);
void store_words4(void* address, Words4 words);
void wait_for_predecessors(const unsigned short*& source, unsigned char*& target);
void release_dependents();

float element_to_float(unsigned short bits);
unsigned float_to_e4m3x4(float a, float b, float c, float d);
