"""Autograd: cases that users reported, views, the LSE's gradient, twice-differentiating, merging partial results."""

import math

import oracle
import pytest
import torch
import torch.utils.checkpoint

import flash_attn3
from flash_attn3 import dispatch

torch.set_num_threads(1)  # the shapes are small, and a busy machine makes threads wait for each other


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def assert_gradients_close(got, q, k, v, dout, dlse=None, **options):
    want = oracle.gradients(q, k, v, dout, dlse, **options)
    base = oracle.gradients(q, k, v, dout, dlse, dtype=q.dtype, **options)
    for name, *values in zip(("dq", "dk", "dv"), got, want, base, strict=True):
        assert torch.isfinite(values[0]).all(), name
        oracle.assert_close(name, *values, floor=1e-4)


def very_negative(sq, sk, heads, d, dtype):
    """Scores of about -120: every LSE is below log of the smallest float32."""
    torch.manual_seed(sq + sk + d)
    q, k = 0.1 * torch.randn(1, sq, heads, d), 0.1 * torch.randn(1, sk, heads, d)
    q[..., 0], k[..., 0] = 1, -120 * math.sqrt(d)
    return q.to(dtype), k.to(dtype), torch.randn(1, sk, heads, d).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d, length", [(32, 64), (64, 192), (128, 320), (64, 704), (32, 832)])
@pytest.mark.parametrize("causal", [False, True])
def test_very_negative_lse_c08(dtype, d, length, causal):
    q, k, v = leaves(*very_negative(length, length, 1, d, dtype))
    out, lse = flash_attn3.flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert (lse < -88.7).all()
    dout = torch.randn_like(out)
    assert_gradients_close(torch.autograd.grad(out, (q, k, v), dout), q, k, v, dout, causal=causal)


@pytest.mark.parametrize("d, length", [(32, 64), (64, 192)])
def test_very_negative_lse_through_sdpa_c08(d, length):
    inputs = leaves(*very_negative(length, length, 1, d, torch.bfloat16))
    mask = torch.ones(length, length, dtype=torch.bool)
    views = [x.transpose(1, 2) for x in inputs]
    out = flash_attn3.scaled_dot_product_attention(*views, attn_mask=mask).transpose(1, 2)
    dout = torch.randn_like(out)
    assert_gradients_close(torch.autograd.grad(out, inputs, dout), *inputs, dout)


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_query_very_negative_scores_c09(deterministic):
    q, k, v = leaves(*very_negative(1, 128, 2, 64, torch.bfloat16))
    out = flash_attn3.flash_attn_func(q, k, v, deterministic=deterministic)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    assert_gradients_close(grads, q, k, v, dout)
    total = grads[2].double().sum(1)
    rounding = 2.0**-8 * grads[2].double().abs().sum(1)  # of each bf16 summand, and of P
    assert ((total - dout[:, 0].double()).abs() <= rounding + 1e-4).all()


def test_large_fp16_inputs_c10():
    torch.manual_seed(0)
    q, k, v = leaves(*(3 * torch.randn(1, 1024, 1, 128).half() for _ in range(3)))
    out = flash_attn3.flash_attn_func(q, k, v, causal=True)
    dout = torch.randn_like(out)
    assert_gradients_close(torch.autograd.grad(out, (q, k, v), dout), q, k, v, dout, causal=True)


