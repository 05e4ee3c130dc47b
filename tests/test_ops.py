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
    "forward", "forward_out", "forward_varlen", "forward_varlen_out", "forward_fp8", "backward", "backward_out",
    "backward_varlen", "backward_varlen_out", "kernel_table", "launch_counts", "select_kernel", "select_fp8",
    "select_backward", "schedule", "schedule_backward", "schedule_varlen", "varlen_layout",
)  # fmt: skip
PORTABLE = ("portable_forward", "portable_forward_varlen", "portable_backward", "portable_backward_varlen")
CAUSAL = (0.25, -1, 0, 0, 0.0)  # softmax_scale, window_left, window_right, attention_chunk, softcap


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


def packed(tensors):
    """(rows of all sequences, heads, head dim) from (batch, sequence, heads, head dim)."""
    return [x.flatten(0, 1) for x in tensors]


def lengths(cu_seqlens_q, cu_seqlens_k, seqused_q=None, seqused_k=None):
    """As operators take them."""
    return [
        None if x is None else torch.tensor(x, dtype=torch.int32)
        for x in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    ]


UNEVEN = ([0, 4, 10], [0, 9, 13], [3, 6], None)  # of 2 x 5 queries and 2 x 7 keys, with gaps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("with_all", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_opcheck(dtype, with_all, is_packed):
    """Of the portable operators, with and without qv and a sink."""
    suffix = "_varlen" if is_packed else ""
    forward, backward = (getattr(torch.ops.flash_attn3, f"portable_{way}{suffix}") for way in ("forward", "backward"))
    tensors = [*inputs(dtype=dtype), torch.randn(2, 5, 4, 6).to(dtype)]
    q, k, v, qv = packed(tensors) if is_packed else tensors
    qv, sink = (qv, torch.randn(4)) if with_all else (None, None)
    options = (*(lengths(*UNEVEN) if is_packed else ()), sink, 0.3, 3, 0, 0, 1.5)
    arguments = (q, k, v, qv, None, None, None, *options)
    out, lse = forward(*arguments)
    torch.library.opcheck(forward.default, arguments)
    torch.library.opcheck(
        backward.default, (torch.randn_like(out), torch.randn_like(lse), q, k, v, qv, out, lse, *options)
    )


def test_opcheck_e4m3():
    q, k, v = (x.to(torch.float8_e4m3fn) for x in inputs())
    scale = torch.rand(2, 2)
    arguments = (q, k, v, None, scale, scale, scale, None, 0.3, -1, 0, 0, 0.0)
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


@pytest.mark.parametrize("with_sink", [False, True])
def test_fakes_of_the_kernel_operators(with_sink):
    operators = torch.ops.flash_attn3
    with FakeTensorMode():
        q, k, v = inputs(d=16, dv=24)
        sink = torch.zeros(4) if with_sink else None
        out, lse = operators.forward(*(x.transpose(0, 1) for x in (q, k, v)), sink, *CAUSAL)
        assert description((out, lse)) == description(
            (torch.empty(5, 2, 4, 24, dtype=torch.bfloat16), torch.empty(5, 4, 2))
        )
        assert description([operators.forward_out(q, k, v, sink, torch.empty(2, 5, 4, 24), *CAUSAL)]) == description(
            [torch.empty(2, 4, 5)]
        )
        for where in (lengths([0, 4, 10], [0, 9, 13]), lengths(*UNEVEN)):
            out, lse = operators.forward_varlen(*packed((q, k, v)), *where, sink, *CAUSAL)
            assert description((out, lse)) == description(
                (torch.empty(10, 4, 24, dtype=torch.bfloat16), torch.empty(4, 10))
            )
            lse = operators.forward_varlen_out(*packed((q, k, v)), *where, sink, torch.empty_like(out), *CAUSAL)
            assert description([lse]) == description([torch.empty(4, 10)])


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_fakes_of_the_kernel_backward(with_dlse, is_packed):
    """On fake CUDA tensors: contiguous gradients of the inputs' shapes, whatever the strides; the `_out` form writes
    them. dsink has a number a head, or none without a sink."""
    operators = torch.ops.flash_attn3
    name = "backward_varlen" if is_packed else "backward"
    backward, backward_out = getattr(operators, name), getattr(operators, f"{name}_out")
    with FakeTensorMode():
        shapes = [x.shape[1:] if is_packed else x.shape for x in inputs(d=16, dv=24)]
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
        heads_first = [(*b, h, s, d) for *b, s, h, d in shapes]
        views = [torch.empty(shape, dtype=q.dtype, device="cuda").transpose(-3, -2) for shape in heads_first]
        where = (torch.empty(3, dtype=torch.int32, device="cuda"),) * 2 + (None, None) if is_packed else ()
        sink, no_sink = torch.empty(4, device="cuda"), torch.empty(0, device="cuda")
        for tensors in ((q, k, v), views):
            forward = operators.forward_varlen if is_packed else operators.forward
            out, lse = forward(*tensors, *where, None, *CAUSAL)
            dout, dlse = out.new_empty(()).expand(out.shape), torch.empty_like(lse) if with_dlse else None
            given = (dout, dlse, *tensors, out, lse, *where)
            for with_sink, dsink in ((None, no_sink), (sink, sink)):
                grads = backward(*given, with_sink, *CAUSAL, False)
                wanted = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in tensors]
                assert description(grads) == description((*wanted, dsink)) and all(x.is_cuda for x in grads)
                result = backward_out(*given, with_sink, *tensors, *CAUSAL, True)
                assert description([result]) == description([dsink])


