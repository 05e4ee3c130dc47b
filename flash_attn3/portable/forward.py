"""Blockwise forward: out = softmax(scores) v with an online softmax over blocks of keys, and the LSE of each row.

    scores = softcap(scale * (q k^T + qv v^T)), masked;  lse = log sum exp(scores);  out = exp(scores - lse) v

A sink is one more score of every row of its head, neither scaled nor capped, without a value. A row that sees no key
has out 0 and lse -inf, or the sink. Peak memory beside the inputs: fp32 copies of the keys and values of the
heads in work, and one block of scores; never (Sq, Sk).
"""

import torch
from torch import Tensor

from flash_attn3.portable.blocks import (
    Band,
    arithmetic,
    block_size,
    head_slices,
    no_autocast,
    product,
    row_blocks,
    stack_keys,
    stack_rows,
    stack_sinks,
)


def empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (.., Sq, H, Dv) in q's dtype (bf16 for e4m3), lse (.., H, Sq) fp32 (fp64 for fp64); contiguous, not filled.

    The leading dimension is the batch of dense tensors; packed ones have none.
    """
    *batch, seqlen_q, heads, _ = q.shape
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = torch.empty(*batch, seqlen_q, heads, v.shape[-1], dtype=dtype, device=q.device)
    return out, torch.empty(*batch, heads, seqlen_q, dtype=arithmetic(q.dtype), device=q.device)


def descale_of(descale: Tensor | None, batches: slice, heads: slice) -> Tensor | float:
    """The factors of the heads in work as (b, h, 1, 1, 1), or 1."""
    return 1.0 if descale is None else descale[batches, heads, None, None, None]


@torch.no_grad()
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """out and lse as in `empty_outputs`; q (B, Sq, H, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), qv (B, Sq, H, Dv)."""
    out, lse = empty_outputs(q, v)
    attend(
        out, lse, q, k, v, qv, q_descale, k_descale, v_descale, sink, softmax_scale, window_left, window_right,
        attention_chunk, softcap,
    )  # fmt: skip
    return out, lse


def attend(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
) -> None:
    """`forward` into out (B, Sq, H, Dv) and lse (B, H, Sq) of any strides."""
    dtype, kv_heads = arithmetic(q.dtype), k.shape[2]
    band = Band(q.shape[1], k.shape[1], window_left, window_right, attention_chunk)
    if out.numel() == 0 and lse.numel() == 0:
        return
    with no_autocast(q.device):
        for batches, heads in head_slices(q, k):
            keys, values = (stack_keys(x, batches, heads, dtype) for x in (k, v))  # (b * h, Sk, D)
            scale = softmax_scale * descale_of(q_descale, batches, heads) * descale_of(k_descale, batches, heads)
            for begin, end in row_blocks(q, k):
                queries = stack_rows(q[batches, begin:end], heads, kv_heads).to(dtype) * scale  # (b, h, G, rows, D)
                shape, queries = queries.shape[:4], queries.flatten(2, 3).flatten(0, 1)  # (b * h, G * rows, D)
                value_queries = None
                if qv is not None:
                    value_queries = stack_rows(qv[batches, begin:end], heads, kv_heads).to(dtype) * scale
                    value_queries = value_queries.flatten(2, 3).flatten(0, 1)
                row_sinks = None if sink is None else stack_sinks(sink, heads, shape, dtype).flatten(2, 3).flatten(0, 1)
                block_out, block_lse = _rows(queries, value_queries, keys, values, row_sinks, band, begin, end, softcap)
                block_out = block_out.unflatten(0, shape[:2]).unflatten(2, shape[2:])
                if v_descale is not None:
                    block_out = block_out * descale_of(v_descale, batches, heads)
                stack_rows(out[batches, begin:end], heads, kv_heads).copy_(block_out)
                # (b, H, rows) -> (b, h, G, rows)
                lse_rows = lse[batches, :, begin:end].unflatten(1, (kv_heads, -1))[:, heads]
                lse_rows.copy_(block_lse.unflatten(0, shape[:2]).unflatten(2, shape[2:]))


def _rows(
    queries: Tensor,
    value_queries: Tensor | None,
    keys: Tensor,
    values: Tensor,
    row_sinks: Tensor | None,
    band: Band,
    row_begin: int,
    row_end: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Attention of the scaled queries (N, G * rows, D) of rows row_begin .. row_end - 1: out (N, G * rows, Dv), lse."""
    group = queries.shape[1] // (row_end - row_begin)
    if row_sinks is None:
        row_max = queries.new_full(queries.shape[:2], -torch.inf)  # (N, G * rows)
        row_sum = torch.zeros_like(row_max)
    else:  # a score that each row has seen before its first key
        row_max, row_sum = row_sinks, torch.ones_like(row_sinks)
    out = queries.new_zeros(*queries.shape[:2], values.shape[2])
    for begin, end, masked in band.key_blocks(row_begin, row_end, block_size(queries.device).keys):
        hidden = None
        if masked:
            hidden = band.hidden(row_begin, row_end, begin, end, queries.device).repeat(group, 1)
        s = scores(queries, value_queries, keys[:, begin:end], values[:, begin:end], softcap)  # (N, G * rows, keys)
        if hidden is not None:
            s.masked_fill_(hidden, -torch.inf)
        new_max = torch.maximum(row_max, s.amax(-1))
        # A row that has seen nothing yet has maximum -inf; any finite value keeps its weights exp(-inf - x) at 0.
        shift = new_max.masked_fill(new_max == -torch.inf, 0)
        p = s.sub_(shift[..., None]).exp_()
        decay = (row_max - shift).exp_()
        row_sum = row_sum * decay + p.sum(-1)
        out.mul_(decay[..., None]).add_(product(p, values[:, begin:end], hidden))
        row_max = new_max
    lse = (row_max + row_sum.log()).where(row_max.isfinite() | row_max.isnan(), row_max)
    return out.div_(row_sum.masked_fill(row_sum == 0, 1)[..., None]), lse


def scores(queries: Tensor, value_queries: Tensor | None, keys: Tensor, values: Tensor, softcap: float) -> Tensor:
    """Scaled and capped scores before the mask, (N, rows, keys); the queries carry the scale."""
    s = torch.bmm(queries, keys.transpose(1, 2))
    if value_queries is not None:
        s.baddbmm_(value_queries, values.transpose(1, 2))
    if softcap > 0:
        s.div_(softcap).tanh_().mul_(softcap)
    return s
