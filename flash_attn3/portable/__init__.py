"""Attention in plain PyTorch, blockwise, O(N) memory: the backend for CPUs, other GPUs and what the kernels refuse.

`forward` and `backward` are the bodies of the operators `flash_attn3::portable_forward` and `portable_backward`; their
arguments are positional as in those schemas. They expect inputs that flash_attn3.checks has accepted.
Arithmetic is fp32, and fp64 for fp64 inputs.
"""

from flash_attn3.portable.backward import backward, empty_gradients
from flash_attn3.portable.forward import empty_outputs, forward

__all__ = ["backward", "empty_gradients", "empty_outputs", "forward"]
