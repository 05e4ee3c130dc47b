// Plain parameters of the kernels: what the host fills in and the device reads. No torch, no CuTe.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_attn3 {

// Order in which a grid walks its tiles. A tile is (block, head, batch): a block of queries and a query head, or, for
// the kernels that hold keys, a block of keys and a key head. Heads of all batches are numbered virtual_head = batch *
// heads + head. Virtual heads are taken in groups whose operands stay in L2 together; inside a group every head shares
// a block before the next block is taken, so that causal tiles come longest first. A position of the order is a tile,
// or, past the first `whole` ones, a part of a tile: those of the last round, which would not fill the GPU, may be cut.
struct TileOrder {
  int32_t blocks;         // per head
  int32_t virtual_heads;  // batch * heads
  int32_t group;          // virtual heads a group
  int32_t whole;          // positions below it are whole tiles
  int32_t parts;          // positions that each tile from there on takes, part after part; 1: none is cut
  int32_t positions;      // of all tiles and parts
};

struct ForwardParams {
  // Each map is 4-D: (head dim, sequence, head, batch), innermost first.
  CUtensorMap map_q, map_k, map_v, map_o;
  float* lse;        // (batch, heads, seqlen_q), natural log
  int32_t* counter;  // next tile, zero before the launch; null: every CTA takes its share by position
  TileOrder order;
  int32_t heads;
  int32_t heads_per_kv_head;
  int32_t seqlen_q;
  int32_t seqlen_k;
  float scale;       // of the scores
  float scale_log2;  // scale * log2(e)
  bool causal;       // bottom-right aligned
};

// A (batch, sequence, head, head dim) tensor that a kernel reads or writes by address; strides in elements, the last 1.
struct StridedTensor {
  void* data;
  int64_t stride_batch, stride_sequence, stride_head;
};

// One structure for every kernel of a backward pass; each reads the part it needs. Statistics of a row live in two fp32
// arrays (batch * heads, statistics_stride), so that TMA copies a block of them; entries past seqlen_q are filled in.
struct BackwardParams {
  // Maps as in ForwardParams. Boxes of `op` "backward" and "backward_keys" (they hold keys, walk queries): q and dout
  // block_m rows, k and v block_n rows, dk and dv 64 rows. Of "backward_queries" (it holds queries, walks keys): q,
  // dout and dq 64 rows, k and v block_n rows.
  CUtensorMap map_q, map_k, map_v, map_dout, map_dq, map_dk, map_dv;
  float* lse_log2;   // lse * log2(e); +inf for rows without a key and past seqlen_q: their probabilities are 0
  float* delta;      // rowsum(dout * out) - dlse; 0 past seqlen_q
  float* dq_sums;    // only "backward": dq / scale in fp32, see kernels/backward/finish.h; zero before the kernel
  int32_t* counter;  // as in ForwardParams
  // Of the tiles that the order cuts: dk / scale and dv of each part in fp32, [slot][part][warpgroup 2]
  // [(head_dim + head_dim_v of the kernel) / 8][thread 128][4], and [slot][warpgroup 2], zero before the kernel, how
  // many parts of a warpgroup's keys are there.
  float* partial_sums;
  int32_t* partial_counts;
  TileOrder order;
  int32_t batch;
  int32_t heads;
  int32_t kv_heads;
  int32_t heads_per_kv_head;
  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t head_dim;
  int32_t head_dim_v;
  int32_t statistics_stride;  // >= seqlen_q rounded up to any block_m; a multiple of 128
  float scale;
  float scale_log2;  // scale * log2(e)
  bool causal;       // bottom-right aligned

  // Of the kernels before and after: "backward_prepare" fills lse_log2 and delta and zeroes `cleared` (dq_sums, and the
  // counters of the kernels that follow), "backward_finish" turns dq_sums into dq.
  StridedTensor out, dout, dq;
  float const* lse;   // (batch, heads, seqlen_q)
  float const* dlse;  // null, or (batch, heads, seqlen_q) with these strides
  int64_t dlse_stride_batch, dlse_stride_head, dlse_stride_sequence;
  float* cleared;
  int64_t cleared_count;  // floats, a multiple of 4
  int32_t dq_block_m;     // queries of a block of dq_sums
  int32_t dq_columns;     // head dim of the kernel that filled it
  bool dq_transposed;     // how its fragments lie, see kernels/backward/finish.h
};

}  // namespace flash_attn3
