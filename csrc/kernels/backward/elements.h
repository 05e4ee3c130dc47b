// 16-bit elements in pairs, for the kernels that only move and add: no CuTe, quick to compile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <cstdint>

namespace flash_attn3 {

template <class Element>
struct ElementPair;

template <>
struct ElementPair<cutlass::bfloat16_t> {
  static __device__ __forceinline__ float2 unpack(uint32_t bits) {
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(pair);
  }
};

template <>
struct ElementPair<cutlass::half_t> {
  static __device__ __forceinline__ float2 unpack(uint32_t bits) {
    return __half22float2(reinterpret_cast<__half2 const&>(bits));
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    __half2 const pair = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t const&>(pair);
  }
};

}  // namespace flash_attn3
