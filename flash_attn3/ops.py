"""The operators `torch.ops.flash_attn3.*`: schemas, fakes, the native extension and the portable backend behind them.

Schemas live here and not in the extension, so that an install without kernels has the same operators. `_C.so` only
adds implementations: `forward`, `backward` and their `_out` forms for CUDA, and the host-side questions
(`kernel_table`, ...) for every device. Importing never fails: `loaded` says whether the extension is there,
`load_error` why not.
The portable operators are plain PyTorch below one operator each, so that torch.compile sees a single node.
"""

import json
import os

import torch
from torch import Tensor

from flash_attn3 import portable

EXTENSION = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_C.so")

_library = torch.library.Library("flash_attn3", "DEF")
_SCHEMAS = (
    # Kernels: out (B, Sq, H, Dv) in q's dtype and contiguous, lse (B, H, Sq) fp32. Causal is bottom-right.
    "forward(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor, Tensor)",
    "forward_out(Tensor q, Tensor k, Tensor v, Tensor(a!) out, float softmax_scale, bool causal) -> Tensor",
    # Contiguous gradients from the out and lse that are passed in; dlse None is zero. Without `deterministic` dq may be
    # a sum by atomics.
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, "
    "bool causal, bool deterministic) -> (Tensor dq, Tensor dk, Tensor dv)",
    "backward_out(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor(a!) dq, "
    "Tensor(b!) dk, Tensor(c!) dv, float softmax_scale, bool causal, bool deterministic) -> ()",
    # What the extension knows about itself, and its host logic; no GPU needed.
    "kernel_table() -> Tensor",
    "launch_counts() -> Tensor",
    "select_kernel(int head_dim, int head_dim_v, int seqlen_q, int seqlen_k, bool causal, bool bf16) -> int",
    "schedule(int row, int batch, int heads, int kv_heads, int seqlen_q, int seqlen_k, bool causal, int num_sms) "
    "-> Tensor",
    # The rows of one backward, in order of launch; -1 each if the build lacks one of them.
    "select_backward(int head_dim, int head_dim_v, int seqlen_q, int seqlen_k, bool causal, bool bf16, "
    "bool deterministic) -> (int, int, int)",
    # Lines of kernels that hold keys: cta, position, key block, key head, batch, query blocks (first, unmasked, end),
    # part of the tile (-1: all of it), steps (begin, end).
    "schedule_backward(int row, int batch, int heads, int kv_heads, int seqlen_q, int seqlen_k, bool causal, "
    "int num_sms) -> Tensor",
    # Any device. Windows are inclusive bounds around the bottom-right diagonal, -1 is unbounded; causal is right = 0.
    "portable_forward(Tensor q, Tensor k, Tensor v, Tensor? qv, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, int window_left, int window_right, int attention_chunk, float softcap) "
    "-> (Tensor, Tensor)",
    # Gradients from the out and lse that are passed in. dqv is empty without qv; dlse None is zero.
    "portable_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? qv, Tensor out, Tensor lse, "
    "float softmax_scale, int window_left, int window_right, int attention_chunk, float softcap) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dqv)",
)
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def _load() -> tuple[bool, str]:
    if not os.path.exists(EXTENSION):
        return False, "this is the portable install: it was built without the CUDA kernels"
    try:
        torch.ops.load_library(EXTENSION)
    except OSError as error:
        return False, f"the extension could not be loaded: {error}"
    return True, ""


loaded, load_error = _load()


def kernel_table() -> list[dict]:
    """The compiled kernels, one dict a row ("id", "name", "op", "dtype", "head_dim", ...); [] without the extension."""
    return json.loads(bytes(torch.ops.flash_attn3.kernel_table().tolist())) if loaded else []


@torch.library.register_fake("flash_attn3::forward", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    return q.new_empty(batch, seqlen_q, heads, v.shape[3]), q.new_empty(batch, heads, seqlen_q, dtype=torch.float32)


@torch.library.register_fake("flash_attn3::forward_out", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


@torch.library.register_fake("flash_attn3::backward", lib=_library)
def _(dout, dlse, q, k, v, out, lse, softmax_scale, causal, deterministic):
    return portable.empty_gradients(q, k, v, None)[:3]


@torch.library.register_fake("flash_attn3::backward_out", lib=_library)
def _(dout, dlse, q, k, v, out, lse, dq, dk, dv, softmax_scale, causal, deterministic):
    pass


@torch.library.register_fake("flash_attn3::portable_forward", lib=_library)
def _(q, k, v, qv, q_descale, k_descale, v_descale, softmax_scale, window_left, window_right, attention_chunk, softcap):
    return portable.empty_outputs(q, v)


@torch.library.register_fake("flash_attn3::portable_backward", lib=_library)
def _(dout, dlse, q, k, v, qv, out, lse, softmax_scale, window_left, window_right, attention_chunk, softcap):
    return portable.empty_gradients(q, k, v, qv)


_library.impl("portable_forward", portable.forward, "CompositeExplicitAutograd")
_library.impl("portable_backward", portable.backward, "CompositeExplicitAutograd")
