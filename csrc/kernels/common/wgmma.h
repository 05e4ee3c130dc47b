// WGMMA over shared-memory tiles as their TMA boxes left them, with hand-made descriptors. That allows what CuTe's
// layouts cannot say: operands whose extent is no multiple of the swizzle (80 queries), and one tile read both ways.
#pragma once

#include <cute/algorithm/gemm.hpp>
#include <cute/arch/mma_sm90.hpp>
#include <cute/atom/mma_atom.hpp>
#include <cute/tensor.hpp>

#include <cstdint>

namespace flash_attn3 {

// kRows rows of 16-bit elements in chunks of kChunk columns, chunk after chunk, each as wide as its swizzle: 64 columns
// 128 bytes, 32 columns 64 bytes. Descriptors count in units of 16 bytes.
template <int kRows, int kChunk>
struct SharedTile {
  static_assert(kChunk == 64 || kChunk == 32, "a chunk is 128 or 64 bytes wide");
  static constexpr int kRowBytes = 2 * kChunk;
  static constexpr int kChunkUnits = kRows * kRowBytes / 16;
  static constexpr int kEightRows = 8 * kRowBytes / 16;

  static __device__ __forceinline__ cute::GMMA::DescriptorIterator descriptor(void const* start, int leading) {
    cute::GmmaDescriptor d{};
    d.bitfield.start_address_ = cute::cast_smem_ptr_to_uint(start) >> 4;
    d.bitfield.leading_byte_offset_ = leading;
    d.bitfield.stride_byte_offset_ = kEightRows;
    d.bitfield.layout_type_ = uint8_t(kChunk == 64 ? cute::GMMA::LayoutType::B128 : cute::GMMA::LayoutType::B64);
    return {d};
  }

  // Rows are M or N, the sum runs over the first kSum columns: (1, 1, kSum / 16). `start` is the tile or a row of it
  // that is a multiple of 8.
  template <int kSum>
  static __device__ __forceinline__ auto sum_over_columns(void const* start) {
    using namespace cute;
    constexpr int kSteps = kChunk / 16;
    if constexpr (kSum <= kChunk) {
      return make_tensor(descriptor(start, 1), Layout<Shape<_1, _1, Int<kSum / 16>>, Stride<_0, _0, _2>>{});
    } else {
      static_assert(kSum % kChunk == 0);
      return make_tensor(descriptor(start, 1), Layout<Shape<_1, _1, Shape<Int<kSteps>, Int<kSum / kChunk>>>,
                                                      Stride<_0, _0, Stride<_2, Int<kChunkUnits>>>>{});
    }
  }

  // Columns are M or N, the sum runs over kSum rows: (1, 1, kSum / 16). `start` is the tile or a chunk of it, at a row
  // that is a multiple of 8. An extent that is no multiple of the chunk reads a part of the last one.
  template <int kSum>
  static __device__ __forceinline__ auto sum_over_rows(void const* start) {
    using namespace cute;
    return make_tensor(descriptor(start, kChunkUnits),
                       Layout<Shape<_1, _1, Int<kSum / 16>>, Stride<_0, _0, Int<2 * kEightRows>>>{});
  }
};

// How an operand lies: kSumOverColumns is K-major, kSumOverRows MN-major.
constexpr auto kSumOverColumns = cute::GMMA::Major::K;
constexpr auto kSumOverRows = cute::GMMA::Major::MN;

// 64 x kN += A B, both in shared memory.
template <class Element, int kN, cute::GMMA::Major kMajorA, cute::GMMA::Major kMajorB>
using SharedMma = decltype(cute::make_tiled_mma(
    cute::GMMA::ss_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kN>, cute::_16>, kMajorA,
                               kMajorB>()));
// The same with A in registers.
template <class Element, int kN, cute::GMMA::Major kMajorB>
using RegisterMma = decltype(cute::make_tiled_mma(
    cute::GMMA::rs_op_selector<Element, Element, float, cute::Shape<cute::_64, cute::Int<kN>, cute::_16>,
                               cute::GMMA::Major::K, kMajorB>()));

// Accumulators of a 64 x n tile, packed in pairs as they lie, are the A operand of a sum over those n columns:
// (MMA, 1, n / 16).
template <class Element, int kPairs>
__device__ __forceinline__ auto register_operand(uint32_t (&pairs)[kPairs]) {
  using namespace cute;
  return make_tensor(reinterpret_cast<Element*>(&pairs[0]), Layout<Shape<Shape<_2, _2, _2>, _1, Int<kPairs / 4>>>{});
}

// Keeps the compiler from moving accesses of accumulators over the issue of a WGMMA or its wait.
template <int kCount>
__device__ __forceinline__ void fence_accumulators(float (&accumulators)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) cute::warpgroup_fence_operand(accumulators[i]);
}

// Issues c += A B, or c = A B where c holds nothing yet, as one group that it commits. The caller has waited for the
// operands and called fence_accumulators(c) if c holds something; warpgroup_arrive is done here.
template <class Mma, class A, class B, int kCount>
__device__ __forceinline__ void issue(A const& a, B const& b, float (&c)[kCount], bool accumulate) {
  using namespace cute;
  Mma mma;
  Tensor tC = make_tensor(&c[0], Layout<Shape<Shape<_2, _2, Int<kCount / 4>>, _1, _1>>{});
  mma.accumulate_ = accumulate ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
  warpgroup_arrive();
#pragma unroll
  for (int k = 0; k < size<2>(a); ++k) {
    cute::gemm(mma, a(_, _, k), b(_, _, k), tC);
    mma.accumulate_ = GMMA::ScaleOut::One;
  }
  warpgroup_commit_batch();
}

}  // namespace flash_attn3
