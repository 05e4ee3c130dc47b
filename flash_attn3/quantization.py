"""`quantize`: 16-bit q, k or v to float8_e4m3fn and its factors, the inputs of FP8 attention.

What is done to each token and head, in fp32: subtract a mean, or turn by rotary angles; multiply by a random orthogonal
matrix; divide by the scale of its block; round. On the GPUs of `_has_kernel` this is one Triton kernel that reads x and
writes the result (`_kernel_source`; the first call imports Triton), elsewhere plain PyTorch, in
flash_attn3/portable/quantize.py. Both round alike; only the sums of the Hadamard transform differ, in their order.

Not here: gradients (the result has none), packed batches, caches with an offset of the rotary position.
"""

from __future__ import annotations  # the kernels name tl.constexpr before Triton is imported

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn3 import checks
from flash_attn3.portable import quantize as portable

BLOCKS = (64, 128)
MAX_HEAD_DIM = 256
MULTIPLE = 16  # of head_dim and of rotary_dim; keys of a transposed result are padded to it, which TMA wants
# Of one step of the kernel. A program of a single step keeps it in registers and reads x once, 64 fp32 a thread of 8
# warps. More steps read twice, and with the larger tile rotary and Hadamard together spill 400 bytes a thread.
WHOLE_TILE, TILE = 128 * 128, 64 * 128
TOKENS_A_PROGRAM = 128  # where one scale covers the sequence

tl = _values = None  # triton.language and the compiled helper, see _compiled


