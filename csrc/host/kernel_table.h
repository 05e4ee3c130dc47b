// The kernels of this build, generated from csrc/instances.py. The index of a row is its id.
#pragma once

#include <cuda_runtime_api.h>

#include "host/fp8_params.h"
#include "host/params.h"

namespace flash_attn3 {

struct KernelRow {
  char const* name;
  char const* op;
  char const* dtype;  // "bf16", "fp16", "e4m3", or "any"
  int head_dim;       // largest that the tile takes; smaller ones are filled up with zeros by TMA
  int head_dim_v;
  int block_m;  // query rows: of a CTA, or of a step where a CTA holds keys
  int block_n;  // keys: of a step, or of a CTA that holds keys
  // One of them, by op; the others are null.
  void (*forward)(ForwardParams const& params, int grid, cudaStream_t stream);
  void (*backward)(BackwardParams const& params, int grid, cudaStream_t stream);
  void (*fp8)(Fp8Params const& params, int grid, cudaStream_t stream);
  void (*packed)(PackedParams const& params, int grid, cudaStream_t stream);
};

constexpr int kMaxKernels = 256;

extern KernelRow const kKernelTable[];
extern int const kKernelCount;

}  // namespace flash_attn3