def test_views_are_as_good_as_copies_c37_c38():
    """Transposed views, every second row, a last stride that is not 1, expanded, packed: bitwise the same."""
    torch.manual_seed(1)
    b, s, h, d = 2, 200, 4, 64

    def half(*shape):
        return torch.randn(shape).bfloat16()

    plain = half(b, s, h, d)
    views = {
        "transposed": half(b, h, s, d).transpose(1, 2),
        "every second row": half(b, 2 * s, h, d)[:, ::2],
        "last stride not 1": half(b, s, d, h).transpose(2, 3),
        "packed": half(b, s, 3, h, d)[:, :, 1],
        "expanded batch": half(1, s, h, d).expand(b, s, h, d),
        "expanded heads": half(b, s, 1, d).expand(b, s, h, d),
    }
    assert not any(view.is_contiguous() for view in views.values())

    def run(q, k, v, dout):
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        out, lse = flash_attn3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
        return out, lse, *torch.autograd.grad(out, (q, k, v), dout)

    for name, view in views.items():
        for place in range(4):
            arguments = [plain, plain.flip(1), plain.flip(2), plain.flip(3)]
            arguments[place] = view
            want = run(*(x.contiguous() for x in arguments))
            assert all(torch.equal(a, b) for a, b in zip(run(*arguments), want, strict=True)), (name, place)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_through_the_lse_c48(causal, dtype):
    torch.manual_seed(2)
    inputs = leaves(*(torch.randn(2, 300, 4, 64).to(dtype) for _ in range(3)))
    weight = torch.randn(2, 300, 4, 64).to(dtype)
    out, lse = flash_attn3.attention(*inputs, causal=causal, return_lse=True)
    assert lse.requires_grad
    ((out * weight).sum() + lse.square().mean()).backward()
    _, exact = oracle.attention(*(x.detach() for x in inputs), causal=causal)
    dlse = 2 * exact / exact.numel()
    assert_gradients_close([x.grad for x in inputs], *inputs, weight, dlse, causal=causal)


def test_only_the_lse_or_only_one_input_needs_a_gradient():
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 30, 2, 16) for _ in range(3))
    for needed in range(3):
        inputs = [x.clone().requires_grad_(i == needed) for i, x in enumerate((q, k, v))]
        _, lse = flash_attn3.attention(*inputs, return_lse=True)
        lse.sum().backward()
        assert all((x.grad is not None) == x.requires_grad for x in inputs)
    assert (inputs[2].grad == 0).all()  # v does not enter the lse


FEATURES = {
    "plain": {},
    "causal, more keys": {"causal": True, "sk": 6},
    "causal, rows without a key": {"causal": True, "sk": 2},
    "no key at all": {"sk": 0},
    "window": {"window_size": (2, 1)},
    "causal window": {"causal": True, "window_size": (1, 0), "sk": 6},
    "chunk": {"attention_chunk": 2, "causal": True},
    "softcap": {"softcap": 1.5},
    "scale": {"softmax_scale": -0.7},
    "GQA": {"heads": 4},
    "MQA": {"heads": 3, "kv_heads": 1},
    "value head dim": {"dv": 5},
    "qv": {"with_qv": True},
    "sink": {"with_sink": True, "heads": 4},
    "sink, rows without a key": {"with_sink": True, "causal": True, "sk": 2},
    "sink, no key at all": {"with_sink": True, "sk": 0},
    "all": {
        "with_qv": True,
        "with_sink": True,
        "softcap": 2.0,
        "window_size": (3, 0),
        "attention_chunk": 3,
        "heads": 4,
        "dv": 2,
        "sk": 7,
    },
}


