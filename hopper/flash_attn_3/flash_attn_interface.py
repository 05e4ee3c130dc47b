"""The objects of the top-level module flash_attn_interface, those with an underscore included."""

from flash_attn_interface import *  # noqa: F403
