"""The public functions: names, signatures, results, errors that name their argument, inputs left alone, imports."""

import importlib.metadata
import inspect
import os
import re
import subprocess
import sys

import pytest
import torch

import flash_attn3
from flash_attn3 import attention, flash_attn_func, flash_attn_qkvpacked_func, interface

OPTIONS = (
    "softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, "
    "return_attn_probs=False"
)
PACKED = (
    "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False"
)


def parameters(function):
    """Names, kinds and defaults, without annotations."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def parameters_of_text(text):
    scope = {}
    exec(f"def function({text}): pass", scope)
    return parameters(scope["function"])


def inputs(sq=5, sk=7, h=4, hkv=2, d=8, dv=8, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in ((2, sq, h, d), (2, sk, hkv, d), (2, sk, hkv, dv))]


def test_signatures():
    assert parameters(flash_attn_func) == parameters_of_text(f"q, k, v, {OPTIONS}")
    assert parameters(flash_attn_qkvpacked_func) == parameters_of_text(PACKED)
    assert parameters(flash_attn3.explain) == parameters(flash_attn_func)
    extended = (
        "q, k, v, *, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, attention_chunk=0, "
        "sink=None, qv=None, q_descale=None, k_descale=None, v_descale=None, deterministic=False, return_lse=False, "
        "backend=None"
    )
    assert parameters(attention) == parameters_of_text(extended)
    sdpa = "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False"
    assert parameters(flash_attn3.scaled_dot_product_attention) == parameters_of_text(sdpa)
    assert set(flash_attn3.__all__) <= set(dir(flash_attn3))


def test_docstrings_name_every_argument_and_no_other():
    doc = flash_attn_func.__doc__
    for name in inspect.signature(flash_attn_func).parameters:
        assert re.search(rf"\b{name}\b", doc), name
    for name in ("dropout", "alibi", "S_dmask"):
        assert name not in doc


def test_version_is_that_of_the_distribution():
    try:
        version = importlib.metadata.version("flash-attn-3")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("flash-attn-3 is not installed")
    assert version == flash_attn3.__version__ and version.startswith("3.")


def test_results():
    q, k, v = inputs(dv=6)
    out = flash_attn_func(q, k, v)
    assert type(out) is torch.Tensor and out.shape == (2, 5, 4, 6) and out.dtype == q.dtype and out.is_contiguous()
    result = flash_attn_func(q, k, v, return_attn_probs=True)
    assert type(result) is tuple and len(result) == 2 and torch.equal(result[0], out)
    assert result[1].shape == (2, 4, 5) and result[1].dtype == torch.float32 and result[1].is_contiguous()
    assert torch.equal(flash_attn_func(q, k, v, 0.25, True), flash_attn_func(q, k, v, softmax_scale=0.25, causal=True))
    assert torch.equal(flash_attn_func(q, k, v, window_size=[3, 0]), flash_attn_func(q, k, v, window_size=(3, 0)))


def test_arguments_that_change_speed_only():
    q, k, v = inputs()
    out = flash_attn_func(q, k, v)
    for options in (
        {"num_splits": 0},
        {"num_splits": 8},
        {"pack_gqa": True},
        {"pack_gqa": False},
        {"sm_margin": 16},
        {"deterministic": True},
    ):
        assert torch.equal(flash_attn_func(q, k, v, **options), out), options


def test_packed():
    torch.manual_seed(0)
    qkv = torch.randn(2, 9, 3, 4, 16).half()
    want = flash_attn_func(*qkv.unbind(2), causal=True, window_size=(3, -1), softcap=2.0)
    assert torch.equal(flash_attn_qkvpacked_func(qkv, causal=True, window_size=(3, -1), softcap=2.0), want)
    grouped = torch.randn(2, 9, 8, 16).half().requires_grad_()
    q, k, v = grouped[:, :, :4], grouped[:, :, 4:6], grouped[:, :, 6:]
    out, lse = flash_attn_qkvpacked_func(grouped, num_heads_q=4, return_attn_probs=True)
    want = flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    (grad,) = torch.autograd.grad(out.sum(), grouped)
    assert torch.equal(grad, torch.autograd.grad(want[0].sum(), grouped)[0])
    for bad, options in ((qkv[:, :, :2], {}), (grouped, {}), (qkv[0, 0], {})):
        with pytest.raises(ValueError, match="qkv has shape"):
            flash_attn_qkvpacked_func(bad, **options)
    with pytest.raises(ValueError, match="qkv is None"):
        flash_attn_qkvpacked_func(None)
    for heads in (0, 3, 8, "4"):
        with pytest.raises(ValueError, match="num_heads_q"):
            flash_attn_qkvpacked_func(grouped, num_heads_q=heads)


def test_attention_takes_wide_types():
    for dtype in (torch.float32, torch.float64):
        q, k, v = inputs(dtype=dtype)
        out, lse = attention(q, k, v, return_lse=True)
        assert out.dtype == dtype and lse.dtype == dtype
        with pytest.raises(ValueError, match=r"q has dtype .*flash_attn3\.attention"):
            flash_attn_func(q, k, v)
    q, k, v = inputs()
    assert torch.equal(attention(q, k, v, causal=True), flash_attn_func(q, k, v, causal=True))


def bad(**changes):
    """Arguments of a good call with some replaced."""
    q, k, v = inputs()
    return {"q": q, "k": k, "v": v, **changes}


Q, K, V = inputs()
DESCALE = torch.ones(2, 2)
ERRORS = {
    "q is 3-D": (bad(q=Q[0]), r"q has shape \(5, 4, 8\)"),
    "v is 5-D": (bad(v=V[None]), "v has shape"),
    "dtypes": (bad(k=K.half()), "k has dtype torch.float16 and q torch.bfloat16"),
    "integers": (bad(q=Q.int(), k=K.int(), v=V.int()), "q has dtype torch.int32"),
    "float32": (bad(q=Q.float(), k=K.float(), v=V.float()), "q has dtype torch.float32"),
    "devices": (bad(v=V.to("meta")), "v is on meta and q on cpu"),
    "batch": (bad(k=K[:1], v=V[:1]), "batch sizes 2, 1 and 1"),
    "lengths": (bad(v=V[:, :5]), "k has 7 keys and v 5 values"),
    "heads of v": (bad(v=V[:, :, :1]), "k has 2 heads and v 1"),
    "head dim": (bad(k=K[..., :4]), "q has head dim 8 and k 4"),
    "no head dim": (bad(q=Q[..., :0], k=K[..., :0]), "head dims 0 and 8"),
    "ratio of heads": (bad(q=Q[:, :, :3]), "q has 3 heads and k 2"),
    "no key heads": (bad(k=K[:, :, :0], v=V[:, :, :0]), "q has 4 heads and k 0"),
    "qv": (bad(qv=Q[:, :3]), r"qv has shape \(2, 3, 4, 8\)"),
    "descale of 16-bit": (bad(k_descale=DESCALE), "k_descale is only for float8_e4m3fn"),
    "window of one": (bad(window_size=(3,)), "window_size is"),
    "window below -1": (bad(window_size=(-2, 0)), r"window_size is \(-2, 0\)"),
    "chunk": (bad(attention_chunk=-4), "attention_chunk is -4"),
    "softcap": (bad(softcap=-1.0), "softcap is -1.0"),
    "softcap nan": (bad(softcap=float("nan")), "softcap is nan"),
    "scale": (bad(softmax_scale=float("inf")), "softmax_scale is inf"),
    "sm_margin": (bad(sm_margin=-1), "sm_margin is -1"),
    "no tensor": (bad(v=None), "v is None"),
    "qv is a number": (bad(qv=3), "qv is 3"),
    "sparse": (bad(k=K.to_sparse()), "k is a torch.sparse_coo tensor"),
    "nested": (bad(q=torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged)), "q is a nested tensor"),
    "scale is a tensor": (bad(softmax_scale=torch.tensor(0.3, requires_grad=True)), "softmax_scale is tensor"),
    "scale is text": (bad(softmax_scale="x"), "softmax_scale is 'x'"),
    "softcap is None": (bad(softcap=None), "softcap is None"),
    "chunk is a fraction": (bad(attention_chunk=2.5), "attention_chunk: 2.5"),
    "sm_margin is None": (bad(sm_margin=None), "sm_margin: None"),
    "window is None": (bad(window_size=None), "window_size is None"),
    "window of a fraction": (bad(window_size=(1.5, 0)), "window_size: 1.5"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name):
    arguments, message = ERRORS[name]
    with pytest.raises((ValueError, RuntimeError), match=message):
        flash_attn_func(**arguments)


class OnHopper(torch.Tensor):
    """A CPU tensor that says it is on cuda:0."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = property(lambda self: True)


