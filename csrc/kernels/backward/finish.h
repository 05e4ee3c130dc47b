// After the fused kernel of a backward pass: dq = scale * dq_sums, rounded to 16 bits.
//
// dq_sums holds, for each block of dq_block_m queries of each head, the accumulators of two warpgroups as WGMMA leaves
// them: [warpgroup w][i][thread t of 128][4]. Of a warpgroup's 64 x n tile, thread t holds in its element e of
// part i: r = t / 32 * 16 + t % 32 / 4 + 8 * (e / 2), c = 8 * i + t % 4 * 2 + e % 2.
//   dQ, two tiles of 64 rows: row 64 * w + r, column c
//   dQ^T (dq_transposed), two tiles of 64 columns: row c, column 64 * w + r
// A head of a dense batch has the blocks of its one sequence, of a packed batch those of all sequences, each from its
// sums_begin on; between them lie blocks that no sequence owns. Bound by memory. A CTA takes a block: it reads in the
// order of memory, and rows leave through shared memory.
#pragma once

#include "host/geometry.h"
#include "host/params.h"
#include "kernels/backward/elements.h"
#include "kernels/backward/packed_rows.h"
#include "kernels/common/launch.h"

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

  wait_for_previous_kernel();

  // Neighbouring CTAs take neighbouring heads, whose rows of dq lie side by side.
  int const head = int(blockIdx.x % unsigned(params.heads));
  unsigned const block_of_batch = blockIdx.x / unsigned(params.heads), blocks = unsigned(params.sums_stride);
  int64_t const batch = block_of_batch / blocks;
  int const block = int(block_of_batch % blocks);
  int first = block * params.dq_block_m, end = params.seqlen_q;  // rows of the tensor
  if (params.packed.sequences != nullptr) {
    OwnedPart const part =
        owner_of(params.packed, block, [&](int q_begin, int b) { return sums_begin(q_begin, b, params.dq_block_m); });
    first = part.sequence.q_begin + part.offset * params.dq_block_m;
    end = part.sequence.q_begin + part.sequence.q_length;
  }
  int const rows = min_int(params.dq_block_m, end - first);
  if (rows <= 0) return;
  int64_t const tile = batch * params.sums_stride_batch + head * params.sums_stride + block;

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
  int64_t const batch = params.packed.sequences != nullptr ? 1 : params.batch;
  int64_t const tiles = batch * params.heads * params.sums_stride;
  if (tiles == 0) return;  // a packed batch without sequences, of few queries
  int const shared = params.dq_block_m * (params.dq_columns + kFinishPadding) * int(sizeof(uint16_t));
  constexpr bool kOverlaps = true;
  launch_overlapping(&backward_finish_kernel<Element>, params, dim3(unsigned(tiles)), kFinishThreads, shared, kOverlaps,
                     stream);
}

}  // namespace flash_attn3
