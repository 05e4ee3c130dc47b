// A consumer warpgroup: 64 keys of a tile, queries walked block by block, for every query head of the group.
//   S^T = K Q^T ; P = exp2(c S - lse) ; dP^T = V dO^T ; dV += P^T dO ; dS = P (dP - delta) ; dK += dS^T Q ; dQ = dS K
// In a step a warpgroup issues S^T | exponentials | dP^T, dV | dS | dQ of the step before, dK | dQ leaves while dK
// runs. dQ is a step late, so that nobody waits for the other warpgroup's dS^T, and the warpgroups take turns at the
// exponentials, which keeps them half a step apart: one's arithmetic then lies under the other's GEMMs.
#pragma once

#include <cute/arch/copy_sm90.hpp>

#include "kernels/backward/keys/config.h"
#include "kernels/common/softmax.h"

namespace flash_attn3 {

template <class Config>
struct KeysConsumer {
  using Element = typename Config::Element;
  using Storage = KeysStorage<Config>;
  static constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kScores = kBlockM / 2;  // accumulators a thread: S^T, dP^T
  static constexpr int kKeys = Config::kHeadDim / 2;
  static constexpr int kValues = Config::kHeadDimV / 2;
  static constexpr int kQueries = Config::kQueryGradientColumns / 2;

  BackwardParams const& params;
  Storage& storage;
  int const warpgroup;
  int const thread;  // in the warpgroup
  uint32_t tile_phase = static_cast<uint32_t>(Role::kConsumer);
  int step = 0;  // so far: every step takes one stage of Q, one of dO, and buffer step % 2 of dS^T

  __device__ __forceinline__ KeysConsumer(BackwardParams const& p, Storage& s, int wg)
      : params(p), storage(s), warpgroup(wg), thread(threadIdx.x % 128) {}

  __device__ __forceinline__ void run() {
    if (warpgroup == 1) pass_turn();
    for (int tiles = 0;; ++tiles) {
      Tile const tile = storage.tiles.take(tiles);
      if (tile.block < 0) break;
      process(tile);
    }
    if (thread == 0) cute::tma_store_wait<0>();  // the buffers of dV and dK live as long as the CTA
  }

  __device__ __forceinline__ auto query_state() const {
    return PipelineState<Config::kQueryStages>::at(Role::kConsumer, step);
  }
  __device__ __forceinline__ auto gradient_state() const {
    return PipelineState<Config::kGradientStages>::at(Role::kConsumer, step);
  }

  // Turn barrier w: warpgroup w waits, the other arrives. Both have the same number of steps, and one token goes to and
  // fro for the life of the CTA.
  __device__ __forceinline__ void take_turn() const {
    cutlass::arch::NamedBarrier::sync(256, Config::kWarpgroups + warpgroup);
  }
  __device__ __forceinline__ void pass_turn() const {
    cutlass::arch::NamedBarrier::arrive(256, Config::kWarpgroups + (warpgroup ^ 1));
  }

  __device__ __forceinline__ void process(Tile const tile) {
    int const key = tile.block * kBlockN;
    QueryRange const range = query_range(key, key + kBlockN, params.seqlen_q, params.seqlen_k, params.causal, kBlockM);
    float dk[kKeys], dv[kValues];
    if (range.first < range.end) {
      walk(tile, key, range, dk, dv);
      tile_phase ^= 1;
    } else {
#pragma unroll
      for (int i = 0; i < kKeys; ++i) dk[i] = 0.f;
#pragma unroll
      for (int i = 0; i < kValues; ++i) dv[i] = 0.f;
    }
    store(tile, key, dk, dv);
  }

