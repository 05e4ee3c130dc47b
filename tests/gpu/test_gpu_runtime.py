"""How the kernels live with torch: streams, devices, graphs, no host sync, repeatability, errors before a launch.

A kernel that waits on the host, keeps scratch between calls or uses another stream than the current one fails here.
"""

import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from harness import DEVICE, HEAD_DIMS, attend, bounds, equal, inputs, ran, row_of

import flash_attn3

FIRST_CALL = """
import torch, flash_attn3
make = lambda: torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    q, k, v = (make().requires_grad_() for _ in range(3))
    torch.cuda._sleep(100_000_000)
    with torch.no_grad():
        q.mul_(2)
    out = flash_attn3.flash_attn_func(q, k, v, causal=True)
    out.backward(torch.ones_like(out))
torch.cuda.current_stream().wait_stream(stream)
again = flash_attn3.flash_attn_func(q, k, v, causal=True)
grads = torch.autograd.grad(again, (q, k, v), torch.ones_like(again))
assert torch.equal(out, again), "out differs between streams"
for x, grad in zip((q, k, v), grads):
    assert (x.grad - grad).abs().max() <= 1e-2 * grad.abs().max()
counts = torch.ops.flash_attn3.launch_counts().tolist()
twice = [row["op"] for row, count in zip(flash_attn3.ops.kernel_table(), counts) if count == 2]
assert sum(counts) == 2 * len(twice)
print("same on both streams", *twice)
"""


