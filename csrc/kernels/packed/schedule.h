// Before the kernels of a packed batch: from cu_seqlens and seqused, which live on the device, to what they read.
//   sequences, gaps: the rules of host/packed.h, which the twin on the host follows number for number
//   longest_first:   the numbers of the sequences, stably sorted by length_bucket
//   first_block:     how many blocks the sequences before each place of that order have, for each main kernel
// One CTA, whatever the batch. Each warp has a segment of the spans (host/packed.h) and walks it 32 at a time, twice:
// the first walk counts, the second writes, at offsets from sums over the warps and segments before. So a batch takes
// six barriers whether it has one sequence or 100,000, and up to 1,022 sequences a warp has one step a walk, whose
// loads are the only ones from global memory that anything waits for. docs/kernels/packed.md has the figures.
#pragma once

#include "host/packed.h"
#include "host/params.h"
#include "kernels/common/launch.h"

namespace flash_attn3 {

constexpr int kScheduleThreads = 1024;
constexpr int kScheduleWarps = kScheduleThreads / 32;
static_assert(kScheduleWarps <= 32, "a lane keeps a warp's sum");

struct ScheduleStorage {
  // [bucket][warp]: how many sequences of the warp's segment; then where the next of them goes. 4 more entries a
  // bucket, so that those of a warp lie in different banks.
  static constexpr int kRow = kScheduleWarps + 4;
  alignas(16) int32_t places[kLengthBuckets * kRow];
  int32_t scan[kScheduleWarps];       // over `places`
  int32_t border[2][kScheduleWarps];  // of queries and of keys: the largest border of each segment
  int32_t gaps[2][kScheduleWarps];    // how many gaps each segment has
  int32_t blocks[PackedParams::kOrders][kScheduleWarps];
  int32_t staged[PackedParams::kOrders][kScheduleThreads];  // blocks of the sequences, in the order, of a small batch
};

// [begin, end): what a warp has of `count` numbers, whole steps but for the last.
__device__ __forceinline__ Span segment_of_warp(int32_t count) {
  int32_t const length = ceil_div(count, kScheduleThreads) * 32;
  int32_t const begin = min_int(count, int32_t(threadIdx.x / 32) * length);
  return {begin, min_int(count, begin + length)};
}

__device__ __forceinline__ int32_t scan_max(int32_t value) {  // over the lanes, inclusive
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    int32_t const before = __shfl_up_sync(0xffffffffu, value, distance);
    if (int(threadIdx.x % 32) >= distance) value = max_int(value, before);
  }
  return value;
}

__device__ __forceinline__ int32_t scan_sum(int32_t value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    int32_t const before = __shfl_up_sync(0xffffffffu, value, distance);
    if (int(threadIdx.x % 32) >= distance) value += before;
  }
  return value;
}

// Sum of one number a warp, over the warps before this one, or over all.
__device__ __forceinline__ int32_t sum_before(int32_t const (&of_warp)[kScheduleWarps], int warps) {
  int const lane = threadIdx.x % 32;
  return __reduce_add_sync(0xffffffffu, lane < warps ? of_warp[lane] : 0);
}

// What global memory says of a span, of queries or of keys.
struct RawSpan {
  int32_t first, next;  // its borders
  int32_t used;

  static __device__ __forceinline__ RawSpan load(int32_t const* cu_seqlens, int32_t const* seqused, int32_t batch,
                                                 int32_t total, int32_t span) {
    int32_t const used = seqused != nullptr && is_sequence(span, batch) ? seqused[span - 1] : 0;
    return {border_at(cu_seqlens, batch, total, span), border_at(cu_seqlens, batch, total, span + 1), used};
  }
};

struct RawSpans {
  RawSpan queries, keys;

  static __device__ __forceinline__ RawSpans load(PackedParams const& params, int32_t span) {
    if (span >= params.batch + 2) return {};
    return {RawSpan::load(params.cu_seqlens_q, params.seqused_q, params.batch, params.total_q, span),
            RawSpan::load(params.cu_seqlens_k, params.seqused_k, params.batch, params.total_k, span)};
  }
};

// Rows that the lane's span owns; `largest` is the largest border so far, before and after. A lane without a span has
// borders 0, which change nothing.
struct OwnedRows {
  int32_t begin, end;
  int32_t used;

  static __device__ __forceinline__ OwnedRows of(RawSpan const& raw, bool has_used, int32_t total, int32_t& largest) {
    int32_t const up_to = max_int(largest, scan_max(min_int(raw.next, total)));
    int32_t const before = __shfl_up_sync(0xffffffffu, up_to, 1);
    int32_t const begin = threadIdx.x % 32 == 0 ? largest : before;
    largest = __shfl_sync(0xffffffffu, up_to, 31);
    return {begin, up_to,
            has_used ? used_rows(raw.first, raw.next, begin, total, raw.used)
                     : used_rows(raw.first, raw.next, begin, total)};
  }
};

