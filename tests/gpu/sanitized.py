"""What runs under compute-sanitizer (see sanitize.py): one shape and more for each kernel row.

Tails of rows, keys and head dims, empty rows, more tiles than SMs; windows and sinks; packed batches with empty and
malformed sequences and gaps. The backward in both modes, into results of its own and into strided ones. Inputs are made
and results compared on the CPU, so that nearly every kernel under the tool is ours.

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


CAUSAL, FULL = (-1, 0, 0, 0.0), (-1, -1, 0, 0.0)
MASKED = (
    (1, 200, 260, 2, 1, 3, False),
    (40, 20, 0, 0.0),
    {"window": (40, 20)},
)  # a shape, bounds, the oracle's options
CAPPED = ((2, 130, 100, 2, 1, 0, False), (-1, -1, 64, 5.0), {"chunk": 64, "softcap": 5.0})
LENGTHS = ([70, 0, 130, 5, 20], [100, 30, 0, 5, 90])  # of queries and keys; the last sequence uses too many of its keys
USED = ([70, 0, 129, 5, 20], [90, 30, 0, 5, 91])


def tensors(shape: tuple, row: dict, generator: torch.Generator) -> tuple[list[torch.Tensor], bool]:
    """q, k, v, dout on the CPU for a row's head dims, and causal."""
    batch, seqlen_q, seqlen_k, heads, kv_heads, less, causal = shape
    dtype = torch.bfloat16 if row["dtype"] == "bf16" else torch.float16
    dim, dim_v = row["head_dim"] - less, row["head_dim_v"] - less
    sizes = ((seqlen_q, heads, dim), (seqlen_k, kv_heads, dim), (seqlen_k, kv_heads, dim_v), (seqlen_q, heads, dim_v))
    return [torch.randn(batch, *size, generator=generator).to(dtype) for size in sizes], causal


def bounds(causal: bool) -> tuple:
    return CAUSAL if causal else FULL


def compute_forward(row: dict, generator: torch.Generator) -> int:
    """Runs one row; the number of shapes."""
    bf16 = row["dtype"] == "bf16"
    short = (row["head_dim"], row["head_dim_v"], 65, 130, False, bf16)
    if torch.ops.flash_attn3.select_kernel(*short) != row["id"]:
        selected = (MANY_KEYS,)  # a row for long sequences only
    else:
        selected = (*SHAPES, MORE_TILES_THAN_SMS, WITHOUT_KEYS) if bf16 else SHAPES[:2]
    for shape in selected:
        (q, k, v, _), causal = tensors(shape, row, generator)
        inputs, options = (q.cuda(), k.cuda(), v.cuda(), None), (q.shape[3] ** -0.5, *bounds(causal))
        out, lse = (x.cpu() for x in torch.ops.flash_attn3.forward(*inputs, *options))
        batch, seqlen_q, heads = q.shape[:3]
        strided = torch.empty(batch, heads, seqlen_q, v.shape[3], dtype=q.dtype, device="cuda").transpose(1, 2)
        torch.ops.flash_attn3.forward_out(*inputs, strided, *options)
        ref, ref_lse = oracle.attention(q, k, v, causal=causal)
        assert (out.double() - ref).abs().max() < 0.05 and torch.equal(strided.cpu(), out), (row["name"], shape)
        assert torch.allclose(lse.double(), ref_lse, atol=1e-3), (row["name"], shape)
    return len(selected)


def compute_fp8(row: dict, generator: torch.Generator) -> int:
    """The same of a row for float8_e4m3fn inputs, with scales and, last, a window; its transposition runs before it."""
    selected = (*SHAPES, MORE_TILES_THAN_SMS, WITHOUT_KEYS, MASKED[0])
    for shape in selected:
        tensors16, causal = tensors(shape, row, generator)
        q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors16[:3])
        descale = torch.rand(q.shape[0], k.shape[2], generator=generator) + 0.5
        windowed = shape == MASKED[0]
        mask, options = (MASKED[1], MASKED[2]) if windowed else (bounds(causal), {"causal": causal})
        out, lse = torch.ops.flash_attn3.forward_fp8(
            q.cuda(), k.cuda(), v.cuda(), None, descale.cuda(), descale.cuda(), None, q.shape[3] ** -0.5, *mask
        )
        ref, ref_lse = oracle.attention(q, k, v, k_descale=descale, v_descale=descale, **options)
        assert (out.cpu().double() - ref).abs().max() < 0.4, (row["name"], shape)  # 2^-4 of values up to 5
        assert torch.allclose(lse.cpu().double(), ref_lse, atol=2e-2), (row["name"], shape)
    return len(selected)


def compute_backward(row: dict, generator: torch.Generator) -> int:
    """Runs all rows of both modes for the head dims and dtype of a "backward_keys" row; the number of shapes."""
    shapes = (*BACKWARD_SHAPES, BACKWARD_MORE_TILES_THAN_SMS, WITHOUT_KEYS)
    shapes = shapes if row["dtype"] == "bf16" else BACKWARD_SHAPES[:1]
    for shape in shapes:
        (q, k, v, dout), causal = tensors(shape, row, generator)
        dlse = torch.randn(q.shape[0], q.shape[2], q.shape[1], generator=generator)
        refs = oracle.gradients(q, k, v, dout, dlse, causal=causal)
        qkv, options = [x.cuda() for x in (q, k, v)], (q.shape[3] ** -0.5, *bounds(causal))
        out, lse = torch.ops.flash_attn3.forward(*qkv, None, *options)
        for deterministic in (False, True):
            arguments = (dout.cuda(), dlse.cuda(), *qkv, out, lse, None)
            *grads, _ = torch.ops.flash_attn3.backward(*arguments, *options, deterministic)
            strided = [torch.empty_like(x.transpose(1, 2).contiguous()).transpose(1, 2) for x in qkv]
            torch.ops.flash_attn3.backward_out(*arguments, *strided, *options, deterministic)
            for results in (grads, strided):
                assert_close(results, refs, (row["name"], shape, deterministic))
    return len(shapes)


