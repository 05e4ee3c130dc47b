// The two consumer warpgroups, for 64 keys of a tile; query blocks m of all query heads of the group follow each other.
//   warpgroup 0: S^T = K Q^T ; P = exp2(S scale_log2 - lse_log2) ; dK += dS^T Q ; dK *= scale
//   warpgroup 1: dP^T = V dO^T ; dV += P^T dO ; dS = P (dP - delta)
// Warpgroup 0 issues S of block m together with dK of block m - 1, and its exponentials of m lie under that dK;
// warpgroup 1 issues dP and dV of block m, and dS of m lies under that dV. While one has nothing in flight the other
// has: each ends an iteration with nothing in flight (ptxas needs that), but they do so at different times.
#pragma once

#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/copy_sm90_tma.hpp>

#include "kernels/backward/keys/tile.h"
#include "kernels/backward/wide_keys/config.h"
#include "kernels/common/pipeline.h"
#include "kernels/common/softmax.h"
#include "kernels/common/tiles.h"
#include "kernels/common/wgmma.h"

namespace flash_attn3 {

// What both roles share.
template <class Config>
struct WideKeysConsumer {
  using Element = typename Config::Element;
  using Blocks = WideKeysBlocks;
  static constexpr int kBlockM = Config::kBlockM;
  static constexpr int kScores = kBlockM / 2;  // accumulators of S or dP a thread
  static constexpr int kWords = Config::kWords;
  static constexpr int kAtoms = kBlockM / 8;  // of 8 queries

  BackwardParams const& params;
  WideKeysStorage<Config>& storage;
  int const thread;                            // in the warpgroup
  int const warp;                              // in the warpgroup; known to be uniform
  PipelineState<1> keys{Role::kConsumer};      // of the tiles that have queries
  PipelineState<1> exchange{Role::kConsumer};  // of P and dS: one phase a block
  Blocks blocks{Role::kConsumer};

  __device__ __forceinline__ WideKeysConsumer(BackwardParams const& p, WideKeysStorage<Config>& s)
      : params(p), storage(s), thread(threadIdx.x % 128), warp(__shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0)) {}

  // Hands the numbers of the CTA's tiles to `process`, which looks them up where it needs them: registers are scarce.
  template <class Process>
  __device__ __forceinline__ void for_each_tile(Process process) const {
    for (int tiles = 0;; ++tiles) {
      if (storage.tiles.look(tiles).block < 0) break;
      process(tiles);
      storage.tiles.release(tiles);
    }
    leave();  // the buffers live as long as the CTA
  }

  // Accumulator i of a thread belongs to key first_key() + 8 * (i / 2 % 2) of the tile and to query
  // i / 4 * 8 + first_column() + i % 2 of the block.
  __device__ __forceinline__ int first_key() const { return warp * 16 + thread % 32 / 4; }
  __device__ __forceinline__ int first_column() const { return thread % 4 * 2; }

  // lse_log2 or delta of a thread's queries: element i of accumulators 4 * i to 4 * i + 3.
  __device__ __forceinline__ void read_statistics(int buffer, float2 (&columns)[kAtoms]) const {
    compiler_fence();
#pragma unroll
    for (int i = 0; i < kAtoms; ++i) {
      columns[i] = *reinterpret_cast<float2 const*>(&storage.statistics[buffer][i * 8 + first_column()]);
    }
  }