// One step of a warp: what each lane's span comes to, and which lanes have a sequence of the same bucket or a gap.
struct ScheduleStep {
  Sequence sequence;
  Gap query_gap, key_gap;
  uint32_t same_bucket;  // 0: no sequence
  uint32_t with_query_gap, with_key_gap;
  int32_t bucket;
};

// Walks the warp's segment of the spans; `head` is its first step, loaded before. Calls visit(span, step) in every
// lane; lanes behind the last span have neither a sequence nor gaps.
template <class Visit>
__device__ __forceinline__ void walk_spans(PackedParams const& params, Span segment, RawSpans const& head,
                                           int32_t largest_q, int32_t largest_k, Visit visit) {
  RawSpans raw = head;
#pragma unroll 1
  for (int32_t first = segment.begin; first < segment.end; first += 32) {
    int32_t const span = first + int32_t(threadIdx.x % 32);
    RawSpans following{};
    if (first + 32 < segment.end) following = RawSpans::load(params, span + 32);
    OwnedRows const q = OwnedRows::of(raw.queries, params.seqused_q != nullptr, params.total_q, largest_q);
    OwnedRows const k = OwnedRows::of(raw.keys, params.seqused_k != nullptr, params.total_k, largest_k);
    bool const valid = is_sequence(span, params.batch);
    ScheduleStep step;
    step.sequence = valid ? sequence_of(q.begin, q.used, k.begin, k.used) : Sequence{q.begin, 0, k.begin, 0};
    bool const malformed = is_malformed(step.sequence);
    step.query_gap = gap_behind(q.begin, step.sequence.q_length, q.end, malformed);
    step.key_gap = gap_behind(k.begin, step.sequence.k_length, k.end, malformed);
    step.bucket = valid ? length_bucket(step.sequence) : kLengthBuckets;
    uint32_t const same = __match_any_sync(0xffffffffu, step.bucket);
    step.same_bucket = valid ? same : 0;
    step.with_query_gap = __ballot_sync(0xffffffffu, !is_empty(step.query_gap));
    step.with_key_gap = __ballot_sync(0xffffffffu, !is_empty(step.key_gap));
    visit(span, step);
    raw = following;
  }
}

// From how many to where, over all buckets and warps.
__device__ __forceinline__ void scan_places(ScheduleStorage& shared) {
  constexpr int kQuads = kScheduleWarps / 4;  // of a bucket
  constexpr int kPerThread = kLengthBuckets * kQuads / kScheduleThreads;
  static_assert(kPerThread == 1, "a thread scans the counts of four warps in one bucket");
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int4& counts =
      *reinterpret_cast<int4*>(shared.places + threadIdx.x / kQuads * ScheduleStorage::kRow + threadIdx.x % kQuads * 4);
  int4 const c = counts;
  int32_t const sum = c.x + c.y + c.z + c.w;
  int32_t const up_to = scan_sum(sum);
  if (lane == 31) shared.scan[warp] = up_to;
  __syncthreads();
  int32_t const before = sum_before(shared.scan, warp) + up_to - sum;
  counts = int4{before, before + c.x, before + c.x + c.y, before + c.x + c.y + c.z};
}

