"""Attention in plain PyTorch, blockwise, O(N) memory: the backend for CPUs, other GPUs and what the kernels refuse.

`forward`, `backward` and, for packed batches, `forward_varlen` and `backward_varlen` are the bodies of the operators
`flash_attn3::portable_*`; their arguments are positional as in those schemas. They expect inputs that
flash_attn3.checks has accepted.
Arithmetic is fp32, and fp64 for fp64 inputs.
"""

from flash_attn3.portable.backward import backward, empty_gradients
from flash_attn3.portable.forward import empty_outputs, forward
from flash_attn3.portable.packed import backward_varlen, forward_varlen, sequences

__all__ = [
    "backward",
    "backward_varlen",
    "empty_gradients",
    "empty_outputs",
    "forward",
    "forward_varlen",
    "sequences",
]
