"""The float64 truth of a few rows of a cell, cheap enough for every cell, and relative errors against it."""

from collections.abc import Sequence

import torch
from torch import Tensor

ROWS_AT_ONCE = 2048  # of a whole (rows, keys) matrix in float64


def reference_rows(seqlen: int) -> Tensor:
    """Rows that are compared: the first and last of the sequence and some in between."""
    spread = torch.linspace(0, seqlen - 1, min(seqlen, 33)).long()
    ends = torch.tensor([0, 1, 63, 64, 127, 128, seqlen - 65, seqlen - 64, seqlen - 2, seqlen - 1])
    return torch.cat([spread, ends]).clamp(0, seqlen - 1).unique()


def visible(position: Tensor, seqlen_k: int, causal: bool, window: tuple[int, int]) -> Tensor:
    """bool (rows, keys) for rows that stand at these positions."""
    left, right = window[0], 0 if causal else window[1]
    keys = torch.arange(seqlen_k, device=position.device)
    seen = torch.ones(len(position), seqlen_k, dtype=torch.bool, device=position.device)
    if left >= 0:
        seen &= keys >= position[:, None] - left
    if right >= 0:
        seen &= keys <= position[:, None] + right
    return seen


def relative_error(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: tuple[int, int] = (-1, -1)
) -> float:
    """|out - ref| / |ref| over some rows of the first head of the first batch and the last of the last, in float64."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    rows = reference_rows(seqlen_q).to(q.device)
    seen = visible(rows + seqlen_k - seqlen_q, seqlen_k, causal, window)
    errors = norms = 0.0
    for b, h in ((0, 0), (batch - 1, heads - 1)):
        s = q[b, rows, h].double() @ k[b, :, h // group].double().T * q.shape[3] ** -0.5
        ref = s.masked_fill(~seen, -torch.inf).softmax(-1) @ v[b, :, h // group].double()
        errors += (out[b, rows, h].double() - ref).square().sum().item()
        norms += ref.square().sum().item()
    return (errors / norms) ** 0.5


def sampled_gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, window: tuple[int, int] = (-1, -1)
) -> list[list[Tensor]]:
    """Exact gradients at the rows of `reference_rows` of the first and the last KV head (of the first and last batch).

    Two lists of (rows of dq (rows, G, D), of dk (keys, D), of dv (keys, Dv)), G query heads on that KV head.
    """
    ends = ((0, 0), (q.shape[0] - 1, k.shape[2] - 1))
    return [_gradients_of_head(*_head(b, h, q, k, v, dout), causal, window) for b, h in ends]


def _head(b: int, h: int, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    group = q.shape[2] // k.shape[2]
    heads = slice(h * group, (h + 1) * group)
    return q[b, :, heads].double(), k[b, :, h].double(), v[b, :, h].double(), dout[b, :, heads].double()


def _gradients_of_head(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, window: tuple[int, int]
) -> list[Tensor]:
    """q, dout (Sq, G, D), k, v (Sk, D) in float64; dk and dv need every row, which are taken in blocks."""
    seqlen_q, seqlen_k, scale = q.shape[0], k.shape[0], q.shape[2] ** -0.5
    rows, keys = reference_rows(seqlen_q).to(q.device), reference_rows(seqlen_k).to(q.device)
    dq = torch.empty(len(rows), *q.shape[1:], dtype=q.dtype, device=q.device)
    dk, dv = torch.zeros_like(k[keys]), torch.zeros_like(v[keys])
    for g in range(q.shape[1]):
        for begin in range(0, seqlen_q, ROWS_AT_ONCE):
            end = min(begin + ROWS_AT_ONCE, seqlen_q)
            here, dhere = q[begin:end, g], dout[begin:end, g]
            s = here @ k.T * scale
            if causal or window != (-1, -1):
                position = torch.arange(begin, end, device=q.device) + seqlen_k - seqlen_q
                s.masked_fill_(~visible(position, seqlen_k, causal, window), -torch.inf)
            p = s.softmax(-1)
            ds = dhere @ v.T
            ds.sub_((p * ds).sum(-1, keepdim=True)).mul_(p)
            dv += p[:, keys].T @ dhere
            dk += scale * ds[:, keys].T @ here
            inside = (rows >= begin) & (rows < end)
            dq[inside, g] = scale * ds[rows[inside] - begin] @ k
    return [dq, dk, dv]


def gradient_error(grads: Sequence[Tensor], refs: list[list[Tensor]]) -> float:
    """The largest of |dq - ref| / |ref|, and the same of dk and dv, over what `sampled_gradients` computed."""
    group = grads[0].shape[2] // grads[1].shape[2]
    places = ((0, slice(0, group), 0), (-1, slice(-group, None), -1))
    worst = 0.0
    for which, grad in enumerate(grads):
        errors = norms = 0.0
        for (b, heads, head), ref in zip(places, refs, strict=True):
            rows = reference_rows(grad.shape[1]).to(grad.device)
            got = grad[b, rows][:, heads if which == 0 else head].double()
            errors += (got - ref[which]).square().sum().item()
            norms += ref[which].square().sum().item()
        error = (errors / norms) ** 0.5
        worst = error if error != error else max(worst, error)  # a NaN stays
        if worst != worst:
            break
    return worst


def compared_sequences(lengths: Sequence[int]) -> list[slice]:
    """Rows of the first, the last and the longest sequence of a packed batch."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    chosen = sorted({0, len(lengths) - 1, max(range(len(lengths)), key=lengths.__getitem__)})
    return [slice(ends[i] - lengths[i], ends[i]) for i in chosen]


def largest(errors: Sequence[float]) -> float:
    """The largest, or NaN if there is one."""
    return torch.tensor(errors, dtype=torch.float64).max().item()
