"""The reference: attention as its formula, in float64 by default, independent of the library; and how close is close.

`attention` builds the whole (Sq, Sk) matrix, is differentiable, and serves twice: in float64 as the truth, and in the
inputs' dtype as the baseline whose error is the unit in which `assert_close` measures. Use small shapes, or the
`rows` argument to compute only some query rows of a large problem.
"""

import torch


def visible(sq, sk, *, causal=False, window=(-1, -1), chunk=0, rows=None, device=None):
    """bool (rows, Sk): which keys each row sees. Bottom-right aligned, inclusive windows, chunks."""
    i = torch.arange(sq, device=device) if rows is None else torch.as_tensor(rows, device=device)
    p = i[:, None] + (sk - sq)
    j = torch.arange(sk, device=device)[None, :]
    left, right = window
    if causal:
        right = 0
    seen = torch.ones(len(i), sk, dtype=torch.bool, device=device)
    if left >= 0:
        seen = seen & (j >= p - left)
    if right >= 0:
        seen = seen & (j <= p + right)
    if chunk > 0:
        seen = seen & (torch.floor_divide(p, chunk) == torch.floor_divide(j, chunk))
    return seen


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    window=(-1, -1),
    softcap=0.0,
    chunk=0,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    sink=None,
    rows=None,
    dtype=torch.float64,
):
    """(out (B, Sq, H, Dv), lse (B, H, Sq)) in `dtype`; differentiable.

    q (B, Sq, H, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), qv (B, Sq, H, Dv), descales (B, Hkv), sink (H,).
    rows: indices of the query rows to compute; out and lse then have only those.
    """
    sq, sk, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    if rows is not None:
        q = q[:, rows]
        qv = None if qv is None else qv[:, rows]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if q_descale is not None:
        q = q * q_descale.to(dtype).repeat_interleave(group, 1)[:, None, :, None]
    if k_descale is not None:
        k = k * k_descale.to(dtype)[:, None, :, None]
    if v_descale is not None:
        v = v * v_descale.to(dtype)[:, None, :, None]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    if scale is None:
        scale = (q.shape[3] + (0 if qv is None else v.shape[3])) ** -0.5
    s = torch.einsum("bihd,bjhd->bhij", q, k)
    if qv is not None:
        s = s + torch.einsum("bihd,bjhd->bhij", qv.to(dtype), v)
    s = s * scale
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    seen = visible(sq, sk, causal=causal, window=window, chunk=chunk, rows=rows, device=q.device)
    s = s.masked_fill(~seen, float("-inf"))
    empty = (~seen.any(-1)).expand(s.shape[1:3])  # (H, rows)
    columns = s
    if sink is not None:  # one more column of scores, whose value would be 0
        columns = torch.cat([s, sink.to(dtype)[:, None, None].expand(*s.shape[:3], 1)], -1)
        empty = empty & (sink == float("-inf"))[:, None]
    # Rows without a key are kept out of logsumexp, whose gradient there is NaN.
    lse = columns.masked_fill(empty[..., None], 0.0).logsumexp(-1) if columns.shape[-1] else s.new_zeros(s.shape[:3])
    p = torch.exp(s - lse[..., None]).masked_fill(empty[..., None], 0.0)
    out = torch.einsum("bhij,bjhd->bihd", p, v)
    return out, lse.masked_fill(empty, float("-inf"))


def gradients(q, k, v, dout, dlse=None, *, dtype=torch.float64, qv=None, sink=None, function=attention, **options):
    """dq, dk, dv (and dqv with qv, then dsink with a sink) in `dtype` of (out * dout).sum() + (lse * dlse).sum(), by
    autograd of the formula.

    dlse at rows without a key takes no part: their lse is constant.
    """
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in (q, k, v, qv, sink)]
    out, lse = function(*leaves[:3], qv=leaves[3], sink=leaves[4], dtype=dtype, **options)
    loss = (out * dout.to(dtype)).sum()
    if dlse is not None:
        finite = lse.detach() > float("-inf")
        loss = loss + (torch.where(finite, lse, 0) * torch.where(finite, dlse.to(dtype), 0)).sum()
    leaves = [x for x in leaves if x is not None]
    if not loss.requires_grad:  # a packed batch without a sequence
        return [torch.zeros_like(x) for x in leaves]
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def sequences(cu_seqlens, seqused, total):
    """(begin, end, first row owned, end of the rows owned, malformed) of each sequence in a tensor of `total` rows.

    Sequence b owns what lies between the largest of cu_seqlens up to b and the largest up to b + 1, within the tensor.
    """
    cu = [int(x) for x in cu_seqlens]
    largest = [min(total, max(0, *cu[: b + 1])) for b in range(len(cu))]
    result = []
    for b in range(len(cu) - 1):
        length = cu[b + 1] - cu[b]
        used = length if seqused is None else int(seqused[b])
        malformed = cu[b] < 0 or cu[b] < largest[b] or length < 0 or cu[b + 1] > total or not 0 <= used <= length
        result.append((cu[b], cu[b] + used, largest[b], largest[b + 1], malformed))
    return result


