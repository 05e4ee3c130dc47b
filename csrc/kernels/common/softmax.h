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
  static constexpr int kShift = 0;
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
  static constexpr int kShift = 0;
  static constexpr int kLimit = 0x5c00;
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    __half2 const pair = __floats2half2_rn(lo, hi);
    return reinterpret_cast<uint32_t const&>(pair);
  }
  static __device__ __forceinline__ float2 unpack(uint32_t pair) {
    return __half22float2(reinterpret_cast<__half2 const&>(pair));
  }
};

// Probabilities are times 2^kShift: e4m3 knows numbers from 2^-9 to 448. Above a maximum of 2^5 there is room for
// references that are not the maximum (3.8 in log2 units); below it 2^-15 of it and less rounds to 0.
template <>
struct Packed<cutlass::float_e4m3_t> {
  static constexpr int kShift = 5;
  static constexpr int kLimit = 0x43e00000;  // 448 as float32
  static __device__ __forceinline__ uint32_t pack(float a, float b, float c, float d) {
    uint32_t word;
    asm("{\n.reg .b16 lo, hi;\n"
        "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
        "mov.b32 %0, {lo, hi};\n}"
        : "=r"(word)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return word;
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
  static constexpr bool kPairs = sizeof(Element) == 2;
  static constexpr float kShift = Packed<Element>::kShift;
  float reference[2];  // -inf while a row has seen no key
  float sum[2];        // of this thread's columns only
  float c;             // scale * log2(e), > 0

  __device__ __forceinline__ explicit OnlineSoftmax(float scale_log2) : c(scale_log2) {
    reference[0] = reference[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
  }

  // Packs P = exponential(score, r) of every score and adds up each row's. Returns whether one exceeds the limit.
  template <int kScores, int kWords, class Exponential>
  static __device__ __forceinline__ bool exponentials(float const (&s)[kScores], uint32_t (&p)[kWords],
                                                      float (&total)[2], Exponential exponential) {
    float even[2] = {0.f, 0.f}, odd[2] = {0.f, 0.f};
    bool exceeds;
    if constexpr (kPairs) {
#pragma unroll
      for (int i = 0; i < kScores; i += 2) {
        int const r = (i >> 1) & 1;
        float const x = exponential(s[i], r), y = exponential(s[i + 1], r);
        even[r] += x;
        odd[r] += y;
        p[i / 2] = Packed<Element>::pack(x, y);
      }
      exceeds = pairs_exceed_limit(p);
    } else {
      // Of 16 keys a thread holds keys 2t, 2t + 1, 2t + 8, 2t + 9 of either row; as an operand, keys 4t to 4t + 3. So
      // these are keys in another order, in which V lies too (kernels/fp8/transpose.h). Maxima of positive floats as
      // integers, NaN above all.
      int top[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < kScores; i += 8) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float x[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) x[j] = exponential(s[i + j / 2 * 4 + 2 * r + j % 2], r);
          even[r] += x[0];
          odd[r] += x[1];
          even[r] += x[2];
          odd[r] += x[3];
          top[0] = __vimax3_s32(top[0], __float_as_int(x[0]), __float_as_int(x[1]));
          top[1] = __vimax3_s32(top[1], __float_as_int(x[2]), __float_as_int(x[3]));
          p[i / 4 + r] = Packed<Element>::pack(x[0], x[1], x[2], x[3]);
        }
      }
      exceeds = max(top[0], top[1]) > Packed<Element>::kLimit;
    }
    total[0] = even[0] + odd[0];
    total[1] = even[1] + odd[1];
    return exceeds;
  }

  // Moves every reference to the row's true maximum and rescales O and the sums. Right for any scores, masked rows too.
  // On the first block of a row there is no O yet.
  template <bool kFirst, int kScores, int kWords, int kOutputs>
  __device__ __forceinline__ void exact(float const (&s)[kScores], uint32_t (&p)[kWords], float (&o)[kOutputs]) {
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
    exponentials(s, p, total, [&](float score, int r) { return exp2_approx(fmaf(score - finite[r], c, kShift)); });
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = kFirst ? total[r] : sum[r] * rescale[r] + total[r];
  }

  // The same without a maximum: probabilities against the reference as it is; if one exceeds 2^8 (or a row has no
  // reference yet: its offset is +inf), the warp falls back to the exact step from the same scores. Counting
  // instructions, this is what lets a warpgroup's softmax fit beside the other warpgroups' GEMMs.
  template <int kScores, int kWords, int kOutputs>
  __device__ __forceinline__ void unchecked_maximum(float const (&s)[kScores], uint32_t (&p)[kWords],
                                                    float (&o)[kOutputs]) {
    float offset[2], total[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      offset[r] = fmaf(-reference[r], c, kShift);
      // Beyond this the rounding of the product shows (2^-11 in log2 units, more above): such rows stay with the exact
      // step.
      if (fabsf(offset[r]) > 16384.f) offset[r] = INFINITY;
    }
    bool const exceeds =
        exponentials(s, p, total, [&](float score, int r) { return exp2_approx(fmaf(score, c, offset[r])); });
    if (__any_sync(0xffffffffu, exceeds)) {
      exact<false>(s, p, o);
    } else {
      sum[0] += total[0];
      sum[1] += total[1];
    }
  }

  template <int kWords>
  static __device__ __forceinline__ bool pairs_exceed_limit(uint32_t const (&p)[kWords]) {
    static_assert(kWords % 4 == 0);
    uint32_t more[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
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
      constexpr float kUnshift = 1.f / (1 << Packed<Element>::kShift);
      float const total = fmaf(quad_sum(sum[r]) * kUnshift, weight, beside);
      inverse[r] = weight * kUnshift / total;
      lse[r] = top + logf(total);
    }
  }
};

}  // namespace flash_attn3