@pytest.mark.parametrize("feature", FEATURES)
def test_against_finite_differences_and_the_formula(feature):
    """Every feature in float64: torch.autograd.gradcheck of out and lse, and the oracle's gradients to rounding."""
    options = {"heads": 2, "kv_heads": 2, "sk": 5, "dv": 3, "with_qv": False, "with_sink": False, **FEATURES[feature]}
    names = ("heads", "kv_heads", "sk", "dv", "with_qv", "with_sink")
    heads, kv_heads, sk, dv, with_qv, with_sink = (options.pop(x) for x in names)
    torch.manual_seed(8)
    shapes = [(1, 5, heads, 3), (1, sk, kv_heads, 3), (1, sk, kv_heads, dv)] + [(1, 5, heads, dv)] * with_qv
    shapes += [(heads,)] * with_sink
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def optional(rest):
        return {"qv": rest[0] if with_qv else None, "sink": rest[-1] if with_sink else None}

    def call(q, k, v, *rest):
        out, lse = flash_attn3.attention(q, k, v, return_lse=True, **optional(rest), **options)
        return out, lse.where(lse.detach().isfinite(), 0)  # -inf has no difference quotient

    assert torch.autograd.gradcheck(call, inputs)
    out, lse = flash_attn3.attention(*inputs[:3], return_lse=True, **optional(inputs[3:]), **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad([out, lse], inputs, [dout, dlse])
    names = {"window_size": "window", "attention_chunk": "chunk", "softmax_scale": "scale"}
    options = {names.get(name, name): value for name, value in options.items()}
    want = oracle.gradients(*inputs[:3], dout, dlse, **optional(inputs[3:]), **options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("switch", [False, True])
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("function", ["flash_attn_func", "flash_attn_qkvpacked_func", "attention"])
def test_the_flag_reaches_the_kernel_c27(kernels, function, asked, switch):
    """deterministic=True or torch's switch, which counts when the gradient is computed."""
    x = torch.randn(2, 9, 3, 4, 16).half().requires_grad_()
    arguments = (x,) if "packed" in function else x.unbind(2)
    out = getattr(flash_attn3, function)(*arguments, deterministic=asked)
    torch.use_deterministic_algorithms(switch)
    try:
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert [call["deterministic"] for call in kernels.backward] == [asked or switch]


def test_what_the_backward_operator_is_given(kernels):
    """dout as it comes, also expanded; dlse only if the lse takes part; zeros for an out that takes none."""
    q, k, v = leaves(*(torch.randn(2, 9, 4, 16).half() for _ in range(3)))
    out = flash_attn3.flash_attn_func(q, k, v)
    out.sum().backward()
    call = kernels.backward.pop()
    assert call["strides"] == (0, 0, 0, 0) and call["dlse"] is None
    for loss, with_dlse in (
        (lambda out, lse: out.sum(), False),
        (lambda out, lse: out.sum() + lse.sum(), True),
        (lambda out, lse: lse.sum(), True),
    ):
        results = []
        for backend in ("kernel", "portable"):
            out, lse = flash_attn3.attention(q, k, v, causal=True, return_lse=True, backend=backend)
            results.append(torch.autograd.grad(loss(out, lse), (q, k, v)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        assert (kernels.backward.pop()["dlse"] is not None) == with_dlse and not kernels.backward


def test_a_build_without_backward_kernels(kernels, monkeypatch):
    """The forward by the kernel, the backward in PyTorch; or only the deterministic one of them."""
    inputs = leaves(*(torch.randn(2, 9, 4, 16).half() for _ in range(3)))
    for rows, ran in (({}, [0, 0]), ({(torch.float16, False): [(64, 64)]}, [1, 0])):
        monkeypatch.setattr(dispatch, "_backward_rows", rows)
        for deterministic, count in zip((False, True), ran, strict=True):
            out = flash_attn3.flash_attn_func(*inputs, deterministic=deterministic)
            grads = torch.autograd.grad(out.square().sum(), inputs)
            assert len(kernels.backward) == count and kernels.forward
            kernels.backward.clear()
            want = flash_attn3.attention(*inputs, backend="portable")
            want = torch.autograd.grad(want.square().sum(), inputs)
            assert all(torch.equal(a, b) for a, b in zip(grads, want, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", ["kernel", "portable"])
def test_activation_checkpointing(kernels, backend, reentrant):
    inputs = leaves(*(torch.randn(2, 9, 4, 16).half() for _ in range(3)))

    def block(q, k, v):
        out, lse = flash_attn3.attention(q * 2, k, v, causal=True, return_lse=True, backend=backend)
        return out.float().square().sum() + lse.sin().sum()

    want = torch.autograd.grad(block(*inputs), inputs)
    kernels.forward.clear()
    torch.utils.checkpoint.checkpoint(block, *inputs, use_reentrant=reentrant).backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(inputs, want, strict=True))
    assert len(kernels.forward) == (2 if backend == "kernel" else 0)


def test_compiled_with_checkpointing(kernels):
    torch._dynamo.reset()
    inputs = leaves(*(torch.randn(2, 9, 4, 16).half() for _ in range(3)))

    def block(q, k, v):
        return flash_attn3.flash_attn_func(q * 2, k, v, causal=True).float().square().sum()

    def call(*x):
        return torch.utils.checkpoint.checkpoint(block, *x, use_reentrant=False)

    want = torch.autograd.grad(block(*inputs), inputs)
    got = torch.autograd.grad(torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", ["grad", "vmap of grad", "vmap, differentiated"])
def test_function_transforms_inside_compile(transform):
    """torch.compile would lose the gradient silently: with fullgraph it is an error, else it runs uncompiled."""
    torch._dynamo.reset()
    inputs = leaves(*(torch.randn(3, 1, 6, 2, 8) for _ in range(3)))

    def loss(q, k, v):
        return flash_attn3.attention(q, k, v, causal=True).square().sum()

    def call(q, k, v):
        if transform == "grad":
            return torch.func.grad(loss, argnums=(0, 1, 2))(q[0], k[0], v[0])
        if transform == "vmap of grad":
            return torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
        return torch.autograd.grad(torch.vmap(loss)(q, k, v).sum(), (q, k, v))

    if transform == "vmap, differentiated":
        out = torch.compile(torch.vmap(loss), backend="aot_eager")(*inputs)
        got = torch.autograd.grad(out.sum(), inputs)
    else:
        got = torch.compile(call, backend="aot_eager")(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, call(*inputs), strict=True))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="cannot trace gradients of attention"):
        torch.compile(call if "grad" in transform else torch.vmap(loss), fullgraph=True, backend="aot_eager")(*inputs)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_inside_compile_without_gradients():
    torch._dynamo.reset()
    inputs = [torch.randn(3, 1, 6, 2, 8) for _ in range(3)]
    call = torch.vmap(lambda *x: flash_attn3.attention(*x, causal=True))
    with torch.no_grad():
        got = torch.compile(call, fullgraph=True, backend="aot_eager")(*inputs)
    assert torch.equal(got, call(*inputs))


def test_function_transforms_around_the_kernels(kernels):
    torch.manual_seed(9)
    q, k, v = (torch.randn(2, 6, 4, 8) for _ in range(3))

    def loss(q, k, v):
        return flash_attn3.attention(q, k, v, causal=True, deterministic=True).square().sum()

    got = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    assert [call["deterministic"] for call in kernels.backward] == [True]
    inputs = leaves(q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(got, torch.autograd.grad(loss(*inputs), inputs), strict=True))


def test_deterministic():
    torch.manual_seed(4)
    inputs = leaves(*(torch.randn(2, 130, 4, 32).half() for _ in range(3)))
    runs = []
    for _ in range(5):
        out = flash_attn3.flash_attn_func(*inputs, causal=True, deterministic=True)
        runs.append(torch.autograd.grad(out.float().square().sum(), inputs))
    assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


def test_differentiating_twice():
    """An error on every way to a second derivative, not a term that is silently missing (a gradient penalty)."""
    inputs = leaves(*(torch.randn(1, 8, 2, 8) for _ in range(3)))
    for loss in (torch.sum, lambda x: x.square().sum()):
        out = flash_attn3.attention(*inputs)
        (dq,) = torch.autograd.grad(loss(out), inputs[:1], create_graph=True)
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            torch.autograd.grad(dq.square().sum() + out.sum(), inputs)
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            dq.sum().backward()
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        torch.autograd.functional.hessian(lambda q: flash_attn3.attention(q, *inputs[1:]).square().sum(), inputs[0])
    out = flash_attn3.attention(*inputs).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_forward_mode_is_an_error():
    q, k, v = (torch.randn(1, 8, 2, 8) for _ in range(3))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: flash_attn3.attention(q, k, v), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, torch.ones_like(k))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            flash_attn3.attention(q, dual, v)
        assert torch.equal(flash_attn3.attention(q, k, v), flash_attn3.attention(q, k, v, return_lse=True)[0])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_function_transforms():
    """torch.func.grad, vmap and both (gradients per sample) are those of autograd, of each sample."""
    torch.manual_seed(7)
    q, k, v = (torch.randn(3, 2, s, 4, 8) for s in (6, 7, 7))

    def loss(q, k, v):
        out, lse = flash_attn3.attention(q, k, v, causal=True, return_lse=True)
        return out.square().sum() + lse.sin().sum()

    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for i in range(3):
        inputs = leaves(q[i], k[i], v[i])
        want = torch.autograd.grad(loss(*inputs), inputs)
        single = torch.func.grad(loss, argnums=(0, 1, 2))(q[i], k[i], v[i])
        assert all(torch.equal(a[i], b) and torch.equal(b, c) for a, b, c in zip(got, want, single, strict=True))
    inputs = leaves(q, k, v)
    out = torch.vmap(lambda *x: flash_attn3.attention(*x, causal=True))(*inputs)
    flat = flash_attn3.attention(*(x.flatten(0, 1) for x in inputs), causal=True)
    assert torch.equal(out.flatten(0, 1), flat)
    grads = torch.autograd.grad(out.square().sum(), inputs)
    for a, b in zip(grads, torch.autograd.grad(flat.square().sum(), inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("with_lse", [False, True])
def test_nothing_large_is_saved(with_lse):
    inputs = leaves(*(torch.randn(1, 64, 2, 16).half() for _ in range(3)))
    saved = []

    def pack(x):
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = flash_attn3.flash_attn_func(*inputs, return_attn_probs=with_lse)
    out, *lse = result if with_lse else (result,)
    assert len(saved) == 5 and {x.data_ptr() for x in (*inputs, out, *lse)} <= {x.data_ptr() for x in saved}
    assert [x.shape for x in saved if x.dtype == torch.float32] == [(1, 2, 64)]


def test_changing_a_saved_tensor_is_noticed():
    inputs = leaves(*(torch.randn(1, 8, 2, 8) for _ in range(3)))
    out = flash_attn3.attention(*inputs)
    with torch.no_grad():
        inputs[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_merged_out_and_lse_give_the_gradients_of_the_whole():
    """Context parallel: the backward of each half of the keys, with the out and lse of all of them."""
    torch.manual_seed(5)
    q, k, v, dout = (torch.randn(2, 50, 4, 16) for _ in range(4))
    options = (None, 0.25, -1, -1, 0, 0.0)
    backward, forward = torch.ops.flash_attn3.portable_backward, torch.ops.flash_attn3.portable_forward
    out, lse = forward(q, k, v, None, None, None, None, *options)
    want = backward(dout, None, q, k, v, None, out, lse, *options)
    halves = [(k[:, :20], v[:, :20]), (k[:, 20:], v[:, 20:])]
    parts = [forward(q, *half, None, None, None, None, *options) for half in halves]
    merged = torch.logaddexp(parts[0][1], parts[1][1])
    torch.testing.assert_close(merged, lse)
    grads = [backward(dout, None, q, *half, None, out, merged, *options) for half in halves]
    torch.testing.assert_close(grads[0][0] + grads[1][0], want[0])
    torch.testing.assert_close(torch.cat([grads[0][1], grads[1][1]], 1), want[1])
    torch.testing.assert_close(torch.cat([grads[0][2], grads[1][2]], 1), want[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_does_not_touch_the_arithmetic(dtype):
    torch.manual_seed(6)
    inputs = leaves(*(torch.randn(1, 40, 2, 16).to(dtype) for _ in range(3)))
    dout = torch.randn(1, 40, 2, 16).to(dtype)

    def run():
        out = flash_attn3.attention(*inputs, causal=True)
        return out, *torch.autograd.grad(out, inputs, dout)

    want = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