  __device__ __forceinline__ void walk(Tile const tile, int key, QueryRange const range, float (&dk)[kKeys],
                                       float (&dv)[kValues]) {
    int const first_step = step;
    int const last_step = step + params.heads_per_kv_head * (range.end - range.first) - 1;
    int block = range.first, head = tile.head * params.heads_per_kv_head;
    int64_t sums = 0;  // where dQ of the step before goes
    storage.key_full.wait(tile_phase);
#pragma unroll 1
    for (; step <= last_step; ++step) {
      float s[kScores];
      uint32_t p[kScores / 2], ds[kScores / 2];
      bool const first = step == first_step;

      storage.query_full[query_state().stage].wait(query_state().phase);
      issue<typename Config::MmaScores>(own_rows<Config::kHeadDim>(storage.k), query_rows(), s, false);
      cute::warpgroup_wait<0>();
      fence_accumulators(s);
      if (block < range.unmasked) mask(s, key, block);
      take_turn();
      exponentials(s, p);
      storage.gradient_full[gradient_state().stage].wait(gradient_state().phase);
      if (first) storage.value_full.wait(tile_phase);
      float dp[kScores];
      issue<typename Config::MmaScores>(own_rows<Config::kHeadDimV>(storage.v), gradient_rows(), dp, false);
      fence_accumulators(dv);
      issue<typename Config::MmaValues>(register_operand<Element>(p), gradient_columns(), dv, !first);
      pass_turn();
      cute::warpgroup_wait<1>();
      fence_accumulators(dp);
      if (step == last_step) arrive_warp(storage.value_empty);
      score_gradients(p, dp, ds);

      float dq[kQueries];
      if constexpr (Config::kFused) {
        if (first) wait_left();
        publish(ds);
        if (!first) storage.score_full[(step - 1) & 1].wait((step - 1) >> 1 & 1);
        issue_queries(step - 1, dq);  // in the first step of something else, and goes nowhere
      }
      fence_accumulators(dk);
      issue<typename Config::MmaKeys>(register_operand<Element>(ds), query_columns(), dk, !first);
      if constexpr (Config::kFused) {
        cute::warpgroup_wait<1>();
        fence_accumulators(dq);
        fence_accumulators(dv);
        if (!first) arrive_warp(storage.score_empty[(step - 1) & 1]);
        arrive_warp(storage.gradient_empty[gradient_state().stage]);
        if (!first) add(sums, dq);
        cute::warpgroup_wait<0>();
      } else {
        cute::warpgroup_wait<0>();
        fence_accumulators(dv);
        arrive_warp(storage.gradient_empty[gradient_state().stage]);
      }
      fence_accumulators(dk);
      arrive_warp(storage.query_empty[query_state().stage]);
      if constexpr (Config::kFused) sums = sums_of(block, head, tile.batch);
      if (++block == range.end) {
        block = range.first;
        ++head;
      }
    }
    if constexpr (Config::kFused) {
      float dq[kQueries];
      storage.score_full[last_step & 1].wait(last_step >> 1 & 1);
      issue_queries(last_step, dq);
      cute::warpgroup_wait<0>();
      fence_accumulators(dq);
      arrive_warp(storage.score_empty[last_step & 1]);
      arrive_warp(storage.key_empty);
      add(sums, dq);
    } else {
      arrive_warp(storage.key_empty);
    }
  }

  // Operands. The warpgroup's own 64 keys, and the block of queries by rows or by columns.
  template <int kColumns>
  __device__ __forceinline__ auto own_rows(Element const* tile) const {
    return Config::KeyTile::template sum_over_columns<kColumns>(tile +
                                                                warpgroup * (kRowsPerWarpgroup * Config::kChunk));
  }
  __device__ __forceinline__ auto query_rows() const {
    return Config::QueryTile::template sum_over_columns<Config::kHeadDim>(storage.q[query_state().stage]);
  }
  __device__ __forceinline__ auto query_columns() const {
    return Config::QueryTile::template sum_over_rows<kBlockM>(storage.q[query_state().stage]);
  }
  __device__ __forceinline__ auto gradient_rows() const {
    return Config::QueryTile::template sum_over_columns<Config::kHeadDimV>(storage.dout[gradient_state().stage]);
  }
  __device__ __forceinline__ auto gradient_columns() const {
    return Config::QueryTile::template sum_over_rows<kBlockM>(storage.dout[gradient_state().stage]);
  }