def test_first_call_of_a_process_on_a_side_stream(tmp_path):
    """flash-attention issue 1957: a stream id was used as a pointer."""
    where = Path(flash_attn3.__file__).resolve().parent.parent
    paths = [str(where), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=80
    )
    assert done.returncode == 0, done.stderr[-2000:]
    words = done.stdout.split()
    assert words[:5] == ["same", "on", "both", "streams", "forward"], done.stdout
    assert "backward_prepare" in words and len(words) == 8, done.stdout


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_side_stream_is_used(dims):
    """The inputs are written on the stream just before the call: a launch on any other stream reads the old ones."""
    q, k, v = inputs(2, 200, 200, 4, 2, *dims)
    wanted = attend(q, k, v, True)
    late = [torch.zeros_like(x) for x in (q, k, v)]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(harness.SLEEP_CYCLES // 10)
        for x, y in zip(late, (q, k, v), strict=True):
            x.copy_(y)
        out, lse = attend(*late, True)
        result = out.clone(), lse.clone()
    stream.synchronize()
    assert equal(result, wanted)


def test_streams_at_the_same_time():
    """Scratch belongs to a call: calls that run together do not share a tile counter."""
    problems = [inputs(1, 700, 900, 8, 2, 128, key=i) for i in range(3)] + [inputs(2, 300, 300, 4, 4, 64)]
    wanted = [attend(*problem, True) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for problem, stream in zip(problems, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(attend(*problem, True))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        assert equal(result, wanted[i % len(problems)])


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_fifty_repeats_are_bitwise_equal(causal, dims):
    """With a matmul on another stream, so that CTAs start at changing times."""
    other, matrix = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
    for shape in ((3, 777, 777, 8, 2), (1, 193, 4000, 6, 6)):
        q, k, v = inputs(*shape, *dims)
        wanted = attend(q, k, v, causal)
        other.wait_stream(torch.cuda.current_stream())
        different = torch.zeros((), dtype=torch.bool, device=DEVICE)
        for repeat in range(50):
            if repeat % 2:
                with torch.cuda.stream(other):
                    matrix = (matrix @ matrix).clamp_(-1, 1)
            out, lse = attend(q, k, v, causal)
            different |= (out != wanted[0]).any() | (lse != wanted[1]).any()
        torch.cuda.synchronize()
        assert not different.item()


def test_nothing_waits_on_the_host():
    q, k, v = inputs(2, 500, 500, 4, 2, 128)
    odd = torch.randn(2, 500, 4, 100, device=DEVICE, dtype=torch.bfloat16)

    def calls():
        for causal in (False, True):
            out = flash_attn3.flash_attn_func(q, k, v, causal=causal)
            flash_attn3.flash_attn_func(odd, odd, odd, causal=causal)
            torch.ops.flash_attn3.forward_out(q, k, v, None, out, 0.1, *bounds(causal))

    harness.assert_nothing_waits(calls, 0.05)


@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_graph_replays_with_new_contents(dims):
    q, k, v = inputs(2, 300, 450, 4, 2, *dims)
    attend(q, k, v, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(q, k, v, True)
    for trial in range(3):
        for x, new in zip((q, k, v), inputs(2, 300, 450, 4, 2, *dims, key=trial), strict=True):
            x.copy_(new)
        for x in captured:
            x.fill_(torch.nan)
        graph.replay()
        assert equal(captured, attend(q, k, v, True))


def test_graphs_replay_at_the_same_time():
    graphs, captured, wanted = [], [], []
    for i in range(2):
        q, k, v = inputs(2, 900, 900, 8, 2, 128, key=i)
        wanted.append(attend(q, k, v, True))
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            captured.append(attend(q, k, v, True))
        captured[-1] += ((q, k, v),)  # the graph reads them at every replay
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(equal(got[:2], want) for got, want in zip(captured, wanted, strict=True))


def test_graph_without_keys():
    """flash-attention issue 2470, captured."""
    q, k, v = inputs(2, 64, 0, 8, 2, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(q, k, v, True, times=(0, 1))
    out.fill_(1.0), lse.fill_(1.0)
    graph.replay()
    assert (out == 0).all() and (lse == -torch.inf).all()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
def test_other_device_than_the_current_one(dims):
    """flash-attention issues 1793, 2356."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs a second GPU")
    q, k, v = (x.to("cuda:1") for x in inputs(2, 300, 300, 4, 2, *dims))
    with torch.cuda.device(1), ran(row_of(q, k, v)):
        wanted = flash_attn3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.cuda.current_device() == 0
    with ran(row_of(q, k, v)):
        got = flash_attn3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.cuda.current_device() == 0 and got[0].device == q.device
    assert equal(got, wanted)
    with pytest.raises((RuntimeError, ValueError)):
        flash_attn3.flash_attn_func(q, k.to("cuda:0"), v)


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: (q, k.cpu(), v),
        lambda q, k, v: (q, k, v.float()),
        lambda q, k, v: (q.float(), k.float(), v.float()),
        lambda q, k, v: (q, k[:, :, :1].expand(-1, -1, 3, -1), v),
        lambda q, k, v: (q, k[..., :32], v),
        lambda q, k, v: (q, k[:, :50], v),
        lambda q, k, v: (q[:1], k, v),
        lambda q, k, v: (q[0], k[0], v[0]),
        lambda q, k, v: (torch.cat([q] * 5, 3), torch.cat([k] * 5, 3), v),
    ],
    ids=["device", "dtypes", "fp32", "heads", "head dim", "keys", "batch", "three dims", "too wide"],
)
def test_operator_refuses_before_any_launch(change):
    """The raw operator checks everything itself: it is called without the Python functions around it."""
    tensors = change(*inputs(2, 100, 100, 4, 2, 64))
    before = torch.ops.flash_attn3.launch_counts()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        torch.ops.flash_attn3.forward(*tensors, None, 0.125, *bounds(False))
    assert len(str(caught.value)) > 20
    assert torch.equal(torch.ops.flash_attn3.launch_counts(), before)
    torch.cuda.synchronize()


def test_operator_refuses_a_scale_or_out_that_does_not_fit():
    q, k, v = inputs(2, 100, 100, 4, 2, 64)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises((RuntimeError, ValueError)):
            torch.ops.flash_attn3.forward(q, k, v, None, scale, *bounds(False))
    for out in (q[:, :50], q.float(), q.cpu(), torch.cat([q, q], 3)):
        with pytest.raises((RuntimeError, ValueError)):
            torch.ops.flash_attn3.forward_out(q, k, v, None, torch.empty_like(out), 0.125, *bounds(False))


def test_peak_memory_is_the_result():
    """Nothing of size Sq x Sk, no copies of inputs: the result and a small workspace."""
    q, k, v = inputs(1, 4096, 4096, 8, 8, 128)
    attend(q, k, v, True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        out, lse = flash_attn3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    extra = torch.cuda.max_memory_allocated() - before - 2 * out.numel() - 4 * lse.numel()
    assert extra <= 2**20, f"{extra} bytes beside the result"


def test_table_has_every_tile_family():
    assert {(r["head_dim"], r["head_dim_v"], r["dtype"]) for r in harness.table()} >= {
        (*dims, dtype) for dims in HEAD_DIMS for dtype in ("bf16", "fp16")
    }
