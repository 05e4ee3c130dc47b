"""Which blocks a kernel walks under a mask, and which of them without masking, against the mask written out.

Random lengths, windows and chunks (10,000 problems), asked of torch.ops.flash_attn3.schedule_backward, which
runs the functions that the kernels run: no block with a visible pair is skipped, none without one is walked, and
those that are not masked are exactly those that are visible as a whole. Then the numbers at the ends of their ranges.
`Bounds` and the spans that follow from them serve test_schedule*.py too.
"""

import math
import random
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch

from flash_attn3 import ops

pytestmark = pytest.mark.skipif(not ops.loaded, reason=f"no extension: {ops.load_error}")

PROBLEMS = 5000  # of each operator
GROUPS = 5  # pytest cases that share them
ROWS = 64  # of a warpgroup
MOST_ROWS = 2**31 - 1 - 1024


class Bounds(NamedTuple):
    """A mask as the operators take it: inclusive bounds around the bottom-right diagonal, -1: none; chunk 0: none."""

    left: int = -1
    right: int = -1
    chunk: int = 0

    def on(self, seqlen_q: int, seqlen_k: int) -> "Bounds":
        """What is left of them on lengths that are known: the kernels drop bounds that hide nothing."""
        left = self.left if 0 <= self.left < seqlen_k - 1 else -1
        right = self.right if 0 <= self.right < seqlen_q - 1 else -1
        # A chunk of all keys hides nothing but from rows before the first key, and causality does that.
        one_chunk = self.right == 0 and self.chunk >= seqlen_k
        return Bounds(left, right, 0 if one_chunk else self.chunk)


FULL, CAUSAL = Bounds(), Bounds(right=0)


def random_bounds(pick: random.Random, size: int) -> Bounds:
    """Any mask for lengths of about `size`."""

    def width() -> int:
        return pick.choice([-1, 0, 1, pick.randint(0, 70), pick.randint(0, size + 2), int(2 ** pick.uniform(0, 40))])

    chunk = pick.choice(
        [0, 0, 1, pick.randint(1, 70), 64, 128, pick.randint(1, size + 2), int(2 ** pick.uniform(0, 40))]
    )
    return Bounds(width(), pick.choice([-1, 0, width()]), chunk)


