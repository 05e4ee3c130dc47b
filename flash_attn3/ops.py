"""The operators `torch.ops.flash_attn3.*`: schemas, fakes, the native extension and the portable backend behind them.

Schemas live here and not in the extension, so that an install without kernels has the same operators. `_C.so` only
adds implementations: `forward` and `backward`, of dense batches and of packed sequences (`_varlen`), for CUDA, and the
host-side questions (`kernel_table`, ...) for every device; an `_out` form writes the caller's tensors. Importing never
fails: `loaded` says whether the extension is there, `load_error` why not.
The portable operators are plain PyTorch below one operator each, so that torch.compile sees a single node.
"""

import json
import os

import torch
from torch import Tensor

from flash_attn3 import portable

EXTENSION = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_C.so")

_library = torch.library.Library("flash_attn3", "DEF")
# What a query sees, and how its scores become probabilities. Windows are inclusive bounds around the bottom-right
# diagonal, -1 is unbounded, causal is window_right = 0; a chunk or a cap of 0 is none. `sink` is an fp32 logit a head.
_MASK = "float softmax_scale, int window_left, int window_right, int attention_chunk, float softcap"
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k"
_BACKWARD_INPUTS = "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse"
_GRADIENTS = "Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv"
_PORTABLE_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? qv, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale"
_PORTABLE_BACKWARD_INPUTS = (
    "Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? qv, Tensor out, Tensor lse"
)
_PORTABLE_GRADIENTS = "Tensor dq, Tensor dk, Tensor dv, Tensor dqv, Tensor dsink"
_SIZES = "int batch, int heads, int kv_heads, int seqlen_q, int seqlen_k"
_BOUNDS = "int window_left, int window_right, int attention_chunk"
_SCHEMAS = (
    # Kernels: out (B, Sq, H, Dv) in q's dtype and contiguous, lse (B, H, Sq) fp32; of packed sequences out (Tq, H, Dv)
    # and lse (H, Tq). The lengths of packed sequences are read on the GPU only.
    f"forward(Tensor q, Tensor k, Tensor v, Tensor? sink, {_MASK}) -> (Tensor out, Tensor lse)",
    f"forward_out(Tensor q, Tensor k, Tensor v, Tensor? sink, Tensor(a!) out, {_MASK}) -> Tensor",
    f"forward_varlen(Tensor q, Tensor k, Tensor v, {_LENGTHS}, Tensor? sink, {_MASK}) -> (Tensor out, Tensor lse)",
    f"forward_varlen_out(Tensor q, Tensor k, Tensor v, {_LENGTHS}, Tensor? sink, Tensor(a!) out, {_MASK}) -> Tensor",
    # Of float8_e4m3fn inputs, a dense batch: out is bfloat16. Scales are fp32 (B, Hkv); None is 1.
    "forward_fp8(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, Tensor? sink, "
    f"{_MASK}) -> (Tensor out, Tensor lse)",
    # Contiguous gradients from the out and lse that are passed in, and dsink, fp32 (H,), or (0,) without a sink; dlse
    # None is zero. Without `deterministic` dq may be a sum by atomics.
    f"backward({_BACKWARD_INPUTS}, Tensor? sink, {_MASK}, bool deterministic) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    f"backward_out({_BACKWARD_INPUTS}, Tensor? sink, {_GRADIENTS}, {_MASK}, bool deterministic) -> Tensor",
    f"backward_varlen({_BACKWARD_INPUTS}, {_LENGTHS}, Tensor? sink, {_MASK}, bool deterministic) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)",
    f"backward_varlen_out({_BACKWARD_INPUTS}, {_LENGTHS}, Tensor? sink, {_GRADIENTS}, {_MASK}, bool deterministic) "
    "-> Tensor",
    # What the extension knows about itself, and its host logic; no GPU needed. Of packed sequences, lengths are means.
    "kernel_table() -> Tensor",
    "launch_counts() -> Tensor",
    "select_kernel(int head_dim, int head_dim_v, int seqlen_q, int seqlen_k, bool varlen, bool bf16) -> int",
    "select_fp8(int head_dim, int head_dim_v, int seqlen_q, int seqlen_k) -> int",
    # The rows of one backward, in order of launch; -1 each if the build lacks one of them.
    f"select_backward(int head_dim, int head_dim_v, int seqlen_q, int seqlen_k, {_BOUNDS}, bool varlen, bool bf16, "
    "bool deterministic) -> (int, int, int)",
    # The tiles of a row in the order of time; the columns of each are in csrc/binding/schedule.h.
    f"schedule(int row, {_SIZES}, {_BOUNDS}, int num_sms) -> Tensor",
    f"schedule_backward(int row, {_SIZES}, {_BOUNDS}, int num_sms) -> Tensor",
    f"schedule_varlen(int row, {_LENGTHS}, int total_q, int total_k, int heads, int kv_heads, {_BOUNDS}) -> Tensor",
    # How packed sequences lie in tensors of so many rows: by the host on CPU tensors, by the kernel on CUDA ones.
    f"varlen_layout({_LENGTHS}, int total_q, int total_k, int block, bool of_keys) "
    "-> (Tensor sequences, Tensor longest_first, Tensor first_block, Tensor query_gaps, Tensor key_gaps)",
    # Any device. lse, dlse, sink and dsink are fp64 for fp64 inputs.
    f"portable_forward({_PORTABLE_INPUTS}, Tensor? sink, {_MASK}) -> (Tensor out, Tensor lse)",
    f"portable_forward_varlen({_PORTABLE_INPUTS}, {_LENGTHS}, Tensor? sink, {_MASK}) -> (Tensor out, Tensor lse)",
    # dqv and dsink are empty without qv and sink.
    f"portable_backward({_PORTABLE_BACKWARD_INPUTS}, Tensor? sink, {_MASK}) -> ({_PORTABLE_GRADIENTS})",
    f"portable_backward_varlen({_PORTABLE_BACKWARD_INPUTS}, {_LENGTHS}, Tensor? sink, {_MASK}) "
    f"-> ({_PORTABLE_GRADIENTS})",
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


def _empty_lse(q: Tensor) -> Tensor:
    """(B, H, Sq) of a dense q, (H, Tq) of a packed one."""
    return q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32)


