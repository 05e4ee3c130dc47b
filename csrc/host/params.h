// Plain parameters of the forward kernels: what the host fills in and the device reads. No torch, no CuTe.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_attn3 {

// Order in which a grid walks its tiles. A tile is (query block, head, batch); heads of all batches are numbered
// virtual_head = batch * heads + head. Virtual heads are taken in groups whose K and V stay in L2 together; inside a
// group every head shares a query block before the next block is taken, so that causal tiles come longest first.
struct TileOrder {
  int32_t query_blocks;   // per head
  int32_t virtual_heads;  // batch * heads
  int32_t group;          // virtual heads a group
  int32_t num_tiles;      // query_blocks * virtual_heads
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

}  // namespace flash_attn3
