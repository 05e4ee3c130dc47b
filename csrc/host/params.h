// Plain parameters of the kernels: what the host fills in and the device reads. No torch, no CuTe.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_attn3 {

// What a query sees. Row i of a sequence stands at key position p = i + seqlen_k - seqlen_q (bottom right) and sees the
// keys j with p - left <= j <= p + right and, with chunks, j / chunk == p / chunk (floor).
constexpr int32_t kUnbounded = INT32_MAX;

struct Mask {
  int32_t left = kUnbounded;
  int32_t right = kUnbounded;  // 0: causal
  int32_t chunk = 0;           // 0: none
};

// The rows of a sequence, counted in the tensors: of a packed batch, sequences follow each other along one dimension.
struct Sequence {
  int32_t q_begin, q_length;
  int32_t k_begin, k_length;
};

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
  bool reversed;          // blocks count down: the last ones are the longest
};

// Rows that no sequence owns, or (malformed) that a sequence owned whose lengths contradict each other.
struct Gap {
  int32_t begin, end;
  int32_t malformed;  // the rows become NaN instead of 0
};

// A packed batch, as "packed_schedule" has read it from cu_seqlens and seqused; see kernels/packed/schedule.h. Lengths
// are known on the device only. The order of its tiles: sequences longest first; inside one, its tiles as in TileOrder.
struct PackedOrder {
  // (batch), q_begin and k_begin never decrease, a malformed one has q_length 0, k_length -1; null: the batch is dense
  Sequence const* sequences;
  int32_t const* longest_first;  // (batch): numbers of sequences
  int32_t const* first_block;    // (batch + 1), in that order: blocks (of one head) of the sequences before
  int32_t batch;
  int32_t group_tokens;  // heads of a group times the tokens that each walks stay below it; 0: groups of one
  bool reversed;
};

// Gaps between the sequences of a packed batch, of queries or of keys.
struct PackedGaps {
  Gap const* gaps;       // (batch + 2) at most; null: the batch is dense
  int32_t const* count;  // on the device
};

// A (batch, sequence, head, head dim) tensor that a kernel reads or writes by address; strides in elements, the last 1.
struct StridedTensor {
  void* data;
  int64_t stride_batch, stride_sequence, stride_head;
};

struct ForwardParams {
  // Each map is 4-D, innermost first: (head dim, sequence, head, batch), or of a packed batch as tma_rows in geometry.h
  // says.
  CUtensorMap map_q, map_k, map_v, map_o;
  // (batch, heads, seqlen_q) or, packed, (heads, total_q), natural log; strides in elements, that of the batch 0 if
  // packed.
  float* lse;
  int64_t lse_stride_batch, lse_stride_head;
  float const* sink;  // null, or (heads): a logit that every row of the head sees beside its keys, without a value
  int32_t* counter;   // next tile, zero before the launch; null: every CTA takes its share by position
  TileOrder order;    // of a dense batch
  PackedOrder packed;
  PackedGaps gaps;    // of queries: rows of out (and lse) that get 0 (-inf) or NaN
  StridedTensor out;  // by address, for these rows; only if packed
  Mask mask;
  int32_t heads;
  int32_t heads_per_kv_head;
  int32_t seqlen_q;    // dense
  int32_t seqlen_k;    // dense
  int32_t head_dim_v;  // of out
  float scale;         // of the scores; with softcap the cap
  float scale_log2;    // scale * log2(e)
  float cap_scale;     // 0, or softmax_scale / softcap: scores are scale * tanh(cap_scale * q.k)
};