def quantize(
    x: Tensor,
    *,
    block: int | None = None,
    hadamard: int | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    mean: Tensor | bool | None = None,
    transpose: bool = False,
    kv_heads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Rounds x to float8_e4m3fn, with one factor for each KV head or each block of its tokens; no gradient.

    Arguments:
        x: (B, S, H, D), float16 or bfloat16, last stride 1, D a multiple of 16 up to 256.
        block: tokens that share a factor, 64 or 128: x is read once (from memory). None: one factor for the whole
            sequence, whose maximum is found by a pass of its own.
        hadamard: a seed >= 0: multiplies each row of D by random signs and a normalised Hadamard matrix, which spreads
            outliers. Orthogonal, so that q.k stays what it was if both got the same seed. Where D is no power of two
            it is block-diagonal, of the largest power of two that divides D.
        rotary_cos, rotary_sin: (at least S, rotary_dim / 2), x's dtype; token t is turned by the angles of row t.
            rotary_dim, a multiple of 16 up to D, counts the leading columns that turn.
        rotary_interleaved: columns 2i and 2i + 1 are a pair; otherwise i and i + rotary_dim / 2.
        mean: (B, H, D) float32, subtracted from every token; True takes the mean of x over the tokens. Subtracting one
            vector from all keys leaves the softmax as it was, and lowers lse by softmax_scale * q.mean. Not with
            rotary, after which the keys' mean is another.
        transpose: for v; the result is contiguous along tokens: (B, H, D, S padded with zeros to a multiple of 16) in
            memory.
        kv_heads: the KV heads that q's heads belong to; each group of H / kv_heads heads shares factors. None is H.

    Returns (values, descale) with x ~ values.float() * descale for the x that was rounded, that is after all steps.
    values is (B, S, H, D), contiguous, or with `transpose` a view with stride(1) == 1. descale is float32,
    (B, kv_heads), or with `block` (B, kv_heads, ceil(S / block)): the largest finite magnitude / 448. Where that is
    below 2**-100 the values are zeros and descale is 1. NaN and infinity become NaN and do not count for descale; they
    spread to what they are mixed with: the other of a rotary pair, all D columns with hadamard, all tokens with
    mean=True.

    Raises ValueError naming the argument that does not fit, and ImportError on a Hopper GPU without Triton. The first
    call with a seed copies a matrix to the GPU, so make it before capturing a CUDA graph.
    """
    problem = _checked(x, block, hadamard, rotary_cos, rotary_sin, rotary_interleaved, mean, transpose, kv_heads)
    with torch.no_grad():
        return _by_triton(problem) if _has_kernel(x.device) else portable.quantize(problem)


@dataclass(frozen=True)
class Problem:
    """Checked arguments. `cos`, `sin` and `mean` are contiguous; group is H / kv_heads."""

    x: Tensor
    block: int | None
    hadamard: int | None
    cos: Tensor | None  # (>= S, rotary_dim / 2)
    sin: Tensor | None
    interleaved: bool
    mean: Tensor | None  # (B, H, D) fp32
    transpose: bool
    kv_heads: int

    @property
    def group(self) -> int:
        return self.x.shape[2] // self.kv_heads

    @property
    def norm(self) -> float:
        return portable.transform_size(self.x.shape[3]) ** -0.5

    def outputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Values in their final layout, not yet written, and descale filled with zeros."""
        batch, seqlen, heads, head_dim = self.x.shape
        blocks = () if self.block is None else (-(-seqlen // self.block),)
        descale = self.x.new_zeros(batch, self.kv_heads, *blocks, dtype=torch.float32)
        if not self.transpose:
            return torch.empty(self.x.shape, dtype=dtype, device=self.x.device), descale
        padded = -(-seqlen // MULTIPLE) * MULTIPLE
        values = torch.empty(batch, heads, head_dim, padded, dtype=dtype, device=self.x.device)
        return values.permute(0, 3, 1, 2), descale


def _checked(x, block, hadamard, cos, sin, interleaved, mean, transpose, kv_heads) -> Problem:
    checks.tensor("x", x)
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}; quantize takes (batch, seqlen, heads, head_dim)")
    if x.dtype not in checks.HALF:
        raise ValueError(f"x has dtype {x.dtype}; quantize takes float16 and bfloat16")
    batch, seqlen, heads, head_dim = x.shape
    if not 0 < head_dim <= MAX_HEAD_DIM or head_dim % MULTIPLE != 0:
        raise ValueError(f"x has head dim {head_dim}; it must be a multiple of {MULTIPLE} up to {MAX_HEAD_DIM}")
    if heads < 1:
        raise ValueError("x has 0 heads; it must have at least 1")
    if x.stride(3) != 1:
        raise ValueError(f"x has strides {x.stride()}; the last must be 1, as in x.contiguous()")
    if block is not None and (isinstance(block, bool) or checks.integer("block", block) not in BLOCKS):
        raise ValueError(f"block is {block}; it must be 64, 128 or None")
    if isinstance(hadamard, bool) or (hadamard is not None and checks.integer("hadamard", hadamard) < 0):
        raise ValueError(f"hadamard is {hadamard}; it must be None or a seed, an integer >= 0")
    kv_heads = heads if kv_heads is None else checks.integer("kv_heads", kv_heads)
    if kv_heads < 1 or heads % kv_heads != 0:
        raise ValueError(f"kv_heads is {kv_heads} and x has {heads} heads, which must be a multiple of it")
    if (cos is None) != (sin is None):
        raise ValueError(f"rotary_{'cos' if cos is None else 'sin'} is None; rotary_cos and rotary_sin go together")
    if cos is not None:
        checks.tensor("rotary_cos", cos)
        half = cos.shape[1] if cos.dim() == 2 else 0
        if half < 1 or 2 * half > head_dim or 2 * half % MULTIPLE != 0 or cos.shape[0] < seqlen:
            raise ValueError(
                f"rotary_cos has shape {tuple(cos.shape)}; it must be (at least {seqlen}, rotary_dim / 2) with "
                f"rotary_dim a multiple of {MULTIPLE} up to {head_dim}"
            )
        checks.same("rotary_cos", cos, tuple(cos.shape), x.dtype, x.device)
        checks.same("rotary_sin", sin, tuple(cos.shape), x.dtype, x.device)
        cos, sin = cos.detach().contiguous(), sin.detach().contiguous()
    if mean is False:
        mean = None
    if mean is not None and cos is not None:
        raise ValueError(
            "mean is given together with rotary_cos; only the mean of turned keys leaves the softmax unchanged. "
            "Turn the keys before the call, or leave one of the two out"
        )
    if mean is True:
        mean = x.detach().mean(1, dtype=torch.float32)
    elif mean is not None:
        checks.same("mean", mean, (batch, heads, head_dim), torch.float32, x.device)
    mean = None if mean is None else mean.detach().contiguous()
    return Problem(x.detach(), block, hadamard, cos, sin, bool(interleaved), mean, bool(transpose), kv_heads)


@functools.cache
def _has_kernel(device: torch.device) -> bool:
    """9.0 and 10.x: older and consumer GPUs lack e4m3, or the shared memory for the matrix of head dim 256."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _values_source(
    x,  # of one head, at token 0
    cos,
    sin,
    mean,  # of this head
    matrix,  # (COLS, COLS), loaded
    norm,
    rows,  # (TILE,) tokens, int64
    seqlen,
    x_token,
    HEAD_DIM: tl.constexpr,
    COLS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MEAN: tl.constexpr,
    HADAMARD: tl.constexpr,
):
    """What is to be rounded, (TILE, COLS) fp32; zero beyond the tensor, but for NaN in columns that nobody stores."""
    cols = tl.arange(0, COLS)
    inside = (rows < seqlen)[:, None] & (cols < HEAD_DIM)[None, :]
    raw = tl.load(x + rows[:, None] * x_token + cols[None, :], mask=inside, other=0.0)
    y = raw.to(tl.float32)
    if MEAN:
        y = tl.where(inside, y - tl.load(mean + cols, mask=cols < HEAD_DIM, other=0.0)[None, :], 0.0)
    if HALF > 0:
        if INTERLEAVED:
            partner, angle, first = cols ^ 1, cols // 2, cols % 2 == 0
        else:
            partner, angle, first = tl.where(cols < HALF, cols + HALF, cols - HALF), cols % HALF, cols < HALF
        turns = inside & (cols < 2 * HALF)[None, :]
        angles = rows[:, None] * HALF + angle[None, :]
        c = tl.load(cos + angles, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + angles, mask=turns, other=0.0).to(tl.float32)
        p = tl.load(x + rows[:, None] * x_token + partner[None, :], mask=turns, other=0.0).to(tl.float32)
        # Products of 16-bit numbers are exact in fp32, so a fused multiply-add rounds as the portable path does.
        y = tl.where(turns, y * c + tl.where(first[None, :], -p, p) * s, y)
    if HADAMARD:
        if MEAN or HALF > 0:
            # y has no 16-bit form; two bf16 parts keep 16 bits of it, and cannot overflow as fp16 would.
            high = y.to(matrix.dtype)
            low = (y - high.to(tl.float32)).to(matrix.dtype)
            y = tl.dot(low, matrix, tl.dot(high, matrix)) * norm
        else:
            y = tl.dot(raw, matrix) * norm
    return y


def _kernel_source(
    x,
    out,
    descale,  # (B, kv_heads, blocks); with SHARED (B, kv_heads)
    amax,  # with SHARED the maxima, (B, kv_heads), zero before the measuring launch
    cos,
    sin,
    mean,
    matrix,
    norm,
    seqlen,
    kv_heads,
    blocks,
    padded,  # tokens of `out`: those from seqlen on get zeros
    x_batch,
    x_token,
    x_head,
    out_batch,
    out_token,
    out_head,
    out_col,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MEAN: tl.constexpr,
    HADAMARD: tl.constexpr,
    SHARED: tl.constexpr,
    MEASURE: tl.constexpr,
    WRITE: tl.constexpr,
    LARGEST: tl.constexpr,
    NEGLIGIBLE: tl.constexpr,
):
    """One program: BLOCK tokens of the GROUP query heads of one KV head of one sequence.

    It walks them in steps of TILE tokens of one head, first for the maximum (MEASURE), then again, from L2, to write.
    A single step stays in registers. With SHARED these are two launches, and `amax` carries the maximum over.
    """
    program = tl.program_id(0).to(tl.int64)
    kv_head = program % kv_heads  # neighbours in memory run side by side
    block = program // kv_heads % blocks
    batch = program // kv_heads // blocks
    factor = batch * kv_heads + kv_head
    cols = tl.arange(0, COLS)
    tiles: tl.constexpr = BLOCK // TILE
    steps: tl.constexpr = GROUP * tiles
    m = 0.0
    if HADAMARD:
        m = tl.load(matrix + cols[:, None] * COLS + cols[None, :])
    y = tl.zeros((TILE, COLS), tl.float32)
    if MEASURE:
        largest = 0.0
        for step in range(steps):
            head = kv_head * GROUP + step // tiles
            rows = block * BLOCK + step % tiles * TILE + tl.arange(0, TILE)
            y = _values(
                x + batch * x_batch + head * x_head, cos, sin, mean + (batch * kv_heads * GROUP + head) * HEAD_DIM,
                m, norm, rows, seqlen, x_token, HEAD_DIM, COLS, HALF, INTERLEAVED, MEAN, HADAMARD,
            )  # fmt: skip
            size = tl.abs(y)
            largest = tl.maximum(largest, tl.max(tl.where(size < float("inf"), size, 0.0)))
        if not WRITE:
            tl.atomic_max(amax + factor, largest)
    if WRITE:
        if not MEASURE:
            largest = tl.load(amax + factor)
        negligible = largest < NEGLIGIBLE
        largest = tl.where(negligible, LARGEST, largest)
        scale = tl.where(negligible, 0.0, tl.div_rn(LARGEST, largest))
        if SHARED:
            tl.store(descale + factor, tl.div_rn(largest, LARGEST), mask=block == 0)
        else:
            tl.store(descale + factor * blocks + block, tl.div_rn(largest, LARGEST))
        for step in range(steps):
            head = kv_head * GROUP + step // tiles
            rows = block * BLOCK + step % tiles * TILE + tl.arange(0, TILE)
            if steps > 1 or not MEASURE:
                z = _values(
                    x + batch * x_batch + head * x_head, cos, sin, mean + (batch * kv_heads * GROUP + head) * HEAD_DIM,
                    m, norm, rows, seqlen, x_token, HEAD_DIM, COLS, HALF, INTERLEAVED, MEAN, HADAMARD,
                )  # fmt: skip
            else:
                z = y
            # The conversion saturates, which would make infinity 448.
            z = tl.where(tl.abs(z) < float("inf"), z * scale, float("nan"))
            tl.store(
                out + batch * out_batch + head * out_head + rows[:, None] * out_token + cols[None, :] * out_col,
                z.to(out.dtype.element_ty),
                mask=(rows < padded)[:, None] & (cols < HEAD_DIM)[None, :],
            )


@functools.cache
def _compiled():
    """The Triton kernel. Its helper and triton.language have to be globals of this file for Triton to find them."""
    global tl, _values
    try:
        import triton
        import triton.language
    except ImportError as error:
        raise ImportError(
            "quantize needs Triton on a GPU, and `import triton` failed; `pip install triton` brings it. "
            "A CPU tensor is quantized without it"
        ) from error
    tl, _values = triton.language, triton.jit(_values_source)
    return triton.jit(_kernel_source)


def _by_triton(
    p: Problem, dtype: torch.dtype = checks.FP8, parts: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Other dtypes, of the values and of the summands of fp32, are for Triton's interpreter: it has none of these."""
    kernel = _compiled()
    batch, seqlen, _, head_dim = p.x.shape
    out, descale = p.outputs(dtype)
    shared = p.block is None
    block = p.block or TOKENS_A_PROGRAM
    blocks, cols = -(-seqlen // block), 1 << (head_dim - 1).bit_length()
    tile = block if p.group == 1 and block * cols <= WHOLE_TILE else min(block, TILE // cols)
    exact = p.mean is None and p.cos is None
    matrix = p.x
    if p.hadamard is not None:
        matrix = portable.transform(head_dim, cols, p.hadamard, p.x.dtype if exact else parts, p.x.device)
    amax = torch.zeros_like(descale) if shared else descale
    # Tensors that an option leaves out are never read; x stands in for them.
    tensors = [p.x if t is None else t for t in (p.cos, p.sin, p.mean)]
    if p.x.numel() > 0:
        with torch.cuda.device_of(p.x):  # Triton launches on the current device
            for measure, write in ((True, False), (False, True)) if shared else ((True, True),):
                kernel[(batch * p.kv_heads * blocks,)](
                    p.x, out, descale, amax, *tensors, matrix, p.norm, seqlen, p.kv_heads, blocks, out.shape[1],
                    *p.x.stride()[:3], *out.stride(), GROUP=p.group, BLOCK=block, TILE=tile, HEAD_DIM=head_dim,
                    COLS=cols, HALF=0 if p.cos is None else p.cos.shape[1], INTERLEAVED=p.interleaved,
                    MEAN=p.mean is not None, HADAMARD=p.hadamard is not None, SHARED=shared, MEASURE=measure,
                    WRITE=write, LARGEST=portable.LARGEST, NEGLIGIBLE=portable.NEGLIGIBLE,
                    num_warps=8 if tile * cols >= TILE else 4, num_stages=1, enable_fp_fusion=False,
                )  # fmt: skip
    elif descale.numel() > 0:
        descale.fill_(1.0)
    return out[:, :seqlen], descale
