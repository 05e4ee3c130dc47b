"""What runs under compute-sanitizer (see sanitize.py): one shape and more for each kernel row.

Tails of rows, keys and head dims, empty rows, more tiles than SMs; the backward in both modes, into results of its own
and into strided ones. Inputs are made and results compared on the CPU, so that nearly every kernel under the tool is
ours.

usage: python tests/gpu/sanitized.py
"""

import os
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))

import oracle

from flash_attn3 import ops

os.environ["FLASH_ATTN3_BACKWARD"] = "fused"  # short sequences would take the separate kernels in both modes

DONE = "all shapes right:"  # sanitize.py looks for it

SHAPES = (  # batch, seqlen_q, seqlen_k, heads, kv_heads, less than the row's head dim, causal
    (1, 65, 130, 2, 1, 0, True),
    (2, 200, 81, 2, 2, 0, False),
    (1, 1, 257, 1, 1, 8, False),
    (1, 130, 66, 1, 1, 3, True),
)
MORE_TILES_THAN_SMS = (5, 70, 40, 30, 10, 0, True)
WITHOUT_KEYS = (1, 70, 0, 1, 1, 0, False)
MANY_KEYS = (1, 65, 8200, 1, 1, 0, True)
BACKWARD_SHAPES = ((1, 150, 203, 4, 2, 0, True), (2, 65, 130, 2, 1, 3, False), (1, 203, 129, 2, 1, 8, True))
BACKWARD_MORE_TILES_THAN_SMS = (5, 70, 66, 28, 28, 0, True)


def tensors(shape: tuple, row: dict, generator: torch.Generator) -> tuple[list[torch.Tensor], bool]:
    """q, k, v, dout on the CPU for a row's head dims, and causal."""
    batch, seqlen_q, seqlen_k, heads, kv_heads, less, causal = shape
    dtype = torch.bfloat16 if row["dtype"] == "bf16" else torch.float16
    dim, dim_v = row["head_dim"] - less, row["head_dim_v"] - less
    sizes = ((seqlen_q, heads, dim), (seqlen_k, kv_heads, dim), (seqlen_k, kv_heads, dim_v), (seqlen_q, heads, dim_v))
    return [torch.randn(batch, *size, generator=generator).to(dtype) for size in sizes], causal


def compute_forward(row: dict, generator: torch.Generator) -> int:
    """Runs one row; the number of shapes."""
    bf16 = row["dtype"] == "bf16"
    short = (row["head_dim"], row["head_dim_v"], 65, 130, True, bf16)
    if torch.ops.flash_attn3.select_kernel(*short) != row["id"]:
        selected = (MANY_KEYS,)  # a row for long sequences only
    else:
        selected = (*SHAPES, MORE_TILES_THAN_SMS, WITHOUT_KEYS) if bf16 else SHAPES[:2]
    for shape in selected:
        (q, k, v, _), causal = tensors(shape, row, generator)
        arguments = (q.cuda(), k.cuda(), v.cuda(), q.shape[3] ** -0.5, causal)
        out, lse = (x.cpu() for x in torch.ops.flash_attn3.forward(*arguments))
        batch, seqlen_q, heads = q.shape[:3]
        strided = torch.empty(batch, heads, seqlen_q, v.shape[3], dtype=q.dtype, device="cuda").transpose(1, 2)
        torch.ops.flash_attn3.forward_out(*arguments[:3], strided, *arguments[3:])
        ref, ref_lse = oracle.attention(q, k, v, causal=causal)
        assert (out.double() - ref).abs().max() < 0.05 and torch.equal(strided.cpu(), out), (row["name"], shape)
        assert torch.allclose(lse.double(), ref_lse, atol=1e-3), (row["name"], shape)
    return len(selected)


def compute_backward(row: dict, generator: torch.Generator) -> int:
    """Runs all rows of both modes for the head dims and dtype of a "backward_keys" row; the number of shapes."""
    shapes = (*BACKWARD_SHAPES, BACKWARD_MORE_TILES_THAN_SMS, WITHOUT_KEYS)
    shapes = shapes if row["dtype"] == "bf16" else BACKWARD_SHAPES[:1]
    for shape in shapes:
        (q, k, v, dout), causal = tensors(shape, row, generator)
        dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=generator)
        scale = q.shape[3] ** -0.5
        refs = oracle.gradients(q, k, v, dout, dlse, causal=causal)
        qkv = [x.cuda() for x in (q, k, v)]
        out, lse = torch.ops.flash_attn3.forward(*qkv, scale, causal)
        for deterministic in (False, True):
            arguments = (dout.cuda(), dlse.cuda(), *qkv, out, lse)
            grads = torch.ops.flash_attn3.backward(*arguments, scale, causal, deterministic)
            strided = [torch.empty_like(x.transpose(1, 2).contiguous()).transpose(1, 2) for x in qkv]
            torch.ops.flash_attn3.backward_out(*arguments, *strided, scale, causal, deterministic)
            for ref, *results in zip(refs, grads, strided, strict=True):
                limit = 0.05 + 0.02 * (ref.abs().max().item() if ref.numel() else 0.0)
                for result in results:
                    close = ((result.cpu().double() - ref).abs() <= limit).all()
                    assert close, (row["name"], shape, deterministic)
    return len(shapes)


def main() -> int:
    generator = torch.Generator().manual_seed(0)
    table = ops.kernel_table()
    shapes = 0
    for row in table:
        if row["op"] == "forward":
            shapes += compute_forward(row, generator)
        elif row["op"] == "backward_keys":
            shapes += compute_backward(row, generator)
    counts = torch.ops.flash_attn3.launch_counts().tolist()
    idle = [row["name"] for row, count in zip(table, counts, strict=True) if not count]
    assert not idle, f"never launched: {idle}"
    print(f"{DONE} {shapes} shapes, {len(table)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
