"""Forward of packed batches: ragged and empty sequences, gaps, malformed lengths, memory around them, invariance.

Against the float64 formula of each sequence. Every call is asserted to launch the schedule and the one row that serves
the head dims, whatever the lengths are.
"""

import random
from dataclasses import replace

import harness
import packed
import pytest
import torch
from harness import DEVICE, DTYPES, HEAD_DIMS, equal, randn
from packed import Batch, attend, check, counted, make, owned

GUARD = 7.0
LAYOUTS = {  # lengths of q, of k
    "one": ([200], [200]),
    "one query each": ([1] * 70, [300, 1, 64, 128, 65, 0, 7] * 10),
    "one key each": ([130, 1, 64, 200], [1, 1, 1, 1]),
    "ragged": ([100, 1, 64, 65, 193, 7], [100, 1, 64, 65, 193, 7]),
    "more keys": ([5, 100, 64, 1], [300, 333, 64, 1000]),
    "more queries": ([300, 333, 64, 700], [5, 100, 64, 1]),
    "empty at both ends": ([0, 70, 130, 0], [0, 80, 140, 0]),
    "empty in between": ([70, 0, 0, 130], [80, 0, 0, 140]),
    "some without queries": ([0, 100, 0, 150, 0], [90, 100, 333, 160, 77]),
    "some without keys": ([90, 100, 333, 160, 77], [0, 100, 0, 150, 0]),
    "neither has both": ([0, 100, 0, 90], [100, 0, 80, 0]),
    "all multiples of the tiles": ([192, 384, 128, 576], [192, 384, 128, 640]),
    "one beside them": ([191, 385, 127, 577], [193, 383, 129, 639]),
    "one long among short": ([3, 1000, 3, 5, 1, 2, 9], [3, 1000, 3, 5, 1, 2, 9]),
}


def ids(value: object) -> str | None:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


both_masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
all_dims = pytest.mark.parametrize("dims", HEAD_DIMS, ids=ids)


def random_batch(seed: int) -> tuple[Batch, dict]:
    """A well-formed batch and a mask."""
    pick = random.Random(f"packed {seed}")
    size, longest = pick.choice([(1, 9), (3, 9), (6, 8.5), (12, 7), (40, 5)])
    lengths = [[int(2 ** pick.uniform(0, longest)) * (pick.random() < 0.85) for _ in range(size)] for _ in range(2)]
    if pick.random() < 0.4:
        lengths[1] = lengths[0]
    used = [[pick.randint(0, n) for n in x] if pick.random() < 0.3 else None for x in lengths]
    kv_heads = pick.choice([1, 2, 3])
    head_dim = pick.choice([64, 64, 96, 128, 128, 192, 256, pick.randrange(8, 257, 8), pick.randint(1, 256)])
    dims = (head_dim, head_dim if pick.random() < 0.8 else pick.randrange(8, 257, 8))
    outside = [(pick.randint(0, 90) * (pick.random() < 0.3), pick.randint(0, 90) * (pick.random() < 0.3)) for _ in "ab"]
    batch = make(
        *lengths, (kv_heads * pick.choice([1, 2, 4, 7]), kv_heads), dims, pick.choice(DTYPES),
        before=outside[0], after=outside[1], used_q=used[0], used_k=used[1], key=seed,
    )  # fmt: skip
    bound = [-1, 0, pick.randint(0, 100), pick.randint(0, 400)]
    mask = {
        "window": (pick.choice(bound), pick.choice(bound)) if pick.random() < 0.4 else (-1, -1),
        "chunk": pick.randint(1, 200) if pick.random() < 0.2 else 0,
        "softcap": pick.uniform(2, 30) if pick.random() < 0.2 else 0.0,
    }
    return batch, mask | {"causal": pick.random() < 0.4}


@both_masks
@all_dims
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, dims, causal):
    check(make(*LAYOUTS[layout], dims=dims), causal)


@all_dims
def test_fp16_windows_chunks_and_softcap(dims):
    batch = make(*LAYOUTS["ragged"], dims=dims, dtype=torch.float16)
    check(batch, True)
    batch = make(*LAYOUTS["more keys"], (6, 2), dims)
    for mask in ({"window": (64, 10)}, {"window": (100, -1)}, {"chunk": 70}, {"softcap": 5.0}):
        check(batch, **mask)
        check(batch, True, **mask)


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_random_batches(first):
    for seed in range(first, first + 20):
        batch, options = random_batch(seed)
        try:
            check(batch, times=(0, 1), **options)
        except AssertionError as error:
            lengths = f"{batch.cu_q}, {batch.cu_k}, used {batch.used_q}, {batch.used_k}"
            raise AssertionError(f"seed {seed}, {tuple(batch.q.shape)}, {lengths}, {options}: {error}") from error


