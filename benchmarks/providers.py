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
from benchmarks.cells import UNBOUNDED, sequence_lengths

Call = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Provider:
    """`call` takes q, k, v (B, S, H, D) and causal, returns out (B, S, H, Dv); `context` is entered around a round."""

    name: str
    call: Call
    context: Callable[[], AbstractContextManager] = field(default=nullcontext)
    deterministic: bool = False
    repeats: int = 1  # times that every head of k and v is repeated before the call, untimed

    @property
    def label(self) -> str:
        """The name in tables: our deterministic mode is a column of its own."""
        return f"{self.name} deterministic" if self.deterministic else self.name


def _through_sdpa(function: Callable) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return function(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    return call


def _ours(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash_attn3.flash_attn_func(q, k, v, causal=causal)


def _ours_deterministic(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return flash_attn3.flash_attn_func(q, k, v, causal=causal, deterministic=True)


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


def for_cell(cell, candidates: list[Provider], device: str = "cuda") -> list[Provider]:
    """Those of `available` that a cell measures: fa2 is no peer of a backward, which has our deterministic mode too.

    Inputs in float8_e4m3fn are for ours alone. Packed sequences and windows are for ours and fa2, which both get what
    the others have no argument for.
    """
    if cell.dtype == "fp8":
        return candidates[:1]
    if cell.packed or cell.window != UNBOUNDED:
        return [Provider("flash_attn3", _ours_of(cell, device)), *([] if device == "cpu" else [_fa2_of(cell, device)])]
    if cell.op != "bwd":
        return candidates
    ours = [Provider("flash_attn3", _ours_deterministic, deterministic=True)] if cell.deterministic_too else []
    return [*(p for p in candidates if p.name != "fa2"), *ours]


def boundaries(cell, device: str) -> Tensor:
    """cu_seqlens of a packed cell."""
    lengths = torch.tensor((0, *sequence_lengths(cell.case)), device=device)
    return lengths.cumsum(0, dtype=torch.int32)


def _ours_of(cell, device: str) -> Call:
    if not cell.packed:
        return lambda q, k, v, causal: flash_attn3.flash_attn_func(q, k, v, causal=causal, window_size=cell.window)
    cu, longest = boundaries(cell, device), cell.seqlen_q
    return lambda q, k, v, causal: flash_attn3.flash_attn_varlen_func(
        q, k, v, cu, cu, longest, longest, causal=causal, window_size=cell.window
    )


def _fa2_of(cell, device: str) -> Provider:
    """torch's own operator, differentiable too; the only way to its lengths and windows."""
    cu, longest = boundaries(cell, device) if cell.packed else None, cell.seqlen_q
    left, right = (None if bound < 0 else bound for bound in cell.window)

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, longest, longest, 0.0, causal, False, window_size_left=left, window_size_right=right
        )[0]

    return Provider("fa2", call, repeats=cell.heads // cell.kv_heads)


def ours_through_sdpa() -> Provider:
    """Our drop-in for F.scaled_dot_product_attention, for the host's time a call."""
    return Provider("flash_attn3", _through_sdpa(flash_attn3.scaled_dot_product_attention))


def make_inputs(cell, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout ~ N(0, 1), contiguous (B, S, H, D), of packed sequences (T, H, D); fp8 is rounded bf16."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}[cell.dtype]
    generator = torch.Generator(device).manual_seed(0)
    tokens = (sum(sequence_lengths(cell.case)),) if cell.packed else None
    rows, keys = tokens or (cell.batch, cell.seqlen_q), tokens or (cell.batch, cell.seqlen_k)
    sizes = (
        (*rows, cell.heads, cell.head_dim),
        (*keys, cell.kv_heads, cell.head_dim),
        (*keys, cell.kv_heads, cell.head_dim_v),
        (*rows, cell.heads, cell.head_dim_v),
    )
    tensors = (torch.randn(*size, dtype=dtype, device=device, generator=generator) for size in sizes)
    return tuple(x.to(torch.float8_e4m3fn) if cell.dtype == "fp8" else x for x in tensors)


def repeated(tensors: tuple[Tensor, ...], times: int) -> tuple[Tensor, ...]:
    """q, k, v, dout with every head of k and v `times` times."""
    q, k, v, dout = tensors
    return q, *(x.repeat_interleave(times, -2) if times > 1 else x for x in (k, v)), dout


def gradients_of(grads: tuple[Tensor, ...], times: int) -> tuple[Tensor, ...]:
    """dq, dk, dv of the tensors before `repeated`."""
    dq, *others = grads
    return dq, *(x.float().unflatten(-2, (-1, times)).sum(-2) if times > 1 else x for x in others)
