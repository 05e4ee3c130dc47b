// Before "fp8_forward": V with the keys of a head dim beside each other, as e4m3 WGMMA needs its B operand.
//
// The result is one block of block_n keys after the other, each head_dim_v rows of 128 bytes of which the first block_n
// are written: what one TMA box takes. Keys past the end are 0, whatever V holds there. Inside each 16 keys they come
// in the order in which P's accumulators are an operand (kernels/common/softmax.h): place 4t + i is key 2t + i, or, of
// i from 2 on, 2t + 8 + i - 2.
//
// A CTA takes one block. It copies the block's rows into shared memory; a thread then takes 16 keys of four head dims,
// which it turns four by four.
#pragma once

#include "host/fp8_params.h"
#include "host/geometry.h"
#include "kernels/common/launch.h"

namespace flash_attn3 {

constexpr int kTransposeThreads = 256;
constexpr int kMostColumns = 256;  // of a head

// Rows of 16 keys each have their 16-byte units in an order of their own, so that a warp which reads 16 keys a lane
// finds them in different banks.
__device__ __forceinline__ int turn_of(int row) { return row / 16 % 8; }

__device__ __forceinline__ void turn_four(uint32_t const (&in)[4], uint32_t (&out)[4]) {
  uint32_t const low01 = __byte_perm(in[0], in[1], 0x5140), low23 = __byte_perm(in[2], in[3], 0x5140);
  uint32_t const high01 = __byte_perm(in[0], in[1], 0x7362), high23 = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(low01, low23, 0x5410);
  out[1] = __byte_perm(low01, low23, 0x7632);
  out[2] = __byte_perm(high01, high23, 0x5410);
  out[3] = __byte_perm(high01, high23, 0x7632);
}

template <class /*Unused*/>
__global__ void __launch_bounds__(kTransposeThreads) fp8_transpose_kernel(__grid_constant__ Fp8Params const params) {
  constexpr int kPitch = kMostColumns / 4;  // words of a row
  __shared__ alignas(16) uint32_t rows[kTransposedKeys][kPitch];
  int const block_n = params.block_n, columns = params.head_dim_v;
  int const kv_heads = params.heads / params.heads_per_kv_head, blocks = ceil_div(params.seqlen_k, block_n);
  int const virtual_head = blockIdx.x / blocks, head = virtual_head % kv_heads, batch = virtual_head / kv_heads;
  int const first_key = blockIdx.x % blocks * block_n;
  auto const* const v =
      static_cast<uint8_t const*>(params.v.data) + batch * params.v.stride_batch + head * params.v.stride_head;
  int const units = columns / 16;
  for (int i = threadIdx.x; i < block_n * units; i += kTransposeThreads) {
    int const row = i / units, unit = i % units, key = first_key + row;
    uint4 value{0, 0, 0, 0};
    if (key < params.seqlen_k) value = __ldg(reinterpret_cast<uint4 const*>(v + key * params.v.stride_sequence) + unit);
    *reinterpret_cast<uint4*>(&rows[row][(unit ^ turn_of(row)) * 4]) = value;
  }
  __syncthreads();
  uint8_t* const out = params.transposed + int64_t(blockIdx.x) * columns * kTransposedKeys;
  int const groups = block_n / 16;  // neighbouring lanes: what they write lies side by side
  for (int i = threadIdx.x; i < groups * (columns / 4); i += kTransposeThreads) {
    int const group = i % groups, quad = i / groups, word = quad ^ turn_of(group * 16) * 4;
    uint32_t turned[4][4];  // [column][four places]
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      uint32_t in[4], column[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) in[j] = rows[group * 16 + 2 * t + j % 2 + j / 2 * 8][word];
      turn_four(in, column);
#pragma unroll
      for (int j = 0; j < 4; ++j) turned[j][t] = column[j];
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      *reinterpret_cast<uint4*>(out + (quad * 4 + j) * kTransposedKeys + group * 16) =
          uint4{turned[j][0], turned[j][1], turned[j][2], turned[j][3]};
    }
  }
}

// The grid follows from the work: a CTA for each block of keys.
template <class Unused>
void launch_fp8_transpose(Fp8Params const& params, int /*grid*/, cudaStream_t stream) {
  constexpr bool kOverlaps = false;
  int const kv_heads = params.heads / params.heads_per_kv_head;
  dim3 const grid(unsigned(params.batch) * kv_heads * ceil_div(params.seqlen_k, params.block_n));
  launch_overlapping(&fp8_transpose_kernel<Unused>, params, grid, kTransposeThreads, 0, kOverlaps, stream);
}

}  // namespace flash_attn3
