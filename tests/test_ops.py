"""The operators: schemas, opcheck, fakes with the real shapes and strides (C31), torch.compile in one graph."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn3
from flash_attn3 import ops

torch.set_num_threads(1)  # the shapes are small, and a busy machine makes threads wait for each other
NAMES = (
    "forward", "forward_out", "backward", "backward_out", "kernel_table", "launch_counts", "select_kernel", "schedule",
    "select_backward", "schedule_backward",
)  # fmt: skip
PORTABLE = ("portable_forward", "portable_backward")


def inputs(sq=5, sk=7, h=4, hkv=2, d=8, dv=6, dtype=torch.bfloat16, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(shape).to(dtype) for shape in ((2, sq, h, d), (2, sk, hkv, d), (2, sk, hkv, dv))]


@pytest.mark.parametrize("name", NAMES + PORTABLE)
def test_operators_are_defined(name):
    assert getattr(torch.ops.flash_attn3, name).default._schema.name == f"flash_attn3::{name}"


def test_a_missing_extension_is_no_error(tmp_path):
    """Without _C.so, and with a file of that name that is no library, the import works and the reason is kept."""
    package = Path(flash_attn3.__file__).parent
    code = "import json, flash_attn3; from flash_attn3 import ops; print(json.dumps([ops.loaded, ops.load_error]))"
    for content, word in ((None, "portable install"), (b"not a library", "could not be loaded")):
        shutil.copytree(package, tmp_path / "flash_attn3", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        if content:
            (tmp_path / "flash_attn3" / "_C.so").write_bytes(content)
        run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        loaded, error = json.loads(run.stdout)
        assert not loaded and word in error
        shutil.rmtree(tmp_path / "flash_attn3")


@pytest.mark.skipif(not ops.loaded, reason="needs the extension")
def test_kernel_table():
    table = ops.kernel_table()
    assert [row["id"] for row in table] == list(range(len(table)))
    assert {"name", "op", "dtype", "head_dim", "head_dim_v", "block_m", "block_n"} <= set(table[0])
    assert torch.ops.flash_attn3.launch_counts().shape == (len(table),)


def portable_arguments(dtype, with_qv, d=8):
    q, k, v = inputs(dtype=dtype, d=d)
    qv = torch.randn(2, 5, 4, 6).to(dtype) if with_qv else None
    options = (0.3, 3, 0, 0, 1.5)
    out, lse = torch.ops.flash_attn3.portable_forward(q, k, v, qv, None, None, None, *options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    return (q, k, v, qv, None, None, None, *options), (dout, dlse, q, k, v, qv, out, lse, *options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("with_qv", [False, True])
def test_opcheck(dtype, with_qv):
    forward, backward = portable_arguments(dtype, with_qv)
    torch.library.opcheck(torch.ops.flash_attn3.portable_forward.default, forward)
    torch.library.opcheck(torch.ops.flash_attn3.portable_backward.default, backward)


def test_opcheck_e4m3():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs())
    scale = torch.rand(2, 2)
    arguments = (q, k, v, None, scale, scale, scale, 0.3, -1, 0, 0, 0.0)
    # test_schema compares arguments before and after with arithmetic that torch lacks for e4m3.
    torch.library.opcheck(torch.ops.flash_attn3.portable_forward.default, arguments, test_utils="test_faketensor")


def views(s):
    """Contiguous, and as transposed (B, H, S, D) views."""
    torch.manual_seed(s)
    for transposed in (False, True):
        shape = (2, 8, s, 64) if transposed else (2, s, 8, 64)
        tensors = [torch.randn(shape).bfloat16() for _ in range(4)]
        yield [x.transpose(1, 2) for x in tensors] if transposed else tensors


def description(tensors):
    return [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]


@pytest.mark.parametrize("s", [196, 257])
def test_fakes_are_like_the_real_thing_c31(s):
    for q, k, v, dout in views(s):

        def run(q, k, v, dout):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out, lse = flash_attn3.flash_attn_func(*leaves, causal=True, return_attn_probs=True)
            return out, lse, *torch.autograd.grad(out, leaves, dout)

        real = description(run(q, k, v, dout))
        with FakeTensorMode() as mode:
            fake = description(run(*(mode.from_tensor(x) for x in (q, k, v, dout))))
        assert fake == real


def test_fakes_of_the_kernel_operators():
    with FakeTensorMode():
        q, k, v = inputs(d=16, dv=24)
        out, lse = torch.ops.flash_attn3.forward(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), 0.25, True)
        assert out.shape == (5, 2, 4, 24) and out.is_contiguous() and out.dtype == torch.bfloat16
        assert lse.shape == (5, 4, 2) and lse.is_contiguous() and lse.dtype == torch.float32
        lse = torch.ops.flash_attn3.forward_out(q, k, v, torch.empty_like(q), 0.25, True)
        assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32


@pytest.mark.parametrize("with_dlse", [False, True])
def test_fakes_of_the_kernel_backward(with_dlse):
    """On fake CUDA tensors: contiguous gradients of the inputs' shapes, whatever the strides; backward_out writes."""
    operators = torch.ops.flash_attn3
    with FakeTensorMode():
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in inputs(d=16, dv=24))
        out, lse = operators.forward(q, k, v, 0.25, True)
        dout, dlse = out.new_empty(()).expand(out.shape), torch.empty_like(lse) if with_dlse else None
        heads_first = ((b, h, s, d) for b, s, h, d in (x.shape for x in (q, k, v)))
        views = [torch.empty(shape, dtype=q.dtype, device="cuda").transpose(1, 2) for shape in heads_first]
        for tensors in ((q, k, v), views):
            grads = operators.backward(dout, dlse, *tensors, out, lse, 0.25, True, False)
            assert description(grads) == description((q, k, v)) and all(x.is_cuda for x in grads)
            assert operators.backward_out(dout, dlse, *tensors, out, lse, *views, 0.25, True, True) is None
    schema = operators.backward_out.default._schema
    written = [x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    assert written == ["dq", "dk", "dv"] and not operators.backward.default._schema.is_mutable


def test_opcheck_of_the_kernel_operators(kernels):
    """With the portable backend standing in for the kernels."""
    q, k, v = inputs(dv=8)
    operators = torch.ops.flash_attn3
    out, lse = operators.forward(q, k, v, 0.25, True)
    arguments = (torch.randn_like(out), torch.randn_like(lse), q, k, v, out, lse)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    torch.library.opcheck(operators.forward.default, (q, k, v, 0.25, True))
    torch.library.opcheck(operators.backward.default, (*arguments, 0.25, True, False))
    torch.library.opcheck(operators.backward_out.default, (*arguments, *grads, 0.25, True, False))


OPTIONS = [
    {},
    {"causal": True},
    {"window_size": (3, 1), "softcap": 2.0},
    {"attention_chunk": 4, "softmax_scale": 0.2, "deterministic": True, "sm_margin": 4, "num_splits": 0},
]


def with_gradients(function, tensors):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = function(*leaves)
    return [out, lse, *torch.autograd.grad([out, lse], leaves, [torch.ones_like(out), torch.ones_like(lse)])]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_compile_fullgraph(options, dynamic):
    torch._dynamo.reset()

    def call(q, k, v):
        return flash_attn3.flash_attn_func(q, k, v, return_attn_probs=True, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for sq, sk in ((5, 7), (9, 12)):
        tensors = inputs(sq=sq, sk=sk)
        with torch.no_grad():
            assert all(torch.equal(a, b) for a, b in zip(compiled(*tensors), call(*tensors), strict=True))
        got, want = with_gradients(compiled, tensors), with_gradients(call, tensors)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph_around_the_kernels(kernels, dynamic):
    """Forward and backward are one operator each; turning determinism on compiles again."""
    torch._dynamo.reset()

    def call(q, k, v):
        return flash_attn3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for sq, sk in ((5, 7), (9, 12)):
        for switch in (False, True):
            torch.use_deterministic_algorithms(switch)
            try:
                got, want = with_gradients(compiled, inputs(sq, sk)), with_gradients(call, inputs(sq, sk))
            finally:
                torch.use_deterministic_algorithms(False)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            assert [x["deterministic"] for x in kernels.backward[-2:]] == [switch] * 2


@pytest.mark.parametrize("what", ["attention", "qkvpacked", "one tensor thrice", "sdpa", "autocast"])
def test_compile_the_other_entries(what):
    torch._dynamo.reset()
    x = torch.randn(2, 9, 4, 16)

    def call(x):
        if what == "attention":
            return flash_attn3.attention(x, x + 1, x, causal=True)
        if what == "qkvpacked":
            return flash_attn3.flash_attn_qkvpacked_func(torch.stack([x, x + 1, x - 1], 2).bfloat16(), causal=True)
        if what == "one tensor thrice":
            return flash_attn3.attention(x, x, x)
        if what == "sdpa":
            return flash_attn3.scaled_dot_product_attention(x, x, x, is_causal=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return flash_attn3.attention(x, x, x)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, want = compiled(a), call(b)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    want.sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


def test_compile_makes_one_node():
    """The whole forward is one operator in the graph."""
    torch._dynamo.reset()
    seen = []

    def backend(graph, example_inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    call = torch.compile(lambda q, k, v: flash_attn3.flash_attn_func(q, k, v), fullgraph=True, backend=backend)
    call(*inputs())
    assert [name for name in seen if "flash_attn3" in name] == ["flash_attn3.portable_forward.default"]
    assert all("flash_attn3" in name or "getitem" in name for name in seen), seen


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compile_with_inductor():
    torch._dynamo.reset()
    call = torch.compile(
        lambda q, k, v: flash_attn3.flash_attn_func(q * 1.5, k, v, causal=True, return_attn_probs=True), fullgraph=True
    )
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs(sq=33, sk=33, d=16, dv=16)]
    got = with_gradients(call, tensors)
    want = with_gradients(
        lambda q, k, v: flash_attn3.flash_attn_func(q * 1.5, k, v, causal=True, return_attn_probs=True), tensors
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