@all_dims
def test_many_tiles_a_cta(dims):
    check(make([777, 333, 500, 80, 1000, 1, 640], heads=(16, 4), dims=dims), True)
    check(make([100 + 7 * i for i in range(40)], heads=(6, 6), dims=dims))


@all_dims
def test_thousands_of_short_sequences(dims):
    """More sequences than a CTA of the schedule has threads, some of them empty."""
    pick = random.Random(0)
    lengths = [[pick.randint(0, 9) for _ in range(3000)] for _ in range(2)]
    check(make(*lengths, (2, 1), dims), True)
    check(make([1] * 5000, [pick.choice([0, 1, 40]) for _ in range(5000)], (2, 1), dims))


# Rows that no sequence owns


@both_masks
@all_dims
def test_rows_outside_of_all_sequences(dims, causal):
    """Before the first, behind the last, and behind seqused: out 0, lse -inf; what they hold reaches nobody."""
    used = {"used_q": [70, 0, 64, 130, 1], "used_k": [100, 50, 0, 65, 200]}
    batch = make([90, 64, 64, 192, 10], [100, 64, 90, 190, 222], (4, 2), dims, before=(33, 70), after=(150, 5), **used)
    wanted = check(batch, causal)
    for which, x in ((0, batch.q), (1, batch.k), (1, batch.v)):
        inside = torch.cat([torch.arange(r.begin, r.begin + r.length) for r in rows_of(batch, which)])
        outside = torch.ones(len(x), dtype=torch.bool)
        outside[inside] = False
        x[outside.to(DEVICE)] = torch.nan
    assert equal(attend(batch, causal), wanted)


def rows_of(batch: Batch, which: int) -> list[packed.Rows]:
    return [pair[which] for pair in batch.sequences]


def test_nan_behind_the_last_sequence_of_one_kv_head():
    """Few rows of NaN right behind the only sequence, inside its last tile."""
    batch = make([21], heads=(16, 1), dims=(128, 128), after=(3, 3))
    for x in (batch.q, batch.k, batch.v):
        x[21:] = 0
    wanted = check(batch)
    for x in (batch.q, batch.k, batch.v):
        x[21:] = torch.nan
    assert equal(attend(batch), wanted)


def test_a_long_tail_behind_the_last_sequence():
    """Its rows are filled by nobody else: 31072 of them, over poisoned memory."""
    batch = make([60_000, 40_000], heads=(8, 8), dims=(64, 64), after=(31_072, 31_072))
    out, lse = attend(batch, True)
    assert (out[100_000:] == 0).all() and (lse[:, 100_000:] == -torch.inf).all()
    assert out[:100_000].isfinite().all() and lse[:, :100_000].isfinite().all()
    check_last_rows(batch, (out, lse), 100_000, 40_000)


def check_last_rows(batch: Batch, result: tuple, end: int, length: int, rows: int = 64, **mask) -> None:
    """The last rows of a long causal sequence that ends at `end`: a dense problem of their own."""
    at, keys = slice(end - rows, end), slice(end - length, end)
    out, lse = result[0][at][None], result[1][:, at][None]
    harness.check(batch.q[at][None], batch.k[keys][None], batch.v[keys][None], True, result=(out, lse), **mask)


@both_masks
@pytest.mark.parametrize("total", [(256, 0), (0, 256), (0, 0)], ids=str)
def test_no_query_or_no_key_in_the_whole_batch(total, causal):
    lengths = [[100 * (n > 0), 156 * (n > 0)] for n in total]
    for dims in HEAD_DIMS:
        out, lse = attend(make(*lengths, (8, 2), dims), causal, times=(0, 1))
        assert (out == 0).all() and (lse == -torch.inf).all()


@both_masks
def test_no_sequence(causal):
    """Batch 0: every row is outside; and no row either."""
    for rows in (130, 0):
        batch = make([], [], before=(rows, rows))
        out, lse = attend(batch, causal, times=(0, 1))
        assert (out == 0).all() and (lse == -torch.inf).all()


# Lengths that contradict each other


