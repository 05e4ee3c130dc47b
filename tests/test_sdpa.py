"""scaled_dot_product_attention: torch's own where the kernels do not apply, the mapping to the kernels elsewhere.

The mapping is tested on the CPU with the portable backend standing in for the kernel operators (`kernels`).
"""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F

import flash_attn3
from flash_attn3 import sdpa
from flash_attn3.sdpa import scaled_dot_product_attention

torch.set_num_threads(1)


def inputs(l=9, s=12, h=4, hkv=4, e=16, ev=16, lead=(2,), dtype=torch.bfloat16):  # noqa: E741
    torch.manual_seed(0)
    shapes = ((*lead, h, l, e), (*lead, hkv, s, e), (*lead, hkv, s, ev))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def test_elsewhere_it_is_torchs_own():
    q, k, v = inputs()
    mask = torch.rand(9, 12) < 0.8
    torch.manual_seed(1)
    dropped = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(1)
    assert torch.equal(dropped, F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": mask}, {"attn_mask": mask.to(q.dtype)}):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            if options.get("attn_mask") is not None and options["attn_mask"].dtype not in (torch.bool, dtype):
                continue
            tensors = [x.to(dtype) for x in (q, k, v)]
            want = F.scaled_dot_product_attention(*tensors, **options)
            assert torch.equal(scaled_dot_product_attention(*tensors, **options), want)
    q, k, v = inputs(hkv=2)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert torch.equal(scaled_dot_product_attention(q, k, v, enable_gqa=True), want)
    with pytest.raises(RuntimeError):
        scaled_dot_product_attention(q, k, v)


def test_mask_with_is_causal_is_an_error():
    q, k, v = inputs()
    with pytest.raises(RuntimeError, match="is_causal"):
        scaled_dot_product_attention(q, k, v, torch.ones(9, 12, dtype=torch.bool), is_causal=True)


@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("hkv", [4, 2, 1])
def test_mapping_to_the_kernels(kernels, lead, is_causal, hkv):
    for l, s, ev in ((9, 9, 16), (9, 12, 16), (12, 9, 8), (1, 5, 24)):  # noqa: E741
        q, k, v = inputs(l=l, s=s, hkv=hkv, ev=ev, lead=lead, dtype=torch.float64)
        assert sdpa._kernels_apply(q, k, v, is_causal, None, True)
        for scale in (None, 0.7):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = sdpa._attend(*leaves, is_causal, scale)
            others = [x.clone().requires_grad_() for x in (q, k, v)]
            want = F.scaled_dot_product_attention(*others, is_causal=is_causal, scale=scale, enable_gqa=True)
            torch.testing.assert_close(out, want)
            with torch.no_grad():
                assert torch.equal(sdpa._attend(*leaves, is_causal, scale), out)
            dout = torch.randn_like(want)
            torch.testing.assert_close(torch.autograd.grad(out, leaves, dout), torch.autograd.grad(want, others, dout))
    assert kernels.forward and kernels.backward


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("ev", [16, 24])
def test_out_is_laid_out_like_the_query(kernels, order, ev):
    q, k, v = inputs(ev=ev)
    order = (*order, 3)
    q = q.permute(order).contiguous().permute([order.index(i) for i in range(4)])
    assert q.shape == (2, 4, 9, 16)
    out = sdpa._attend(q, k, v, False, None)
    like = torch.empty_like(q) if ev == 16 else torch.empty_permuted((2, 4, 9, ev), order)
    assert out.stride() == like.stride()


@pytest.mark.parametrize(
    "name",
    [
        "heads without enable_gqa",
        "heads not divisible",
        "dtypes",
        "batch to broadcast",
        "lengths",
        "head dims",
        "2-D",
        "scale",
        "no tensor",
    ],
)
def test_what_does_not_fit_goes_to_torch(kernels, name):
    q, k, v = inputs()
    gqa, scale = True, None
    if name == "heads without enable_gqa":
        k, v, gqa = k[:, :2], v[:, :2], False
    elif name == "heads not divisible":
        k, v = k[:, :3], v[:, :3]
    elif name == "dtypes":
        k = k.half()
    elif name == "batch to broadcast":
        k, v = k[:1], v[:1]
    elif name == "lengths":
        v = v[:, :, :5]
    elif name == "head dims":
        k = k[..., :8]
    elif name == "scale":
        scale = -0.3
    elif name == "no tensor":
        v = None
    else:
        q, k, v = q[0, 0], k[0, 0], v[0, 0]
    assert not sdpa._kernels_apply(q, k, v, False, scale, gqa)


def test_derivatives_that_the_kernels_lack_go_to_torch(kernels):
    """Under torch.func and forward mode torch's own function runs, which has a rule for them."""
    q, k, v = inputs()
    seen = []

    def ask(q):
        seen.append(sdpa._kernels_apply(q, k, v, False, None, False))
        return q.sum()

    ask(q)
    torch.func.grad(ask)(q)
    torch.vmap(ask)(torch.stack([q, q]))
    torch.func.jvp(ask, (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        ask(q)
    assert seen == [True, False, False, False, False]


def test_compiles_around_the_kernel(kernels):
    """The operator that writes `out` is functionalised and the gradient is right."""
    torch._dynamo.reset()
    q, k, v = inputs(s=9)
    call = torch.compile(lambda *x: sdpa._attend(*x, True, None), fullgraph=True, backend="aot_eager")
    results = []
    for function in (call, lambda *x: sdpa._attend(*x, True, None)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
        assert out.stride() == q.stride()
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_compiles_one_tensor_thrice(kernels):
    torch._dynamo.reset()
    x = inputs()[0].requires_grad_()
    call = torch.compile(lambda x: sdpa._attend(x, x, x, True, None), fullgraph=True, backend="aot_eager")
    want = sdpa._attend(x, x, x, True, None)
    got = call(x)
    assert torch.equal(got, want)
    assert torch.equal(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(want.sum(), x)[0])


@pytest.mark.parametrize("switch", [False, True])
def test_determinism_follows_torch(kernels, switch):
    leaves = [x.requires_grad_() for x in inputs()]
    out = sdpa._attend(*leaves, False, None)
    torch.use_deterministic_algorithms(switch)
    try:
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [x["deterministic"] for x in kernels.backward] == [switch] and kernels.backward[0]["dlse"] is None


def test_around_the_kernel_operators(kernels):
    """attention around the kernel operators: same gradients as around the portable ones."""
    q, k, v = (x.transpose(1, 2) for x in inputs())
    results = []
    for backend in ("kernel", "portable"):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        before = len(kernels.forward), len(kernels.backward)
        out, lse = flash_attn3.attention(*leaves, causal=True, return_lse=True, backend=backend)
        results.append([out, lse, *torch.autograd.grad(out.float().square().sum() + lse.sum(), leaves)])
        ran = len(kernels.forward) - before[0], len(kernels.backward) - before[1]
        assert ran == ((1, 1) if backend == "kernel" else (0, 0))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_is_torchs(dtype):
    q, k, v = inputs(dtype=dtype)
    for context in (contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            got, want = scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k, v)
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_autocast_casts_for_the_kernels(monkeypatch):
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.float16)
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    got = sdpa._autocast(*(torch.ones(1, dtype=dtype) for dtype in dtypes))
    assert [x.dtype for x in got] == [torch.float16, torch.float16, torch.float64]
    assert sdpa._autocast(None) == [None]  # for torch to refuse
