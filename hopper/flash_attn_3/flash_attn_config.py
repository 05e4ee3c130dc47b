"""The objects of the top-level module flash_attn_config."""

from flash_attn_config import CONFIG, show

__all__ = ["CONFIG", "show"]