def malformed_batches() -> dict[str, dict]:
    """cu_seqlens and seqused that no caller should pass, for 400 rows of q and of k."""
    good = (0, 100, 250, 400)
    return {
        "backwards": {"cu_q": (0, 250, 100, 400), "cu_k": good},
        "keys backwards": {"cu_q": good, "cu_k": (0, 250, 100, 400)},
        "negative": {"cu_q": (-50, 100, 250, 400), "cu_k": good},
        "all negative": {"cu_q": (-400, -300, -200, -100), "cu_k": good},
        "keys negative": {"cu_q": good, "cu_k": (0, -1, 250, 400)},
        "past the end": {"cu_q": (0, 100, 250, 401), "cu_k": good},
        "keys past the end": {"cu_q": good, "cu_k": (0, 100, 1000, 1200)},
        "far past the end": {"cu_q": (0, 100, 2**31 - 1, 2**31 - 1), "cu_k": (0, 2**30, 2**31 - 1, 400)},
        "smallest and largest": {"cu_q": (-(2**31), 2**31 - 1, -(2**31), 2**31 - 1), "cu_k": good},
        "first past the end": {"cu_q": (500, 600, 700, 800), "cu_k": good},
        "falling": {"cu_q": (400, 250, 100, 0), "cu_k": good},
        "returns": {"cu_q": (0, 300, 100, 200), "cu_k": good},
        "used is negative": {"cu_q": good, "cu_k": good, "used_q": (50, -1, 150), "used_k": (100, 150, 20)},
        "used is too long": {"cu_q": good, "cu_k": good, "used_q": (100, 151, 150)},
        "used keys are too long": {"cu_q": good, "cu_k": good, "used_k": (100, 2**31 - 1, 150)},
        "used keys are negative": {"cu_q": good, "cu_k": good, "used_k": (-(2**31), 10, 150)},
        "everything": {"cu_q": (7, 3, 500, -9), "cu_k": (-3, 500, 100, 90), "used_q": (-1, 5, 999)},
    }


def malformed(name: str, dims: tuple[int, int] = (64, 64)) -> Batch:
    return replace(make([400], heads=(2, 1), dims=dims), **malformed_batches()[name])


@both_masks
@pytest.mark.parametrize("name", malformed_batches())
def test_malformed_lengths(name, causal):
    """Rows of the sequence in question are NaN; all others are right, and nothing else is touched."""
    for dims in ((64, 64), (128, 128), (256, 256)):
        batch = malformed(name, dims)
        assert any(q.malformed for q, _ in batch.sequences)
        around = torch.full((400 + 512, 4, dims[1] + 64), GUARD, dtype=batch.q.dtype, device=DEVICE)
        out = around[256:656, 1:3, 32 : 32 + dims[1]]
        check(batch, causal, result=attend(batch, causal, out=out))
        out.fill_(GUARD)
        assert (around == GUARD).all(), "written outside of out"


def test_a_gap_of_many_malformed_sequences_among_good_ones():
    """Every third sequence is malformed."""
    lengths, used = [5, 70, 130] * 40, [5, 70, -1] * 40
    batch = make(lengths, used_k=used)
    out, _ = check(batch, True)
    assert out.isnan().any(-1).any(-1).sum() == 130 * 40


# Memory


def test_strided_tensors():
    """Slices of packed tensors, transposed views, views that TMA cannot read: bitwise what copies give."""
    batch = make([100, 0, 65, 200], heads=(4, 4))
    total = len(batch.q)
    for name, (q, k, v) in {
        "qkv": randn(total, 3, 4, 64).unbind(1),
        "heads": randn(total, 4 + 2 * 2, 64).split([4, 2, 2], 1),
        "columns": randn(total, 4, 3 * 64).chunk(3, 2),
        "transposed": [randn(4, total, 64, key=i).transpose(0, 1) for i in range(3)],
        "every second row": [randn(2 * total, 4, 64, key=i)[::2] for i in range(3)],
        "expanded heads": [randn(total, 1, 64, key=i).expand(-1, 4, -1) for i in range(3)],
        "expanded rows": [randn(1, 4, 64, key=i).expand(total, -1, -1) for i in range(3)],
        "head dim not last": [randn(total, 64, 4, key=i).transpose(1, 2) for i in range(3)],
        "two bytes off": [randn(total * 4 * 64 + 1, key=i)[1:].view(total, 4, 64) for i in range(3)],
        "odd row stride": [randn(total, 4, 68, key=i)[..., :64] for i in range(3)],
        "one head, stride 7": [randn(total, 1, 64, key=i).as_strided((total, 1, 64), (64, 7, 1)) for i in range(3)],
    }.items():
        views = replace(batch, q=q, k=k, v=v)
        q, k, v = (torch.empty(x.shape, dtype=x.dtype, device=DEVICE).copy_(x) for x in (q, k, v))
        copies = replace(batch, q=q, k=k, v=v)
        assert equal(attend(views, True), attend(copies, True)), name
        for which in "qkv":
            one = replace(copies, **{which: getattr(views, which)})
            assert equal(attend(one, True), attend(copies, True)), (name, which)