// One structure for every kernel of a backward pass; each reads the part it needs. Statistics of a row live in two fp32
// arrays (batch * heads, statistics_stride) or, packed, (heads, statistics_stride) with a sequence's first row at
// statistics_begin (geometry.h), so that TMA copies a block of them; entries past the sequence's end are filled in.
struct BackwardParams {
  // Maps as in ForwardParams. Boxes of `op` "backward" and "backward_keys" (they hold keys, walk queries): q and dout
  // block_m rows, k and v block_n rows, dk and dv 64 rows. Of "backward_queries" (it holds queries, walks keys): q,
  // dout and dq 64 rows, k and v block_n rows.
  CUtensorMap map_q, map_k, map_v, map_dout, map_dq, map_dk, map_dv;
  float* lse_log2;  // lse * log2(e); +inf for rows without a key and past the end: their probabilities are 0
  float* delta;     // rowsum(dout * out) - dlse; 0 past the end
  float* dq_sums;   // only "backward": dq / scale in fp32, see kernels/backward/finish.h
  // Of dq_sums, which the kernel zeroes itself (kernels/backward/keys/zero.h): the next piece, and for each key head of
  // each batch (of a packed one, each key head) how many of its pieces are zero. All 0 before the kernel.
  int32_t* zeroing;
  int32_t* counter;  // as in ForwardParams
  // Of the tiles that the order cuts: dk / scale and dv of each part in fp32, [slot][part][warpgroup 2]
  // [(head_dim + head_dim_v of the kernel) / 8][thread 128][4], and [slot][warpgroup 2], zero before the kernel, how
  // many parts of a warpgroup's keys are there.
  float* partial_sums;
  int32_t* partial_counts;
  TileOrder order;     // of a dense batch
  PackedOrder packed;  // of the tiles of this kernel
  Mask mask;
  int32_t batch;
  int32_t heads;
  int32_t kv_heads;
  int32_t heads_per_kv_head;
  int32_t seqlen_q;  // dense; packed: total_q
  int32_t seqlen_k;  // dense; packed: total_k
  int32_t head_dim;
  int32_t head_dim_v;
  int64_t statistics_stride;        // of a head: rows of a sequence rounded up to any block_m; a multiple of 128
  int64_t statistics_stride_batch;  // heads * statistics_stride; 0 if packed
  int64_t sums_stride;              // of a head in dq_sums, in blocks of dq_block_m queries
  int64_t sums_stride_batch;        // heads * sums_stride; 0 if packed
  float scale;                      // of dQ and dK
  float scale_log2;                 // of the scores times log2(e); with softcap the cap times log2(e)
  // 0, or softmax_scale / softcap: scores in units of the cap are t = tanh(cap_scale * q.k), and dS is times 1 - t^2.
  float cap_scale;

  // Of the kernels before and after: "backward_prepare" fills lse_log2 and delta and zeroes `cleared` (the counters of
  // the kernels that follow), "backward_finish" turns dq_sums into dq.
  StridedTensor out, dout, dq, dk, dv;  // dk and dv for the gaps of a packed batch
  PackedGaps query_gaps, key_gaps;      // rows of dq, and of dk and dv, that "backward_prepare" fills
  float const* lse;                     // (batch, heads, seqlen_q) or (heads, total_q), with these strides
  int64_t lse_stride_batch, lse_stride_head;
  float const* dlse;  // null, or the same shape with these strides
  int64_t dlse_stride_batch, dlse_stride_head, dlse_stride_sequence;
  float* cleared;
  int64_t cleared_count;  // floats, a multiple of 4
  int32_t dq_block_m;     // queries of a block of dq_sums
  int32_t dq_columns;     // head dim of the kernel that filled it
  bool dq_transposed;     // how its fragments lie, see kernels/backward/finish.h

  // "backward_sink": dsink[h] = -sum over the rows of exp(sink[h] - lse) * delta.
  float const* sink;  // (heads)
  float* dsink;       // (heads)
};

// What "packed_schedule" reads and writes, once for each call on a packed batch; see kernels/packed/schedule.h.
struct PackedParams {
  int32_t const *cu_seqlens_q, *cu_seqlens_k;  // (batch + 1)
  int32_t const *seqused_q, *seqused_k;        // null, or (batch)
  int32_t batch;
  int32_t total_q, total_k;  // rows of the tensors
  Sequence* sequences;
  int32_t* longest_first;
  // One list of blocks for each main kernel of the call, of so many queries or keys.
  static constexpr int kOrders = 2;
  struct {
    int32_t* first_block;  // null: there is no such kernel
    int32_t block;
    bool of_keys;
  } orders[kOrders];
  Gap *query_gaps, *key_gaps;
  int32_t* gap_counts;  // of queries, of keys
  int32_t* cleared;     // zeroed: the tile counters
  int32_t cleared_count;
};

}  // namespace flash_attn3
