// Rows of a packed batch that no sequence computes: kernels fill them beside their work. A row of a gap becomes 0, or
// NaN where a malformed sequence owned it. Gaps may be many and short, or one of 100,000 rows: the rows of 32 gaps at a
// time are numbered through, and each goes to one warp of all that help.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "host/params.h"

namespace flash_attn3 {

// Calls visit(row, malformed) with the rows of warp number thread / 32 of threads / 32; all its lanes call together.
// Reads past the L1, whose lines may be older than the kernel that wrote the gaps. Numbers of the whole warp are known
// to be uniform: the forward kernel has 24 registers a thread for this.
template <class Visit>
__device__ __forceinline__ void for_each_gap_row(PackedGaps const& gaps, int thread, int threads, Visit visit) {
  auto of_lane = [](int value, int lane) { return __shfl_sync(0xffffffffu, value, lane); };
  int const count = of_lane(__ldcg(gaps.count), 0);
  int const lane = thread % 32, warps = threads / 32;
  int next = of_lane(thread / 32, 0);  // row of this warp, counted from the first of these 32 gaps
#pragma unroll 1
  for (int first = 0; first < count; first += 32) {
    int begin = 0, rows = 0, malformed = 0;
    if (first + lane < count) {
      Gap const* const gap = gaps.gaps + first + lane;
      begin = __ldcg(&gap->begin);
      rows = __ldcg(&gap->end) - begin;
      malformed = __ldcg(&gap->malformed);
    }
    int end = rows;  // sum of the rows up to this lane's gap
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      int const before = __shfl_up_sync(0xffffffffu, end, distance);
      if (lane >= distance) end += before;
    }
    int const total = of_lane(end, 31);
    begin -= end - rows;  // from the number of a row to the row
#pragma unroll 1
    for (; next < total; next += warps) {
      int const owner = __popc(__ballot_sync(0xffffffffu, end <= next));
      visit(next + of_lane(begin, owner), of_lane(malformed, owner) != 0);
    }
    next -= total;
  }
}

// Fills the gaps' rows of all heads of a tensor of `columns` columns, a multiple of 8. `thread` of `threads`, both of
// whole warps; stride_batch is not used.
template <class Element>
__device__ __forceinline__ void fill_gaps(PackedGaps const& gaps, StridedTensor const& tensor, int heads, int columns,
                                          int thread, int threads) {
  constexpr uint32_t kNaN = std::is_same_v<Element, cutlass::half_t> ? 0x7e007e00u : 0x7fc07fc0u;
  for_each_gap_row(gaps, thread, threads, [&](int row, bool malformed) {
    auto* of_head = static_cast<Element*>(tensor.data) + row * tensor.stride_sequence;
    uint32_t const pair = malformed ? kNaN : 0;
#pragma unroll 1
    for (int head = 0; head < heads; ++head, of_head += tensor.stride_head) {
#pragma unroll 1
      for (int column = thread % 32 * 4; column < columns; column += 128) {
        __stcs(reinterpret_cast<uint2*>(of_head + column), uint2{pair, pair});
      }
    }
  });
}

// Fills the gaps' rows of a (heads, rows) array of LSE: -inf, or NaN.
__device__ __forceinline__ void fill_lse_gaps(PackedGaps const& gaps, float* lse, int64_t stride_head, int heads,
                                              int thread, int threads) {
  for_each_gap_row(gaps, thread, threads, [&](int row, bool malformed) {
    float const value = malformed ? NAN : -INFINITY;
#pragma unroll 1
    for (int head = thread % 32; head < heads; head += 32) lse[head * stride_head + row] = value;
  });
}

}  // namespace flash_attn3