def assert_close(results, refs, what: tuple) -> None:
    for ref, result in zip(refs, results, strict=True):
        limit = 0.05 + 0.02 * (ref.nan_to_num().abs().max().item() if ref.numel() else 0.0)
        result = result.cpu().double()
        assert torch.equal(result.isnan(), ref.isnan()), what
        assert ((result - ref).nan_to_num().abs() <= limit).all(), what


def compute_masks(row: dict, generator: torch.Generator) -> int:
    """Windows, chunks and softcap with a sink, both directions, for the head dims of a "backward_keys" row."""
    for shape, mask, options in (MASKED, CAPPED) if row["dtype"] == "bf16" else (MASKED,):
        (q, k, v, dout), _ = tensors(shape, row, generator)
        sink = torch.randn(q.shape[2], generator=generator)
        refs = oracle.gradients(q, k, v, dout, sink=sink, **options)
        inputs, scale = [x.cuda() for x in (dout, q, k, v, sink)], q.shape[3] ** -0.5
        out, lse = torch.ops.flash_attn3.forward(*inputs[1:], scale, *mask)
        ref, _ = oracle.attention(q, k, v, sink=sink, **options)
        assert (out.cpu().double() - ref).abs().max() < 0.05, (row["name"], shape)
        for deterministic in (False, True):
            arguments = (inputs[0], None, *inputs[1:4], out, lse, inputs[4], scale, *mask, deterministic)
            assert_close(torch.ops.flash_attn3.backward(*arguments), refs, (row["name"], shape, deterministic))
    return 2 if row["dtype"] == "bf16" else 1


def compute_packed(row: dict, generator: torch.Generator) -> int:
    """A packed batch, causal, both directions, for the head dims of a "backward_keys" row."""
    begins = [[3 + sum(lengths[:i]) for i in range(len(lengths) + 1)] for lengths in LENGTHS]
    totals = [begin[-1] + 6 for begin in begins]
    (q, _, _, dout), _ = tensors((1, totals[0], 0, 2, 1, 0, True), row, generator)
    (_, k, v, _), _ = tensors((1, 0, totals[1], 2, 1, 0, True), row, generator)
    refs = [torch.zeros_like(x[0], dtype=torch.float64) for x in (q, k, v)]
    ref_out = torch.zeros_like(dout[0], dtype=torch.float64)
    for i, used in enumerate(zip(*USED, strict=True)):
        begin = [x[i] for x in begins]
        rows, keys = (slice(at, at + count) for at, count in zip(begin, used, strict=True))
        if used[1] > LENGTHS[1][i]:  # malformed: all rows that it owns
            rows, keys = (slice(at, at + lengths[i]) for at, lengths in zip(begin, LENGTHS, strict=True))
            for x, at in zip((ref_out, *refs), (rows, rows, keys, keys), strict=True):
                x[at] = torch.nan
        elif min(used):
            part = (q[:, rows], k[:, keys], v[:, keys])
            ref_out[rows] = oracle.attention(*part, causal=True)[0][0]
            grads = oracle.gradients(*part, dout[:, rows], causal=True)
            for x, at, grad in zip(refs, (rows, keys, keys), grads, strict=True):
                x[at] = grad[0]
    lengths = [torch.tensor(x, dtype=torch.int32).cuda() for x in (*begins, *USED)]
    inputs, options = [x[0].cuda() for x in (dout, q, k, v)], (q.shape[3] ** -0.5, *CAUSAL)
    out, lse = torch.ops.flash_attn3.forward_varlen(*inputs[1:], *lengths, None, *options)
    assert_close([out], [ref_out], (row["name"], "packed"))
    for deterministic in (False, True):
        *grads, _ = torch.ops.flash_attn3.backward_varlen(
            inputs[0], None, *inputs[1:], out, lse, *lengths, None, *options, deterministic
        )
        assert_close(grads, refs, (row["name"], "packed", deterministic))
    return 1


def main() -> int:
    generator = torch.Generator().manual_seed(0)
    table = ops.kernel_table()
    shapes = 0
    for row in table:
        if row["op"] == "forward":
            shapes += compute_forward(row, generator)
        elif row["op"] == "fp8_forward":
            shapes += compute_fp8(row, generator)
        elif row["op"] == "backward_keys":
            shapes += compute_backward(row, generator)
            shapes += compute_masks(row, generator)
            shapes += compute_packed(row, generator)
    counts = torch.ops.flash_attn3.launch_counts().tolist()
    idle = [row["name"] for row, count in zip(table, counts, strict=True) if not count]
    assert not idle, f"never launched: {idle}"
    print(f"{DONE} {shapes} shapes, {len(table)} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
