"""How the backward kernels live with torch: repeatability, streams, devices, graphs, no host sync, errors.

The deterministic mode is bitwise repeatable whatever else the GPU does; the default one is so up to the order of fp32
sums of dq.
"""

import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from harness import (
    DEVICE,
    HEAD_DIMS,
    attend,
    backward,
    backward_rows,
    bounds,
    equal,
    gradient_of_out,
    inputs,
    ran,
    row_of,
)

import flash_attn3

REPEATS = 1000

WITHOUT_CACHING = """
import torch
assert torch.ops.flash_attn3 is not None
import flash_attn3
torch.manual_seed(0)
q, k, v, dout = (torch.randn(2, 512, 8, 64, device="cuda", dtype=torch.float16) for _ in range(4))
different = torch.zeros((), dtype=torch.bool, device="cuda")
for causal in (False, True):
    mask = (-1, 0 if causal else -1, 0, 0.0)
    out, lse = torch.ops.flash_attn3.forward(q, k, v, None, 0.125, *mask)
    call = lambda: torch.ops.flash_attn3.backward(dout, None, q, k, v, out, lse, None, 0.125, *mask, True)[:3]
    wanted = call()
    for _ in range(500):
        for x, y in zip(call(), wanted):
            different |= (x != y).any()
print("different" if different else "equal")
"""