def packed(q, k, v, *, lengths, qv=None, dtype=torch.float64, **options):
    """`attention` of a packed batch, sequence by sequence: (out (Tq, H, Dv), lse (H, Tq)); differentiable.

    q (Tq, H, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), qv (Tq, H, Dv). lengths: cu_seqlens_q, cu_seqlens_k, seqused_q,
    seqused_k (None: all). Rows without an owner have out 0, lse -inf; those of malformed sequences have NaN.
    """
    cu_q, cu_k, used_q, used_k = lengths
    descales = {name: options.pop(name, None) for name in ("q_descale", "k_descale", "v_descale")}
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=dtype, device=q.device)
    both = zip(sequences(cu_q, used_q, q.shape[0]), sequences(cu_k, used_k, k.shape[0]), strict=True)
    for b, ((begin, end, first, last, bad), (key_begin, key_end, _, _, bad_keys)) in enumerate(both):
        if bad or bad_keys:
            out[first:last], lse[:, first:last] = float("nan"), float("nan")
            continue
        given = {name: None if x is None else x[b : b + 1] for name, x in descales.items()}
        out[begin:end], lse[:, begin:end] = (
            x[0]
            for x in attention(
                q[None, begin:end], k[None, key_begin:key_end], v[None, key_begin:key_end],
                qv=None if qv is None else qv[None, begin:end], dtype=dtype, **given, **options,
            )
        )  # fmt: skip
    return out, lse


def sink_floor(sink, dout, out, lse, dtype):
    """The floor for dsink, beside 1e-4 three times the root sum of squares of what the rounding of out adds to it.

    It sums delta = rowsum(dout * out), and out was saved in `dtype`; a baseline of few numbers may not show that.
    """
    share = (sink - lse.transpose(-1, -2)).exp()[..., None]  # (.., rows, H, 1)
    terms = (share * dout * out).double().nan_to_num(0).square()
    total = terms.movedim(-2, 0).flatten(1).sum(1).sqrt().max().item() if terms.numel() else 0.0
    return 1e-4 + 3 * torch.finfo(dtype).eps / 2 * total


def tolerance(ref, base, floor=1e-5):
    """2 x the largest error of the baseline, plus a floor: the rounding of the result, where the baseline is exact."""
    finite = ref.isfinite() & base.isfinite()
    error = (base.to(ref.dtype) - ref).abs()[finite]
    return 2 * (error.max().item() if error.numel() else 0.0) + floor


def close(got, ref, base, floor=1e-5):
    """None if `got` is close to `ref`, else a sentence. NaN and infinities must be at the same places."""
    if got.shape != ref.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(ref.shape)}"
    got = got.detach().to(ref.dtype)
    ref, base = ref.detach(), base.detach()
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(got) != test(ref)
        if wrong.any():
            where = tuple(wrong.nonzero()[0].tolist())
            values = f"{got[where].item()}, expected {ref[where].item()}"
            return f"{kind} at {int(wrong.sum())} wrong places, first {where}: {values}"
    limit = tolerance(ref, base, floor)
    error = torch.where(ref.isfinite(), (got - ref).abs(), torch.zeros_like(ref))
    if error.numel() and error.max().item() > limit:
        where = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        values = f"{got[where].item():.6g}, expected {ref[where].item():.6g}"
        return f"error {error.max().item():.3e} at {where} ({values}), limit {limit:.3e}"
    return None


def assert_close(name, got, ref, base, floor=1e-5):
    """max |got - ref| <= 2 max |base - ref| + floor. Floors: 1e-5 for outputs, 1e-4 for gradients."""
    problem = close(got, ref, base, floor)
    assert problem is None, f"{name}: {problem}"