@all_dims
def test_guard_bands_around_out(dims):
    """Rows, heads and columns around the caller's out survive, also beside tiles that its end or a sequence's cuts."""
    for less in (0, 8, 3):
        lengths, narrower = ([100, 0, 65, 131], [97, 50, 0, 200]), (dims[0], dims[1] - less)
        batch = make(*lengths, (3, 1), narrower, before=(5, 0), after=(3, 0))
        wanted = attend(batch)
        around = torch.full((304 + 512, 5, dims[1] + 64), GUARD, dtype=batch.q.dtype, device=DEVICE)
        out = around[256 : 256 + 304, 1:4, 32 : 32 + dims[1] - less]
        assert equal(attend(batch, out=out), wanted)
        out.fill_(GUARD)
        assert (around == GUARD).all(), f"written outside of out, value head dim {dims[1] - less}"


def test_out_is_a_view():
    batch = make([100, 0, 65, 130], [100, 40, 65, 200])
    wanted = attend(batch, True)
    shape, new = wanted[0].shape, {"dtype": batch.q.dtype, "device": DEVICE}
    outs = {
        "transposed": torch.empty(shape[1], shape[0], shape[2], **new).transpose(0, 1),
        "every second row": torch.empty(2 * shape[0], *shape[1:], **new)[::2],
        "columns": torch.empty(*shape[:2], 3 * shape[2], **new)[..., 64:128],
        "head dim not last": torch.empty(shape[0], shape[2], shape[1], **new).transpose(1, 2),
        "two bytes off": torch.empty(shape.numel() + 1, **new)[1:].view(shape),
    }
    for name, out in outs.items():
        storage = out.new_empty(0).set_(out.untyped_storage()).fill_(GUARD)
        assert equal((out, attend(batch, True, out=out)[1]), wanted), name
        out.fill_(GUARD)
        assert (storage == GUARD).all(), f"{name}: written outside of out"


def test_rows_past_two_to_the_31_elements():
    """Short sequences at both ends and one in between that nobody computes on: it has no key."""
    lengths = [300, 2**24 + 1000, 300]
    batch = make(lengths, [200, 0, 200], (1, 1), (128, 128))
    assert batch.q.numel() > 2**31
    out, lse = attend(batch)
    for which, rows in ((0, slice(0, 300)), (2, slice(len(batch.q) - 300, None))):
        assert equal((out[rows], lse[:, rows]), attend(batch.part(which)))
    assert not out[300:-300].any()


def test_keys_past_two_to_the_31_elements():
    batch = make([100, 0, 130], [200, 2**24 + 1000, 300], (1, 1), (128, 128))
    assert batch.k.numel() > 2**31
    out, lse = attend(batch, True)
    for which, rows in ((0, slice(0, 100)), (2, slice(100, 230))):
        assert equal((out[rows], lse[:, rows]), attend(batch.part(which), True))


@pytest.mark.parametrize("strides", [(2**24 + 512, 64), (64, 2**31 + 4096)], ids=["rows", "heads"])
def test_strides_past_two_to_the_31_elements(strides):
    """Views whose last element lies more than 2^31 elements behind their first, for q, k, v and out."""
    batch = make([70, 0, 65], heads=(2, 2))
    span = 134 * strides[0] + strides[1] + 64
    view = torch.empty(span, dtype=batch.q.dtype, device=DEVICE).as_strided((135, 2, 64), (*strides, 1))
    wanted = attend(batch, True)
    for which in "qkv":
        far = replace(batch, **{which: view.copy_(getattr(batch, which))})
        assert equal(attend(far, True), wanted), which
    assert equal(attend(batch, True, out=view.fill_(torch.nan)), wanted)


def test_four_million_tokens():
    """Of one sequence, and of one among empty ones: 2^32 elements a tensor, window 1024."""
    total = 2**22
    q, k, v = (randn(total, 8, 128, key=i) for i in range(3))
    for cu in ((0, total), (0, 0, total, total)):
        batch = Batch(q, k, v, cu, cu)
        out, lse = attend(batch, True, window=(1023, 0))
        assert out[:, 0, 0].isfinite().all()
        check_last_rows(batch, (out, lse), total, 4096, window=(1023, 0))
        short = replace(batch, q=q[-4096:], k=k[-4096:], v=v[-4096:], cu_q=(0, 4096), cu_k=(0, 4096))
        last, last_lse = attend(short, True, window=(1023, 0))
        for x, y in ((out[-1000:], last[-1000:]), (lse[:, -1000:], last_lse[:, -1000:])):
            assert torch.equal(x, y)