class OtherWork:
    """A matmul on another stream beside every second call, so that CTAs start at changing times and places."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.matrix = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
        self.stream.wait_stream(torch.cuda.current_stream())
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls % 2:
            with torch.cuda.stream(self.stream):
                self.matrix = (self.matrix @ self.matrix).clamp_(-1, 1)


def assert_repeatable(q, k, v, causal: bool, repeats: int = REPEATS) -> None:
    """Bitwise equal gradients; the calls go to the operator itself, for `repeats` is large."""
    dout, (out, lse) = gradient_of_out(q, v), attend(q, k, v, causal)
    wanted = backward(q, k, v, dout, None, causal, deterministic=True, saved=(out, lse))
    assert all(x.isfinite().all() for x in wanted)
    different, other = torch.zeros((), dtype=torch.bool, device=DEVICE), OtherWork()
    arguments = (dout, None, q, k, v, out, lse, None, q.shape[3] ** -0.5, *bounds(causal), True)
    with ran(backward_rows(q, k, v, causal, True), repeats):
        for _ in range(repeats):
            other()
            *grads, _ = torch.ops.flash_attn3.backward(*arguments)
            for x, y in zip(grads, wanted, strict=True):
                different |= (x != y).any()
    torch.cuda.synchronize()
    assert not different.item()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_a_thousand_deterministic_repeats(dims, heads, causal):
    assert_repeatable(*inputs(2, 333, 300, *heads, *dims), causal)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [(2, 1024, 1024, 12, 12, 64), (2, 512, 512, 8, 8, 64)], ids=str)
def test_a_thousand_repeats_of_a_reported_shape(shape, causal):
    """flash-attention issue 2244."""
    assert_repeatable(*inputs(*shape, dtype=torch.float16), causal)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_the_flag_reaches_the_kernels(dims):
    """flash-attention issues 1596, 1766: accepted and dropped. Through autograd, 16 query heads on 2."""
    q, k, v = inputs(1, 700, 700, 16, 2, *dims)
    leaves, dout = [x.requires_grad_() for x in (q, k, v)], gradient_of_out(q, v)
    rows = (row_of(q, k, v), *backward_rows(q, k, v, True, True))
    other, wanted = OtherWork(), None
    for _ in range(50):
        other()
        with ran(rows):
            out = flash_attn3.flash_attn_func(*leaves, causal=True, deterministic=True)
            grads = torch.autograd.grad(out, leaves, dout)
        wanted = wanted or grads
        assert equal(grads, wanted)


def test_without_the_caching_allocator(tmp_path):
    """Every call gets other memory, and what it did not write shows."""
    where = Path(flash_attn3.__file__).resolve().parent.parent
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(where), os.environ.get("PYTHONPATH", "")])),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CACHING],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=80,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["equal"], done.stdout


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_a_hundred_repeats_of_the_default_mode(dims, causal):
    """Within tolerance every time; dk and dv do not depend on the order of anything."""
    q, k, v = inputs(2, 400, 400, 6, 2, *dims)
    dout, saved = gradient_of_out(q, v), attend(q, k, v, causal)
    refs, bases = harness.reference_gradients(q, k, v, dout, causal=causal)
    other, first = OtherWork(), None
    for _ in range(100):
        other()
        grads = backward(q, k, v, dout, None, causal, None, False, saved)
        harness.assert_close_gradients(grads, refs, bases)
        first = first or grads
        assert equal(grads[1:], first[1:])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_side_stream_is_used(dims, deterministic):
    """The inputs are written on the stream just before the call: a launch on any other stream reads the old ones."""
    q, k, v = inputs(2, 200, 200, 4, 2, *dims)
    dout, saved = gradient_of_out(q, v), attend(q, k, v, True)
    wanted = backward(q, k, v, dout, None, True, None, deterministic, saved)
    tensors = (q, k, v, dout, *saved)
    late = [torch.zeros_like(x) for x in tensors]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(harness.SLEEP_CYCLES // 10)
        for x, y in zip(late, tensors, strict=True):
            x.copy_(y)
        result = [x.clone() for x in backward(*late[:4], None, True, None, deterministic, tuple(late[4:]))]
    stream.synchronize()
    assert_alike(result, wanted, deterministic)


def assert_alike(grads, wanted, deterministic: bool) -> None:
    """Bitwise equal, in the default mode but for the order of sums of dq."""
    assert equal(grads[1:], wanted[1:])
    error = (grads[0].float() - wanted[0].float()).abs().max()
    assert error <= (0 if deterministic else 2.0**-6 * wanted[0].abs().max())  # NaN fails too


def test_streams_at_the_same_time():
    """Scratch belongs to a call: calls that run together share no counter and no sums."""
    shapes = [(1, 700, 900, 8, 2, 128), (2, 500, 500, 4, 4, 64), (1, 600, 600, 4, 2, 256), (1, 700, 900, 8, 2, 128)]
    problems = []
    for i, shape in enumerate(shapes):
        q, k, v = inputs(*shape, key=i)
        problems.append((q, k, v, gradient_of_out(q, v, i), attend(q, k, v, True)))

    def run(problem, deterministic):
        q, k, v, dout, saved = problem
        return backward(q, k, v, dout, None, True, None, deterministic, saved)

    wanted = {mode: [run(problem, mode) for problem in problems] for mode in (False, True)}
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = []
    for repeat in range(10):
        for index, (problem, stream) in enumerate(zip(problems, streams, strict=True)):
            with torch.cuda.stream(stream):
                results.append((index, bool(repeat % 2), run(problem, bool(repeat % 2))))
    torch.cuda.synchronize()
    for index, mode, grads in results:
        assert_alike(grads, wanted[mode][index], mode)


def test_nothing_waits_on_the_host():
    """Forward and backward through autograd, and the operators: also where tensors have to be copied first."""
    plain = [x.requires_grad_() for x in inputs(2, 500, 500, 4, 2, 128)]
    odd = [x.requires_grad_() for x in inputs(2, 500, 500, 4, 2, 100)]
    wide = [x.requires_grad_() for x in inputs(2, 500, 500, 4, 2, 256)]
    douts = [gradient_of_out(leaves[0], leaves[2]) for leaves in (plain, odd, wide)]

    def calls():
        for leaves, dout in zip((plain, odd, wide), douts, strict=True):
            for deterministic in (False, True):
                out, lse = flash_attn3.flash_attn_func(
                    *leaves, causal=True, deterministic=deterministic, return_attn_probs=True
                )
                torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
                out = flash_attn3.flash_attn_func(*leaves, deterministic=deterministic)
                torch.autograd.grad(out.sum(), leaves)

    harness.assert_nothing_waits(calls, 0.1)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_graph_of_forward_and_backward(dims, deterministic):
    """Captured through autograd, replayed with new contents."""
    leaves = [x.requires_grad_() for x in inputs(2, 300, 450, 4, 2, *dims)]
    dout = gradient_of_out(leaves[0], leaves[2])

    def step():
        options = {"causal": True, "deterministic": deterministic, "return_attn_probs": True}
        out, lse = flash_attn3.flash_attn_func(*leaves, **options)
        return torch.autograd.grad((out, lse), leaves, (dout, lse.detach()))

    side = torch.cuda.Stream()  # autograd needs a call of its own outside of the capture
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    rows = (row_of(*leaves), *backward_rows(*leaves, True, deterministic))
    with ran(rows), torch.cuda.graph(graph):
        captured = step()
    for trial in range(3):
        with torch.no_grad():
            for x, new in zip(leaves, inputs(2, 300, 450, 4, 2, *dims, key=trial), strict=True):
                x.copy_(new)
            dout.copy_(gradient_of_out(*leaves[::2], trial))
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        q, k, v = (x.detach() for x in leaves)
        saved = attend(q, k, v, True)
        wanted = backward(q, k, v, dout, saved[1], True, None, deterministic, saved)
        assert_alike(captured, wanted, deterministic)


def test_graphs_replay_at_the_same_time():
    graphs, captured, wanted = [], [], []
    for i in range(2):
        q, k, v = inputs(2, 700, 700, 8, 2, 128, key=i)
        dout, saved = gradient_of_out(q, v, i), attend(q, k, v, True)
        wanted.append(backward(q, k, v, dout, None, True, None, False, saved))
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            *grads, _ = torch.ops.flash_attn3.backward(
                dout, None, q, k, v, *saved, None, 128**-0.5, *bounds(True), False
            )
        captured.append((grads, (q, k, v, dout, saved)))  # the graph reads these at every replay
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (grads, _), want in zip(captured, wanted, strict=True):
        assert_alike(grads, want, False)


@pytest.mark.parametrize("dims", [(64, 64), (256, 256)], ids=str)
def test_other_device_than_the_current_one(dims):
    """flash-attention issues 1793, 2356."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    q, k, v = inputs(2, 300, 300, 4, 2, *dims)
    dout, saved = gradient_of_out(q, v), attend(q, k, v, True)
    wanted = backward(q, k, v, dout, None, True, deterministic=True, saved=saved)
    there = [x.to("cuda:1") for x in (dout, q, k, v, *saved)]
    with ran(backward_rows(q, k, v, True, True)):
        *got, _ = torch.ops.flash_attn3.backward(there[0], None, *there[1:], None, dims[0] ** -0.5, *bounds(True), True)
    assert torch.cuda.current_device() == 0 and all(x.device == there[1].device for x in got)
    assert equal([x.to(DEVICE) for x in got], wanted)
    leaves = [x.requires_grad_() for x in there[1:4]]
    out = flash_attn3.flash_attn_func(*leaves, causal=True, deterministic=True)
    assert equal([x.to(DEVICE) for x in torch.autograd.grad(out, leaves, there[0])], wanted)
    assert torch.cuda.current_device() == 0
    with pytest.raises((RuntimeError, ValueError)):
        torch.ops.flash_attn3.backward(dout, None, *there[1:], None, dims[0] ** -0.5, *bounds(True), True)


