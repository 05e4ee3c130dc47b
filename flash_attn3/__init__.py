"""Exact attention for NVIDIA Hopper GPUs, and the same semantics in plain PyTorch everywhere else.

    from flash_attn3 import flash_attn_func
    out = flash_attn_func(q, k, v, causal=True)        # (B, S, H, D), float16 or bfloat16

`flash_attn_varlen_func` takes sequences of different lengths, packed one after the other; `quantize` makes
float8_e4m3fn inputs. `python -m flash_attn3` says what is installed; `explain` says how a call runs.
"""

from flash_attn3.checks import check_seqlens
from flash_attn3.interface import attention, explain, flash_attn_func, flash_attn_qkvpacked_func
from flash_attn3.quantization import quantize
from flash_attn3.sdpa import scaled_dot_product_attention
from flash_attn3.varlen import (
    attention_varlen,
    explain_varlen,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_attn3.version import __version__

__all__ = [
    "__version__",
    "attention",
    "attention_varlen",
    "check_seqlens",
    "explain",
    "explain_varlen",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_qkvpacked_func",
    "quantize",
    "scaled_dot_product_attention",
]
