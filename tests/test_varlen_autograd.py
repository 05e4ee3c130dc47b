"""Packed batches: what autograd saves and refuses, transforms, fakes, torch.compile; slices of one tensor qkv."""

import pytest
import torch
from packed_batches import cumulative, ints, leaves, make, run
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash_attn3

torch.set_num_threads(1)  # the shapes are small, and a busy machine makes threads wait for each other


def test_lengths_are_saved_and_watched():
    """Nothing of size Tq x Tk is saved; a change of the lengths before the backward is noticed."""
    q, k, v, sink = leaves(*make(64, 64), torch.zeros(4))
    cu, saved = cumulative([30, 34]), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, _ = flash_attn3.attention_varlen(q, k, v, cu, cu, 34, 34, sink=sink, return_lse=True)
    shapes = [(64, 4, 16), (64, 2, 16), (64, 2, 16), (64, 4, 16), (4, 64), (4,), (3,), (3,)]
    assert [tuple(x.shape) for x in saved] == shapes
    out = flash_attn3.attention_varlen(q, k, v, cu, cu, 34, 34)
    cu += 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_deterministic_reaches_the_kernel_c27(kernels):
    for asked in (False, True):
        for function in ("flash_attn_varlen_func", "flash_attn_varlen_qkvpacked_func", "attention_varlen"):
            x, cu = torch.randn(20, 3, 4, 16).half().requires_grad_(), cumulative([8, 12])
            inputs = (x, cu, 12) if "packed" in function else (*x.unbind(1), cu, cu, 12, 12)
            getattr(flash_attn3, function)(*inputs, deterministic=asked).sum().backward()
            assert kernels.backward.pop()["deterministic"] == asked and not kernels.backward


def test_second_derivatives_and_forward_mode_are_errors():
    q, k, v = leaves(*make(20, 20, dtype=torch.float32))
    qkv, cu = leaves(torch.randn(20, 3, 2, 8).half())[0], cumulative([8, 12])
    for inputs, call in (
        (q, lambda: flash_attn3.attention_varlen(q, k, v, cu, cu, 12, 12)),
        (qkv, lambda: flash_attn3.flash_attn_varlen_qkvpacked_func(qkv, cu, 12)),
    ):
        (grad,) = torch.autograd.grad(call().square().sum(), inputs, create_graph=True)
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            grad.sum().backward()
    with pytest.raises(NotImplementedError, match="sink has a forward-mode derivative"):
        call = lambda sink: flash_attn3.attention_varlen(q, k, v, cu, cu, 12, 12, sink=sink)  # noqa: E731
        torch.func.jvp(call, (torch.zeros(4),), (torch.ones(4),))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_function_transforms():
    """torch.func.grad, and gradients per sample by vmap over batches of the same lengths."""
    torch.manual_seed(5)
    q, k, v = (torch.randn(3, 12, heads, 8) for heads in (4, 2, 2))
    sink, cu = torch.randn(3, 4), cumulative([5, 7])

    def loss(q, k, v, sink):
        out, lse = flash_attn3.attention_varlen(q, k, v, cu, cu, 7, 7, causal=True, sink=sink, return_lse=True)
        return out.square().sum() + lse.sin().sum()

    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, sink)
    for i in range(3):
        inputs = leaves(q[i], k[i], v[i], sink[i])
        want = torch.autograd.grad(loss(*inputs), inputs)
        assert all(torch.equal(a[i], b) for a, b in zip(got, want, strict=True))


def operator_arguments():
    q, k, v = make(20, 30, dv=8)
    lengths, mask = (ints(0, 12, 20), ints(0, 15, 30), None, ints(15, 9)), (0.3, 3, 0, 0, 1.5)
    return q, k, v, lengths, torch.randn(4), mask


def test_opcheck(kernels):
    """The portable operators, and those of the kernels with the portable backend standing in."""
    q, k, v, lengths, sink, mask = operator_arguments()
    operators = torch.ops.flash_attn3
    for qv in (None, torch.randn(20, 4, 8).to(q.dtype)):
        forward = (q, k, v, qv, None, None, None, *lengths, sink, *mask)
        out, lse = operators.portable_forward_varlen(*forward)
        backward = (torch.randn_like(out), torch.randn_like(lse), q, k, v, qv, out, lse, *lengths, sink, *mask)
        torch.library.opcheck(operators.portable_forward_varlen.default, forward)
        torch.library.opcheck(operators.portable_backward_varlen.default, backward)
    out, lse = operators.forward_varlen(q, k, v, *lengths, sink, *mask)
    inputs = (torch.randn_like(out), None, q, k, v, out, lse, *lengths, sink)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    torch.library.opcheck(operators.forward_varlen.default, (q, k, v, *lengths, sink, *mask))
    torch.library.opcheck(operators.forward_varlen_out.default, (q, k, v, *lengths, sink, torch.zeros_like(out), *mask))
    torch.library.opcheck(operators.backward_varlen.default, (*inputs, *mask, True))
    torch.library.opcheck(operators.backward_varlen_out.default, (*inputs, *grads, *mask, True))


def test_fakes_are_like_the_real_thing_c31():
    def description(tensors):
        return [(tuple(x.shape), x.stride(), x.dtype) for x in tensors]

    q, k, v, lengths, sink, _ = operator_arguments()
    for tensors in ((q, k, v), [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]):
        real = description(run(*tensors, lengths, sink=sink, causal=True))
        with FakeTensorMode() as mode:
            fake = [None if x is None else mode.from_tensor(x) for x in (*tensors, *lengths, sink)]
            assert description(run(*fake[:3], fake[3:7], sink=fake[7], causal=True)) == real


