// The structure of vLLM's one-launch decode epilogue, re-created from a description of it; no line is vLLM's.
//
// One warp or three a row, blocks of 256 threads, a multiply by a device scale, the row of the cache read ahead of
// the wait, the release of dependents last. Vectors of 8 elements: 72 a row, so that one warp makes three rounds of
// loads and three warps make one. HEADS, WARPS_A_ROW and PDL are defined by whoever compiles this.

using Element = unsigned short;  // bits of one bf16

constexpr unsigned kRank = 512, kRope = 64, kVector = 8;
constexpr unsigned kVectors = (kRank + kRope) / kVector;
constexpr unsigned kRows = HEADS + 1;  // query heads, then the row of the cache
constexpr unsigned kRounds = (kVectors + 32 * WARPS_A_ROW - 1) / (32 * WARPS_A_ROW);

#ifdef __CUDACC__
struct Vector { unsigned words[kVector / 2]; };

__device__ __forceinline__ Vector load_vector(const Element* address) {
  const uint4 v = *reinterpret_cast<const uint4*>(address);
  return {{v.x, v.y, v.z, v.w}};
}

__device__ __forceinline__ void store_codes(unsigned char* address, unsigned low, unsigned high) {
  *reinterpret_cast<uint2*>(address) = make_uint2(low, high);
}

__device__ __forceinline__ float element_to_float(unsigned bits) { return __uint_as_float(bits << 16); }

__device__ __forceinline__ unsigned float_to_e4m3x4(float a, float b, float c, float d) {
  unsigned packed;
  asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
      " mov.b32 %0, {low, high}; }" : "=r"(packed) : "f"(a), "f"(b), "f"(c), "f"(d));
  return packed;
}

__device__ __forceinline__ void wait_for_predecessors() {
#if PDL
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_dependents() {
#if PDL
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#endif

__device__ __forceinline__ unsigned codes_of(const Vector& v, unsigned half, float scale) {
  const unsigned low = v.words[2 * half], high = v.words[2 * half + 1];
  return float_to_e4m3x4(element_to_float(low & 0xffff) * scale, element_to_float(low >> 16) * scale,
                         element_to_float(high & 0xffff) * scale, element_to_float(high >> 16) * scale);
}

extern "C" __global__ void __launch_bounds__(256) one_launch(
    unsigned char* q_out, unsigned char* kv_cache, const Element* q_nope, const Element* q_rope, const Element* k_nope,
    const Element* k_rope, const long long* loc, const float* q_scale, const float* kv_scale, unsigned tokens,
    long long q_nope_token_stride, long long q_nope_head_stride, long long q_rope_token_stride,
    long long q_rope_head_stride, long long k_nope_token_stride, long long k_rope_token_stride,
    long long cache_row_stride) {
  const unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  const unsigned row = warp / WARPS_A_ROW, first = warp % WARPS_A_ROW * 32 + lane;
  const long long token = row / kRows;
  const unsigned head = row % kRows;
  const bool is_query = head < HEADS;
  if (token < tokens) {
    const Element* nope;
    const Element* rope;
    if (is_query) {
      nope = q_nope + token * q_nope_token_stride + head * q_nope_head_stride;
      rope = q_rope + token * q_rope_token_stride + head * q_rope_head_stride - kRank;
    } else {
      nope = k_nope + token * k_nope_token_stride;
      rope = k_rope + token * k_rope_token_stride - kRank;
    }
    Vector vectors[kRounds];
    long long slot = 0;
    if (is_query) {
      wait_for_predecessors();
    } else {
      slot = loc[token];
    }
#pragma unroll
    for (unsigned round = 0; round < kRounds; ++round) {
      const unsigned column = (first + round * 32 * WARPS_A_ROW) * kVector;
      if (column < kRank + kRope) vectors[round] = load_vector((column < kRank ? nope : rope) + column);
    }
    if (!is_query) wait_for_predecessors();
    const float scale = *(is_query ? q_scale : kv_scale);
    unsigned char* target = is_query ? q_out + (token * HEADS + head) * (kRank + kRope)
                                     : kv_cache + slot * cache_row_stride;
    if (is_query || slot >= 0) {
#pragma unroll
      for (unsigned round = 0; round < kRounds; ++round) {
        const unsigned column = (first + round * 32 * WARPS_A_ROW) * kVector;
        if (column < kRank + kRope)
          store_codes(target + column, codes_of(vectors[round], 0, scale), codes_of(vectors[round], 1, scale));
      }
    }
  } else {
    wait_for_predecessors();
  }
  release_dependents();
}
