// A consumer warpgroup: 64 query rows of a tile, keys walked from right to left.
//   S = Q K^T ; P = exp2(c S - LSE) ; dP = dO V^T ; dS = P (dP - delta) ; dQ += dS K ; dQ *= scale
// In a step the warpgroup issues S and dP, takes the exponentials while dP runs, then issues dQ and waits for it: while
// it does arithmetic the tensor cores work for the other warpgroups, which drift apart by themselves. That reaches the
// full rate, and K of one block only is held at a time. Every warpgroup walks the blocks that its own rows need and
// only releases the tile's others. Those at either end of its walk may need a mask.
//
// Softcap: with t = tanh(s), s in units of the cap, P is exp2(c t - LSE) and dS is times 1 - t^2. Nothing here needs P
// itself, so P takes that factor at once.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "host/geometry.h"
#include "kernels/backward/queries/config.h"
#include "kernels/common/pipeline.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tiles.h"
#include "kernels/common/wgmma.h"

namespace flash_attn3 {

template <class Config>
struct QueriesConsumer {
  using Element = typename Config::Element;
  using Storage = QueriesStorage<Config>;
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kScores = kBlockN / 2;            // accumulators of S, and of dP, a thread
  static constexpr int kOutputs = Config::kHeadDim / 2;  // accumulators of dQ a thread

  BackwardParams const& params;
  Storage& storage;
  int const warpgroup;
  int const thread;  // in the warpgroup
  PipelineState<Config::kKeyStages> key_state{Role::kConsumer};
  PipelineState<Config::kValueSlots> value_state{Role::kConsumer};
  PipelineState<Config::kRowBuffers> row_state{Role::kConsumer};
  PipelineState<1> output_state{Role::kProducer};

  __device__ __forceinline__ QueriesConsumer(BackwardParams const& p, Storage& s, int wg)
      : params(p), storage(s), warpgroup(wg), thread(threadIdx.x % 128) {}

  __device__ __forceinline__ void run() {
    for (int tiles = 0;; ++tiles) {
      Tile const tile = storage.tiles.take(tiles);
      if (tile.block < 0) break;
      process(tile);
    }
  }

  // One arrival a warp: each warp's quarter of a WGMMA retires on its own.
  __device__ __forceinline__ void release_keys() {
    arrive_warp(storage.key_empty[key_state.stage]);
    key_state.advance();
  }
  __device__ __forceinline__ void release_values() {
    arrive_warp(storage.value_empty[value_state.stage]);
    value_state.advance();
  }
  __device__ __forceinline__ void release_rows() {
    arrive_warp(storage.dout_empty[row_state.stage][warpgroup]);
    if constexpr (!Config::kOutputOverQuery) arrive_warp(storage.query_empty[row_state.stage][warpgroup]);
  }

  // Of a thread's two rows, eight apart: accumulator i of S, dP and dQ belongs to row (i / 2) % 2.
  struct Rows {
    float lse_log2[2];
    float delta[2];
  };

  __device__ __forceinline__ int row_in_warpgroup() const { return thread / 32 * 16 + thread % 32 / 4; }

  __device__ __forceinline__ Rows load_statistics(Tile const tile, int row) const {
    int64_t first = tile.batch * params.statistics_stride_batch + tile.head * params.statistics_stride;
    if (params.packed.sequences != nullptr) first += statistics_begin(tile.sequence.q_begin, tile.batch);
    first += row + row_in_warpgroup();
    Rows rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows.lse_log2[r] = __ldg(params.lse_log2 + first + 8 * r);
      rows.delta[r] = __ldg(params.delta + first + 8 * r);
    }
    return rows;
  }

  __device__ __forceinline__ KeyRange blocks_of(Sequence const& sequence, int begin, int end) const {
    return key_range(begin, end, sequence.q_length, sequence.k_length, params.mask, kBlockN);
  }