def _empty_outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:-1], v.shape[-1]), _empty_lse(q)


def _empty_dsink(q: Tensor, sink: Tensor | None) -> Tensor:
    return q.new_empty(0 if sink is None else q.shape[-2], dtype=torch.float32)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), _empty_dsink(q, sink)


@torch.library.register_fake("flash_attn3::forward", lib=_library)
def _(q, k, v, sink, *mask):
    return _empty_outputs(q, v)


@torch.library.register_fake("flash_attn3::forward_fp8", lib=_library)
def _(q, k, v, q_descale, k_descale, v_descale, sink, *mask):
    return q.new_empty(*q.shape[:-1], v.shape[-1], dtype=torch.bfloat16), _empty_lse(q)


@torch.library.register_fake("flash_attn3::forward_out", lib=_library)
def _(q, k, v, sink, out, *mask):
    return _empty_lse(q)


@torch.library.register_fake("flash_attn3::forward_varlen", lib=_library)
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sink, *mask):
    return _empty_outputs(q, v)


@torch.library.register_fake("flash_attn3::forward_varlen_out", lib=_library)
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sink, out, *mask):
    return _empty_lse(q)


@torch.library.register_fake("flash_attn3::backward", lib=_library)
def _(dout, dlse, q, k, v, out, lse, sink, *mask_and_deterministic):
    return _empty_gradients(q, k, v, sink)


@torch.library.register_fake("flash_attn3::backward_out", lib=_library)
def _(dout, dlse, q, k, v, out, lse, sink, dq, dk, dv, *mask_and_deterministic):
    return _empty_dsink(q, sink)


@torch.library.register_fake("flash_attn3::backward_varlen", lib=_library)
def _(dout, dlse, q, k, v, out, lse, cu_q, cu_k, seqused_q, seqused_k, sink, *mask_and_deterministic):
    return _empty_gradients(q, k, v, sink)


@torch.library.register_fake("flash_attn3::backward_varlen_out", lib=_library)
def _(dout, dlse, q, k, v, out, lse, cu_q, cu_k, seqused_q, seqused_k, sink, dq, dk, dv, *mask_and_deterministic):
    return _empty_dsink(q, sink)


@torch.library.register_fake("flash_attn3::portable_forward", lib=_library)
def _(q, k, v, *_options):
    return portable.empty_outputs(q, v)


@torch.library.register_fake("flash_attn3::portable_forward_varlen", lib=_library)
def _(q, k, v, *_options):
    return portable.empty_outputs(q, v)


@torch.library.register_fake("flash_attn3::portable_backward", lib=_library)
def _(dout, dlse, q, k, v, qv, out, lse, sink, *_mask):
    return portable.empty_gradients(q, k, v, qv, sink)


@torch.library.register_fake("flash_attn3::portable_backward_varlen", lib=_library)
def _(dout, dlse, q, k, v, qv, out, lse, cu_q, cu_k, seqused_q, seqused_k, sink, *_mask):
    return portable.empty_gradients(q, k, v, qv, sink)


_library.impl("portable_forward", portable.forward, "CompositeExplicitAutograd")
_library.impl("portable_forward_varlen", portable.forward_varlen, "CompositeExplicitAutograd")
_library.impl("portable_backward", portable.backward, "CompositeExplicitAutograd")
_library.impl("portable_backward_varlen", portable.backward_varlen, "CompositeExplicitAutograd")
