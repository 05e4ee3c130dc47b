"""Host logic of the backward pass without a GPU: which kernels run, which CTA holds which keys, which queries it walks.

Properties over thousands of random shapes and masks of torch.ops.flash_attn3.schedule_backward, which runs the
functions that the kernels run: every block of keys of every key head exactly once, no query block that sees
one of its keys skipped, none walked in vain, a mask exactly where one is needed; and where the tiles of the last round
are cut into parts, every step of a tile in exactly one of them.
"""

import math
import random
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from test_masks import CAUSAL, FULL, Bounds, row_spans
from test_schedule import check_walk, cta_loads, one_dtype, random_problem

from flash_attn3 import ops

SHAPES = 1200
GROUPS = 12  # pytest cases that share them
CTA, POSITION, BLOCK, HEAD, BATCH, FIRST, END, UNMASKED, UNMASKED_END, PART, STEP, STEP_END = range(12)
MOST_PARTS, STEPS_OF_PART = 16, 10
MAIN = ("backward", "backward_keys", "backward_queries")


@cache
def table(*names: str) -> list[dict]:
    return [row for row in ops.kernel_table() if row["op"] in names]


HOLDS_KEYS = one_dtype(table("backward", "backward_keys"))
pytestmark = pytest.mark.skipif(
    not HOLDS_KEYS, reason=ops.load_error or "this build has no backward kernels that hold keys"
)


def schedule(row: dict, batch, heads, kv_heads, seqlen_q, seqlen_k, bounds: Bounds, num_sms) -> torch.Tensor:
    """(n, 12) lines, by position."""
    question = (row["id"], batch, heads, kv_heads, seqlen_q, seqlen_k, *bounds, num_sms)
    lines = torch.ops.flash_attn3.schedule_backward(*question)
    assert lines.dtype == torch.int64 and lines.dim() == 2 and lines.shape[1] == 12
    return lines[lines[:, POSITION].argsort(stable=True)]


def steps_of(lines: torch.Tensor) -> torch.Tensor:
    return lines[:, STEP_END] - lines[:, STEP]


def check_parts(row: dict, lines: torch.Tensor, tiles: int, heads_per_kv_head: int, masked: bool, num_sms: int) -> None:
    """The lines, one a position, are `tiles` whole tiles or, in the last round, parts of equal length; every step of a
    tile is in one of them."""
    whole = lines[:, PART] < 0
    parts = max(1, int(lines[:, PART].max()) + 1)
    cut = tiles - int(whole.sum())
    assert (lines[whole][:, PART] == -1).all() and len(lines) == tiles - cut + parts * cut
    total = heads_per_kv_head * (lines[:, END] - lines[:, FIRST])
    assert (lines[whole][:, STEP] == 0).all() and (lines[whole][:, STEP_END] == total[whole]).all()

    # Which tiles are cut, and into how many parts.
    last = tiles % num_sms
    uses_counter = masked and tiles > num_sms
    if row["op"] != "backward" or uses_counter or last == 0:
        assert cut == 0
    else:
        longest = int(total.max())
        durations = {1: longest}
        for p in range(2, MOST_PARTS + 1):
            durations[p] = math.ceil(last * p / num_sms) * (math.ceil(longest / p) + STEPS_OF_PART)
        assert parts == min(durations, key=lambda p: (durations[p], p))
        assert cut == (last if parts > 1 else 0)
    if not cut:
        return

    # They come last, part after part; each part goes on where the one before ended.
    assert whole[: tiles - cut].all() and (tiles - cut) % num_sms == 0
    of_tile = lines[tiles - cut :].view(cut, parts, -1)
    assert (of_tile[:, :, BLOCK:PART] == of_tile[:, :1, BLOCK:PART]).all()
    assert (of_tile[:, :, PART] == torch.arange(parts)).all()
    assert (of_tile[:, 0, STEP] == 0).all() and (of_tile[:, 1:, STEP] == of_tile[:, :-1, STEP_END]).all()
    assert (of_tile[:, -1, STEP_END] == total[tiles - cut :].view(cut, parts)[:, -1]).all()
    steps = of_tile[:, :, STEP_END] - of_tile[:, :, STEP]
    assert (steps.amax(1) - steps.amin(1) <= 1).all() and (steps >= (0 if masked else 1)).all()


