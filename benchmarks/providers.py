"""The implementations that are measured, each called through its own Python API in its natural layout.

All get the same (B, S, H, D) storage; those behind F.scaled_dot_product_attention get transposed views of it. A
provider that cannot be imported, or that is this library under another name, is left out.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn3

Call = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Provider:
    """`call` takes q, k, v (B, S, H, D) and causal, returns out (B, S, H, Dv); `context` is entered around a round."""

    name: str
    call: Call
    context: Callable[[], AbstractContextManager] = field(default=nullcontext)


def _through_sdpa(function: Callable) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return function(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return call


def _ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash_attn3.flash_attn_func(q, k, v, causal=causal)


def _foreign(module_name: str) -> Call | None:
    """flash_attn_func of an importable peer; None if it is absent, broken here, or ours."""
    try:
        function = importlib.import_module(module_name).flash_attn_func
    except Exception:  # a peer built for another torch or GPU fails in many ways, none of which matters here
        return None
    if function is flash_attn3.flash_attn_func:
        return None

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        result = function(q, k, v, causal=causal)
        return result[0] if isinstance(result, tuple) else result

    return call


def _sdpa(name: str, backend: SDPBackend) -> Provider:
    return Provider(name, _through_sdpa(F.scaled_dot_product_attention), lambda: sdpa_kernel(backend))


def available(device: str) -> list[Provider]:
    """Providers for "cuda", ours first; on "cpu" ours and torch's own formula, to try the harness out."""
    ours = Provider("flash_attn3", _ours)
    if device == "cpu":
        return [ours, _sdpa("math", SDPBackend.MATH)]
    providers = [ours, _sdpa("cudnn", SDPBackend.CUDNN_ATTENTION), _sdpa("fa2", SDPBackend.FLASH_ATTENTION)]
    for name, module in (("fa3", "flash_attn_interface"), ("fa4", "flash_attn.cute")):
        call = _foreign(module)
        if call is not None:
            providers.append(Provider(name, call))
    return providers


def ours_through_sdpa() -> Provider:
    """Our drop-in for F.scaled_dot_product_attention, for the host's time a call."""
    return Provider("flash_attn3", _through_sdpa(flash_attn3.scaled_dot_product_attention))


def make_inputs(cell, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v ~ N(0, 1), contiguous (B, S, H, D)."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[cell.dtype]
    generator = torch.Generator(device).manual_seed(0)
    sizes = (
        (cell.seqlen_q, cell.heads, cell.head_dim),
        (cell.seqlen_k, cell.kv_heads, cell.head_dim),
        (cell.seqlen_k, cell.kv_heads, cell.head_dim_v),
    )
    return tuple(torch.randn(cell.batch, *size, dtype=dtype, device=device, generator=generator) for size in sizes)


def reference_rows(seqlen: int) -> Tensor:
    """Rows that are compared: the first and last of the sequence and some in between."""
    spread = torch.linspace(0, seqlen - 1, min(seqlen, 33)).long()
    ends = torch.tensor([0, 1, 63, 64, 127, 128, seqlen - 65, seqlen - 64, seqlen - 2, seqlen - 1])
    return torch.cat([spread, ends]).clamp(0, seqlen - 1).unique()


def relative_error(out: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> float:
    """|out - ref| / |ref| over some rows of the first head of the first batch and the last of the last, in float64."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    rows = reference_rows(seqlen_q).to(q.device)
    visible = torch.arange(seqlen_k, device=q.device) <= (rows + seqlen_k - seqlen_q)[:, None]
    errors = norms = 0.0
    for b, h in ((0, 0), (batch - 1, heads - 1)):
        s = q[b, rows, h].double() @ k[b, :, h // group].double().T * q.shape[3] ** -0.5
        if causal:
            s = s.masked_fill(~visible, -torch.inf)
        ref = s.softmax(-1) @ v[b, :, h // group].double()
        errors += (out[b, rows, h].double() - ref).square().sum().item()
        norms += ref.square().sum().item()
    return (errors / norms) ** 0.5
