"""Packed batches without a GPU: who owns which rows, which sequences are malformed, which tile comes at which position.

torch.ops.flash_attn3.varlen_layout, which on CPU tensors is the host's twin of the kernel "packed_schedule", against a
reference in numpy over 10,000 random batches, and schedule_varlen, which walks the positions as the kernels do, over
every second of them: empty sequences, gaps, seqused, integers that contradict each other, totals up to 2^31 - 1.
"""

import random
from functools import cache

import numpy as np
import pytest
import torch
from test_masks import CAUSAL, FULL, Bounds

from flash_attn3 import ops

pytestmark = pytest.mark.skipif(not ops.loaded, reason=f"no extension: {ops.load_error}")

BATCHES = 10_000
GROUPS = 10  # pytest cases that share them
MOST = 2**31 - 1
POSITION, BLOCK, HEAD, SEQUENCE = range(4)
MAIN = ("forward", "backward", "backward_keys", "backward_queries")


@cache
def table() -> list[dict]:
    return [row for row in ops.kernel_table() if row["op"] in MAIN]


class Batch:
    """cu_seqlens and seqused of queries and of keys, as lists, and the rows of the tensors."""

    def __init__(self, cu_q, cu_k, used_q, used_k, total_q, total_k):
        self.cu, self.used, self.total = (cu_q, cu_k), (used_q, used_k), (total_q, total_k)

    def arguments(self) -> list:
        lengths = [*self.cu, *self.used]
        return [None if x is None else torch.tensor(x, dtype=torch.int32) for x in lengths] + list(self.total)

    def __repr__(self):
        return f"Batch({', '.join(map(repr, (*self.cu, *self.used, *self.total)))})"


