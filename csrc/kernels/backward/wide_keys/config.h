// Compile-time configuration of one "backward_keys" kernel for wide heads, and its shared-memory plan.
//
// A CTA holds 64 keys and walks queries in blocks of kBlockM. The registers of one warpgroup cannot hold dK and dV of
// 64 keys, so the gradients are shared out by role: warpgroup 0 computes S and P and holds dK, warpgroup 1 computes dP
// and dS and holds dV, warpgroup 2 loads. Only warpgroup 0 reads K and Q, only warpgroup 1 reads V and dO; what crosses
// is P one way and dS the other, both in the order of WGMMA fragments: a thread's 64 x kBlockM accumulators, packed in
// pairs, are what the same thread of the other warpgroup needs, as A operand of a sum over queries.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_types.h>

#include "host/geometry.h"
#include "kernels/common/pipeline.h"
#include "kernels/common/tiles.h"
#include "kernels/common/wgmma.h"

namespace flash_attn3 {

template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kQueryStages_,
          int kOutputStages_>
struct WideKeysConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kBuffers = kQueryStages_ + kOutputStages_;  // of Q or dO
  static constexpr int kThreads = 384;
  static constexpr int kConsumerWarps = 8;

  // 65536 registers an SM; ptxas starts from 65536 / kThreads each, setmaxnreg moves them to the consumers.
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;

  static constexpr int kChunk = chunk_columns(kHeadDim, kHeadDimV);
  static_assert(kBlockN == 64, "one warpgroup's rows");
  static_assert(kBlockM % 16 == 0 && kBlockM >= 64, "sums over queries take 16; dK leaves through P and dS");
  static_assert(kQueryStages_ == 2 && kOutputStages_ == 2, "Q and dO change buffers in pairs");
  static_assert(kChunk == 64, "the gradients leave in chunks of 64 columns");
  static_assert(kHeadDim <= 256 && kHeadDimV <= 256, "accumulators of one warpgroup, and N of one WGMMA");

  using Keys = SharedTile<kBlockN, kChunk>;     // K, V
  using Queries = SharedTile<kBlockM, kChunk>;  // Q, dO
  // S^T = K Q^T and dP^T = V dO^T; dK += dS^T Q and dV += P^T dO.
  using MmaScores = SharedMma<Element, kBlockM, kSumOverColumns, kSumOverColumns>;
  template <int kColumns>
  using MmaGradient = RegisterMma<Element, kColumns, kSumOverRows>;

  static constexpr int kWords = kBlockM / 4;  // packed pairs a thread of P or dS

  static constexpr int kSharedLimit = 232448;
  static constexpr int kBlockElements = kBlockM * (kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV);
  static constexpr int kChunkElements = kBlockN * kChunk;  // of a gradient
  static constexpr int kFreeBytes = kSharedLimit - kBlockN * (kHeadDim + kHeadDimV) * 2 -
                                    kBuffers * kBlockElements * 2 - 2 * kBlockN * kBlockM * 2 - kBuffers * kBlockM * 4 -
                                    1536;  // alignment; barriers and tile slots
  static constexpr int kValueGradientBuffers = kFreeBytes >= 2 * kChunkElements * 2 ? 2 : 1;
};

// Place of a walked block. Q and dO lie in two pairs of buffers; block m uses pair m % 2. dO is done with after one
// iteration of its warpgroup, Q after two, because dK follows S by an iteration. So they change places: Q takes the
// buffer that dO of block m - 2 has left, dO the one of Q, and each has about an iteration of time to arrive (with a
// ring of its own Q would have none). The statistics of the rows, lse_log2 with Q and delta with dO, come with them.
struct WideKeysBlocks : PipelineState<2> {
  using PipelineState<2>::PipelineState;
  // `turn`: parity of the round, which is the phase that a consumer waits for
  static __device__ __forceinline__ int query(int pair, uint32_t turn) { return 2 * pair + turn; }
  static __device__ __forceinline__ int output(int pair, uint32_t turn) { return 2 * pair + 1 - turn; }
};

// Barriers in shared memory: who arrives -> who waits, and what the waiter may then do.
// - key_full, value_full: producer and TMA bytes -> warpgroup 0 reads K, warpgroup 1 reads V
// - key_empty, value_empty: each warp of that warpgroup, after the last S (dP) of the tile -> producer overwrites it
// - block_full[b]: producer and TMA bytes -> the warpgroup whose block it is (0: Q, 1: dO) reads buffer b
// - block_empty[b]: each warp of that warpgroup, after dK (dV) of the block -> producer overwrites buffer b
// - p_full[w]: warp w of warpgroup 0 -> warp w of warpgroup 1 reads its part of P; warp w of warpgroup 0 has also read
//   the dS before, whose place may be overwritten
// - ds_full[w]: warp w of warpgroup 1 -> warp w of warpgroup 0 reads its part of dS; warp w of warpgroup 1 has also
//   read P of the block, whose place may be overwritten
// - tiles: see TileSlots
// P(m + 1) is written after ds_full of m and dS(m + 1) after p_full of m + 1, so each needs one place and no "empty".
// With softcap the factors of dS (tile.h) cross together with P, in the place of dS.
// Named barriers: w, the 128 threads of warpgroup w, when a gradient leaves.

template <class Config>
struct WideKeysStorage {
  using Element = typename Config::Element;
  using Barrier = cutlass::arch::ClusterBarrier;
  using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

  alignas(1024) Element k[Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element v[Config::kBlockN * Config::kHeadDimV];
  alignas(1024) Element blocks[Config::kBuffers][Config::kBlockElements];
  // Pieces of 16 bytes a thread. dK leaves over P and dS: warpgroup 0 has read the last dS, warpgroup 1 the last P, and
  // the next P, without which there is no next dS, comes from warpgroup 0.
  alignas(1024) uint4 exchange[2][Config::kWords / 4][128];
  alignas(1024) Element dv[Config::kValueGradientBuffers][Config::kChunkElements];
  alignas(128) float statistics[Config::kBuffers][Config::kBlockM];
  TransactionBarrier key_full, value_full;
  Barrier key_empty, value_empty;
  TransactionBarrier block_full[Config::kBuffers];
  Barrier block_empty[Config::kBuffers];
  Barrier p_full[4], ds_full[4];
  TileSlots<2> tiles;
};

}  // namespace flash_attn3
