// After the fused kernel of a backward pass: dq = scale * dq_sums, rounded to 16 bits.
//
// dq_sums holds, for each (batch * heads, block of dq_block_m queries), the accumulators of two warpgroups as WGMMA
// leaves them: [warpgroup w][i][thread t of 128][4]. Of a warpgroup's 64 x n tile, thread t holds in its element e of
// part i: r = t / 32 * 16 + t % 32 / 4 + 8 * (e / 2), c = 8 * i + t % 4 * 2 + e % 2.
//   dQ, two tiles of 64 rows: row 64 * w + r, column c
//   dQ^T (dq_transposed), two tiles of 64 columns: row c, column 64 * w + r
// Bound by memory. A CTA takes a block: it reads in the order of memory, and rows leave through shared memory.
#pragma once

#include "host/geometry.h"
#include "host/params.h"
#include "kernels/backward/elements.h"

namespace flash_attn3 {

constexpr int kFinishThreads = 256;  // the two warpgroups of dq_sums
// Eight elements that no one writes end each row of the buffer, so that the rows that a warp writes together lie in
// different banks.
constexpr int kFinishPadding = 8;

// Of an 8 x 8 matrix of 16-bit elements, two neighbours of a row a lane.
__device__ __forceinline__ uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

template <class Element>
__global__ void __launch_bounds__(kFinishThreads)
    backward_finish_kernel(__grid_constant__ BackwardParams const params) {
  extern __shared__ uint4 finish_buffer[];
  auto* const buffer = reinterpret_cast<uint16_t*>(finish_buffer);  // (dq_block_m, pitch)
  int const pitch = params.dq_columns + kFinishPadding;

  // Neighbouring CTAs take neighbouring heads, whose rows of dq lie side by side.
  int const blocks = ceil_div(params.seqlen_q, params.dq_block_m);
  int const head = int(blockIdx.x % unsigned(params.heads));
  int const block_of_batch = int(blockIdx.x / unsigned(params.heads));
  int const first = block_of_batch % blocks * params.dq_block_m;
  int64_t const batch = block_of_batch / blocks;
  int64_t const tile = (batch * params.heads + head) * blocks + block_of_batch % blocks;

  int const parts = params.dq_block_m * params.dq_columns / (4 * kFinishThreads);
  int const warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  auto const* const sums =
      reinterpret_cast<float4 const*>(params.dq_sums) + (tile * 2 + warpgroup) * parts * 128 + thread;
  int const across = warpgroup * 64 + thread / 32 * 16;  // first r of this warp
  constexpr int kBatch = 4;                              // loads in flight
  for (int begin = 0; begin < parts; begin += kBatch) {
    float4 part[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (begin + j < parts) part[j] = __ldcs(sums + (begin + j) * 128);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (begin + j >= parts) break;
      int const along = 8 * (begin + j);
      uint32_t low = ElementPair<Element>::pack(part[j].x * params.scale, part[j].y * params.scale);
      uint32_t high = ElementPair<Element>::pack(part[j].z * params.scale, part[j].w * params.scale);
      int row = across, column = along, next = 8 * pitch;  // the 8 x 8 elements of `high` follow those of `low`
      if (params.dq_transposed) {
        low = transposed(low);
        high = transposed(high);
        row = along, column = across, next = 8;
      }
      uint16_t* const target = buffer + (row + lane / 4) * pitch + column + lane % 4 * 2;
      *reinterpret_cast<uint32_t*>(target) = low;
      *reinterpret_cast<uint32_t*>(target + next) = high;
    }
  }
  __syncthreads();

  auto* const dq =
      static_cast<Element*>(params.dq.data) + batch * params.dq.stride_batch + int64_t(head) * params.dq.stride_head;
  int const rows = min_int(params.dq_block_m, params.seqlen_q - first);
  int const vectors = params.head_dim / 8;  // of a row, 16 bytes each
  for (int i = threadIdx.x; i < rows * vectors; i += kFinishThreads) {
    int const row = i / vectors, column = i % vectors * 8;
    *reinterpret_cast<uint4*>(dq + int64_t(first + row) * params.dq.stride_sequence + column) =
        *reinterpret_cast<uint4 const*>(buffer + row * pitch + column);
  }
}

// The grid follows from the work: a CTA for each block of queries of each head.
template <class Element>
void launch_backward_finish(BackwardParams const& params, int /*grid*/, cudaStream_t stream) {
  int64_t const tiles = int64_t(params.batch) * params.heads * ceil_div(params.seqlen_q, params.dq_block_m);
  int const shared = params.dq_block_m * (params.dq_columns + kFinishPadding) * int(sizeof(uint16_t));
  backward_finish_kernel<Element><<<unsigned(tiles), kFinishThreads, shared, stream>>>(params);
  check_launch("backward_finish");
}

}  // namespace flash_attn3