// `Any` stands where other kernels have their dtype.
template <class Any>
__global__ void __launch_bounds__(kScheduleThreads)
    packed_schedule_kernel(__grid_constant__ PackedParams const params) {
  allow_next_kernel();
  __shared__ ScheduleStorage shared;
  int const warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32_t const lower_lanes = (1u << lane) - 1;
  Span const segment = segment_of_warp(params.batch + 2);
  RawSpans const head = RawSpans::load(params, segment.begin + lane);

  for (int i = threadIdx.x; i < kLengthBuckets * ScheduleStorage::kRow; i += kScheduleThreads) shared.places[i] = 0;
  for (int i = threadIdx.x; i < params.cleared_count; i += kScheduleThreads) params.cleared[i] = 0;

  // The largest border of each segment. Lanes without a span have 0.
  int32_t border_q = 0, border_k = 0;
  RawSpans raw = head;
#pragma unroll 1
  for (int32_t first = segment.begin; first < segment.end; first += 32) {
    RawSpans following{};
    if (first + 32 < segment.end) following = RawSpans::load(params, first + 32 + lane);
    border_q = max_int(border_q, min_int(raw.queries.next, params.total_q));
    border_k = max_int(border_k, min_int(raw.keys.next, params.total_k));
    raw = following;
  }
  border_q = __reduce_max_sync(0xffffffffu, border_q);
  border_k = __reduce_max_sync(0xffffffffu, border_k);
  if (lane == 0) {
    shared.border[0][warp] = border_q;
    shared.border[1][warp] = border_k;
  }
  __syncthreads();
  border_q = __reduce_max_sync(0xffffffffu, lane < warp ? shared.border[0][lane] : 0);
  border_k = __reduce_max_sync(0xffffffffu, lane < warp ? shared.border[1][lane] : 0);

  // How many sequences of each bucket, and how many gaps.
  int32_t query_gaps = 0, key_gaps = 0;
  walk_spans(params, segment, head, border_q, border_k, [&](int32_t, ScheduleStep const& step) {
    bool const leader = step.same_bucket != 0 && (step.same_bucket & lower_lanes) == 0;
    if (leader) shared.places[step.bucket * ScheduleStorage::kRow + warp] += __popc(step.same_bucket);
    query_gaps += __popc(step.with_query_gap);
    key_gaps += __popc(step.with_key_gap);
    __syncwarp();
  });
  if (lane == 0) {
    shared.gaps[0][warp] = query_gaps;
    shared.gaps[1][warp] = key_gaps;
  }
  __syncthreads();
  query_gaps = sum_before(shared.gaps[0], warp);
  key_gaps = sum_before(shared.gaps[1], warp);
  if (warp == 0) {
    int32_t const all_of_queries = sum_before(shared.gaps[0], kScheduleWarps);
    int32_t const all_of_keys = sum_before(shared.gaps[1], kScheduleWarps);
    if (lane == 0) params.gap_counts[0] = all_of_queries;
    if (lane == 0) params.gap_counts[1] = all_of_keys;
  }
  scan_places(shared);
  __syncthreads();

  // Everything that belongs to a span. The blocks of its sequence go to its place in the order, to be summed up there.
  bool const small = params.batch <= kScheduleThreads;
  walk_spans(params, segment, head, border_q, border_k, [&](int32_t span, ScheduleStep const& step) {
    if (!is_empty(step.query_gap)) {
      params.query_gaps[query_gaps + __popc(step.with_query_gap & lower_lanes)] = step.query_gap;
    }
    if (!is_empty(step.key_gap)) {
      params.key_gaps[key_gaps + __popc(step.with_key_gap & lower_lanes)] = step.key_gap;
    }
    query_gaps += __popc(step.with_query_gap);
    key_gaps += __popc(step.with_key_gap);
    int32_t place = 0;
    int32_t* next_place = shared.places + (step.same_bucket != 0 ? step.bucket : 0) * ScheduleStorage::kRow + warp;
    if (step.same_bucket != 0) {
      place = *next_place + __popc(step.same_bucket & lower_lanes);
      params.sequences[span - 1] = step.sequence;
      params.longest_first[place] = span - 1;
#pragma unroll
      for (int i = 0; i < PackedParams::kOrders; ++i) {
        auto const& order = params.orders[i];
        if (order.first_block == nullptr) continue;
        (small ? shared.staged[i] : order.first_block)[place] = blocks_of(step.sequence, order.block, order.of_keys);
      }
    }
    __syncwarp();  // every lane has read its place
    bool const leader = step.same_bucket != 0 && (step.same_bucket & lower_lanes) == 0;
    if (leader) *next_place += __popc(step.same_bucket);
    __syncwarp();
  });
  __syncthreads();

  // Sums of the blocks before each place; entry `batch` is all of them.
  Span const places = segment_of_warp(params.batch + 1);
  auto blocks_at = [&](int i, int32_t place) {
    if (place >= params.batch) return 0;
    return (small ? shared.staged[i] : params.orders[i].first_block)[place];
  };
#pragma unroll
  for (int i = 0; i < PackedParams::kOrders; ++i) {
    if (params.orders[i].first_block == nullptr) continue;
    int32_t sum = 0;
    for (int32_t place = places.begin + lane; place < places.end; place += 32) sum += blocks_at(i, place);
    sum = __reduce_add_sync(0xffffffffu, sum);
    if (lane == 0) shared.blocks[i][warp] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < PackedParams::kOrders; ++i) {
    int32_t* const first_block = params.orders[i].first_block;
    if (first_block == nullptr) continue;
    int32_t before = sum_before(shared.blocks[i], warp);
#pragma unroll 1
    for (int32_t first = places.begin; first < places.end; first += 32) {
      int32_t const place = first + lane;
      int32_t const blocks = blocks_at(i, place);
      int32_t const up_to = scan_sum(blocks);
      if (place <= params.batch) first_block[place] = before + up_to - blocks;
      before += __shfl_sync(0xffffffffu, up_to, 31);
    }
  }
}

template <class Any>
void launch_packed_schedule(PackedParams const& params, int /*grid*/, cudaStream_t stream) {
  packed_schedule_kernel<Any><<<1, kScheduleThreads, 0, stream>>>(params);
  check_cuda_call(cudaGetLastError(), "launch of packed_schedule");
}

}  // namespace flash_attn3
