"""Host logic without a GPU: which CTA does which tile when, and which key blocks each warpgroup walks.

Properties over thousands of random shapes and masks of torch.ops.flash_attn3.schedule, which runs the functions that
the kernels run: every row exactly once, no needed key block skipped and none walked in vain, balanced, longest first
when causal. Of the kernels whose CTAs hold queries: the forward, and dQ of the backward. test_schedule_backward.py has
the others, test_schedule_varlen.py packed batches.
"""

import heapq
import math
import random
from functools import cache

import numpy as np
import pytest
import torch
from test_masks import CAUSAL, FULL, Bounds, key_spans, random_bounds

from flash_attn3 import ops

pytestmark = pytest.mark.skipif(not ops.loaded, reason=f"no extension: {ops.load_error}")

ROWS_OF_A_WARPGROUP = 64
SHAPES = 1200
GROUPS = 12  # pytest cases that share them
CTA, SEQUENCE, WARPGROUP, ROW, HEAD, BATCH, BEGIN, END, UNMASKED, UNMASKED_END = range(10)


@cache
def table(*names: str) -> list[dict]:
    return [row for row in ops.kernel_table() if row["op"] in (names or ("forward", "backward_queries"))]


def one_dtype(rows: list[dict]) -> list[dict]:
    """The rows without those that differ from others in the dtype alone: schedules do not depend on it."""
    return list({row["name"].replace(row["dtype"], ""): row for row in rows}.values())


def schedule(row: dict, batch, heads, kv_heads, seqlen_q, seqlen_k, bounds: Bounds, num_sms) -> torch.Tensor:
    """(n, 10) lines, by sequence number."""
    question = (row["id"], batch, heads, kv_heads, seqlen_q, seqlen_k, *bounds, num_sms)
    lines = torch.ops.flash_attn3.schedule(*question)
    assert lines.dtype == torch.int64 and lines.dim() == 2 and lines.shape[1] == 10
    return lines[lines[:, SEQUENCE].argsort(stable=True)]


def tile_work(lines: torch.Tensor) -> torch.Tensor:
    """(tiles, 2) in launch order: the CTA of each tile, and the key blocks of its longest warpgroup."""
    first = lines[lines[:, WARPGROUP] == 0]
    longest = torch.zeros(len(first), dtype=torch.int64)
    longest.scatter_reduce_(0, lines[:, SEQUENCE], lines[:, END] - lines[:, BEGIN], "amax")
    return torch.stack([first[:, CTA], longest], 1)


def cta_loads(work: torch.Tensor, num_sms: int) -> torch.Tensor:
    """Key blocks that each CTA walks. CTAs that take tiles from a counter are numbered by position in the order: there
    the next tile goes to the CTA that is free first."""
    grid = min(num_sms, len(work))
    if torch.equal(work[:, 0], torch.arange(len(work)) % grid):
        free = [0] * grid
        for blocks in work[:, 1].tolist():
            heapq.heapreplace(free, free[0] + blocks)
        return torch.tensor(free)
    return torch.zeros(grid, dtype=torch.int64).index_add_(0, work[:, 0], work[:, 1])