@pytest.mark.parametrize("name", ["forward", "forward_varlen", "backward", "backward_varlen"])
def test_only_out_forms_write(name):
    targets = ["out"] if name.startswith("forward") else ["dq", "dk", "dv"]
    operator, out_form = (getattr(torch.ops.flash_attn3, n).default for n in (name, f"{name}_out"))
    arguments = out_form._schema.arguments
    written = [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]
    assert written == targets and not operator._schema.is_mutable
    assert [x.name for x in operator._schema.arguments] == [x.name for x in arguments if x.name not in targets]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("with_sink", [False, True])
def test_opcheck_of_the_kernel_operators(kernels, with_sink, is_packed):
    """With the portable backend standing in for the kernels."""
    suffix = "_varlen" if is_packed else ""
    forward, backward, backward_out = (
        getattr(torch.ops.flash_attn3, name)
        for name in (f"forward{suffix}", f"backward{suffix}", f"backward{suffix}_out")
    )
    tensors, where = inputs(dv=8), []
    if is_packed:
        tensors, where = packed(tensors), lengths(*UNEVEN)
    where.append(torch.randn(4) if with_sink else None)
    out, lse = forward(*tensors, *where, *CAUSAL)
    given = (torch.randn_like(out), torch.randn_like(lse), *tensors, out, lse, *where)
    torch.library.opcheck(forward.default, (*tensors, *where, *CAUSAL))
    torch.library.opcheck(backward.default, (*given, *CAUSAL, False))
    targets = [torch.zeros_like(x) for x in tensors]
    torch.library.opcheck(backward_out.default, (*given, *targets, *CAUSAL, False))


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


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("by_kernels", [False, True])
def test_compile_fullgraph_of_packed_sequences(request, by_kernels, dynamic):
    """Lengths are read by the operators alone: other lengths in tensors of the same shape compile nothing again."""
    if by_kernels:
        request.getfixturevalue("kernels")
    torch._dynamo.reset()
    compiled_graphs = []

    def backend(graph, example_inputs):
        compiled_graphs.append(graph)
        return graph.forward

    def call(q, k, v, cu_seqlens_q, cu_seqlens_k):
        return flash_attn3.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, 10, 14, causal=True, return_attn_probs=True
        )

    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    tensors = packed(inputs(dv=8))
    for where in (([0, 5, 10], [0, 7, 14]), ([0, 1, 9], [0, 12, 12])):
        where = lengths(*where)[:2]
        got = with_gradients(lambda q, k, v, where=where: compiled(q, k, v, *where), tensors)
        want = with_gradients(lambda q, k, v, where=where: call(q, k, v, *where), tensors)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(compiled_graphs) == 1


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