@pytest.mark.parametrize(
    "backend, dynamic", [("portable", False), ("portable", True), ("kernel", True)], indirect=["backend"]
)
def test_compile_fullgraph_c30(backend, dynamic):
    """One graph for any lengths and, if dynamic, any number of tokens and sequences; one tensor for both cu_seqlens."""
    torch._dynamo.reset()

    def call(q, k, v, sink, cu, bound):
        return flash_attn3.attention_varlen(
            q, k, v, cu, cu, bound, bound, causal=True, window_size=(6, 6), sink=sink, return_lse=True
        )

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter, dynamic=dynamic)
    for lengths in ([9, 11], [20, 0], *([[5, 12, 20], [3, 3, 3, 20]] if dynamic else [])):
        cu, total = cumulative(lengths), sum(lengths)
        tensors = (*make(total, total), torch.randn(4))
        for bound in (max(lengths), torch.tensor(max(lengths))):
            results = []
            for function in (compiled, call):
                inputs = leaves(*tensors)
                out, lse = function(*inputs, cu, bound)
                grads = torch.autograd.grad([out, lse], inputs, [torch.ones_like(out), torch.ones_like(lse)])
                with torch.no_grad():
                    again = function(*tensors, cu, bound)
                results.append([out, lse, *grads, *again])
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    # with and without gradients, and with either kind of bound; an int bound may cost one more
    assert counter.frame_count <= (6 if dynamic else 7)


# Slices of one tensor


class Calls(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["three", "grouped"])
@pytest.mark.parametrize("varlen", [True, False])
def test_packed_heads_c49(backend, request, varlen, layout):
    """Bitwise the call on the slices; one gradient, of which the kernels write the slices: no concatenation."""
    torch.manual_seed(6)
    heads = None if layout == "three" else 4
    shape = (20, 3, 4, 16) if heads is None else (20, 8, 16)
    qkv, cu, used = torch.randn(shape).half(), cumulative([8, 12]), ints(8, 10)
    if not varlen:
        qkv = qkv.unflatten(0, (2, 10))
    options = {"causal": True, "window_size": (6, 0), "softcap": 3.0, "return_attn_probs": True}

    def call(qkv):
        if varlen:
            return flash_attn3.flash_attn_varlen_qkvpacked_func(qkv, cu, 12, used, num_heads_q=heads, **options)
        return flash_attn3.flash_attn_qkvpacked_func(qkv, num_heads_q=heads, **options)

    def slices(qkv):
        q, k, v = qkv.unbind(-3) if heads is None else qkv.split((4, 2, 2), -2)
        if varlen:
            return flash_attn3.flash_attn_varlen_func(q, k, v, cu, cu, 12, 12, used, used, **options)
        return flash_attn3.flash_attn_func(q, k, v, **options)

    packed, other = leaves(qkv, qkv)
    got, want = call(packed), slices(other)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(call(qkv), want, strict=True))
    cotangents = [torch.randn_like(x) for x in want]
    for chosen in ([0], [1], [0, 1]):
        pick = [x for i, x in enumerate(cotangents) if i in chosen]
        with Calls() as calls:
            (grad,) = torch.autograd.grad([got[i] for i in chosen], packed, pick, retain_graph=True)
        (wanted,) = torch.autograd.grad([want[i] for i in chosen], other, pick, retain_graph=True)
        assert torch.equal(grad, wanted) and grad.is_contiguous()
        if backend == "kernel":
            assert not [x for x in calls.names if any(y in x for y in ("cat", "stack", "add", "pad", "slice_backward"))]
    if backend == "kernel":
        view = grad.unbind(-3)[1] if heads is None else grad.split((4, 2, 2), -2)[1]
        kernels = request.getfixturevalue("kernels")
        written = [x["targets"] for x in kernels.backward if x["targets"] is not None]
        assert len(written) == 3 and all(x[1] == view.stride() for x in written)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    (again,) = leaves(qkv)
    result = compiled(again)
    assert all(torch.equal(a, b) for a, b in zip(result, want, strict=True))
    assert torch.equal(torch.autograd.grad(result, again, cotangents)[0], grad)


def test_packed_heads_elsewhere():
    """Transforms, e4m3 and errors: as flash_attn_varlen_func on the slices."""
    qkv, cu = torch.randn(20, 3, 2, 8).half(), cumulative([8, 12])

    def loss(x):
        return flash_attn3.flash_attn_varlen_qkvpacked_func(x, cu, 12, causal=True).float().square().sum()

    (leaf,) = leaves(qkv)
    assert torch.equal(torch.func.grad(loss)(qkv), torch.autograd.grad(loss(leaf), leaf)[0])
    quantised = qkv.to(torch.float8_e4m3fn)
    assert flash_attn3.flash_attn_varlen_qkvpacked_func(quantised, cu, 12).dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="float8_e4m3fn has no gradient"):
        flash_attn3.flash_attn_varlen_qkvpacked_func(quantised.requires_grad_(), cu, 12)
    for bad, heads in ((qkv[:, :2], None), (qkv[0, 0], 1), (qkv[None], None)):
        with pytest.raises(ValueError, match="qkv has shape"):
            flash_attn3.flash_attn_varlen_qkvpacked_func(bad, cu, 12, num_heads_q=heads)
    with pytest.raises(ValueError, match="num_heads_q is 5"):
        flash_attn3.flash_attn_varlen_qkvpacked_func(torch.zeros(20, 6, 8).half(), cu, 12, num_heads_q=5)
    with pytest.raises(ValueError, match="max_seqlen is -1"):
        flash_attn3.flash_attn_varlen_qkvpacked_func(qkv, cu, -1)
