"""Blockwise backward: gradients of out and lse from q, k, v and the out and lse of the forward, recomputing the scores.

    p = exp(scores - lse);  delta = rowsum(dout * out) - dlse;  ds = p * (dout v^T - delta) * (1 - (scores / softcap)^2)
    dq = scale ds k;  dk = scale ds^T q;  dv = p^T dout [+ scale ds^T qv];  dqv = scale ds v

The out and lse that are passed in are used as they are, which is what merging partial results by their LSE (context
parallel) needs. Rows without a key (lse -inf) have zero gradient.
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
)
from flash_attn3.portable.forward import scores


def empty_gradients(q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dqv with the shapes and dtypes of their inputs, contiguous, not filled; dqv (0,) without qv."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return dq, dk, dv, torch.empty((0,) if qv is None else qv.shape, dtype=q.dtype, device=q.device)


@torch.no_grad()
def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dqv as in `empty_gradients`; dout and out (B, Sq, H, Dv), dlse and lse (B, H, Sq)."""
    dtype, kv_heads = arithmetic(q.dtype), k.shape[2]
    band = Band(q.shape[1], k.shape[1], window_left, window_right, attention_chunk)
    dq, dk, dv, dqv = empty_gradients(q, k, v, qv)
    if k.numel() == 0 and v.numel() == 0:
        return dq.zero_(), dk, dv, dqv.zero_()
    with no_autocast(q.device):
        for batches, heads in head_slices(q, k):
            keys, values = (stack_keys(x, batches, heads, dtype) for x in (k, v))  # (b * h, Sk, D)
            dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)

            def rows_of(x, begin, end, batches=batches, heads=heads):  # (B, Sq, H, D) -> (b * h, G * rows, D)
                x = stack_rows(x[batches, begin:end], heads, kv_heads)
                return x.to(dtype).flatten(2, 3).flatten(0, 1)

            def put_rows(x, value, begin, end, batches=batches, heads=heads):
                target = stack_rows(x[batches, begin:end], heads, kv_heads)
                target.copy_(value.view(target.shape))

            for begin, end in row_blocks(q, k):
                gradient = rows_of(dout, begin, end)
                delta = (gradient * rows_of(out, begin, end)).sum(-1)
                if dlse is not None:
                    delta -= rows_of(dlse.transpose(1, 2)[..., None], begin, end)[..., 0]
                row_lse = rows_of(lse.transpose(1, 2)[..., None], begin, end)[..., 0]
                dqueries, dvalue_queries = _rows(
                    rows_of(q, begin, end).mul(softmax_scale),
                    None if qv is None else rows_of(qv, begin, end).mul(softmax_scale),
                    (keys, values, dkeys, dvalues),
                    (gradient, delta, row_lse),
                    band,
                    (begin, end),
                    softcap,
                )
                put_rows(dq, dqueries.mul_(softmax_scale), begin, end)
                if qv is not None:
                    put_rows(dqv, dvalue_queries.mul_(softmax_scale), begin, end)
            for target, value in ((dk, dkeys), (dv, dvalues)):
                target = target[batches, :, heads].transpose(1, 2)
                target.copy_(value.view(target.shape))
    return dq, dk, dv, dqv


def _rows(
    queries: Tensor,
    value_queries: Tensor | None,
    sequence: tuple[Tensor, Tensor, Tensor, Tensor],
    upstream: tuple[Tensor, Tensor, Tensor],
    band: Band,
    rows: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor | None]:
    """dq / scale and dqv / scale of one block of rows; adds to the dkeys and dvalues of `sequence`.

    queries and value_queries are scaled, (N, G * rows, D); sequence is keys, values, dkeys, dvalues (N, Sk, D);
    upstream is dout (N, G * rows, Dv), delta and lse (N, G * rows).
    """
    keys, values, dkeys, dvalues = sequence
    dout, delta, lse = upstream
    group = queries.shape[1] // (rows[1] - rows[0])
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(scores - inf) = 0 for rows without a key
    dqueries = torch.zeros_like(queries)
    dvalue_queries = None if value_queries is None else torch.zeros_like(value_queries)
    for begin, end, masked in band.key_blocks(*rows, block_size(queries.device).keys):
        visible = hidden = visible_keys = None
        if masked:
            visible = band.visible(*rows, begin, end, queries.device).repeat(group, 1)  # (G * rows, keys)
            hidden, visible_keys = ~visible, visible.transpose(0, 1)
        block_keys, block_values = keys[:, begin:end], values[:, begin:end]
        s = scores(queries, value_queries, block_keys, block_values, softcap)  # (N, G * rows, keys)
        p = (s - lse[..., None]).exp_()
        dp = dout @ block_values.transpose(1, 2)
        ds = dp.sub_(delta[..., None]).mul_(p)
        if softcap > 0:
            ds.mul_(1 - (s / softcap).square_())
        if hidden is not None:
            p.masked_fill_(hidden, 0)
            ds.masked_fill_(hidden, 0)
        ds_keys = ds.transpose(1, 2)
        dqueries += product(ds, block_keys, visible)
        dkeys[:, begin:end] += product(ds_keys, queries, visible_keys)
        dvalues[:, begin:end] += product(p.transpose(1, 2), dout, visible_keys)
        if value_queries is not None:
            dvalue_queries += product(ds, block_values, visible)
            dvalues[:, begin:end] += product(ds_keys, value_queries, visible_keys)
    return dqueries, dvalue_queries
