// Online softmax on the accumulators of one warpgroup's 64 x N tile of scores.
//
// A thread holds two rows: r = 0 and r = 1, eight apart. Accumulator i belongs to row (i / 2) % 2; four neighbouring
// threads share a row. Probabilities are exp2(score * c - reference * c) with c = scale * log2(e). The reference of a
// row is a maximum that it once had, never more than kHeadroom below the present one in log2 units, so nothing
// overflows; what is summed and accumulated is relative to it, and the final division cancels it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

namespace flash_attn3 {

template <class Element>
struct Packed;

// Bits of the largest probability that the fast path lets pass: 2^8. Positive 16-bit floats order like integers, and so
// do +inf and the NaN that conversions make, which lie above.
template <>
struct Packed<cutlass::bfloat16_t> {
  static constexpr int kLimit = 0x4380;
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(lo, hi);
    return reinterpret_cast<uint32_t const&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  }
};

template <>
struct Packed<cutlass::half_t> {
  static constexpr int kLimit = 0x5c00;
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    __half2 const pair = __floats2half2_rn(lo, hi);
    return reinterpret_cast<uint32_t const&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __half22float2(reinterpret_cast<__half2 const&>(pair));
  }
};

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Within 6e-7 of tanh(x), for any x; NaN stays NaN. 1 - 2 / (1 + exp(2 x)) reaches -1 and 1 where exp runs to 0 or inf.
__device__ __forceinline__ float tanh_by_exp2(float x) {
  constexpr float kTwoLog2E = 2.885390082f;
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + exp2_approx(x * kTwoLog2E)));
  return fmaf(-2.f, inverse, 1.f);
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <class Element>
struct OnlineSoftmax {
  float reference[2];  // -inf while a row has seen no key
  float sum[2];        // of this thread's columns only
  float c;             // scale * log2(e), > 0

  __device__ __forceinline__ explicit OnlineSoftmax(float scale_log2) : c(scale_log2) {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
  }

  // Packs P = exponential(score, r) of every score in pairs and adds up each row's.
  template <int kScores, class Exponential>
  static __device__ __forceinline__ void exponentials(float const (&s)[kScores], uint32_t (&p)[kScores / 2],
                                                      float (&total)[2], Exponential exponential) {
    float even[2] = {0.f, 0.f}, odd[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      int const r = (i >> 1) & 1;
      float const x = exponential(s[i], r), y = exponential(s[i + 1], r);
      even[r] += x;
      odd[r] += y;
      p[i / 2] = Packed<Element>::pack(x, y);
    }
    total[0] = even[0] + odd[0];
    total[1] = even[1] + odd[1];
  }

  // Moves every reference to the row's true maximum and rescales O and the sums. Right for any scores, masked rows too.
  // On the first block of a row there is no O yet.
  template <bool kFirst, int kScores, int kOutputs>
  __device__ __forceinline__ void exact(float const (&s)[kScores], uint32_t (&p)[kScores / 2], float (&o)[kOutputs]) {
    float top[2] = {s[0], s[2]}, other[2] = {s[1], s[3]};
#pragma unroll
    for (int i = 0; i < kScores; i += 2) {
      int const r = (i >> 1) & 1;
      top[r] = fmaxf(top[r], s[i]);
      other[r] = fmaxf(other[r], s[i + 1]);
    }
    float finite[2], rescale[2], total[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = quad_max(fmaxf(top[r], other[r]));
      if constexpr (!kFirst) top[r] = fmaxf(top[r], reference[r]);
      finite[r] = top[r] == -INFINITY ? 0.f : top[r];  // no key yet: every probability is exp2(-inf)
      rescale[r] = exp2_approx((reference[r] - finite[r]) * c);
      reference[r] = top[r];
    }
    if constexpr (!kFirst) {
#pragma unroll
      for (int i = 0; i < kOutputs; ++i) o[i] *= rescale[(i >> 1) & 1];
    }
    exponentials(s, p, total, [&](float score, int r) { return exp2_approx((score - finite[r]) * c); });
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = kFirst ? total[r] : sum[r] * rescale[r] + total[r];
  }

  // The same without a maximum: probabilities against the reference as it is; if one exceeds 2^8 (or a row has no
  // reference yet: its offset is +inf), the warp falls back to the exact step from the same scores. Counting
  // instructions, this is what lets a warpgroup's softmax fit beside the other warpgroups' GEMMs.
  template <int kScores, int kOutputs>
  __device__ __forceinline__ void unchecked_maximum(float const (&s)[kScores], uint32_t (&p)[kScores / 2],
                                                    float (&o)[kOutputs]) {
    float offset[2], total[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      offset[r] = -reference[r] * c;
      // Beyond this the rounding of the product shows (2^-11 in log2 units, more above): such rows stay with the exact
      // step.
      if (fabsf(offset[r]) > 16384.f) offset[r] = INFINITY;
    }
    exponentials(s, p, total, [&](float score, int r) { return exp2_approx(fmaf(score, c, offset[r])); });
    if (__any_sync(0xffffffffu, exceeds_limit(p))) {
      exact<false>(s, p, o);
    } else {
      sum[0] += total[0];
      sum[1] += total[1];
    }
  }

  template <int kPairs>
  static __device__ __forceinline__ bool exceeds_limit(uint32_t const (&p)[kPairs]) {
    static_assert(kPairs % 4 == 0);
    uint32_t more[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kPairs; i += 4) {
      more[0] = __vimax3_s16x2(more[0], p[i], p[i + 1]);
      more[1] = __vimax3_s16x2(more[1], p[i + 2], p[i + 3]);
    }
    uint32_t const top = __vmaxs2(more[0], more[1]);
    constexpr int kFirstAbove = (Packed<Element>::kLimit + 1) << 16;
    return static_cast<int>(top) >= kFirstAbove || static_cast<int>(top << 16) >= kFirstAbove;
  }

  // What O is multiplied by, and the natural-log LSE. The sink is a logit of every row that has no value and joins
  // here, -inf: none; whichever of it and the row's reference is larger, nothing overflows. A row without a key, whose
  // O and sum are 0, gets the sink as LSE.
  __device__ __forceinline__ void finish(float scale, float sink, float (&inverse)[2], float (&lse)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float const own = reference[r] * scale;
      float const top = fmaxf(own, sink);
      float const weight = own == top ? 1.f : expf(own - top);    // of the keys; the comparisons are for infinities
      float const beside = sink == top ? 1.f : expf(sink - top);  // of the sink
      float const total = fmaf(quad_sum(sum[r]), weight, beside);
      inverse[r] = weight / total;
      lse[r] = top + logf(total);
    }
  }
};

}  // namespace flash_attn3