def test_which_calls_go_straight_to_the_kernel(monkeypatch):
    """The short cuts of flash_attn_func take what the kernels do and nothing else; the rest takes the checked way."""
    calls = []

    def forward(q, k, v, *options):
        calls.append(options)
        return q, q

    def differentiable(*arguments):
        calls.append(arguments[3:])
        return arguments[0]

    monkeypatch.setattr(interface, "_forward", forward)
    monkeypatch.setattr(interface, "_differentiable", differentiable)
    monkeypatch.setattr(interface, "_has_kernels", lambda index: True)
    monkeypatch.setattr(interface, "_has_row", lambda dtype, *dims: dtype == torch.bfloat16 and max(dims) <= 256)
    q, k, v = (x.as_subclass(OnHopper) for x in inputs())
    for options, want in (
        ({}, (None, 8**-0.5, -1, -1, 0, 0.0)),
        ({"softmax_scale": 0.3, "causal": 1}, (None, 0.3, -1, 0, 0, 0.0)),
    ):
        assert flash_attn_func(q, k, v, **options) is q and calls.pop() == want
    for options in (
        {"softmax_scale": -0.3},
        {"softmax_scale": 0.0},
        {"softcap": 1.0},
        {"window_size": (3, 0)},
        {"attention_chunk": 4},
        {"sm_margin": 3},
    ):
        flash_attn_func(q, k, v, **options)
        assert flash_attn_func(q, k, v, **options).shape == q.shape
    flash_attn_func(q.half(), k.half(), v.half())  # a kernel that the build lacks
    assert not calls
    leaf = k.detach().requires_grad_()
    for options, want in (
        ({}, (8**-0.5, -1, -1, 0, 0.0, True, False, False)),
        ({"softmax_scale": 0.3, "causal": 1, "deterministic": True}, (0.3, -1, 0, 0, 0.0, True, True, False)),
        ({"return_attn_probs": True}, (8**-0.5, -1, -1, 0, 0.0, True, False, True)),
    ):
        assert flash_attn_func(q, leaf, v, **options) is q and calls.pop() == ((None,) * 6 + want)
    flash_attn_func(q, leaf, v, softcap=1.0)
    flash_attn_func(leaf, leaf, leaf)  # torch.compile refuses that in an autograd.Function
    for arguments in ((q, k, None), (q[0, 0, 0, 0], k, v), (q[0], k, v), (q, k, v[0]), (q, k, v, float("nan"))):
        with pytest.raises(ValueError, match=r"is None|has shape|is nan"):
            flash_attn_func(*arguments)
    assert not calls