def check_walk(held: np.ndarray, walked: torch.Tensor, spans, block: int, seqlen_q: int = 0) -> None:
    """Each of `walked` (n, 4), block bounds, is what the n lines of `held` need: numbers into the spans, -1 for none.
    Exactly the blocks with something visible; without a mask exactly those that are visible as a whole. Where queries
    are walked, `seqlen_q`, rows behind the last need no mask, but keys behind the last do."""
    begins, ends = (span[held] for span in spans)
    exists, some = held >= 0, (begins < ends) & (held >= 0)
    far = np.int64(2**62)
    begin, end = np.where(some, begins, far).min(1) // block, -(-np.where(some, ends, 0).max(1) // block)
    walked_begin, walked_end, unmasked_begin, unmasked_end = walked.numpy().T
    any_seen = some.any(1)
    assert (walked_begin == walked_end)[~any_seen].all()
    assert (walked_begin == begin)[any_seen].all() and (walked_end == end)[any_seen].all()

    latest, earliest = np.where(exists, begins, 0).max(1), np.where(exists, ends, far).min(1)
    whole_begin, whole_end = -(-latest // block), earliest // block
    may_be_whole = any_seen & (exists == some).all(1)
    if seqlen_q:
        whole_end = np.where(earliest >= seqlen_q, end, whole_end)
        may_be_whole &= exists.all(1)
    whole = np.where(may_be_whole, (whole_end - whole_begin).clip(0), 0)
    assert (unmasked_end - unmasked_begin == whole).all()
    assert (unmasked_begin == whole_begin)[whole > 0].all()


def check(row: dict, batch, heads, kv_heads, seqlen_q, seqlen_k, bounds: Bounds, num_sms) -> None:
    lines = schedule(row, batch, heads, kv_heads, seqlen_q, seqlen_k, bounds, num_sms)
    block_m, block_n = row["block_m"], row["block_n"]
    tiles = batch * heads * math.ceil(seqlen_q / block_m)
    if not tiles:
        assert len(lines) == 0
        return

    # Every (batch, head, 64 rows) exactly once; a tile is consecutive lines of one CTA; tiles are numbered.
    groups = math.ceil(seqlen_q / ROWS_OF_A_WARPGROUP)
    rows = lines[:, ROW]
    assert (rows % ROWS_OF_A_WARPGROUP == 0).all() and (lines[:, [ROW, HEAD, BATCH]] >= 0).all()
    assert (rows < seqlen_q).all() and (lines[:, HEAD] < heads).all() and (lines[:, BATCH] < batch).all()
    key = (lines[:, BATCH] * heads + lines[:, HEAD]) * groups + rows // ROWS_OF_A_WARPGROUP
    assert torch.equal(key.sort().values, torch.arange(batch * heads * groups))
    assert torch.equal(lines[:, WARPGROUP], rows % block_m // ROWS_OF_A_WARPGROUP)
    follows = lines[1:, WARPGROUP] > 0
    same_tile = lines[1:] - lines[:-1]
    assert (same_tile[follows][:, [CTA, SEQUENCE, HEAD, BATCH]] == 0).all()
    assert (same_tile[follows][:, ROW] == ROWS_OF_A_WARPGROUP).all()
    first = lines[lines[:, WARPGROUP] == 0]
    ctas, sequence = first[:, CTA], first[:, SEQUENCE]
    assert len(first) == tiles
    assert (ctas >= 0).all() and (ctas < num_sms).all() and (sequence >= 0).all()
    assert torch.equal(sequence, torch.arange(tiles))

    # Key blocks: the same of every (batch, head); exactly those with a key that a row sees.
    once = lines[(lines[:, HEAD] == 0) & (lines[:, BATCH] == 0)]
    once = once[once[:, ROW].argsort()]
    assert torch.equal(lines[:, BEGIN:], once[rows // ROWS_OF_A_WARPGROUP][:, BEGIN:])
    held = np.arange(groups * ROWS_OF_A_WARPGROUP).reshape(groups, -1)
    spans = key_spans(np.arange(seqlen_q), seqlen_q, seqlen_k, bounds)
    check_walk(np.where(held < seqlen_q, held, -1), once[:, BEGIN:], spans, block_n)

    # Balance: every CTA has a tile, and none has more than its share and the two largest tiles.
    work = tile_work(lines)
    loads = cta_loads(work, num_sms)
    assert loads.max() <= loads.sum() / len(loads) + 2 * work[:, 1].max()
    assert len(ctas.unique()) == min(num_sms, tiles)

    # Longest first within every head when causal, and over all where K and V surely stay in L2.
    if bounds == CAUSAL:
        position = (first[:, BATCH] * heads + first[:, HEAD]).argsort(stable=True)
        ordered = first[position]
        same_head = (ordered[1:, [HEAD, BATCH]] == ordered[:-1, [HEAD, BATCH]]).all(1)
        assert (ordered[1:, ROW] < ordered[:-1, ROW])[same_head].all()
        if 2 * batch * kv_heads * seqlen_k * (row["head_dim"] + row["head_dim_v"]) <= 2**21:
            assert (work[1:, 1] <= work[:-1, 1]).all()


def random_problem(pick: random.Random) -> tuple:
    kv_heads = pick.choice([1, 1, 2, 3, 8])
    heads = kv_heads * pick.choice([1, 1, 2, 3, 7, 8])
    lengths = [
        pick.choice([int(2 ** pick.uniform(0, 11)), pick.randint(0, 300), 64 * pick.randint(0, 12)]) for _ in "qk"
    ]
    return (
        pick.choice([0, 1, 1, 2, 3, 5]),
        heads,
        kv_heads,
        *lengths,
        pick.choice([FULL, CAUSAL, CAUSAL, random_bounds(pick, max(lengths))]),
        pick.choice([1, 2, 7, 78, 132]),
    )


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_shapes(group):
    pick = random.Random(group)
    for number in range(SHAPES // GROUPS):
        row, problem = table()[number % len(table())], random_problem(pick)
        try:
            check(row, *problem)
        except AssertionError as error:
            raise AssertionError(f"{row['name']}: (B, H, Hkv, Sq, Sk, bounds, SMs) = {problem}") from error


@pytest.mark.parametrize("bounds", [FULL, CAUSAL], ids=["full", "causal"])
def test_every_row_at_its_tile_edges(bounds):
    for row in one_dtype(table()):
        m, n = row["block_m"], row["block_n"]
        for seqlen_q in (1, 63, 64, 65, m - 1, m, m + 1, 2 * m + 65):
            for seqlen_k in (0, 1, n - 1, n, n + 1, m, m + n):
                check(row, 2, 2, 1, seqlen_q, seqlen_k, bounds, 132)


@pytest.mark.parametrize("bounds", [FULL, CAUSAL], ids=["full", "causal"])
def test_standard_grid_is_balanced(bounds):
    """At least 85 % of the SMs' time is used, counting key blocks alone, wherever there are two tiles an SM."""
    for row in one_dtype(table()):
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
            heads = 2048 // row["head_dim"]
            work = tile_work(schedule(row, 16384 // seqlen, heads, heads, seqlen, seqlen, bounds, 132))
            loads = cta_loads(work, 132).float()
            if len(work) >= 264:
                assert loads.mean() / loads.max() >= 0.85, (
                    f"{row['name']} at {seqlen}: {loads.mean() / loads.max():.2f}"
                )


def test_long_sequences_do_not_overflow():
    for row in one_dtype(table()):
        check(row, 1, 1, 1, 65, 2**31 - 1025, CAUSAL, 132)
    for row in table()[:2]:
        check(row, 1, 1, 1, 2**17, 2**20, CAUSAL, 132)


@pytest.mark.parametrize("varlen", [False, True])
def test_selection_is_a_row_that_holds_the_head_dims(varlen):
    for bf16 in (True, False):
        for head_dim in (1, 8, 33, 64, 72, 96, 128, 160, 192, 200, 256):
            for head_dim_v in {head_dim, 64, 128}:
                row = torch.ops.flash_attn3.select_kernel(head_dim, head_dim_v, 128, 128, varlen, bf16)
                holding = [
                    (r["head_dim"], r["head_dim_v"])
                    for r in table("forward")
                    if (r["dtype"] == "bf16") == bf16 and r["head_dim"] >= head_dim and r["head_dim_v"] >= head_dim_v
                ]
                if not holding:
                    assert row == -1
                    continue
                chosen = next(r for r in table("forward") if r["id"] == row)
                assert (chosen["head_dim"], chosen["head_dim_v"]) == min(holding)
                assert (chosen["dtype"] == "bf16") == bf16
        assert torch.ops.flash_attn3.select_kernel(257, 64, 128, 128, varlen, bf16) == -1
        assert torch.ops.flash_attn3.select_kernel(64, 264, 128, 128, varlen, bf16) == -1


def test_packed_batches_take_one_row_whatever_their_lengths():
    """A sequence's result must not depend on the others of its batch."""
    for head_dim in (64, 128, 192, 256):
        rows = {
            torch.ops.flash_attn3.select_kernel(head_dim, head_dim, *lengths, True, True)
            for lengths in ((1, 1), (4096, 4096), (1, 2**20), (2**20, 2**20))
        }
        assert len(rows) == 1


def test_arguments_are_named():
    row, row_ids = table()[0]["id"], len(ops.kernel_table())
    good = [row, 1, 2, 1, 64, 64, -1, -1, 0, 132]
    for number, value, name in (
        (0, row_ids, "row"),
        (1, -1, "batch"),
        (2, 2**40, "heads"),
        (3, 0, "kv_heads"),
        (4, -1, "seqlen_q"),
        (5, 2**31, "seqlen_k"),
        (6, -2, "window_left"),
        (7, -7, "window_right"),
        (8, -1, "attention_chunk"),
        (9, 0, "num_sms"),
    ):
        asked = [*good[:number], value, *good[number + 1 :]]
        with pytest.raises(RuntimeError, match=rf"\b{name} is {value}"):
            torch.ops.flash_attn3.schedule(*asked)
    with pytest.raises(RuntimeError, match="heads is 3; expected a multiple of kv_heads"):
        torch.ops.flash_attn3.schedule(row, 1, 3, 2, *good[4:])


def test_asking_launches_nothing():
    assert torch.ops.flash_attn3.launch_counts().tolist() == [0] * len(ops.kernel_table())