  // dQ of a step, this warpgroup's half: 64 queries, or 64 columns of dQ^T.
  __device__ __forceinline__ void issue_queries(int of_step, float (&dq)[kQueries]) const {
    Element const* const scores = storage.ds[of_step & 1];
    if constexpr (Config::kTransposed) {
      issue<typename Config::MmaQueries>(
          Config::KeyTile::template sum_over_rows<kBlockN>(storage.k + warpgroup * (kBlockN * Config::kChunk)),
          Config::ScoreTile::template sum_over_rows<kBlockN>(scores), dq, false);
    } else {
      issue<typename Config::MmaQueries>(
          Config::ScoreTile::template sum_over_rows<kBlockN>(scores + warpgroup * (kBlockN * 64)),
          Config::KeyTile::template sum_over_rows<kBlockN>(storage.k), dq, false);
    }
  }

  // Scores of rows that do not see a key become -inf. Rows (columns of S^T) are compile-time numbers against the first
  // row that sees the thread's key.
  __device__ __forceinline__ void mask(float (&s)[kScores], int key, int block) const {
    int const own_key = key + warpgroup * kRowsPerWarpgroup + thread / 32 * 16 + thread % 32 / 4;
    int const first_row = block * kBlockM + thread % 4 * 2;
    int limit[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      int const k = own_key + 8 * r;
      int const sees = params.causal ? k - (params.seqlen_k - params.seqlen_q) : 0;
      limit[r] = k < params.seqlen_k ? sees - first_row : kBlockM;
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) {
      if (i / 4 * 8 + i % 2 < limit[(i >> 1) & 1]) s[i] = -INFINITY;
    }
  }

  // The statistic of the two rows that accumulators 4 j .. 4 j + 3 belong to. Volatile, so that the compiler does not
  // load all of them ahead into registers that are not there.
  __device__ __forceinline__ float2 statistic(float const* rows, int j) const {
    float2 pair;
    asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(pair.x), "=f"(pair.y)
                 : "r"(cute::cast_smem_ptr_to_uint(rows + 8 * j + thread % 4 * 2)));
    return pair;
  }