def owned_rows(cu: np.ndarray, used: np.ndarray | None, total: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(batch + 1) borders of what the sequences own; (batch) their lengths; (batch) whether they are malformed."""
    largest = np.maximum.accumulate(np.maximum(cu, 0))
    borders = np.minimum(largest, total)
    length = cu[1:] - cu[:-1]
    backwards = (cu[:-1] < borders[:-1]) | (length < 0)
    malformed = (cu[:-1] < 0) | backwards | (cu[1:] > total)
    if used is None:
        return borders, length, malformed
    return borders, used, malformed | (used < 0) | (used > length)


def reference(batch: Batch):
    """(sequences, bucket, gaps of queries, gaps of keys); buckets fall with the length."""
    queries, keys = (
        owned_rows(np.array(cu, np.int64), None if used is None else np.array(used, np.int64), total)
        for cu, used, total in zip(batch.cu, batch.used, batch.total, strict=True)
    )
    malformed = queries[2] | keys[2]
    lengths = np.where(malformed, 0, queries[1]), np.where(malformed, -1, keys[1])
    sequences = np.stack([queries[0][:-1], lengths[0], keys[0][:-1], lengths[1]], 1)
    gaps = []
    for (borders, _, _), length, total in zip((queries, keys), lengths, batch.total, strict=True):
        begin = np.concatenate([[0], borders[:-1] + length.clip(0), borders[-1:]])
        end = np.concatenate([borders, [total]])
        every = np.stack([begin, end, np.concatenate([[0], malformed, [0]])], 1)
        gaps.append(every[begin < end])
    # A quarter of an octave: fraction is length / 2^exponent, from 1/2 to 1.
    fraction, exponent = np.frexp((lengths[0] + lengths[1].clip(0)).astype(np.float64))
    bucket = -(4 * exponent + np.floor(8 * fraction - 4).astype(np.int64))
    return sequences, np.where(fraction > 0, bucket, 1), *gaps


def check_layout(batch: Batch, block: int, of_keys: bool) -> None:
    sequences, bucket, query_gaps, key_gaps = reference(batch)
    results = torch.ops.flash_attn3.varlen_layout(*batch.arguments(), block, of_keys)
    assert all(result.dtype == torch.int32 for result in results)
    got_sequences, longest_first, first_block, got_query_gaps, got_key_gaps = (
        r.numpy().astype(np.int64) for r in results
    )
    assert np.array_equal(got_sequences, sequences)
    assert np.array_equal(got_query_gaps, query_gaps) and np.array_equal(got_key_gaps, key_gaps)
    assert np.array_equal(longest_first, np.argsort(bucket, kind="stable"))
    blocks = -(-sequences[longest_first][:, 3 if of_keys else 1].clip(0) // block)
    assert np.array_equal(first_block, np.concatenate([[0], blocks.cumsum()]))

    # By buckets is nearly by length: none is a quarter longer than one before it.
    length = (sequences[:, 1] + sequences[:, 3].clip(0))[longest_first]
    if len(length):
        longest_behind = np.maximum.accumulate(length[::-1])[::-1]
        assert (longest_behind <= 1.25 * length).all()

    # Sequences and gaps part the rows of each tensor.
    for begin, rows, gaps, total in (
        (sequences[:, 0], sequences[:, 1], got_query_gaps, batch.total[0]),
        (sequences[:, 2], sequences[:, 3], got_key_gaps, batch.total[1]),
    ):
        assert (begin[1:] >= begin[:-1]).all() and ((begin >= 0) & (begin <= total)).all()
        spans = np.concatenate([np.stack([begin, begin + rows.clip(0)], 1)[rows > 0], gaps[:, :2]])
        spans = spans[spans[:, 0].argsort()]
        assert np.array_equal(np.append(spans[:, 0], total), np.append(0, spans[:, 1]))
        assert (gaps[1:, 0] >= gaps[:-1, 1]).all() and (gaps[:, 0] < gaps[:, 1]).all()


def check_tiles(batch: Batch, row: dict, heads: int, kv_heads: int, bounds: Bounds) -> None:
    sequences, bucket, _, _ = reference(batch)
    lines = torch.ops.flash_attn3.schedule_varlen(row["id"], *batch.arguments(), heads, kv_heads, *bounds).numpy()
    assert lines.dtype == np.int64 and lines.shape[1] == 8
    holds_keys = row["op"] in ("backward", "backward_keys")
    tile_heads = kv_heads if holds_keys else heads
    block, length = (row["block_n"], sequences[:, 3]) if holds_keys else (row["block_m"], sequences[:, 1])
    blocks = -(-length.clip(0) // block)
    assert np.array_equal(lines[:, POSITION], np.arange(blocks.sum() * tile_heads))
    if not len(lines):
        return

    # Every (sequence, block, head) exactly once, with its rows.
    number = lines[:, SEQUENCE]
    assert ((number >= 0) & (number < len(blocks))).all()
    assert np.array_equal(lines[:, 4:], sequences[number])
    assert ((lines[:, BLOCK] >= 0) & (lines[:, BLOCK] < blocks[number])).all()
    assert ((lines[:, HEAD] >= 0) & (lines[:, HEAD] < tile_heads)).all()
    before = blocks.cumsum() - blocks
    key = (before[number] + lines[:, BLOCK]) * tile_heads + lines[:, HEAD]
    assert np.array_equal(np.sort(key), np.arange(len(lines)))

    # Sequences longest first, each as a whole.
    order = np.argsort(bucket, kind="stable")
    assert np.array_equal(number, np.repeat(order, blocks[order] * tile_heads))

    # Causal tiles of queries come longest first within a head; what shares keys stays together under a mask.
    by_head = np.lexsort((lines[:, POSITION], lines[:, HEAD], number))
    following = np.diff(number[by_head] * tile_heads + lines[by_head, HEAD]) == 0
    steps = np.diff(lines[by_head, BLOCK])[following]
    assert (steps == (-1 if bounds == CAUSAL and not holds_keys else 1)).all()
    if bounds != FULL and not holds_keys:
        ratio = heads // kv_heads
        together = lines.reshape(-1, ratio, 8)
        assert (together[:, :, BLOCK] == together[:, :1, BLOCK]).all()
        assert (together[:, :, HEAD] // ratio == together[:, :1, HEAD] // ratio).all()


def random_lengths(pick: random.Random, batch: int, limit: int) -> tuple[list[int], list[int], int]:
    """cu_seqlens, seqused and the total, not malformed."""
    kind = pick.choice(["any", "short", "empty", "equal"])
    largest = max(1, limit // max(1, batch))
    length = {
        "any": lambda: pick.randint(0, largest),
        "short": lambda: pick.choice([0, 0, 1, 2, 63, 64, 65, 128, 192]),
        "empty": lambda: 0,
        "equal": lambda: largest // 2,
    }[kind]
    cu = [pick.choice([0, 0, 0, pick.randint(0, 5)])]
    used = []
    for _ in range(batch):
        rows = length()
        cu.append(cu[-1] + rows)
        used.append(pick.choice([rows, rows, 0, pick.randint(0, rows)]))
    return cu, used, cu[-1] + pick.choice([0, 0, pick.randint(0, 9)])


def random_batch(pick: random.Random, limit: int) -> Batch:
    batch = pick.choice([0, 1, 1, 2, 3, pick.randint(0, 12), pick.randint(0, 40)])
    lengths = [random_lengths(pick, batch, limit) for _ in "qk"]
    if pick.random() < 0.2:
        lengths[1] = tuple(x[:] if isinstance(x, list) else x for x in lengths[0])
    if pick.random() < 0.6:
        for _ in range(pick.choice([1, 1, 2, batch])):
            cu, used, total = pick.choice(lengths)
            wrong = pick.choice(
                [-1, 0, 1, total, total + 1, pick.randint(0, total), MOST, -MOST - 1, pick.randint(-MOST, MOST)]
            )
            values = cu if pick.random() < 0.6 or not used else used
            values[pick.randrange(len(values))] = wrong
    (cu_q, used_q, total_q), (cu_k, used_k, total_k) = lengths
    if pick.random() < 0.1:
        total_q = pick.randint(0, total_q)
    return Batch(
        cu_q, cu_k, used_q if pick.random() < 0.5 else None, used_k if pick.random() < 0.5 else None, total_q, total_k
    )


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_batches(group):
    pick = random.Random(group)
    for number in range(BATCHES // GROUPS):
        huge = number % 6 == 0
        batch = random_batch(pick, MOST - 1000 if huge else pick.choice([100, 1000, 5000]))
        kv_heads = pick.choice([1, 1, 2, 3])
        heads = kv_heads * pick.choice([1, 2, 3, 8])
        bounds = pick.choice([FULL, CAUSAL, CAUSAL, Bounds(100, 0), Bounds(-1, -1, 64), Bounds(7, 9)])
        row = table()[number // 2 % len(table())]
        try:
            check_layout(batch, pick.choice([64, 80, 128, 192]), pick.random() < 0.5)
            if number % 2:
                check_tiles(batch, row, heads, kv_heads, bounds)
        except AssertionError as error:
            raise AssertionError(f"{row['name']}, {heads} heads, {kv_heads} of keys, {bounds}: {batch!r}") from error


def of_lengths(lengths) -> Batch:
    cu = [0, *np.cumsum(lengths).tolist()]
    return Batch(cu, cu, None, None, cu[-1], cu[-1])


def named_batches() -> dict[str, Batch]:
    generator = torch.Generator().manual_seed(0)
    lognormal = torch.exp(torch.randn(64, generator=generator) + 6.4).clamp(8, 16384).int().tolist()
    short = torch.randint(32, 256, (512,), generator=generator).tolist()
    many = torch.randint(0, 20, (100_000,), generator=generator).tolist()
    return {
        "64 lognormal": of_lengths(lognormal),
        "512 short": of_lengths(short),
        "one long": of_lengths([16384] + 63 * [128]),
        "one long, last": of_lengths(63 * [128] + [16384]),
        "16 x 2048": of_lengths(16 * [2048]),
        "8192 x 34": of_lengths(8192 * [34]),
        "100,000": of_lengths(many),
    }


@pytest.mark.parametrize(
    "name", ["64 lognormal", "512 short", "one long", "one long, last", "16 x 2048", "8192 x 34", "100,000"]
)
def test_named_batches(name):
    batch = named_batches()[name]
    rows = table() if len(batch.cu[0]) < 1000 else table()[:1]
    for row in rows:
        check_layout(batch, row["block_m"], False)
        check_layout(batch, row["block_n"], True)
        heads = (32, 8) if len(batch.cu[0]) < 100 else (2, 1)
        for bounds in (FULL, CAUSAL):
            check_tiles(batch, row, *heads, bounds)


def test_a_long_sequence_comes_first_wherever_it_stands():
    for name in ("one long", "one long, last"):
        batch = named_batches()[name]
        for row in table():
            lines = torch.ops.flash_attn3.schedule_varlen(row["id"], *batch.arguments(), 1, 1, *CAUSAL)
            assert lines[0, SEQUENCE] == (0 if name == "one long" else 63)


MALFORMED = {
    "as they should be": ([0, 4, 6, 9], None, []),
    "a gap before the first": ([2, 4, 6, 9], None, []),
    "negative": ([-1, 4, 6, 9], None, [0]),
    "backwards": ([0, 6, 4, 9], None, [1, 2]),
    "backwards and on below": ([0, 6, 2, 4], None, [1, 2]),
    "past the end": ([0, 4, 6, 11], None, [2]),
    "past the end and back": ([0, 11, 6, 9], None, [0, 1, 2]),
    "the largest": ([0, 4, MOST, MOST], None, [1, 2]),
    "the smallest": ([0, -MOST - 1, 6, 9], None, [0, 1]),
    "largest and smallest": ([-MOST - 1, MOST, -MOST - 1, MOST], None, [0, 1, 2]),
    "used more than there is": ([0, 4, 6, 9], [4, 3, 0], [1]),
    "used negative": ([0, 4, 6, 9], [-1, 2, 3], [0]),
    "used the largest and smallest": ([0, 4, 6, 9], [MOST, -MOST - 1, 3], [0, 1]),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
def test_malformed_lengths(name, of_keys):
    """Of queries or of keys, nine rows each; the other is as it should be. Both of a malformed sequence are gaps."""
    cu, used, expected = MALFORMED[name]
    good = [0, 3, 6, 9]
    arguments = (good, cu, None, used, 9, 9) if of_keys else (cu, good, used, None, 9, 9)
    batch = Batch(*arguments)
    check_layout(batch, 64, of_keys)
    sequences, _, _, *gaps = torch.ops.flash_attn3.varlen_layout(*batch.arguments(), 64, of_keys)
    malformed = [number for number in range(3) if sequences[number, 3] < 0]
    assert malformed == expected
    assert (sequences[malformed] == torch.tensor([0, 0, 0, -1]))[:, [1, 3]].all()
    good_gaps = gaps[0] if of_keys else gaps[1]
    assert good_gaps.tolist() == [[3 * number, 3 * number + 3, 1] for number in expected]


def test_arguments_are_named():
    def lengths(*values, dtype=torch.int32):
        return torch.tensor(values, dtype=dtype)

    cu, layout = lengths(0, 3, 9), torch.ops.flash_attn3.varlen_layout
    good = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "seqused_q": None, "seqused_k": None, "total_q": 9, "total_k": 9}
    good |= {"block": 64, "of_keys": False}
    layout(**good)
    for name, value, message in (
        ("cu_seqlens_q", lengths(0, 3, 9, dtype=torch.int64), "int32"),
        ("cu_seqlens_q", lengths(), "batch"),
        ("cu_seqlens_q", cu[None], "batch"),
        ("cu_seqlens_k", lengths(0, 3, 9, 9), r"\(3,\)"),
        ("cu_seqlens_k", lengths(0, 0, 3, 3, 9, 9)[::2], "contiguous"),
        ("seqused_q", lengths(1, 2, 3), r"\(2,\)"),
        ("seqused_k", lengths(1, 2, dtype=torch.int64), "int32"),
        ("total_q", -1, "-1"),
        ("total_k", 2**31, "2147483648"),
        ("block", 0, "0"),
    ):
        with pytest.raises(RuntimeError, match=f"{name} .*{message}"):
            layout(**good | {name: value})

    tiles = torch.ops.flash_attn3.schedule_varlen
    for number, value, message in (
        (0, len(ops.kernel_table()), "row is"),
        (7, -1, "heads is -1"),
        (8, 0, "kv_heads is 0"),
        (8, 3, "heads is 4; expected a multiple of kv_heads, 3"),
        (9, -2, "window_left is -2"),
        (10, -2, "window_right is -2"),
        (11, -1, "attention_chunk is -1"),
    ):
        asked = [table()[0]["id"], cu, cu, None, None, 9, 9, 4, 2, -1, -1, 0]
        asked[number] = value
        with pytest.raises(RuntimeError, match=message):
            tiles(*asked)
