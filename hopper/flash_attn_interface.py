"""FlashAttention-3's module name for flash_attn3: the same objects, and torch.ops.flash_attn_3.* registered."""

from flash_attn3.compat import _flash_attn_backward, _flash_attn_forward
from flash_attn3.interface import flash_attn_func, flash_attn_qkvpacked_func
from flash_attn3.varlen import (
    flash_attn_combine,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
    maybe_contiguous,
)

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "maybe_contiguous",
]
