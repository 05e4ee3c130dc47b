"""What the tests of packed batches share: inputs, the call with options in the oracle's words, and its comparison."""

import oracle
import torch

import flash_attn3

NAN = float("nan")
NAMES = {"scale": "softmax_scale", "window": "window_size", "chunk": "attention_chunk"}


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make(tq, tk, h=4, hkv=2, d=16, dv=16, dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(shape).to(dtype) for shape in ((tq, h, d), (tk, hkv, d), (tk, hkv, dv))]


def leaves(*tensors):
    return [None if x is None else x.detach().clone().requires_grad_() for x in tensors]


def arguments(lengths):
    """cu_seqlens and seqused as keywords, with bounds that are not true: nothing may depend on them."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
    return {**dict(zip(names, lengths, strict=True)), "max_seqlen_q": 1, "max_seqlen_k": 0}


def run(q, k, v, lengths, dout=None, dlse=None, qv=None, sink=None, backend=None, **options):
    """out, lse, dq, dk, dv[, dqv][, dsink] by attention_varlen, with options in the oracle's words."""
    options = {NAMES.get(name, name): value for name, value in options.items()}
    *tensors, qv, sink = inputs = leaves(q, k, v, qv, sink)
    out, lse = flash_attn3.attention_varlen(
        *tensors, **arguments(lengths), qv=qv, sink=sink, return_lse=True, backend=backend, **options
    )
    dout = torch.ones_like(out) if dout is None else dout
    dlse = torch.zeros_like(lse) if dlse is None else dlse
    return out, lse, *torch.autograd.grad([out, lse], [x for x in inputs if x is not None], [dout, dlse])


def compare(q, k, v, lengths, **options):
    """All results against the formula of each sequence; the malformed ones' gradients are NaN. Returns the results."""
    torch.manual_seed(1)
    dout, dlse = torch.randn(*q.shape[:2], v.shape[2]).to(q.dtype), torch.randn(q.shape[1], q.shape[0])
    results = run(q, k, v, lengths, dout, dlse.to(q.dtype) if q.dtype == torch.float64 else dlse, **options)
    options.pop("backend", None)
    wanted = []
    bad = [a[4] or b[4] for a, b in zip(*owners(lengths, q.shape[0], k.shape[0]), strict=True)]
    for dtype in (torch.float64, q.dtype):
        tensors = {name: options.get(name) for name in ("qv", "sink")}
        others = {name: x for name, x in options.items() if name not in tensors}
        out, lse = oracle.packed(q, k, v, lengths=lengths, dtype=dtype, **options)
        grads = oracle.gradients(
            q, k, v, dout, dlse, function=oracle.packed, lengths=lengths, dtype=dtype, **tensors, **others
        )
        rows, keys = owners(lengths, q.shape[0], k.shape[0])
        for grad, owned in zip(grads, (rows, keys, keys, rows), strict=False):
            if grad.dim() == 3:  # not dsink
                for (_, _, begin, end, _), malformed in zip(owned, bad, strict=True):
                    grad[begin:end] = NAN if malformed else grad[begin:end]
        wanted.append([out, lse, *grads])
    names = ["out", "lse", "dq", "dk", "dv"]
    names += [f"d{name}" for name in ("qv", "sink") if options.get(name) is not None]
    for name, *values in zip(names, results, *wanted, strict=True):
        floor = 1e-4 if name.startswith("d") else 1e-5
        if name == "dsink":
            floor = oracle.sink_floor(options["sink"], dout, *wanted[0][:2], q.dtype)
        oracle.assert_close(name, *values, floor=floor)
    return results


def owners(lengths, total_q, total_k):
    cu_q, cu_k, used_q, used_k = lengths
    return oracle.sequences(cu_q, used_q, total_q), oracle.sequences(cu_k, used_k, total_k)