def test_errors_of_e4m3():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs())
    with pytest.raises(ValueError, match=r"v_descale has shape \(2,\)"):
        flash_attn_func(q, k, v, v_descale=torch.ones(2))
    with pytest.raises(ValueError, match=r"q_descale .*float64"):
        flash_attn_func(q, k, v, q_descale=DESCALE.double())
    with pytest.raises(NotImplementedError, match="qv"):
        flash_attn_func(q, k, v, qv=q)
    with pytest.raises(NotImplementedError, match="float8_e4m3fn"):
        flash_attn_func(q.detach().requires_grad_(), k, v)
    sink = torch.zeros(q.shape[2])
    with pytest.raises(NotImplementedError, match="sink has a forward-mode derivative"):
        torch.func.jvp(lambda s: attention(q, k, v, sink=s), (sink,), (torch.ones_like(sink),))


def test_unknown_keywords():
    for name in ("dropout_p", "sink", "alibi_slopes", "block_table"):
        with pytest.raises(TypeError, match=name):
            flash_attn_func(*inputs(), **{name: 0.1})


def test_inputs_are_not_modified():
    torch.manual_seed(1)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        q, k, v = (x.requires_grad_() for x in inputs(sq=40, sk=30, dtype=dtype))
        qv = torch.randn(2, 40, 4, 8).to(dtype).requires_grad_()
        copies = [x.detach().clone() for x in (q, k, v, qv)]
        out, lse = attention(q, k, v, qv=qv, causal=True, softcap=2.0, return_lse=True)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        kept = [x.detach().clone() for x in (out, lse, dout, dlse)]
        torch.autograd.grad([out, lse], (q, k, v, qv), [dout, dlse])
        assert all(torch.equal(a, b) for a, b in zip((q, k, v, qv), copies, strict=True))
        assert all(torch.equal(a, b) for a, b in zip((out, lse, dout, dlse), kept, strict=True))


def run(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_import_has_no_side_effects():
    code = """
import torch, sys
state = lambda: (torch.get_default_dtype(), torch.is_grad_enabled(), torch.backends.cuda.flash_sdp_enabled(),
                 torch.get_float32_matmul_precision(), torch.get_num_threads())
before, modules = state(), set(sys.modules)
import flash_attn3
assert state() == before and not torch.cuda.is_initialized()
new = {name.split(".")[0] for name in set(sys.modules) - modules}
heavy = new & {"numpy", "triton", "flash_attn_interface", "flash_attn_3"}
assert not heavy and "torch._dynamo" not in sys.modules, heavy
assert not hasattr(torch.ops.flash_attn_3, "fwd")
"""
    result = run("-c", code)
    assert result.returncode == 0, result.stderr


def test_module_runs_and_checks_itself():
    result = run("-m", "flash_attn3")
    assert result.returncode == 0, result.stdout + result.stderr
    for word in (flash_attn3.__version__, torch.__version__, "self-check passed", "torch sdpa"):
        assert word in result.stdout


def test_module_fails_when_the_numbers_are_wrong():
    code = """
import sys
from flash_attn3 import __main__ as module
right = module.attention
module.attention = lambda *x, **y: tuple(1.1 * t for t in right(*x, **y))
module.timings = lambda device: None
sys.exit(module.main())
"""
    result = run("-c", code)
    assert result.returncode == 1 and "FAILED" in result.stdout, result.stderr