def _spans(positions: np.ndarray, below: int, above: int, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
    """[begin, end) of the positions that lie between `below` before and `above` behind, in the same chunk."""
    far = 2**32  # as good as infinite
    begin = positions - (min(below, far) if below >= 0 else far)
    end = positions + 1 + (min(above, far) if above >= 0 else far)
    if bounds.chunk > 0:
        size = min(bounds.chunk, far)
        chunk = positions // size * size
        begin, end = np.maximum(begin, chunk), np.minimum(end, chunk + size)
    return begin, end


def key_spans(rows: np.ndarray, seqlen_q: int, seqlen_k: int, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
    """[begin, end) of the keys that each row sees, both 0 if there are none."""
    begin, end = _spans(rows.astype(np.int64) + seqlen_k - seqlen_q, bounds.left, bounds.right, bounds)
    begin, end = begin.clip(0), end.clip(max=seqlen_k)
    return np.where(begin < end, begin, 0), np.where(begin < end, end, 0)


def row_spans(keys: np.ndarray, seqlen_q: int, seqlen_k: int, bounds: Bounds) -> tuple[np.ndarray, np.ndarray]:
    """[begin, end) of the rows that see each key, both 0 if there are none."""
    begin, end = _spans(keys.astype(np.int64), bounds.right, bounds.left, bounds)
    offset = seqlen_k - seqlen_q
    begin, end = (begin - offset).clip(0), (end - offset).clip(max=seqlen_q)
    return np.where(begin < end, begin, 0), np.where(begin < end, end, 0)


def visible(seqlen_q: int, seqlen_k: int, bounds: Bounds) -> np.ndarray:
    """(seqlen_q, seqlen_k) bool, by the definition."""
    p = np.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
    j = np.arange(seqlen_k)[None]
    sees = np.ones((seqlen_q, seqlen_k), bool)
    if bounds.left >= 0:
        sees &= j >= p - bounds.left
    if bounds.right >= 0:
        sees &= j <= p + bounds.right
    if bounds.chunk > 0:
        sees &= j // bounds.chunk == p // bounds.chunk
    return sees


def blocks_of(sees: np.ndarray, held: int, walked: int, ends_are_masked: bool) -> tuple[np.ndarray, np.ndarray]:
    """(blocks held, blocks walked), twice: whether anything of a block is visible, and whether all of it is. What lies
    behind the end of the first dimension hides nothing or, `ends_are_masked`, everything; of the second the reverse."""
    shape = [math.ceil(size / block) * block for size, block in zip(sees.shape, (held, walked), strict=True)]
    some, whole = np.zeros(shape, bool), np.empty(shape, bool)
    some[: sees.shape[0], : sees.shape[1]] = sees
    whole[:] = not ends_are_masked
    whole[: sees.shape[0]] = ends_are_masked
    whole[: sees.shape[0], : sees.shape[1]] = sees
    by_block = (shape[0] // held, held, shape[1] // walked, walked)
    return some.reshape(by_block).any((1, 3)), whole.reshape(by_block).all((1, 3))


@cache
def rows_of_shapes(*names: str) -> list[dict]:
    """One row of the build for each pair of block sizes of these operations."""
    table = [row for row in ops.kernel_table() if row["op"] in names]
    return list({(row["block_m"], row["block_n"]): row for row in table}.values())


def lines_of(row: dict, seqlen_q: int, seqlen_k: int, bounds: Bounds) -> np.ndarray:
    """Those of schedule_backward, which answers for the forward kernels too."""
    return torch.ops.flash_attn3.schedule_backward(row["id"], 1, 1, 1, seqlen_q, seqlen_k, *bounds, 132).numpy()


def check_walk(lines: np.ndarray, columns: tuple[int, ...], some: np.ndarray, whole: np.ndarray) -> None:
    """`columns` are those of the block that is held and of the four bounds of the blocks that are walked."""
    held, begin, end, unmasked_begin, unmasked_end = lines[:, columns].T[:, :, None]
    held = held[:, 0]
    assert sorted(set(held.tolist())) == list(range(len(some)))
    blocks = np.arange(some.shape[1])
    walked = (begin <= blocks) & (blocks < end)
    assert (walked == some[held]).all()
    assert (((unmasked_begin <= blocks) & (blocks < unmasked_end)) == whole[held]).all()
    assert ((begin <= unmasked_begin) & (unmasked_begin <= unmasked_end) & (unmasked_end <= end)).all()
    assert (begin >= 0).all() and (end <= len(blocks)).all()


def check_keys(row: dict, seqlen_q: int, seqlen_k: int, bounds: Bounds) -> None:
    lines = lines_of(row, seqlen_q, seqlen_k, bounds)
    lines[:, 3] //= ROWS
    sees = visible(seqlen_q, seqlen_k, bounds)
    check_walk(lines, (3, 6, 7, 8, 9), *blocks_of(sees, ROWS, row["block_n"], False))


def check_queries(row: dict, seqlen_q: int, seqlen_k: int, bounds: Bounds) -> None:
    lines = lines_of(row, seqlen_q, seqlen_k, bounds)
    sees = visible(seqlen_q, seqlen_k, bounds).T
    check_walk(lines, (2, 5, 6, 7, 8), *blocks_of(sees, row["block_n"], row["block_m"], True))


def check_random(group: int, names: tuple[str, ...], check) -> None:
    rows = rows_of_shapes(*names)
    if not rows:
        pytest.skip(f"this build has none of {names}")
    pick = random.Random(group)
    for number in range(PROBLEMS // GROUPS):
        size = pick.choice([20, 200, 200, 500])
        seqlen_q, seqlen_k = pick.randint(1, size), pick.randint(1, size)
        bounds = random_bounds(pick, size)
        row = rows[number % len(rows)]
        try:
            check(row, seqlen_q, seqlen_k, bounds)
        except AssertionError as error:
            raise AssertionError(f"{row['name']}: Sq {seqlen_q}, Sk {seqlen_k}, {bounds}") from error


@pytest.mark.parametrize("group", range(GROUPS))
def test_blocks_of_keys(group):
    check_random(group, ("forward", "backward_queries"), check_keys)


@pytest.mark.parametrize("group", range(GROUPS))
def test_blocks_of_queries(group):
    check_random(group, ("backward", "backward_keys"), check_queries)


def test_spans_are_the_mask():
    """What test_schedule*.py compares with at lengths that are too large to write the mask out."""
    pick = random.Random(0)
    for _ in range(500):
        seqlen_q, seqlen_k = pick.randint(1, 90), pick.randint(1, 90)
        bounds = random_bounds(pick, 90)
        sees = visible(seqlen_q, seqlen_k, bounds)
        rows, keys = np.arange(seqlen_q), np.arange(seqlen_k)
        begin, end = key_spans(rows, seqlen_q, seqlen_k, bounds)
        assert (sees == ((begin[:, None] <= keys) & (keys < end[:, None]))).all()
        begin, end = row_spans(keys, seqlen_q, seqlen_k, bounds)
        assert (((begin[:, None] <= rows) & (rows < end[:, None])) == sees.T).all()


def test_largest_numbers():
    """Lengths near 2^31 and bounds up to 2^63 - 1, of which nothing may overflow."""
    widths = (-1, 0, 1, 1000, MOST_ROWS, 2**31 - 1, 2**31, 2**63 - 1)
    every = [Bounds(left, right, chunk) for left in widths for right in widths for chunk in (0, 1, 1000, 2**63 - 1)]
    rows = rows_of_shapes("forward", "backward_queries"), rows_of_shapes("backward", "backward_keys")
    for number, bounds in enumerate(random.Random(0).sample(every, 150)):
        for walked in (300, MOST_ROWS):
            if rows[0]:
                row = rows[0][number % len(rows[0])]
                lines = lines_of(row, 100, walked, bounds)
                check_ends(
                    lines[:, 6:10], lines[:, 3], ROWS, key_spans(np.arange(100), 100, walked, bounds), row["block_n"]
                )
            if rows[1]:
                row = rows[1][number % len(rows[1])]
                lines = lines_of(row, walked, 100, bounds)
                spans = row_spans(np.arange(100), walked, 100, bounds)
                check_ends(lines[:, 5:9], lines[:, 2] * row["block_n"], row["block_n"], spans, row["block_m"], walked)


def check_ends(bounds: np.ndarray, firsts: np.ndarray, held: int, spans, block: int, free_end: int = -1) -> None:
    """The block bounds of each line are those of the spans of what it holds, `held` from `first` on. Nothing is hidden
    behind `free_end`."""
    for (begin, end, unmasked_begin, unmasked_end), first in zip(bounds.tolist(), firsts.tolist(), strict=True):
        begins, ends = (span[first : first + held] for span in spans)
        some = begins < ends
        if not some.any():
            assert begin >= end
            continue
        assert (begin, end) == (begins[some].min() // block, -(-ends[some].max() // block))
        if unmasked_begin < unmasked_end:
            assert begins.max() <= unmasked_begin * block
            assert unmasked_end * block <= ends.min() or (ends.min() == ends.max() and unmasked_end == end)
