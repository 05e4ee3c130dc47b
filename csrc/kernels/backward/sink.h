// After the main kernels of a backward pass, if there is a sink: dsink[h] = -sum over rows of exp(sink[h] - lse) *
// delta.
//
// The sum runs over every entry of the head's statistics. Those of no row, and of rows that see nothing, have lse_log2
// = +inf and are skipped. A row without a key has lse = sink: it counts through its dlse, which is in its delta. A CTA
// takes a head and adds in an order that depends on nothing but the lengths: bitwise repeatable. It reads what
// "backward_prepare" wrote; every kernel that follows that one lets it start.
//
// It knows no elements: its row in the table has dtype "any" and config "void", the launch is
// launch_backward_sink<void>.
#pragma once

#include "host/params.h"
#include "kernels/common/launch.h"

namespace flash_attn3 {

constexpr int kSinkThreads = 1024;

// Of the sink's column of P, times delta.
__device__ __forceinline__ float sink_product(float sink_log2, float lse_log2, float delta) {
  return lse_log2 == INFINITY ? 0.f : exp2f(sink_log2 - lse_log2) * delta;
}

template <class /*Unused*/>
__global__ void __launch_bounds__(kSinkThreads) backward_sink_kernel(__grid_constant__ BackwardParams const params) {
  wait_for_previous_kernel();
  constexpr float kLog2E = 1.4426950408889634f;
  int const head = blockIdx.x;
  float const sink_log2 = params.sink[head] * kLog2E;
  // Four entries each. 2^32 of a head would not fit into any memory.
  unsigned const units_of_batch = unsigned(params.statistics_stride / 4);
  unsigned const units = units_of_batch * (params.packed.sequences != nullptr ? 1 : params.batch);

  float sum[4] = {0.f, 0.f, 0.f, 0.f};
  constexpr int kBatch = 4;  // loads in flight
  for (unsigned begin = threadIdx.x; begin < units; begin += kBatch * kSinkThreads) {
    float4 lse[kBatch], delta[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      unsigned const unit = begin + j * kSinkThreads;
      lse[j] = {INFINITY, INFINITY, INFINITY, INFINITY};
      if (unit >= units) continue;
      int64_t const batch = unit / units_of_batch, in_batch = unit % units_of_batch;
      int64_t const entry = batch * params.statistics_stride_batch + head * params.statistics_stride + in_batch * 4;
      lse[j] = __ldcg(reinterpret_cast<float4 const*>(params.lse_log2 + entry));
      delta[j] = __ldcg(reinterpret_cast<float4 const*>(params.delta + entry));
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      sum[0] += sink_product(sink_log2, lse[j].x, delta[j].x);
      sum[1] += sink_product(sink_log2, lse[j].y, delta[j].y);
      sum[2] += sink_product(sink_log2, lse[j].z, delta[j].z);
      sum[3] += sink_product(sink_log2, lse[j].w, delta[j].w);
    }
  }

  __shared__ float of_warp[kSinkThreads / 32];
  float mine = (sum[0] + sum[1]) + (sum[2] + sum[3]);
  auto sum_over_lanes = [](float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
  };
  mine = sum_over_lanes(mine);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  mine = sum_over_lanes(of_warp[threadIdx.x]);
  // A sink of -inf has no part in anything, whatever delta is.
  if (threadIdx.x == 0) params.dsink[head] = sink_log2 == -INFINITY ? 0.f : -mine;
}

// The grid follows from the work: a CTA for each head.
template <class Unused>
void launch_backward_sink(BackwardParams const& params, int /*grid*/, cudaStream_t stream) {
  constexpr bool kOverlaps = true;
  launch_overlapping(&backward_sink_kernel<Unused>, params, dim3(unsigned(params.heads)), kSinkThreads, 0, kOverlaps,
                     stream);
}

}  // namespace flash_attn3
