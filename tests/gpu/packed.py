"""Packed batches of sequences ("varlen") for the tests: their making, the calls, and the formula sequence by sequence.

`rows_of` reads cu_seqlens and seqused as the library promises to, whatever they hold, on the host and independently of
it. Sequences of equal lengths go through the dense formula together.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import harness
import oracle
import torch
from harness import DEVICE, Gradients, bounds, ran, randn
from torch import Tensor


class Rows(NamedTuple):
    """Of one sequence in a tensor: the rows [begin, begin + length) that count, and [begin, end) that it owns."""

    begin: int
    length: int
    end: int
    malformed: bool


def rows_of(cu: Sequence[int], used: Sequence[int] | None, total: int) -> list[Rows]:
    """The rows of every sequence, for any cu_seqlens and seqused."""
    starts = [min(total, begin) for begin in itertools.accumulate(cu, max, initial=0)][1:]
    sequences = []
    for index, (begin, end) in enumerate(itertools.pairwise(starts)):
        length = cu[index + 1] - cu[index]
        count = length if used is None else used[index]
        bad = cu[index] < 0 or cu[index] < begin or length < 0 or cu[index + 1] > total or not 0 <= count <= length
        sequences.append(Rows(begin, 0 if bad else count, end, bad))
    return sequences


def prefix_sums(lengths: Sequence[int], first: int = 0) -> list[int]:
    return list(itertools.accumulate(lengths, initial=first))


def ints(values: Sequence[int] | None) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.int32, device=DEVICE)


@dataclass(frozen=True)
class Batch:
    """q (Tq, H, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), and the lengths, known on the host too."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: tuple[int, ...]
    cu_k: tuple[int, ...]
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return len(self.cu_q) - 1

    @property
    def lengths(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """cu_seqlens and seqused as operators take them."""
        return ints(self.cu_q), ints(self.cu_k), ints(self.used_q), ints(self.used_k)

    @property
    def sequences(self) -> list[tuple[Rows, Rows]]:
        """Rows of queries and keys of every sequence; both are malformed if one is."""
        pairs = zip(
            rows_of(self.cu_q, self.used_q, len(self.q)), rows_of(self.cu_k, self.used_k, len(self.k)), strict=True
        )
        return [
            (q._replace(length=0, malformed=True), k._replace(length=0, malformed=True))
            if q.malformed or k.malformed
            else (q, k)
            for q, k in pairs
        ]

    def part(self, *which: int) -> "Batch":
        """The sequences `which`, in this order, as a batch of their own."""
        sequences = self.sequences
        q_rows = torch.cat([owned(sequences[i][0]) for i in which])
        k_rows = torch.cat([owned(sequences[i][1]) for i in which])
        return replace(
            self,
            q=self.q[q_rows], k=self.k[k_rows], v=self.v[k_rows],
            cu_q=tuple(prefix_sums([sequences[i][0].end - sequences[i][0].begin for i in which])),
            cu_k=tuple(prefix_sums([sequences[i][1].end - sequences[i][1].begin for i in which])),
            used_q=self.used_q and tuple(self.used_q[i] for i in which),
            used_k=self.used_k and tuple(self.used_k[i] for i in which),
        )  # fmt: skip


def owned(rows: Rows) -> Tensor:
    return torch.arange(rows.begin, rows.end, device=DEVICE)


def counted(rows: Rows) -> slice:
    return slice(rows.begin, rows.begin + rows.length)


def make(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    *,
    before: tuple[int, int] = (0, 0),
    after: tuple[int, int] = (0, 0),
    used_q: Sequence[int] | None = None,
    used_k: Sequence[int] | None = None,
    key: object = 0,
) -> Batch:
    """A well-formed batch of N(0, 1); `before` and `after`: rows of q and k outside of all sequences."""
    lengths_k = lengths_q if lengths_k is None else lengths_k
    cu_q, cu_k = prefix_sums(lengths_q, before[0]), prefix_sums(lengths_k, before[1])
    total_q, total_k = cu_q[-1] + after[0], cu_k[-1] + after[1]
    return Batch(
        randn(total_q, heads[0], dims[0], dtype=dtype, key=(key, "q")),
        randn(total_k, heads[1], dims[0], dtype=dtype, key=(key, "k")),
        randn(total_k, heads[1], dims[1], dtype=dtype, key=(key, "v")),
        tuple(cu_q),
        tuple(cu_k),
        None if used_q is None else tuple(used_q),
        None if used_k is None else tuple(used_k),
    )


def gradient_of_out(batch: Batch, key: object = "dout") -> Tensor:
    return randn(*batch.q.shape[:2], batch.v.shape[2], dtype=batch.q.dtype, key=key)


def gradient_of_lse(batch: Batch, key: object = "dlse") -> Tensor:
    return randn(batch.q.shape[1], batch.q.shape[0], dtype=torch.float32, key=key)


def forward_rows(batch: Batch) -> tuple[str, ...]:
    """The schedule, and the forward row, which no length may decide on."""
    dims = (batch.q.shape[2], batch.v.shape[2])
    row = harness.expected_row(*dims, 1, 1, batch.q.dtype, varlen=True)
    assert row == harness.expected_row(*dims, 1 << 20, 1 << 20, batch.q.dtype, varlen=True)
    return (*harness.rows_of_op("packed_schedule"), row)


def backward_rows(
    batch: Batch, causal: bool, deterministic: bool, sink: Tensor | None = None, **mask
) -> tuple[str, ...]:
    means = len(batch.q) // max(1, batch.size), len(batch.k) // max(1, batch.size)
    dims = (batch.q.shape[2], batch.v.shape[2])
    rows = harness.expected_backward(*dims, *means, bounds(causal, **mask), batch.q.dtype, deterministic, varlen=True)
    last = () if sink is None else harness.rows_of_op("backward_sink")
    return (*harness.rows_of_op("packed_schedule"), *rows, *last)


def modes(batch: Batch, causal: bool, **mask) -> list[bool]:
    """The values of `deterministic` that run different kernels."""
    same = backward_rows(batch, causal, False, **mask) == backward_rows(batch, causal, True, **mask)
    return [True] if same else [False, True]


def poison(batch: Batch) -> None:
    """Poisons what results and the workspace of a forward or backward will lie in."""
    rows = batch.q.shape[1] * (len(batch.q) + 256 * batch.size + 256)
    columns = max(64, batch.q.shape[2], batch.v.shape[2])
    sizes = [2 * x.numel() for x in (batch.q, batch.k, batch.v)]
    harness.poison(*sizes, 2 * batch.q.shape[0] * batch.q.shape[1] * batch.v.shape[2], 4 * rows, 8 * rows)
    harness.poison(4 * rows * columns, *(size * (batch.size + 1) for size in (4, 16, 32, 64, 128)))


def attend(
    batch: Batch,
    causal: bool = False,
    scale: float | None = None,
    times: tuple[int, ...] = (1,),
    sink: Tensor | None = None,
    out: Tensor | None = None,
    **mask,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator over poisoned memory, asserted to have run the expected rows. `out`: the caller's."""
    scale = batch.q.shape[2] ** -0.5 if scale is None else scale
    inputs, options = (batch.q, batch.k, batch.v, *batch.lengths, sink), (scale, *bounds(causal, **mask))
    poison(batch)
    with torch.no_grad(), ran(forward_rows(batch), *times):
        if out is None:
            out, lse = torch.ops.flash_attn3.forward_varlen(*inputs, *options)
            assert out.is_contiguous()
        else:
            lse = torch.ops.flash_attn3.forward_varlen_out(*inputs, out, *options)
    assert out.shape == (*batch.q.shape[:2], batch.v.shape[2]) and out.dtype == batch.q.dtype
    assert lse.shape == batch.q.shape[1::-1] and lse.dtype == torch.float32 and lse.is_contiguous()
    return out, lse


def backward(
    batch: Batch,
    dout: Tensor,
    dlse: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    deterministic: bool = False,
    saved: tuple[Tensor, Tensor] | None = None,
    times: tuple[int, ...] = (1,),
    sink: Tensor | None = None,
    grads: Sequence[Tensor] | None = None,
    **mask,
) -> Gradients:
    """dq, dk, dv (and dsink) like `attend`; `grads` are the caller's dq, dk, dv."""
    saved = saved or attend(batch, causal, scale, times, sink, **mask)
    scale = batch.q.shape[2] ** -0.5 if scale is None else scale
    inputs = (dout, dlse, batch.q, batch.k, batch.v, *saved, *batch.lengths, sink)
    options = (scale, *bounds(causal, **mask), deterministic)
    poison(batch)
    with torch.no_grad(), ran(backward_rows(batch, causal, deterministic, sink, **mask), *times):
        if grads is None:
            results = torch.ops.flash_attn3.backward_varlen(*inputs, *options)
            return harness.checked_gradients((batch.q, batch.k, batch.v, sink), results)
        dsink = torch.ops.flash_attn3.backward_varlen_out(*inputs, *grads, *options)
    return (*grads, dsink) if sink is not None else tuple(grads)


# The formula


def formula(
    batch: Batch, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, sink: Tensor | None, **options
) -> tuple[Tensor, Tensor]:
    """out (Tq, H, Dv) and lse (H, Tq) of rows that well-formed sequences own, elsewhere 0 and -inf; differentiable."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=dtype, device=q.device)
    lse = torch.full(q.shape[1::-1], -torch.inf, dtype=dtype, device=q.device)
    groups = defaultdict(list)
    for rows_q, rows_k in batch.sequences:
        groups[rows_q.length, rows_k.length].append((rows_q.begin, rows_k.begin))
    for (length_q, length_k), begins in groups.items():
        starts = torch.tensor(begins, device=q.device)
        rows = starts[:, :1] + torch.arange(length_q, device=q.device)
        keys = starts[:, 1:] + torch.arange(length_k, device=q.device)
        if length_q and length_k:
            extra = {} if sink is None else {"sink": sink}
            some, some_lse = oracle.attention(q[rows], k[keys], v[keys], dtype=dtype, **extra, **options)
            out[rows], lse[:, rows] = some, some_lse.transpose(0, 1)
        elif length_q and sink is not None:
            lse[:, rows] = sink.to(dtype)[:, None, None].expand(-1, *rows.shape)
    return out, lse


def malformed_rows(batch: Batch, which: int) -> Tensor:
    """Rows of q (0) or k (1) that malformed sequences own."""
    bad = [owned(pair[which]) for pair in batch.sequences if pair[which].malformed]
    return torch.cat(bad) if bad else torch.empty(0, dtype=torch.int64, device=DEVICE)


def reference(
    batch: Batch, causal: bool, scale: float | None, dtype: torch.dtype, sink: Tensor | None = None, **mask
) -> tuple[Tensor, Tensor]:
    out, lse = formula(batch, batch.q, batch.k, batch.v, dtype, sink, causal=causal, scale=scale, **mask)
    bad = malformed_rows(batch, 0)
    out[bad], lse[:, bad] = torch.nan, torch.nan
    return out, lse


def reference_gradients(
    batch: Batch,
    dout: Tensor,
    dlse: Tensor | None,
    causal: bool,
    scale: float | None,
    dtype: torch.dtype,
    sink: Tensor | None = None,
    **mask,
) -> Gradients:
    """dq, dk, dv (and dsink) of (out * dout).sum() + (lse * dlse).sum() over rows that well-formed sequences own."""
    inputs = (batch.q, batch.k, batch.v) if sink is None else (batch.q, batch.k, batch.v, sink)
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out, lse = formula(
        batch, *leaves[:3], dtype, None if sink is None else leaves[3], causal=causal, scale=scale, **mask
    )
    loss = (out * dout.to(dtype)).sum() + sum((0 * x).sum() for x in leaves)  # with an edge to every leaf
    if dlse is not None:
        finite = lse.detach().isfinite()
        loss = loss + (torch.where(finite, lse, 0) * torch.where(finite, dlse.to(dtype), 0)).sum()
    grads = torch.autograd.grad(loss, leaves)
    for grad, which in zip(grads, (0, 1, 1), strict=False):
        grad[malformed_rows(batch, which)] = torch.nan
    return grads


def check(
    batch: Batch,
    causal: bool = False,
    scale: float | None = None,
    result: tuple[Tensor, Tensor] | None = None,
    times: tuple[int, ...] = (1,),
    **options,
) -> tuple[Tensor, Tensor]:
    """Runs the kernel (or takes its `result`) and compares out and lse with the float64 formula; returns them."""
    out, lse = result or attend(batch, causal, scale, times, **options)
    ref, ref_lse = reference(batch, causal, scale, torch.float64, **options)
    base, _ = reference(batch, causal, scale, batch.q.dtype, **options)
    oracle.assert_close("out", out, ref, base, 1e-5)
    harness.check_lse(lse, ref_lse)
    return out, lse


def check_gradients(
    batch: Batch,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    times: tuple[int, ...] = (1,),
    **options,
) -> Gradients:
    """Compares the gradients of every mode with those of the float64 formula; returns the deterministic ones."""
    dout = gradient_of_out(batch) if dout is None else dout
    saved = attend(batch, causal, scale, times, **options)
    arguments = (batch, dout, dlse, causal, scale)
    refs = reference_gradients(*arguments, torch.float64, **options)
    bases = reference_gradients(*arguments, batch.q.dtype, **options)
    for mode in modes(batch, causal, **options):
        grads = backward(*arguments, mode, saved, times, **options)
        harness.assert_close_gradients(grads, refs, bases, "deterministic " if mode else "")
    return grads
