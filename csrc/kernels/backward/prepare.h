// Before the main kernels of a backward pass: the statistics of every row, and zeros in their counters.
//   lse_log2 = lse * log2(e) ; delta = rowsum(dout * out) - dlse
// A row without a key (lse = -inf) and the entries past a sequence's end get lse_log2 = +inf, so that their
// probabilities are 0, and delta = 0, whatever dout and dlse hold there. (With a sink a row without a key has a finite
// lse; it has a delta then, which "backward_sink" reads, and the masks keep its probabilities out.) Of a packed batch
// also the rows of dq, dk and dv that no sequence computes.
//
// Bound by memory. A warp takes 32 rows of a head; kLanes lanes share a row, 16 bytes of each tensor a lane.
// Neighbouring warps take neighbouring heads, whose rows lie side by side in (batch, sequence, head, head dim).
#pragma once

#include <algorithm>

#include "host/geometry.h"
#include "host/params.h"
#include "kernels/backward/elements.h"
#include "kernels/backward/packed_rows.h"
#include "kernels/common/gaps.h"
#include "kernels/common/launch.h"

namespace flash_attn3 {

constexpr int kPrepareThreads = 256;
constexpr int kMaxPrepareBlocks = INT32_MAX / kPrepareThreads;  // threads are counted in 32 bits
constexpr int kPrepareRows = 32;                                // of a warp
static_assert(kPrepareRows == 32, "a lane keeps the sum of a row");

// Sum of the products of eight pairs of elements.
template <class Element>
__device__ __forceinline__ float dot(uint4 const& a, uint4 const& b) {
  uint32_t const left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const x = ElementPair<Element>::unpack(left[i]), y = ElementPair<Element>::unpack(right[i]);
    sum = fmaf(x.x, y.x, sum);
    sum = fmaf(x.y, y.y, sum);
  }
  return sum;
}

// Walks the rows of a head, 16 bytes of each.
struct PrepareColumn {
  char const* next;
  int64_t row_bytes;

  __device__ __forceinline__ PrepareColumn(StridedTensor const& t, int64_t batch, int64_t head, int64_t row, int column)
      : next(static_cast<char const*>(t.data) +
             2 * (batch * t.stride_batch + row * t.stride_sequence + head * t.stride_head + column)),
        row_bytes(2 * t.stride_sequence) {}

  __device__ __forceinline__ uint4 load(bool exists) {
    uint4 const value = exists ? __ldg(reinterpret_cast<uint4 const*>(next)) : uint4{0, 0, 0, 0};
    next += row_bytes;
    return value;
  }
};

// The 32 rows of a warp: of `batch` and `head` of the tensors, from row `first` on. The sequence may have fewer.
struct PrepareRows {
  int64_t batch, head;
  int32_t first, count;
};

// rowsum(dout * out) of row first + lane.
template <class Element, int kLanes>
__device__ __forceinline__ float row_sum(BackwardParams const& params, PrepareRows const& chunk) {
  constexpr int kBatch = 4;  // rows whose loads are in flight together
  int const lane = threadIdx.x % 32;
  int const column = lane % kLanes * 8;
  int const skipped = lane / kLanes * kLanes;  // before this lane's rows; their number lane % kLanes is first + lane
  int64_t const batch = chunk.batch, head = chunk.head, begin = int64_t(chunk.first) + skipped;
  int const rows = column < params.head_dim_v ? chunk.count - skipped : 0;
  PrepareColumn out(params.out, batch, head, begin, column), dout(params.dout, batch, head, begin, column);
  float result = 0.f;
#pragma unroll 1
  for (int i = 0; i < kLanes; i += kBatch) {
    uint4 a[kBatch], b[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      a[j] = out.load(i + j < rows);
      b[j] = dout.load(i + j < rows);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      float sum = dot<Element>(a[j], b[j]);
#pragma unroll
      for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
      if (lane % kLanes == i + j) result = sum;
    }
  }
  return result;
}