  // Fragments on their way to the same thread of the other warpgroup, 0: P, 1: dS.
  __device__ __forceinline__ void put(int which, uint32_t const (&words)[kWords]) const {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      storage.exchange[which][i / 4][thread] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
    }
    compiler_fence();
  }
  __device__ __forceinline__ void get(int which, uint32_t (&words)[kWords]) const {
    compiler_fence();
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      uint4 const piece = storage.exchange[which][i / 4][thread];
      words[i] = piece.x, words[i + 1] = piece.y, words[i + 2] = piece.z, words[i + 3] = piece.w;
    }
    compiler_fence();
  }

  // Softcap: the factors of dS (tile.h), pair j at factor(j), where dS of the same thread will lie: threads of other
  // numbers are not waited for. That of warpgroup 0 has read the dS of the block before.
  __device__ __forceinline__ uint32_t volatile* factors() const {
    return reinterpret_cast<uint32_t*>(storage.exchange[1]) + opaque(thread) * 4;
  }
  static constexpr int factor(int j) { return j / 4 * 512 + j % 4; }

  // A gradient of the tile's keys through shared memory and TMA, which clips rows and columns outside the
  // sequence, a chunk at a time. The buffers' last readers were this warpgroup or have been waited for by each of its
  // warps.
  template <int kColumns, int kBuffers>
  __device__ __forceinline__ void store(CUtensorMap const& map, Element* const (&buffers)[kBuffers], float factor,
                                        float const (&gradient)[kColumns / 2], Tile const& tile, int warpgroup) const {
    using namespace cute;
    // STSM.x4: lanes 8i..8i+7 hold the row addresses of 8x8 matrix i: rows 0-7 or 8-15, left or right 8 columns. The
    // TMA box swizzles its 16-byte units by row % 8.
    constexpr int kUnits = Config::kChunk / 8;
    int const lane = thread % 32, row = warp * 16 + lane % 16;
    leave();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
#pragma unroll
    for (int first = 0; first < kColumns; first += Config::kChunk) {
      if (kBuffers == 1 && first > 0) {
        leave();
        cutlass::arch::NamedBarrier::sync(128, warpgroup);
      }
      Element* const buffer = buffers[first / Config::kChunk % kBuffers];
      uint128_t* const units = reinterpret_cast<uint128_t*>(buffer) + row * kUnits;
#pragma unroll
      for (int column = 0; column < Config::kChunk; column += 16) {
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          int const i = (first + column) / 2 + 2 * j;
          packed[j] = Packed<Element>::pack(gradient[i] * factor, gradient[i + 1] * factor);
        }
        int const unit = column / 8 + lane / 16;
        SM90_U32x4_STSM_N::copy(packed[0], packed[1], packed[2], packed[3], units[unit ^ (row % 8)]);
      }
      tma_store_fence();
      leave();  // with two buffers: the chunk before, whose buffer is written next
      cutlass::arch::NamedBarrier::sync(128, warpgroup);
      if (thread == 0) {
        TmaRows const rows = key_rows(params, tile, tile.block * Config::kBlockN, Config::kBlockN);
        SM90_TMA_STORE_4D::copy(&map, buffer, first, rows.sequence, tile.head, rows.batch);
        tma_store_arrive();
      }
    }
  }

  // What thread 0 has stored has been read from shared memory; the others learn of it by a barrier.
  __device__ __forceinline__ void leave() const {
    if (thread == 0) cute::tma_store_wait<0>();
  }
};

// Warpgroup 0.
template <class Config>
struct WideKeysScores : WideKeysConsumer<Config> {
  using Base = WideKeysConsumer<Config>;
  using Base::Base, Base::params, Base::storage, Base::thread, Base::warp, Base::keys, Base::exchange, Base::blocks;
  using Base::kBlockM, Base::kScores, Base::kWords, Base::kAtoms;
  using typename Base::Blocks, typename Base::Element;
  static constexpr int kHeadDim = Config::kHeadDim;

  __device__ __forceinline__ void run() {
    this->for_each_tile([&](int tiles) { process(tiles); });
  }

  __device__ __forceinline__ void process(int tiles) {
    QueryRange const range = range_of<Config>(params, storage.tiles.look(tiles));
    int const count = (range.end - range.first) * params.heads_per_kv_head;
    float dk[kHeadDim / 2];
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) dk[i] = 0.f;