# A sequence gives the same bits whatever else is in the batch


@both_masks
@all_dims
def test_neighbours_change_no_bit(dims, causal):
    """Alone, in another order, with a long neighbour, at another offset."""
    batch = make([64, 1, 300, 128, 90], [64, 500, 300, 200, 40], dims=dims)
    out, lse = attend(batch, causal)
    pieces = [(out[counted(q)], lse[:, counted(q)]) for q, _ in batch.sequences]
    for which, piece in enumerate(pieces):
        assert equal(attend(batch.part(which), causal), piece)
    order = (3, 0, 4, 2, 1)
    outs, lses = zip(*(pieces[i] for i in order), strict=True)
    assert equal(attend(batch.part(*order), causal), (torch.cat(outs), torch.cat(lses, 1)))

    long = make([4000], [5000], dims=dims, key="long")
    joined = Batch(
        *(torch.cat([getattr(long, x), getattr(batch, x)]) for x in "qkv"),
        (0, *(4000 + n for n in batch.cu_q)),
        (0, *(5000 + n for n in batch.cu_k)),
    )
    got, got_lse = attend(joined, causal)
    assert equal((got[4000:], got_lse[:, 4000:]), (out, lse))


def test_a_neighbours_prefill_length_changes_no_bit_of_a_decode():
    """One query over 19802 keys beside 9, then 10 queries; 14 query heads on 2."""
    results = []
    for queries in (9, 10):
        batch = make([1, 10], [19_802, 50], (14, 2))
        batch = replace(batch, q=batch.q[: 1 + queries], cu_q=(0, 1, 1 + queries))
        results.append(attend(batch, True))
    assert equal([x[:1] for x in (results[0][0], results[0][1].T)], [x[:1] for x in (results[1][0], results[1][1].T)])


def test_short_sequences_with_and_without_a_long_one():
    """63 sequences of 128 tokens, alone and with one of 8192 before, between or behind them."""
    for heads, dims in (((8, 2), (128, 128)), ((4, 1), (256, 256))):
        short = make([128] * 63, heads=heads, dims=dims)
        long = make([8192], heads=heads, dims=dims, key="long")
        out, lse = attend(short, True)
        for place in (0, 30, 63):
            cut = 128 * place
            parts = [(getattr(short, x)[:cut], getattr(long, x), getattr(short, x)[cut:]) for x in "qkv"]
            lengths = [128] * place + [8192] + [128] * (63 - place)
            cu = tuple(packed.prefix_sums(lengths))
            got, got_lse = attend(Batch(*map(torch.cat, parts), cu, cu), True)
            rest = torch.cat([torch.arange(cut), torch.arange(cut + 8192, 63 * 128 + 8192)]).to(DEVICE)
            assert equal((got[rest], got_lse[:, rest]), (out, lse))


@both_masks
@all_dims
def test_equal_lengths_are_the_dense_call(dims, causal):
    """Bitwise where the dense call takes the same row, and it does at these lengths."""
    q, k, v = harness.inputs(3, 200, 333, 4, 2, *dims)
    batch = Batch(*(x.flatten(0, 1) for x in (q, k, v)), (0, 200, 400, 600), (0, 333, 666, 999))
    assert harness.row_of(q, k, v) == packed.forward_rows(batch)[-1]
    out, lse = attend(batch, causal)
    dense, dense_lse = harness.attend(q, k, v, causal)
    assert equal((out, lse), (dense.flatten(0, 1), dense_lse.transpose(0, 1).flatten(1)))


def test_sequences_are_those_of_their_rows():
    """The helper itself: what `part` cuts out is what the batch holds."""
    batch = make([3, 0, 5], [4, 2, 0], before=(2, 1), after=(1, 1))
    assert [(r.begin, r.length, r.end, r.malformed) for r in rows_of(batch, 0)] == [
        (2, 3, 5, False), (5, 0, 5, False), (5, 5, 10, False),
    ]  # fmt: skip
    part = batch.part(2, 0)
    assert torch.equal(part.q, batch.q[torch.cat([owned(rows_of(batch, 0)[i]) for i in (2, 0)])])
    assert part.cu_q == (0, 5, 8) and part.cu_k == (0, 0, 4)
