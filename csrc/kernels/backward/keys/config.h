// Compile-time configuration of one kernel that holds keys, and its shared-memory plan.
//
// A CTA is a producer warpgroup and two consumer warpgroups of 64 keys. A warpgroup computes S^T and dP^T of its own
// keys, so that P^T and dS^T are already the register operands of its dV and dK. Only dQ needs the keys of both: dS^T
// goes through shared memory for it. Tiles lie in chunks of kChunk columns as their TMA boxes leave them.
#pragma once

#include <cutlass/arch/barrier.h>

#include "host/geometry.h"
#include "kernels/common/tiles.h"
#include "kernels/common/wgmma.h"

namespace flash_attn3 {

template <class Element_, int kHeadDim_, int kHeadDimV_, int kBlockM_, int kBlockN_, int kQueryStages_,
          int kGradientStages_, bool kFused_>
struct KeysConfig {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kHeadDimV = kHeadDimV_;
  static constexpr int kBlockM = kBlockM_;  // queries of a step
  static constexpr int kBlockN = kBlockN_;  // keys of the CTA
  static constexpr int kQueryStages = kQueryStages_;
  static constexpr int kGradientStages = kGradientStages_;  // of dO
  static constexpr bool kFused = kFused_;                   // dQ too

  static constexpr int kWarpgroups = 2;
  static constexpr int kThreads = (kWarpgroups + 1) * 128;
  static constexpr int kProducerRegisters = 24;
  static constexpr int kConsumerRegisters = 240;
  static constexpr int kChunk = chunk_columns(kHeadDim, kHeadDimV);
  static_assert(kBlockN == kWarpgroups * kRowsPerWarpgroup, "64 keys a warpgroup");
  static_assert(kBlockM % 16 == 0 && kBlockM > kRowsPerWarpgroup && kBlockM <= 128, "dS^T takes two chunks of queries");
  static_assert(kHeadDim % kChunk == 0 && kHeadDimV % kChunk == 0, "head dims are multiples of the chunk");

  // dQ of a step is shared between the warpgroups by 64 queries each, or, where the block has no two such halves, as
  // dQ^T by 64 columns each.
  static constexpr bool kTransposed = kBlockM != kWarpgroups * kRowsPerWarpgroup;
  static_assert(!kTransposed || kHeadDim == kWarpgroups * kRowsPerWarpgroup, "64 columns of dQ a warpgroup");
  static_assert(!kTransposed || kChunk == kRowsPerWarpgroup, "... which are a chunk of K");

  // S^T of the next step runs before dK of the present one. Its Q is then needed a GEMM earlier, which two stages
  // would not have loaded; and dK, dV, S, dS and P are in registers at once.
  static constexpr bool kEarlyScores = !kFused && kQueryStages > 2;
  static_assert(!kEarlyScores || (kHeadDim + kHeadDimV) / 2 + kBlockM <= 208, "registers");

  using KeyTile = SharedTile<kBlockN, kChunk>;
  using QueryTile = SharedTile<kBlockM, kChunk>;
  using ScoreTile = SharedTile<kBlockN, 64>;  // dS^T: keys x queries

  using MmaScores = SharedMma<Element, kBlockM, kSumOverColumns, kSumOverColumns>;
  using MmaKeys = RegisterMma<Element, kHeadDim, kSumOverRows>;
  using MmaValues = RegisterMma<Element, kHeadDimV, kSumOverRows>;
  static constexpr int kQueryGradientColumns = kTransposed ? kBlockM : kHeadDim;
  using MmaQueries = SharedMma<Element, kQueryGradientColumns, kSumOverRows, kSumOverRows>;

  // Where a warpgroup writes: its 64 rows in each of the two chunks of the two buffers of dS^T. dV and dK leave through
  // the same places, so that K and V of the next tile can load meanwhile.
  static constexpr int kScoreBuffers = 2;
  static constexpr int kScoreElements = kBlockN * 128;  // of a buffer
  static constexpr int kRegionElements = kRowsPerWarpgroup * 64;
  static constexpr int kOutputChunk = kRowsPerWarpgroup * kChunk;
  static_assert((kHeadDim + kHeadDimV) / kChunk * kOutputChunk <= 4 * kRegionElements, "dV and dK fit");
  static constexpr int kSharedLimit = 232448;
};

// Barriers in shared memory: who arrives -> who waits, and what the waiter may then do.
// - key_full, value_full: producer and TMA bytes -> both warpgroups read K, V of the tile
// - key_empty: each consumer warp, after its last dQ of a tile (or S^T without dQ) -> producer overwrites K
// - value_empty: each consumer warp, after its last dP^T of a tile -> producer overwrites V
// - query_full[s]: producer and TMA bytes -> both warpgroups read Q and the LSE of stage s
// - query_empty[s]: each consumer warp, after dK of the step -> producer overwrites stage s
// - gradient_full[s], gradient_empty[s]: the same for dO and delta, after dV of the step
// - score_full[b]: each consumer warp, when its dS^T is in buffer b -> both warpgroups compute dQ from it
// - score_empty[b]: each consumer warp, after that dQ -> both warpgroups overwrite buffer b
// Without dQ a buffer holds the factors that softcap gives to dS of a step (tile.h): each warp has its own rows.
// Named barriers: w, the 128 threads of warpgroup w have dV and dK in shared memory, or know that they have left;
// kWarpgroups + w, the turn of w (consumer.h).
template <class Config>
struct KeysStorage {
  using Element = typename Config::Element;
  using Barrier = cutlass::arch::ClusterBarrier;
  using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

  alignas(1024) Element k[Config::kBlockN * Config::kHeadDim];
  alignas(1024) Element v[Config::kBlockN * Config::kHeadDimV];
  alignas(1024) Element q[Config::kQueryStages][Config::kBlockM * Config::kHeadDim];
  alignas(1024) Element dout[Config::kGradientStages][Config::kBlockM * Config::kHeadDimV];
  alignas(1024) Element ds[Config::kScoreBuffers][Config::kScoreElements];
  alignas(16) float lse_log2[Config::kQueryStages][Config::kBlockM];
  alignas(16) float delta[Config::kGradientStages][Config::kBlockM];
  TransactionBarrier key_full, value_full;
  Barrier key_empty, value_empty;
  TransactionBarrier query_full[Config::kQueryStages];
  Barrier query_empty[Config::kQueryStages];
  TransactionBarrier gradient_full[Config::kGradientStages];
  Barrier gradient_empty[Config::kGradientStages];
  Barrier score_full[Config::kScoreBuffers];
  Barrier score_empty[Config::kScoreBuffers];
  TileSlots<2> tiles;
  int parts_before[Config::kWarpgroups];  // of a cut tile, that were done when the last one of this CTA was
};

}  // namespace flash_attn3
