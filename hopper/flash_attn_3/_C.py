"""Importing this registers torch.ops.flash_attn_3.{fwd, bwd, fwd_combine, get_scheduler_metadata}."""

import flash_attn3.compat  # noqa: F401