NAMES = ("dout", "dlse", "q", "k", "v", "out", "lse")


@pytest.mark.parametrize(
    "name, change",
    [
        ("k", lambda x: x.cpu()),
        ("lse", lambda x: x.cpu()),
        ("dout", lambda x: x.float()),
        ("dlse", lambda x: x.double()),
        ("lse", lambda x: x.half()),
        ("out", lambda x: x[:, :50]),
        ("dout", lambda x: x[..., :32]),
        ("dlse", lambda x: x.transpose(1, 2)),
        ("lse", lambda x: x[:1]),
        ("v", lambda x: x[:, :50]),
        ("k", lambda x: x[..., :32]),
        ("k", lambda x: x[:, :, :1].expand(-1, -1, 3, -1)),
        ("q", lambda x: x[0]),
        ("q", lambda x: torch.cat([x] * 5, 3)),
    ],
)
def test_operator_refuses_before_any_launch(name, change):
    """The raw operator checks everything itself: it is called without the Python functions around it."""
    q, k, v = inputs(2, 100, 100, 4, 2, 64)
    out, lse = attend(q, k, v)
    tensors = dict(zip(NAMES, (gradient_of_out(q, v), harness.gradient_of_lse(q), q, k, v, out, lse), strict=True))
    tensors[name] = change(tensors[name])
    before = torch.ops.flash_attn3.launch_counts()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        torch.ops.flash_attn3.backward(*tensors.values(), None, 0.125, *bounds(False), False)
    assert len(str(caught.value)) > 20
    assert torch.equal(torch.ops.flash_attn3.launch_counts(), before)
    torch.cuda.synchronize()


def test_operator_refuses_a_scale_or_gradients_that_do_not_fit():
    q, k, v = inputs(2, 100, 100, 4, 2, 64)
    tensors = (gradient_of_out(q, v), None, q, k, v, *attend(q, k, v))
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises((RuntimeError, ValueError)):
            torch.ops.flash_attn3.backward(*tensors, None, scale, *bounds(False), False)
    for which in range(3):
        for change in (lambda x: x[:, :50], lambda x: x.float(), lambda x: x.cpu(), lambda x: torch.cat([x, x], 3)):
            grads = [torch.empty_like(x) for x in (q, k, v)]
            grads[which] = change(grads[which])
            with pytest.raises((RuntimeError, ValueError)):
                torch.ops.flash_attn3.backward_out(*tensors, None, *grads, 0.125, *bounds(False), False)


def test_separate_kernels_at_short_lengths(monkeypatch):
    """The library's own choice: no sums of dQ where sequences are short, one kernel where they are long."""
    monkeypatch.delenv("FLASH_ATTN3_BACKWARD")
    for seqlen, causal, separate in ((512, False, True), (1024, True, True), (1024, False, False), (2048, True, False)):
        q, k, v = inputs(1, seqlen, seqlen, 2, 2, 128)
        rows = harness.backward_rows(q, k, v, causal, False)
        assert rows[1].startswith("backward_keys" if separate else "backward_bf16")
        assert harness.modes(q, k, v, causal) == ([True] if separate else [False, True])
        harness.check_gradients(q, k, v, causal=causal, deterministic=False)
