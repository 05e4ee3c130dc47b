"""Packed ("varlen") batches: which rows belong to which sequence, and attention of one sequence after the other.

The lengths are read on the host, which waits for the GPU if they are there. Each sequence is cut out before anything is
computed, so nothing outside it can reach it. Rows that no sequence owns have out 0, lse -inf and zero gradients.
Lengths that contradict each other never lead outside the tensors: see `sequences`.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn3.portable.backward import add_gradients, empty_gradients
from flash_attn3.portable.forward import attend, empty_outputs


class Rows(NamedTuple):
    """The rows of one sequence in q or in k and v."""

    used: slice  # those that count
    owned: slice  # those, and padding behind them
    error: str  # what is wrong with the lengths; the rows that count mean nothing then


class Sequence(NamedTuple):
    queries: Rows
    keys: Rows

    @property
    def error(self) -> str:
        """Empty, or why the sequence is malformed: then its out, lse and gradients are NaN."""
        return "; ".join(x for x in (self.queries.error, self.keys.error) if x)


def sequences(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    total_q: int,
    total_k: int,
) -> list[Sequence]:
    """The sequences of a packed batch of total_q rows in q and total_k in k and v.

    With m_b the largest of 0, cu_seqlens[0], .., cu_seqlens[b], at most the total, sequence b owns rows m_b .. m_{b+1}:
    every row has one owner at most, whatever the lengths. A sequence is malformed, and says so in `error`, if its
    cu_seqlens are negative, go backwards or beyond the total, or if its seqused is negative or above its length.
    """
    queries = _rows("q", cu_seqlens_q, seqused_q, total_q)
    return [Sequence(*both) for both in zip(queries, _rows("k", cu_seqlens_k, seqused_k, total_k), strict=True)]


def _rows(name: str, cu_seqlens: Tensor, seqused: Tensor | None, total: int) -> list[Rows]:
    bounds = cu_seqlens.tolist()
    counts = None if seqused is None else seqused.tolist()
    rows, reached = [], 0
    for b, (begin, end) in enumerate(itertools.pairwise(bounds)):
        reached = max(reached, min(begin, total))
        owned, error = slice(reached, max(reached, min(end, total))), ""
        count = end - begin if counts is None else counts[b]
        if begin < reached or end < begin or end > total:
            error = (
                f"cu_seqlens_{name} goes from {begin} to {end}, where rows {reached} to {total} of {name} are left; "
                "it must begin at 0 or above, never decrease and never exceed the rows"
            )
        elif not 0 <= count <= end - begin:
            error = f"seqused_{name} is {count}; it must be from 0 to the sequence's {end - begin} rows of {name}"
        reached = owned.stop
        rows.append(Rows(slice(begin, begin + count), owned, error))
    return rows


@torch.no_grad()
def forward_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """out and lse as in `empty_outputs`; q (Tq, H, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), qv (Tq, H, Dv)."""
    out, lse = empty_outputs(q, v)
    out.zero_()
    lse.fill_(-torch.inf)
    mask = (softmax_scale, window_left, window_right, attention_chunk, softcap)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    for b, sequence in enumerate(sequences(*lengths, q.shape[0], k.shape[0])):
        if sequence.error:
            out[sequence.queries.owned] = torch.nan
            lse[:, sequence.queries.owned] = torch.nan
            continue
        rows, keys = sequence.queries.used, sequence.keys.used
        descales = (None if x is None else x[b : b + 1] for x in (q_descale, k_descale, v_descale))
        value_queries = None if qv is None else qv[None, rows]
        attend(
            out[None, rows], lse[None, :, rows], q[None, rows], k[None, keys], v[None, keys], value_queries, *descales,
            sink, *mask,
        )  # fmt: skip
    return out, lse


@torch.no_grad()
def backward_varlen(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    sink: Tensor | None,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    attention_chunk: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dqv, dsink as in `empty_gradients`; dout and out (Tq, H, Dv), dlse and lse (H, Tq)."""
    dq, dk, dv, dqv, dsink = (x.zero_() for x in empty_gradients(q, k, v, qv, sink))
    mask = (softmax_scale, window_left, window_right, attention_chunk, softcap)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    for sequence in sequences(*lengths, q.shape[0], k.shape[0]):
        if sequence.error:
            for grad, rows in ((dq, sequence.queries), (dk, sequence.keys), (dv, sequence.keys)):
                grad[rows.owned] = torch.nan
            if qv is not None:
                dqv[sequence.queries.owned] = torch.nan
            continue
        rows, keys = sequence.queries.used, sequence.keys.used
        add_gradients(
            (dq[None, rows], dk[None, keys], dv[None, keys], dqv if qv is None else dqv[None, rows], dsink),
            dout[None, rows], None if dlse is None else dlse[None, :, rows], q[None, rows], k[None, keys],
            v[None, keys], None if qv is None else qv[None, rows], out[None, rows], lse[None, :, rows], sink, *mask,
        )  # fmt: skip
    return dq, dk, dv, dqv, dsink
