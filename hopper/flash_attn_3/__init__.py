"""FlashAttention-3's package name for flash_attn3; see flash_attn_3.flash_attn_interface."""

from flash_attn3.version import __version__

__all__ = ["__version__"]
