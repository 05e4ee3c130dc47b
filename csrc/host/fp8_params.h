// Parameters of the kernels for e4m3 inputs.
#pragma once

#include "host/params.h"

namespace flash_attn3 {

// Bytes of a row of transposed V: keys of a block, and what TMA and its swizzle take at a time.
constexpr int kTransposedKeys = 128;

// Columns of a box of Q and K: as wide a swizzle as divides the head dim.
constexpr int fp8_chunk_columns(int head_dim) { return head_dim % 128 == 0 ? 128 : head_dim % 64 == 0 ? 64 : 32; }

// A scale for each key head of each batch, fp32; any strides.
struct Descale {
  float const* data;  // null: all 1
  int64_t stride_batch, stride_head;

#if defined(__CUDACC__)
  __device__ __forceinline__ float of(int batch, int head) const {
    return data == nullptr ? 1.f : __ldg(data + batch * stride_batch + head * stride_head);
  }
#endif
};

// "fp8_forward" reads the scales, "fp8_transpose" what follows them. map_v is of what "fp8_transpose" writes: (128,
// head_dim_v, blocks, batch * kv_heads). Out is bfloat16.
struct Fp8Params : ForwardParams {
  Descale q_descale, k_descale, v_descale;

  StridedTensor v;
  uint8_t* transposed;  // [batch][kv_heads][blocks][head_dim_v][kTransposedKeys], see kernels/fp8/transpose.h
  int32_t block_n;      // keys of a block
  int32_t batch;
};

}  // namespace flash_attn3