template <class Element, int kLanes>
__global__ void __launch_bounds__(kPrepareThreads)
    backward_prepare_kernel(__grid_constant__ BackwardParams const params) {
  bool const packed = params.packed.sequences != nullptr;
  if (packed) wait_for_previous_kernel();
  allow_next_kernel();

  int64_t const thread = int64_t(blockIdx.x) * kPrepareThreads + threadIdx.x;
  int64_t const threads = int64_t(gridDim.x) * kPrepareThreads;
  auto* const cleared = reinterpret_cast<float4*>(params.cleared);
  for (int64_t i = thread; i < params.cleared_count / 4; i += threads) cleared[i] = float4{0.f, 0.f, 0.f, 0.f};

  constexpr float kLog2E = 1.4426950408889634f;
  int const lane = threadIdx.x % 32;
  int const chunks = params.statistics_stride / kPrepareRows;
  int64_t const tasks = int64_t(packed ? 1 : params.batch) * chunks * params.heads;
  for (int64_t task = thread / 32; task < tasks; task += threads / 32) {
    int const head = int(task % params.heads);
    int64_t const chunk_of_batch = task / params.heads;
    int64_t const batch = chunk_of_batch / chunks;
    int const entry = int(chunk_of_batch % chunks) * kPrepareRows;  // of the head's statistics
    PrepareRows rows{batch, head, entry, params.seqlen_q - entry};
    if (packed) {
      OwnedPart const part =
          owner_of(params.packed, entry, [](int q_begin, int b) { return statistics_begin(q_begin, b); });
      rows.first = part.sequence.q_begin + part.offset;
      rows.count = part.sequence.q_length - part.offset;
    }
    float lse = -INFINITY, dlse = 0.f;
    if (lane < rows.count) {
      int64_t const row = int64_t(rows.first) + lane;
      lse = params.lse[batch * params.lse_stride_batch + head * params.lse_stride_head + row];
      if (params.dlse != nullptr) {
        dlse = params.dlse[batch * params.dlse_stride_batch + head * params.dlse_stride_head +
                           row * params.dlse_stride_sequence];
      }
    }
    float const sum = rows.count > 0 ? row_sum<Element, kLanes>(params, rows) : 0.f;
    bool const empty = lse == -INFINITY;
    int64_t const target = batch * params.statistics_stride_batch + head * params.statistics_stride + entry + lane;
    params.lse_log2[target] = empty ? INFINITY : lse * kLog2E;
    params.delta[target] = empty ? 0.f : sum - dlse;
  }

  if (packed) {
    int const of_gaps = int(thread), all = int(threads);
    fill_gaps<Element>(params.query_gaps, params.dq, params.heads, params.head_dim, of_gaps, all);
    fill_gaps<Element>(params.key_gaps, params.dk, params.kv_heads, params.head_dim, of_gaps, all);
    fill_gaps<Element>(params.key_gaps, params.dv, params.kv_heads, params.head_dim_v, of_gaps, all);
  }
}

// The grid follows from the work: a thread for each entry of the statistics, or for 16 stores of zeros.
template <class Element>
void launch_backward_prepare(BackwardParams const& params, int /*grid*/, cudaStream_t stream) {
  bool const packed = params.packed.sequences != nullptr;
  int64_t const entries = (packed ? 1 : params.batch) * params.heads * params.statistics_stride;
  int64_t const threads = std::max(entries, params.cleared_count / (4 * 16));
  int64_t const blocks = std::min<int64_t>((threads + kPrepareThreads - 1) / kPrepareThreads, kMaxPrepareBlocks);
  auto* kernel = &backward_prepare_kernel<Element, 32>;
  if (params.head_dim_v <= 128) kernel = &backward_prepare_kernel<Element, 16>;
  if (params.head_dim_v <= 64) kernel = &backward_prepare_kernel<Element, 8>;
  bool const overlaps = packed;  // a dense call's first kernel: what it reads comes from anywhere
  // A batch without sequences has gaps at most.
  launch_overlapping(kernel, params, dim3(unsigned(std::max<int64_t>(1, blocks))), kPrepareThreads, 0, overlaps,
                     stream);
}

}  // namespace flash_attn3
