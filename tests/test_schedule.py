"""Host logic without a GPU: which CTA does which tile when, and which key blocks each warpgroup walks.

Properties over thousands of random shapes of torch.ops.flash_attn3.schedule, which runs the functions that the kernels
run: every row exactly once, no needed key block skipped and none walked in vain, balanced, longest first when causal.
Of the kernels whose CTAs hold queries: the forward, and dQ of the backward. test_schedule_backward.py has the others.
"""

import heapq
import math
import random
from functools import cache

import pytest
import torch

from flash_attn3 import ops

pytestmark = pytest.mark.skipif(not ops.loaded, reason=f"no extension: {ops.load_error}")

ROWS_OF_A_WARPGROUP = 64
SHAPES = 2400
GROUPS = 24  # pytest cases that share them
CTA, SEQUENCE, WARPGROUP, ROW, HEAD, BATCH, BLOCKS, UNMASKED = range(8)


@cache
def table(*names: str) -> list[dict]:
    return [row for row in ops.kernel_table() if row["op"] in (names or ("forward", "backward_queries"))]


def schedule(row: dict, *problem: int) -> torch.Tensor:
    """(n, 8) lines, by sequence number, of a problem (batch, heads, kv_heads, seqlen_q, seqlen_k, causal, num_sms)."""
    lines = torch.ops.flash_attn3.schedule(row["id"], *problem)
    assert lines.dtype == torch.int64 and lines.dim() == 2 and lines.shape[1] == 8
    return lines[lines[:, SEQUENCE].argsort(stable=True)]


def visible_keys(rows: torch.Tensor, seqlen_q: int, seqlen_k: int, causal: bool) -> torch.Tensor:
    """How many keys each row sees, by the definition of the bottom-right mask."""
    return (rows + 1 + seqlen_k - seqlen_q).clamp(0, seqlen_k) if causal else torch.full_like(rows, seqlen_k)


def tile_work(lines: torch.Tensor) -> torch.Tensor:
    """(tiles, 2) in launch order: the CTA of each tile, and the key blocks of its longest warpgroup, its last line."""
    last = torch.ones(len(lines), dtype=torch.bool)
    last[:-1] = lines[1:, WARPGROUP] == 0
    return lines[last][:, [CTA, BLOCKS]]


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


def check(row: dict, batch, heads, kv_heads, seqlen_q, seqlen_k, causal, num_sms) -> None:
    lines = schedule(row, batch, heads, kv_heads, seqlen_q, seqlen_k, causal, num_sms)
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

    # Key blocks: exactly those with a key that a row sees; unmasked exactly those that all rows see whole.
    last = (rows + ROWS_OF_A_WARPGROUP).clamp(max=seqlen_q) - 1
    needed = (visible_keys(last, seqlen_q, seqlen_k, causal) + block_n - 1) // block_n
    assert torch.equal(lines[:, BLOCKS], needed)
    whole = visible_keys(rows, seqlen_q, seqlen_k, causal) // block_n
    assert torch.equal(lines[:, UNMASKED], whole)

    # Balance: every CTA has a tile, and none has more than its share and the two largest tiles.
    work = tile_work(lines)
    loads = cta_loads(work, num_sms)
    assert loads.max() <= loads.sum() / len(loads) + 2 * work[:, 1].max()
    assert len(ctas.unique()) == min(num_sms, tiles)

    # Longest first within every head when causal, and over all where K and V surely stay in L2.
    if causal:
        position = (first[:, BATCH] * heads + first[:, HEAD]).argsort(stable=True)
        ordered = first[position]
        same_head = (ordered[1:, [HEAD, BATCH]] == ordered[:-1, [HEAD, BATCH]]).all(1)
        assert (ordered[1:, ROW] < ordered[:-1, ROW])[same_head].all()
        if 2 * batch * kv_heads * seqlen_k * (row["head_dim"] + row["head_dim_v"]) <= 2**21:
            assert (work[1:, 1] <= work[:-1, 1]).all()


def random_problem(pick: random.Random) -> tuple[int, ...]:
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
        pick.random() < 0.6,
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
            raise AssertionError(f"{row['name']}: (B, H, Hkv, Sq, Sk, causal, SMs) = {problem}") from error


@pytest.mark.parametrize("causal", [False, True])
def test_every_row_at_its_tile_edges(causal):
    for row in table():
        m, n = row["block_m"], row["block_n"]
        for seqlen_q in (1, 63, 64, 65, m - 1, m, m + 1, 2 * m + 65):
            for seqlen_k in (0, 1, n - 1, n, n + 1, m, m + n):
                check(row, 2, 2, 1, seqlen_q, seqlen_k, causal, 132)


@pytest.mark.parametrize("causal", [False, True])
def test_standard_grid_is_balanced(causal):
    """At least 85 % of the SMs' time is used, counting key blocks alone, wherever there are two tiles an SM."""
    for row in table():
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
            heads = 2048 // row["head_dim"]
            work = tile_work(schedule(row, 16384 // seqlen, heads, heads, seqlen, seqlen, causal, 132))
            loads = cta_loads(work, 132).float()
            if len(work) >= 264:
                assert loads.mean() / loads.max() >= 0.85, (
                    f"{row['name']} at {seqlen}: {loads.mean() / loads.max():.2f}"
                )


def test_long_sequences_do_not_overflow():
    for row in table():
        check(row, 1, 1, 1, 65, 2**31 - 1024, True, 132)
        check(row, 1, 1, 1, 2**17, 2**20, True, 132)


def test_selection_is_a_row_that_holds_the_head_dims():
    for bf16 in (True, False):
        for head_dim in (1, 8, 33, 64, 72, 96, 128, 160, 192, 200, 256):
            for head_dim_v in {head_dim, 64, 128}:
                row = torch.ops.flash_attn3.select_kernel(head_dim, head_dim_v, 128, 128, True, bf16)
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
        assert torch.ops.flash_attn3.select_kernel(257, 64, 128, 128, True, bf16) == -1
        assert torch.ops.flash_attn3.select_kernel(64, 264, 128, 128, True, bf16) == -1


def test_asking_launches_nothing():
    assert torch.ops.flash_attn3.launch_counts().tolist() == [0] * len(ops.kernel_table())