    if (count > 0) {
      float s[kScores];
      uint32_t ds[kWords];
      float2 lse[kAtoms];
      Walk at(range, range.first, 0);
      storage.key_full.wait(keys.phase);
      keys.advance();
      int buffer = multiply_scores(s);
      this->read_statistics(buffer, lse);
      cute::warpgroup_wait<0>();
      fence_accumulators(s);
      if (count == 1) arrive_warp(storage.key_empty);
      this->leave();  // dK of the tile before is still leaving over P and dS
      cutlass::arch::NamedBarrier::sync(128, 0);
      publish(s, lse, at.block, range, tiles);

#pragma unroll 1
      for (int i = 1; i < count; ++i) {
        at.advance(range);
        int const next = multiply_scores(s);
        multiply_gradient(dk, ds, buffer);
        this->read_statistics(next, lse);
        cute::warpgroup_wait<1>();
        fence_accumulators(s);
        if (i == count - 1) arrive_warp(storage.key_empty);
        publish(s, lse, at.block, range, tiles);
        cute::warpgroup_wait<0>();
        fence_accumulators(dk);
        arrive_warp(storage.block_empty[buffer]);
        buffer = next;
      }

      multiply_gradient(dk, ds, buffer);
      cute::warpgroup_wait<0>();
      fence_accumulators(dk);
      arrive_warp(storage.block_empty[buffer]);
    }
    Element* const buffers[2] = {reinterpret_cast<Element*>(storage.exchange[0]),
                                 reinterpret_cast<Element*>(storage.exchange[1])};
    this->template store<kHeadDim>(params.map_dk, buffers, params.scale, dk, storage.tiles.look(tiles), 0);
  }

  // S^T = K Q^T of the next block; returns the buffer of its Q.
  __device__ __forceinline__ int multiply_scores(float (&s)[kScores]) {
    int const buffer = Blocks::query(blocks.stage, blocks.phase);
    storage.block_full[buffer].wait(blocks.phase);
    blocks.advance();
    fence_accumulators(s);
    issue<typename Config::MmaScores>(Config::Keys::template sum_over_columns<kHeadDim>(storage.k),
                                      Config::Queries::template sum_over_columns<kHeadDim>(storage.blocks[buffer]), s,
                                      false);
    return buffer;
  }

  // dK += dS^T Q of the block before.
  __device__ __forceinline__ void multiply_gradient(float (&dk)[kHeadDim / 2], uint32_t (&ds)[kWords], int buffer) {
    storage.ds_full[warp].wait(exchange.phase);
    exchange.advance();
    this->get(1, ds);
    fence_accumulators(dk);
    issue<typename Config::template MmaGradient<kHeadDim>>(
        register_operand<Element>(ds), Config::Queries::template sum_over_rows<kBlockM>(storage.blocks[buffer]), dk,
        true);
  }

  // P of a block, to warpgroup 1.
  __device__ __forceinline__ void publish(float (&s)[kScores], float2 const (&lse)[kAtoms], int block,
                                          QueryRange const& range, int tiles) const {
    if (params.cap_scale != 0.f) {
      uint32_t volatile* const factors = this->factors();
#pragma unroll
      for (int j = 0; j < kWords; ++j) {
        factors[Base::factor(j)] = cap_scores(s[2 * j], s[2 * j + 1], params.cap_scale);
      }
    }
    if (block < range.unmasked_first || block >= range.unmasked_end) mask(s, block, tiles);
    uint32_t p[kWords];
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      float const x = exp2_approx(fmaf(s[2 * j], params.scale_log2, -lse[j / 2].x));
      float const y = exp2_approx(fmaf(s[2 * j + 1], params.scale_log2, -lse[j / 2].y));
      p[j] = Packed<Element>::pack(x, y);
    }
    this->put(0, p);
    arrive_warp(storage.p_full[warp]);
  }

  // Scores of rows that do not see a key become -inf.
  __device__ __forceinline__ void mask(float (&s)[kScores], int block, int tiles) const {
    Tile const tile = storage.tiles.tile[tiles % storage.tiles.kSlots];
    int const key = tile.block * Config::kBlockN + this->first_key();
    int const first_row = block * kBlockM + this->first_column();
    Span seen[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) seen[r] = rows_from(first_row, key + 8 * r, tile.sequence, params.mask);
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      int const row = i / 4 * 8 + i % 2, r = i / 2 % 2;
      if (row < seen[r].begin || row >= seen[r].end) s[i] = -INFINITY;
    }
  }
};

