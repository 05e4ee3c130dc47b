"""Shared by all tests: which flash_attn3 is under test, and where the helpers are.

The installed library is tested. `python -m pytest` puts the checkout first on sys.path, where a flash_attn3 without its
extension would hide an installed one that has it, so the checkout goes to the end. tests/ itself goes there too, for
`import oracle` from any folder below. `kernels` lets the paths around the kernels run without a GPU.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT] + [str(ROOT), str(TESTS)]


def pytest_report_header() -> str:
    import flash_attn3
    from flash_attn3 import ops

    kernels = f"{len(ops.kernel_table())} kernels" if ops.loaded else ops.load_error
    return f"flash_attn3: {Path(flash_attn3.__file__).parent} ({kernels})"


@pytest.fixture
def kernels(monkeypatch):
    """CPU implementations of the kernel operators, by the portable backend; dispatch finds no reason against them.

    Yields what they were called with: `forward` has q's shapes, `backward` dicts of the arguments that tests look at.
    """
    import torch

    from flash_attn3 import dispatch

    library = torch.library.Library("flash_attn3", "IMPL")
    calls = SimpleNamespace(forward=[], backward=[])
    operators = torch.ops.flash_attn3

    def forward(q, k, v, *options):
        calls.forward.append(tuple(q.shape))
        return operators.portable_forward(q, k, v, None, None, None, None, *options)

    def forward_varlen(q, k, v, *options):
        calls.forward.append(tuple(q.shape))
        return operators.portable_forward_varlen(q, k, v, None, None, None, None, *options)

    def forward_out(q, k, v, sink, out, *mask):
        result, lse = forward(q, k, v, sink, *mask)
        out.copy_(result)
        return lse

    def forward_varlen_out(q, k, v, cu_q, cu_k, used_q, used_k, sink, out, *mask):
        result, lse = forward_varlen(q, k, v, cu_q, cu_k, used_q, used_k, sink, *mask)
        out.copy_(result)
        return lse

    def backward_by(operator, dout, dlse, q, k, v, out, lse, options, targets=None):
        *options, deterministic = options
        strides = None if targets is None else [x.stride() for x in targets]
        calls.backward.append(
            {"deterministic": deterministic, "dlse": dlse, "strides": dout.stride(), "targets": strides}
        )
        dq, dk, dv, _, dsink = operator(dout, dlse, q, k, v, None, out, lse, *options)
        for target, grad in zip(targets or (), (dq, dk, dv), strict=bool(targets)):
            target.copy_(grad)
        return (dq, dk, dv, dsink) if targets is None else dsink

    def backward(dout, dlse, q, k, v, out, lse, *options):
        return backward_by(operators.portable_backward, dout, dlse, q, k, v, out, lse, options)

    def backward_varlen(dout, dlse, q, k, v, out, lse, *options):
        return backward_by(operators.portable_backward_varlen, dout, dlse, q, k, v, out, lse, options)

    def backward_out(dout, dlse, q, k, v, out, lse, sink, dq, dk, dv, *options):
        arguments = (dout, dlse, q, k, v, out, lse, (sink, *options), (dq, dk, dv))
        return backward_by(operators.portable_backward, *arguments)

    def backward_varlen_out(dout, dlse, q, k, v, out, lse, cu_q, cu_k, used_q, used_k, sink, dq, dk, dv, *options):
        arguments = (dout, dlse, q, k, v, out, lse, (cu_q, cu_k, used_q, used_k, sink, *options), (dq, dk, dv))
        return backward_by(operators.portable_backward_varlen, *arguments)

    for function in (
        forward, forward_out, forward_varlen, forward_varlen_out,
        backward, backward_out, backward_varlen, backward_varlen_out,
    ):  # fmt: skip
        library.impl(function.__name__, function, "CPU")
    every = [(1 << 20, 1 << 20)]
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    monkeypatch.setattr(dispatch, "_reasons", lambda problem: [])
    monkeypatch.setattr(dispatch, "_rows", dict.fromkeys(dtypes, every))
    monkeypatch.setattr(dispatch, "_ops", {"packed_schedule", "backward_sink"})
    monkeypatch.setattr(
        dispatch, "_backward_rows", {(dtype, flag): every for dtype in dtypes for flag in (False, True)}
    )
    yield calls
    library._destroy()


@pytest.fixture(params=["portable", "kernel"])
def backend(request):
    """Runs a test on the portable backend and around the kernel operators (see `kernels`); its name."""
    if request.param == "kernel":
        request.getfixturevalue("kernels")
    return request.param
