"""Blockwise backward: gradients of out and lse from q, k, v and the out and lse of the forward, recomputing the scores.

    p = exp(scores - lse);  delta = rowsum(dout * out) - dlse;  ds = p * (dout v^T - delta) * (1 - (scores / softcap)^2)
    dq = scale ds k;  dk = scale ds^T q;  dv = p^T dout [+ scale ds^T qv];  dqv = scale ds v
    dsink = -sum over the rows of exp(sink - lse) * delta

The out and lse that are passed in are used as they are, which is what merging partial results by their LSE (context
parallel) needs. Rows without a key (lse -inf) have zero gradient.
"""

import functools

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
from flash_attn3.portable.forward import scores


def empty_gradients(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None, sink: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dqv, dsink with the shapes and dtypes of their inputs, contiguous, not filled; (0,) without one."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dqv = torch.empty((0,) if qv is None else qv.shape, dtype=q.dtype, device=q.device)
    return (
        dq,
        dk,
        dv,
        dqv,
        torch.empty(0 if sink is None else sink.shape[0], dtype=arithmetic(q.dtype), device=q.device),
    )


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
    sink: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dqv, dsink as in `empty_gradients`; dout and out (B, Sq, H, Dv), dlse and lse (B, H, Sq)."""
    grads = empty_gradients(q, k, v, qv, sink)
    grads[4].zero_()
    add_gradients(
        grads, dout, dlse, q, k, v, qv, out, lse, sink, softmax_scale, window_left, window_right, attention_chunk,
        softcap,
    )  # fmt: skip
    return grads


def add_gradients(
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    out: Tensor,
    lse: Tensor,
    sink: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
) -> None:
    """`backward` into dq, dk, dv, dqv of any strides, which are overwritten, and dsink, to which it is added."""
    dtype, kv_heads = arithmetic(q.dtype), k.shape[2]
    band = Band(q.shape[1], k.shape[1], window_left, window_right, attention_chunk)
    dq, dk, dv, dqv, dsink = grads
    with no_autocast(q.device):
        for batches, heads in head_slices(q, k):

            def rows_of(x, batches=batches, heads=heads):  # (B, Sq, H, D) -> (b * h, G, Sq, D)
                return stack_rows(x[batches], heads, kv_heads).to(dtype).flatten(0, 1)

            def numbers_of(x, batches=batches, heads=heads):  # (B, H, Sq) -> (b * h, G, Sq)
                return x[batches].unflatten(1, (kv_heads, -1))[:, heads].to(dtype).flatten(0, 1)

            keys, values = (stack_keys(x, batches, heads, dtype) for x in (k, v))  # (b * h, Sk, D)
            sequence = (keys, values, torch.zeros_like(keys), torch.zeros_like(values))
            row_lse, gradient, queries = numbers_of(lse), rows_of(dout), rows_of(q).mul(softmax_scale)
            row_lse = row_lse.masked_fill(row_lse == -torch.inf, torch.inf)  # exp(scores - inf) = 0 without a key
            delta = (gradient * rows_of(out)).sum(-1)
            if dlse is not None:
                delta -= numbers_of(dlse)
            if sink is not None:
                grouped = delta.unflatten(0, (q[batches].shape[0], -1))  # (b, h, G, Sq)
                statistics = row_lse.view_as(grouped)
                shares = grouped * (stack_sinks(sink, heads, grouped.shape, dtype) - statistics).exp()
                shares.masked_fill_(statistics == torch.inf, 0)  # whatever its dlse: this lse is constant
                dsink.unflatten(0, (kv_heads, -1))[heads] -= shares.sum((0, 3))
            value_queries = None if qv is None else rows_of(qv).mul(softmax_scale)
            for begin, end in row_blocks(q, k):
                block = [
                    None if x is None else x[:, :, begin:end].flatten(1, 2)
                    for x in (queries, value_queries, gradient, delta, row_lse)
                ]
                results = _rows(*block, sequence, band, begin, end, softcap)
                for target, value in zip((dq, dqv), results, strict=True):
                    if value is not None:
                        target = stack_rows(target[batches, begin:end], heads, kv_heads)
                        target.copy_(value.mul_(softmax_scale).view(target.shape))
            for target, value in zip((dk, dv), sequence[2:], strict=True):
                target = target[batches, :, heads].transpose(1, 2)
                target.copy_(value.view(target.shape))


def _rows(
    queries: Tensor,
    value_queries: Tensor | None,
    dout: Tensor,
    delta: Tensor,
    lse: Tensor,
    sequence: tuple[Tensor, Tensor, Tensor, Tensor],
    band: Band,
    row_begin: int,
    row_end: int,
    softcap: float,
) -> tuple[Tensor, Tensor | None]:
    """dq / scale and dqv / scale of rows row_begin .. row_end - 1; adds to the dkeys and dvalues of `sequence`.

    queries and value_queries are scaled, (N, G * rows, D); dout (N, G * rows, Dv), delta and lse (N, G * rows), lse
    +inf for rows without a key; sequence is keys, values, dkeys, dvalues (N, Sk, D).
    """
    group = queries.shape[1] // (row_end - row_begin)
    dqueries = torch.zeros_like(queries)
    dvalue_queries = None if value_queries is None else torch.zeros_like(value_queries)
    # What is not finite in q, k and qv acts through the scores: ds is NaN where it is seen and 0 where it is hidden.
    finite = functools.partial(torch.nan_to_num, nan=0, posinf=0, neginf=0) if band.bounded else lambda x: x
    finite_queries = finite(queries)
    for begin, end, masked in band.key_blocks(row_begin, row_end, block_size(queries.device).keys):
        hidden = hidden_rows = None
        if masked:
            hidden = band.hidden(row_begin, row_end, begin, end, queries.device).repeat(group, 1)  # (G * rows, keys)
            hidden_rows = hidden.t()
        block_keys, block_values, block_dkeys, block_dvalues = (x[:, begin:end] for x in sequence)
        s = scores(queries, value_queries, block_keys, block_values, softcap)  # (N, G * rows, keys)
        p = (s - lse[..., None]).exp_()
        ds = torch.bmm(dout, block_values.transpose(1, 2)).sub_(delta[..., None]).mul_(p)
        if softcap > 0:
            ds.mul_(1 - (s / softcap).square_())
        if hidden is not None:
            p.masked_fill_(hidden, 0)
            ds.masked_fill_(hidden, 0)
        ds_keys = ds.transpose(1, 2)
        dqueries.baddbmm_(ds, finite(block_keys))
        block_dkeys.baddbmm_(ds_keys, finite_queries)
        block_dvalues += product(p.transpose(1, 2), dout, hidden_rows)
        if value_queries is not None:
            dvalue_queries.baddbmm_(ds, finite(block_values))
            block_dvalues.baddbmm_(ds_keys, finite(value_queries))
    return dqueries, dvalue_queries