  __device__ __forceinline__ void process(Tile const& tile) {
    int const tile_row = tile.block * Config::kBlockM;
    int const row = tile_row + warpgroup * kRowsPerWarpgroup;
    KeyRange const all = blocks_of(tile.sequence, tile_row, tile_row + Config::kBlockM);
    KeyRange const keys = blocks_of(tile.sequence, row, row + kRowsPerWarpgroup);

    skip(all.end - max_int(keys.end, all.begin));  // all blocks, if its own range is empty
    if (row >= tile.sequence.q_length) return;     // its mover loads nothing

    Rows const rows = load_statistics(tile, row);
    float dq[kOutputs];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) dq[i] = 0.f;
    storage.query_full[row_state.stage][warpgroup].wait(row_state.phase);
    storage.dout_full[row_state.stage][warpgroup].wait(row_state.phase);
    if (keys.begin >= keys.end) release_rows();
#pragma unroll 1
    for (int block = keys.end - 1; block >= keys.begin; --block) step(tile.sequence, keys, block, row, rows, dq);
    // Before the output: its second round waits for the mover, which stores the first once it has the tile after this
    // one, which the producer gives when all blocks of this one have been loaded. An empty range begins at 0.
    skip(keys.begin - all.begin);
    write(dq);
    row_state.advance();
  }

  // Releases blocks, each when it has come: the others' blocks pass through the same stages.
  __device__ __forceinline__ void skip(int blocks) {
#pragma unroll 1
    for (; blocks > 0; --blocks) {
      storage.key_full[key_state.stage].wait(key_state.phase);
      release_keys();
#pragma unroll
      for (int part = 0; part < Config::kValueParts; ++part) {
        storage.value_full[value_state.stage].wait(value_state.phase);
        release_values();
      }
    }
  }

  __device__ __forceinline__ void step(Sequence const& sequence, KeyRange const& keys, int block, int row,
                                       Rows const& rows, float (&dq)[kOutputs]) {
    using RowTile = typename Config::RowTile;
    using KeyTile = typename Config::KeyTile;
    float s[kScores], dp[kScores], p[kScores];
    uint32_t ds[kScores / 2];
    Element* const k = storage.k[key_state.stage];  // (N, D)

    // S = Q K^T
    storage.key_full[key_state.stage].wait(key_state.phase);
    issue<typename Config::MmaScores>(
        RowTile::template sum_over_columns<Config::kHeadDim>(storage.q[row_state.stage][warpgroup]),
        KeyTile::template sum_over_columns<Config::kHeadDim>(k), s, false);
    // dP = dO V^T
    auto values = value_state;
#pragma unroll
    for (int part = 0; part < Config::kValueParts; ++part, values.advance()) {
      Element* const dout =
          storage.dout[row_state.stage][warpgroup] + part * (kRowsPerWarpgroup * Config::kPartColumns);
      storage.value_full[values.stage].wait(values.phase);
      issue<typename Config::MmaScores>(
          RowTile::template sum_over_columns<Config::kPartColumns>(dout),
          KeyTile::template sum_over_columns<Config::kPartColumns>(storage.v[values.stage]), dp, part > 0);
    }

    cute::warpgroup_wait<Config::kValueParts>();
    fence_accumulators(s);
    exponentials(s, rows, p);
    if constexpr (Config::kValueParts == 2) {
      cute::warpgroup_wait<1>();
      release_values();
    }
    cute::warpgroup_wait<0>();
    fence_accumulators(dp);
    release_values();
    if (block == keys.begin) release_rows();  // the last that these rows read

#pragma unroll
    for (int i = 0; i < kScores; ++i) dp[i] = p[i] * (dp[i] - rows.delta[(i >> 1) & 1]);
    if (block >= keys.unmasked_end || block < keys.unmasked_begin) mask(dp, sequence, block, row);
#pragma unroll
    for (int i = 0; i < kScores; i += 2) ds[i / 2] = Packed<Element>::pack(dp[i], dp[i + 1]);

    // dQ += dS K
    fence_accumulators(dq);
    issue<typename Config::MmaQueries>(register_operand<Element>(ds), KeyTile::template sum_over_rows<kBlockN>(k), dq,
                                       true);
    cute::warpgroup_wait<0>();
    fence_accumulators(dq);
    release_keys();
  }

  // In a block of instructions of their own, over which ptxas does not move the wait for dP: they run under it.
  __device__ __forceinline__ void exponentials(float const (&s)[kScores], Rows const& rows, float (&p)[kScores]) const {
    if (__builtin_expect(params.cap_scale == 0.f, true)) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) p[i] = exp2_approx(fmaf(s[i], params.scale_log2, -rows.lse_log2[(i >> 1) & 1]));
    } else {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        float const t = tanh_by_exp2(s[i] * params.cap_scale);
        p[i] = exp2_approx(fmaf(t, params.scale_log2, -rows.lse_log2[(i >> 1) & 1])) * fmaf(-t, t, 1.f);
      }
    }
  }

  // dS of keys that a row does not see becomes 0, whatever P (exp2 of anything) and dP are there. Columns are
  // compile-time numbers against two limits per row, which are not kept between blocks.
  __device__ __forceinline__ void mask(float (&ds)[kScores], Sequence const& sequence, int block, int row) const {
    int const first_column = block * kBlockN + thread % 4 * 2;
    int const first_row = opaque(row) + row_in_warpgroup();
    int begin[2], end[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      Span const keys = visible_keys(first_row + 8 * r, sequence.q_length, sequence.k_length, params.mask);
      begin[r] = keys.begin - first_column;
      end[r] = keys.end - first_column;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      int const column = i / 4 * 8 + i % 2, r = (i >> 1) & 1;
      if (column < begin[r] || column >= end[r]) ds[i] = 0.f;
    }
  }

  // dQ into shared memory, from where its mover stores it.
  __device__ __forceinline__ void write(float (&dq)[kOutputs]) {
    // STSM.x4: lanes 8i..8i+7 hold the row addresses of 8x8 matrix i: rows 0-7 or 8-15, left or right 8 columns.
    // The TMA box swizzles its 16-byte units: 128-byte rows by row % 8, 64-byte rows by row / 2 % 4.
    constexpr int kUnits = Config::kChunk / 8;
    int const lane = thread % 32;
    int const stsm_row = thread / 32 * 16 + lane % 16;
    int const swizzle = kUnits == 8 ? stsm_row % 8 : stsm_row / 2 % 4;
    Element* const buffer = Config::kOutputOverQuery ? storage.q[row_state.stage][warpgroup] : storage.dq[warpgroup];
    cute::uint128_t* const row_units = reinterpret_cast<cute::uint128_t*>(buffer) + stsm_row * kUnits;
#pragma unroll
    for (int first = 0; first < Config::kHeadDim; first += Config::kOutputColumns) {
      if constexpr (Config::kOutputOverQuery) {
        cutlass::arch::NamedBarrier::sync(128, warpgroup);  // no warp's Q K^T reads these rows any more
      } else {
        storage.output_empty[warpgroup].wait(output_state.phase);
        output_state.advance();
      }
#pragma unroll
      for (int column = 0; column < Config::kOutputColumns; column += 16) {
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int const i = (first + column) / 2 + 2 * j;
          packed[j] = Packed<Element>::pack(dq[i] * params.scale, dq[i + 1] * params.scale);
        }
        int const chunk = column / Config::kChunk, unit = column % Config::kChunk / 8 + lane / 16;
        cute::SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3],
                                      row_units[chunk * kRowsPerWarpgroup * kUnits + (unit ^ swizzle)]);
      }
      cute::tma_store_fence();  // by every writer, before it arrives
      arrive_warp(Config::kOutputOverQuery ? storage.query_empty[row_state.stage][warpgroup]
                                           : storage.output_full[warpgroup]);
    }
  }
};

}  // namespace flash_attn3
