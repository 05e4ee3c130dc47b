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
    portable_forward, portable_backward = (
        torch.ops.flash_attn3.portable_forward,
        torch.ops.flash_attn3.portable_backward,
    )

    def forward(q, k, v, softmax_scale, causal):
        calls.forward.append(tuple(q.shape))
        return portable_forward(q, k, v, None, None, None, None, softmax_scale, -1, 0 if causal else -1, 0, 0.0)

    def forward_out(q, k, v, out, softmax_scale, causal):
        result, lse = forward(q, k, v, softmax_scale, causal)
        out.copy_(result)
        return lse

    def backward(dout, dlse, q, k, v, out, lse, softmax_scale, causal, deterministic):
        calls.backward.append({"deterministic": deterministic, "dlse": dlse, "strides": dout.stride()})
        window = (-1, 0 if causal else -1)
        return portable_backward(dout, dlse, q, k, v, None, out, lse, softmax_scale, *window, 0, 0.0)[:3]

    def backward_out(dout, dlse, q, k, v, out, lse, dq, dk, dv, *options):
        for target, grad in zip((dq, dk, dv), backward(dout, dlse, q, k, v, out, lse, *options), strict=True):
            target.copy_(grad)

    for function in (forward, forward_out, backward, backward_out):
        library.impl(function.__name__, function, "CPU")
    every = [(1 << 20, 1 << 20)]
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    monkeypatch.setattr(dispatch, "_reasons", lambda problem: [])
    monkeypatch.setattr(dispatch, "_rows", dict.fromkeys(dtypes, every))
    monkeypatch.setattr(
        dispatch, "_backward_rows", {(dtype, flag): every for dtype in dtypes for flag in (False, True)}
    )
    yield calls
    library._destroy()