// Warpgroup 1.
template <class Config>
struct WideKeysValues : WideKeysConsumer<Config> {
  using Base = WideKeysConsumer<Config>;
  using Base::Base, Base::params, Base::storage, Base::thread, Base::warp, Base::keys, Base::exchange, Base::blocks;
  using Base::kBlockM, Base::kScores, Base::kWords, Base::kAtoms;
  using typename Base::Blocks, typename Base::Element;
  static constexpr int kHeadDimV = Config::kHeadDimV;

  __device__ __forceinline__ void run() {
    this->for_each_tile([&](int tiles) { process(tiles); });
  }

  __device__ __forceinline__ void process(int tiles) {
    QueryRange const range = range_of<Config>(params, storage.tiles.look(tiles));
    int const count = (range.end - range.first) * params.heads_per_kv_head;
    float dv[kHeadDimV / 2];
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) dv[i] = 0.f;

    if (count > 0) {
      storage.value_full.wait(keys.phase);
      keys.advance();
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        float dp[kScores];
        uint32_t p[kWords];
        int const buffer = Blocks::output(blocks.stage, blocks.phase);
        storage.block_full[buffer].wait(blocks.phase);
        blocks.advance();
        multiply_scores(dp, buffer);
        storage.p_full[warp].wait(exchange.phase);
        exchange.advance();
        this->get(0, p);
        multiply_gradient(dv, p, buffer);
        // P is read once more: the registers of an operand in flight must not be touched.
        uint32_t pairs[kWords];
        float2 delta[kAtoms];
        this->get(0, pairs);
        this->read_statistics(buffer, delta);
        cute::warpgroup_wait<1>();
        fence_accumulators(dp);
        if (i == count - 1) arrive_warp(storage.value_empty);
        if (params.cap_scale != 0.f) {
          uint32_t const volatile* const factors = this->factors();
#pragma unroll
          for (int j = 0; j < kWords; ++j) {
            cap_gradients(dp[2 * j], dp[2 * j + 1], delta[j / 2], factors[Base::factor(j)]);
          }
        }
        publish(dp, pairs, delta);
        cute::warpgroup_wait<0>();
        fence_accumulators(dv);
        arrive_warp(storage.block_empty[buffer]);
      }
    }
    Element* buffers[Config::kValueGradientBuffers];
#pragma unroll
    for (int i = 0; i < Config::kValueGradientBuffers; ++i) buffers[i] = storage.dv[i];
    this->template store<kHeadDimV>(params.map_dv, buffers, 1.f, dv, storage.tiles.look(tiles), 1);
  }

  // dP^T = V dO^T
  __device__ __forceinline__ void multiply_scores(float (&dp)[kScores], int buffer) const {
    fence_accumulators(dp);
    issue<typename Config::MmaScores>(Config::Keys::template sum_over_columns<kHeadDimV>(storage.v),
                                      Config::Queries::template sum_over_columns<kHeadDimV>(storage.blocks[buffer]), dp,
                                      false);
  }

  // dV += P^T dO
  __device__ __forceinline__ void multiply_gradient(float (&dv)[kHeadDimV / 2], uint32_t (&p)[kWords],
                                                    int buffer) const {
    fence_accumulators(dv);
    issue<typename Config::template MmaGradient<kHeadDimV>>(
        register_operand<Element>(p), Config::Queries::template sum_over_rows<kBlockM>(storage.blocks[buffer]), dv,
        true);
  }

  // dS of a block, to warpgroup 0.
  __device__ __forceinline__ void publish(float const (&dp)[kScores], uint32_t const (&p)[kWords],
                                          float2 const (&delta)[kAtoms]) const {
    uint32_t ds[kWords];
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      float2 const pair = Packed<Element>::unpack(p[j]);
      ds[j] = Packed<Element>::pack(pair.x * (dp[2 * j] - delta[j / 2].x), pair.y * (dp[2 * j + 1] - delta[j / 2].y));
    }
    this->put(1, ds);
    arrive_warp(storage.ds_full[warp]);
  }
};

}  // namespace flash_attn3