  __device__ __forceinline__ void exponentials(float const (&s)[kScores], uint32_t (&p)[kScores / 2]) const {
    float const* const lse = storage.lse_log2[query_state().stage];
    float const c = params.scale_log2;
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      float2 const l = statistic(lse, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int const i = 4 * j + 2 * r;
        p[i / 2] = Packed<Element>::pack(exp2_approx(fmaf(s[i], c, -l.x)), exp2_approx(fmaf(s[i + 1], c, -l.y)));
      }
    }
  }

  // dS = P (dP - delta) with P from its 16-bit words, so that it need not stay in fp32 beside them.
  __device__ __forceinline__ void score_gradients(uint32_t const (&p)[kScores / 2], float const (&dp)[kScores],
                                                  uint32_t (&ds)[kScores / 2]) const {
    float const* const delta = storage.delta[gradient_state().stage];
#pragma unroll
    for (int j = 0; j < kBlockM / 8; ++j) {
      float2 const d = statistic(delta, j);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        int const i = 4 * j + 2 * r;
        float2 const probability = Packed<Element>::unpack(p[i / 2]);
        ds[i / 2] = Packed<Element>::pack(probability.x * (dp[i] - d.x), probability.y * (dp[i + 1] - d.y));
      }
    }
  }

  // The 64 rows of this warpgroup in one of the four chunks of the dS^T buffers.
  __device__ __forceinline__ Element* region(int i) const {
    return storage.ds[i / 2] + i % 2 * (kBlockN * 64) + warpgroup * Config::kRegionElements;
  }

  // STSM.x4 stores 16 rows x 16 columns a warp: lane l holds the address of row l % 16, left or right 8 columns.
  template <int kUnits>
  __device__ __forceinline__ void store_matrices(Element* rows, int unit, uint32_t const (&words)[4]) const {
    int const row = thread / 32 * 16 + thread % 16;
    int const swizzle = kUnits == 8 ? row % 8 : row / 2 % 4;
    cute::SM90_U32x4_STSM_N::copy(
        words[0], words[1], words[2], words[3],
        reinterpret_cast<cute::uint128_t*>(rows)[row * kUnits + ((unit + thread % 32 / 16) ^ swizzle)]);
  }

  // dS^T of this step into its buffer, for both warpgroups.
  __device__ __forceinline__ void publish(uint32_t const (&ds)[kScores / 2]) {
    wait_empty(step);
#pragma unroll
    for (int i = 0; i < kBlockM / 16; ++i) {
      uint32_t const words[4] = {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]};
      store_matrices<8>(region(0) + (step & 1) * Config::kScoreElements + i / 4 * (kBlockN * 64), i % 4 * 2, words);
    }
    cutlass::arch::fence_view_async_shared();
    arrive_warp(storage.score_full[step & 1]);
  }

  // Until every warp has read what step `of_step - 2` left in the buffer that `of_step` fills.
  __device__ __forceinline__ void wait_empty(int of_step) {
    storage.score_empty[of_step & 1].wait((of_step >> 1 & 1) ^ 1);
  }

  // Start of a block in dq_sums.
  __device__ __forceinline__ int64_t sums_of(int block, int head, int batch) const {
    int const blocks = ceil_div(params.seqlen_q, kBlockM);
    return ((int64_t(batch) * params.heads + head) * blocks + block) * (kBlockM * Config::kHeadDim);
  }

  // Fragment order (params.h): four accumulators of a thread are 16 bytes, those of a warp 512 contiguous ones.
  __device__ __forceinline__ void add(int64_t sums, float const (&dq)[kQueries]) const {
    float* const target = params.dq_sums + sums + (warpgroup * (kBlockM * Config::kHeadDim / 2) + thread * 4);
#pragma unroll
    for (int i = 0; i < kQueries; i += 4) {
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(target + i * 128), "f"(dq[i]),
                   "f"(dq[i + 1]), "f"(dq[i + 2]), "f"(dq[i + 3])
                   : "memory");
    }
  }

  // dV and scale * dK through shared memory and TMA, which clips rows and columns outside the tensors.
  __device__ __forceinline__ void store(Tile const tile, int key, float (&dk)[kKeys], float (&dv)[kValues]) {
    if constexpr (Config::kFused) {
      wait_empty(step);
      wait_empty(step + 1);
    }
    wait_left();
    constexpr int kValueChunks = Config::kHeadDimV / Config::kChunk;
    stage<0>(dv, 1.f);
    stage<kValueChunks>(dk, params.scale);
    cute::tma_store_fence();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
    int const row = key + warpgroup * kRowsPerWarpgroup;
    if (thread == 0) {
#pragma unroll
      for (int i = 0; i < kValueChunks; ++i) {
        cute::SM90_TMA_STORE_4D::copy(&params.map_dv, chunk(i), i * Config::kChunk, row, tile.head, tile.batch);
      }
#pragma unroll
      for (int i = 0; i < Config::kHeadDim / Config::kChunk; ++i) {
        cute::SM90_TMA_STORE_4D::copy(&params.map_dk, chunk(kValueChunks + i), i * Config::kChunk, row, tile.head,
                                      tile.batch);
      }
      cute::tma_store_arrive();
    }
  }

  // Until dV and dK of the tile before have left the buffers.
  __device__ __forceinline__ void wait_left() const {
    if (thread == 0) cute::tma_store_wait<0>();
    cutlass::arch::NamedBarrier::sync(128, warpgroup);
  }

  // Chunk number i of what leaves: dV, then dK.
  __device__ __forceinline__ Element* chunk(int i) const {
    constexpr int kPerRegion = Config::kRegionElements / Config::kOutputChunk;
    return region(i / kPerRegion) + i % kPerRegion * Config::kOutputChunk;
  }

  template <int kFirstChunk, int kCount>
  __device__ __forceinline__ void stage(float const (&values)[kCount], float factor) const {
#pragma unroll
    for (int i = 0; i < kCount; i += 8) {
      uint32_t words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = Packed<Element>::pack(values[i + 2 * j] * factor, values[i + 2 * j + 1] * factor);
      }
      int const column = i * 2;
      store_matrices<Config::kChunk / 8>(chunk(kFirstChunk + column / Config::kChunk), column % Config::kChunk / 8,
                                         words);
    }
  }
};

}  // namespace flash_attn3
