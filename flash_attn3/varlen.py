"""Variable-length batches, KV caches and merging of partial results: the signatures of FlashAttention-3, for importing.

No backend runs them in this version; each raises NotImplementedError that says what to call instead. They exist because
libraries import all of these names at once and probe their parameters.
"""

import torch


def _missing(function: str, feature: str, instead: str):
    return NotImplementedError(f"{function}: {feature} not implemented in this version; {instead}")


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """Attention of sequences packed as (T, H, D) with cu_seqlens. Raises NotImplementedError in this version."""
    instead = "flash_attn_func takes each sequence, or a batch of equal lengths, as (batch, seqlen, heads, head_dim)"
    raise _missing("flash_attn_varlen_func", "cu_seqlens_q, cu_seqlens_k: variable-length batches are", instead)


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """Attention over a (paged) KV cache, with append and rotary. Raises NotImplementedError in this version."""
    instead = "flash_attn_func over the valid keys, k_cache[:, :length], with causal=True gives the same"
    raise _missing("flash_attn_with_kvcache", "k_cache, v_cache: KV caches are", instead)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merges partial results of splits by their LSE. Raises NotImplementedError in this version."""
    instead = "with lse = logsumexp(lse_partial, 0) it is (out_partial * exp(lse_partial - lse)[..., None]).sum(0)"
    raise _missing("flash_attn_combine", "out_partial, lse_partial: merging partial results is", instead)


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, max_seqlen_k_new=0,
    causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """Scheduling data for flash_attn_with_kvcache. Raises NotImplementedError in this version."""
    instead = "scheduler_metadata may be left out everywhere"
    raise _missing("get_scheduler_metadata", "batch_size: scheduler metadata is", instead)


def maybe_contiguous(x):
    """x, or a copy of it if its last stride is not 1; None stays None."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x