def check(row: dict, batch, heads, kv_heads, seqlen_q, seqlen_k, bounds: Bounds, num_sms) -> None:
    lines = schedule(row, batch, heads, kv_heads, seqlen_q, seqlen_k, bounds, num_sms)
    block_m, block_n = row["block_m"], row["block_n"]
    blocks = math.ceil(seqlen_k / block_n)
    tiles = batch * kv_heads * blocks if seqlen_q and heads else 0
    if not tiles:
        assert len(lines) == 0
        return

    # Every (batch, key head, block of keys) exactly once, whole or in parts, by CTAs that exist, at positions 0, 1, ...
    assert (lines[:, [BLOCK, HEAD, BATCH]] >= 0).all()
    assert (lines[:, HEAD] < kv_heads).all() and (lines[:, BATCH] < batch).all() and (lines[:, BLOCK] < blocks).all()
    begun = lines[lines[:, PART] <= 0]
    key = (begun[:, BATCH] * kv_heads + begun[:, HEAD]) * blocks + begun[:, BLOCK]
    assert torch.equal(key.sort().values, torch.arange(tiles))
    assert torch.equal(lines[:, POSITION], torch.arange(len(lines)))
    assert (lines[:, CTA] >= 0).all() and len(lines[:, CTA].unique()) == min(num_sms, len(lines))
    assert lines[:, CTA].max() < num_sms
    check_parts(row, lines, tiles, heads // kv_heads, bounds.on(seqlen_q, seqlen_k) != FULL, num_sms)

    # Query blocks: the same of every (batch, head); exactly those with a row that sees a key of the block.
    once = begun[(begun[:, HEAD] == 0) & (begun[:, BATCH] == 0)]
    once = once[once[:, BLOCK].argsort()]
    assert torch.equal(lines[:, FIRST:PART], once[lines[:, BLOCK]][:, FIRST:PART])
    held = np.arange(blocks * block_n).reshape(blocks, block_n)
    spans = row_spans(np.arange(seqlen_k), seqlen_q, seqlen_k, bounds)
    check_walk(np.where(held < seqlen_k, held, -1), once[:, FIRST:PART], spans, block_m, seqlen_q)

    # Balance: no CTA has more than its share and the two largest tiles. Longest first when causal.
    work = torch.stack([lines[:, CTA], steps_of(lines)], 1)
    loads = cta_loads(work, num_sms)
    assert loads.max() <= loads.sum() / len(loads) + 2 * work[:, 1].max()
    if bounds == CAUSAL:
        ordered = begun[(begun[:, BATCH] * kv_heads + begun[:, HEAD]).argsort(stable=True)]
        same_head = (ordered[1:, [HEAD, BATCH]] == ordered[:-1, [HEAD, BATCH]]).all(1)
        assert (ordered[1:, BLOCK] > ordered[:-1, BLOCK])[same_head].all()
        # Q, dO and sums of dQ surely stay in L2: all heads together.
        if batch * heads * seqlen_q * (6 * row["head_dim"] + 2 * row["head_dim_v"]) <= 2**21:
            length = begun[:, END] - begun[:, FIRST]
            assert (length[1:] <= length[:-1]).all()


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_shapes(group):
    pick = random.Random(group)
    for number in range(SHAPES // GROUPS):
        row, problem = HOLDS_KEYS[number % len(HOLDS_KEYS)], random_problem(pick)
        try:
            check(row, *problem)
        except AssertionError as error:
            raise AssertionError(f"{row['name']}: (B, H, Hkv, Sq, Sk, bounds, SMs) = {problem}") from error


@pytest.mark.parametrize("bounds", [FULL, CAUSAL], ids=["full", "causal"])
def test_every_block_at_its_edges(bounds):
    for row in HOLDS_KEYS:
        m, n = row["block_m"], row["block_n"]
        for seqlen_q in (0, 1, m - 1, m, m + 1, n, 2 * m + 65):
            for seqlen_k in (0, 1, n - 1, n, n + 1, m, m + n, 3 * n):
                check(row, 2, 2, 1, seqlen_q, seqlen_k, bounds, 132)


@pytest.mark.parametrize("bounds", [FULL, CAUSAL], ids=["full", "causal"])
def test_standard_grid_is_balanced(bounds):
    """At least 85 % of the SMs' time is used, counting query blocks alone, wherever there are two tiles an SM."""
    for row in HOLDS_KEYS:
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
            heads = 2048 // row["head_dim"]
            lines = schedule(row, 16384 // seqlen, heads, heads, seqlen, seqlen, bounds, 132)
            loads = cta_loads(torch.stack([lines[:, CTA], steps_of(lines)], 1), 132).float()
            if len(lines) >= 264:
                assert loads.mean() / loads.max() >= 0.85, (
                    f"{row['name']} at {seqlen}: {loads.mean() / loads.max():.2f}"
                )


def test_the_last_round_is_shared():
    """No CTA has more steps than whole rounds and its parts of the last one; where half of the SMs would be idle for
    long the last round is cut, and at 2048 tiles on 132 SMs the idle time is at most a third of a tile."""
    pick = random.Random(0)
    cutting = one_dtype(table("backward"))
    if not cutting:
        pytest.skip("this build has no kernel that cuts tiles")
    problems = [(16384 // s, 2048 // d, s, 132) for s in (512, 1024, 2048, 4096, 8192, 16384) for d in (64, 96, 128)]
    sizes = pick.randint
    for _ in range(300):
        problems.append((sizes(1, 9), sizes(1, 40), sizes(1, 8192), pick.choice([7, 78, 114, 132])))
    shared = 0
    for number, (batch, heads, seqlen, num_sms) in enumerate(problems):
        row = cutting[number % len(cutting)]
        lines = schedule(row, batch, heads, heads, seqlen, seqlen, FULL, num_sms)
        tiles, total = batch * heads * math.ceil(seqlen / row["block_n"]), int(lines[0, END])
        work = torch.zeros(num_sms, dtype=torch.int64).index_add_(0, lines[:, CTA], steps_of(lines))
        parts, last = int(lines[:, PART].max()) + 1, tiles % num_sms
        if parts > 1:
            assert work.max() <= tiles // num_sms * total + math.ceil(last * parts / num_sms) * math.ceil(total / parts)
            shared += 1
        else:
            assert last == 0 or 2 * last > num_sms or total <= 4 * STEPS_OF_PART
    assert shared > len(problems) // 8
    for row in cutting:
        if row["head_dim"] == 128:
            lines = schedule(row, 1, 16, 16, 16384, 16384, FULL, 132)
            work = torch.zeros(132, dtype=torch.int64).index_add_(0, lines[:, CTA], steps_of(lines))
            assert work.max() - work.double().mean() <= int(lines[0, END]) / 3


def test_causal_tiles_that_leave_sms_free_are_shared():
    """One sequence and few heads: the longest part is at most half as long as the longest tile. None is cut where all
    SMs have a tile, or where the tiles are short."""
    for row in HOLDS_KEYS:
        lines = schedule(row, 1, 2, 2, 2048, 2048, CAUSAL, 132)
        longest = int(lines[:, END].max()) // (2 if row["op"] == "backward" else 1)
        assert steps_of(lines).max() <= longest, row["name"]
        for seqlen, num_sms in ((2048, 16), (512, 132)):
            lines = schedule(row, 1, 1, 1, seqlen, seqlen, CAUSAL, num_sms)
            assert (lines[:, PART] == -1).all() and len(lines) == math.ceil(seqlen / row["block_n"]), row["name"]


def test_heads_in_flight_stay_in_l2():
    """Causal heads are taken in groups whose Q, dO and fp32 sums of dQ fit 40 MB, unless that is less than about two
    rounds of tiles or a single key head has more."""
    for row in HOLDS_KEYS:
        for seqlen, ratio in ((2048, 1), (8192, 1), (8192, 4), (65536, 1)):
            lines = schedule(row, 1, 16 * ratio, 16, seqlen, seqlen, CAUSAL, 132)
            together = len(lines[lines[:, POSITION] < 16][:, HEAD].unique())
            bytes_of_a_head = ratio * seqlen * 2 * (row["head_dim"] + row["head_dim_v"])
            if row["op"] == "backward":
                bytes_of_a_head += ratio * seqlen * 4 * row["head_dim"]
            fits = together * bytes_of_a_head <= 40 * 2**20
            tiles = together * math.ceil(seqlen / row["block_n"])
            assert together == 1 or fits or tiles <= 3 * 132, (row["name"], seqlen, ratio, together)


def test_long_sequences_do_not_overflow():
    for row in HOLDS_KEYS:
        for bounds in (FULL, CAUSAL):
            check(row, 1, 1, 1, 2**31 - 1025, 65, bounds, 132)
        check(row, 1, 1, 1, 65, 2**17, CAUSAL, 132)
        check(row, 1, 1, 1, 2**31 - 1025, 300, Bounds(2**31 - 1, 1000), 132)


def rows_of(*question) -> list[dict]:
    """The rows that select_backward chooses, in order of launch; [] if there are none."""
    chosen = torch.ops.flash_attn3.select_backward(*question)
    assert len(chosen) == 3 and (min(chosen) >= 0 or set(chosen) == {-1})
    return [ops.kernel_table()[i] for i in chosen if i >= 0]


def keys_walked(seqlen_q: int, seqlen_k: int, bounds: Bounds) -> int:
    """Of a query, on average, if queries and keys are as many as the longer of both."""
    keys = max(seqlen_q, seqlen_k)
    if bounds.chunk:
        keys = min(keys, bounds.chunk)
    half = (keys + 1) // 2
    left, right = (half if bound < 0 else min(bound, half) for bound in bounds[:2])
    return min(keys, left + right)


def faster_apart(head_dim: int, seqlen_q: int, seqlen_k: int, bounds: Bounds) -> bool:
    """The rule of csrc/host/plan.cpp: whether two kernels that need no sums of dQ are faster than the fused one."""
    bounds = bounds.on(seqlen_q, seqlen_k)
    if bounds == FULL:
        return head_dim > 96 and max(seqlen_q, seqlen_k) <= 768
    return keys_walked(seqlen_q, seqlen_k, bounds) <= 512


@pytest.mark.parametrize("bf16", [True, False])
def test_selection(bf16):
    dtype = "bf16" if bf16 else "fp16"

    def holding(op, *dims):
        """Head dims of the rows of an operation that hold these."""
        rows = [(r["head_dim"], r["head_dim_v"]) for r in table(op) if r["dtype"] == dtype]
        return [d for d in rows if d[0] >= dims[0] and d[1] >= dims[1]]

    lengths = [(128, 128), (768, 1), (1, 769), (1024, 1024), (4096, 4096), (4096, 64)]
    masks = [FULL, CAUSAL, Bounds(200, 0), Bounds(600, 0), Bounds(600, 600), Bounds(-1, 0, 2048), Bounds(-1, -1, 512)]
    for head_dim in (1, 8, 33, 64, 72, 96, 128, 160, 192, 200, 256):
        for head_dim_v in {head_dim, 64, 128}:
            keys, queries, fused = (holding(op, head_dim, head_dim_v) for op in ("backward_keys", MAIN[2], MAIN[0]))
            for deterministic, bounds, seqlens in product((False, True), masks, lengths):
                rows = rows_of(head_dim, head_dim_v, *seqlens, *bounds, False, bf16, deterministic)
                if not table("backward_prepare") or not (keys and queries):
                    continue  # part of a build
                wide = max(sum(min(keys, key=sum)), sum(min(queries, key=sum)))
                one = table("backward_finish") and fused and sum(min(fused, key=sum)) <= wide and not deterministic
                if one and sum(min(fused, key=sum)) == wide:
                    one = not faster_apart(max(min(fused, key=sum)), *seqlens, bounds)
                wanted = (MAIN[0], "backward_finish") if one else MAIN[1:]
                assert tuple(row["op"] for row in rows) == ("backward_prepare", *wanted)
                assert all(row["dtype"] == dtype for row in rows)
                for row in rows:
                    if row["op"] in MAIN:
                        narrowest = min(holding(row["op"], head_dim, head_dim_v), key=sum)
                        assert (row["head_dim"], row["head_dim_v"]) == narrowest
    for varlen in (False, True):
        assert rows_of(257, 64, 128, 128, *CAUSAL, varlen, bf16, False) == []
        assert rows_of(64, 264, 128, 128, *CAUSAL, varlen, bf16, True) == []


def test_rows_without_tiles_are_refused():
    for row in table("packed_schedule", "backward_prepare", "backward_finish", "backward_sink"):
        for operator in (torch.ops.flash_attn3.schedule, torch.ops.flash_attn3.schedule_backward):
            with pytest.raises(RuntimeError, match="no tiles"):
                operator(row["id"], 1, 1, 1, 64, 64, *FULL, 132)
    with pytest.raises(RuntimeError, match="schedule_backward"):
        torch.ops.flash_attn3.schedule(HOLDS_KEYS[0]["id"], 1, 1, 1, 64, 64, *FULL, 132)


def test_both_operators_agree_where_ctas_hold_queries():
    for row in table("backward_queries"):
        question = (row["id"], 2, 6, 2, 700, 900, *CAUSAL, 132)
        one, other = (torch.ops.flash_attn3.schedule(*question), torch.ops.flash_attn3.schedule_backward(*question))
        assert len(one) > 0 and torch.equal(one, other)
