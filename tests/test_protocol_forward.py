"""Barriers of the forward kernel, without a GPU: a model of csrc/kernels/forward under random schedules.

The model mirrors producer.h and consumer.h by hand, under the same names; who changes the order of waits and arrivals
there changes this file too. Each run is a random problem (lengths, causal, window or no mask, softcap or not), a random
kernel (warpgroups, stages, buffers of Q, where O leaves) and a random order of events; what is stored in the end is
compared with the blocks that every row block needs. The same runs must fail when one wait, fence or arrival is taken
out or moved (MUTATIONS). A tag (tile, block) stands for K or V of a block, (tile, rows) for Q of 64 rows.
"""

import random
from itertools import product
from typing import NamedTuple

import pytest
from protocol import (
    Agent,
    Condition,
    Mbarrier,
    MmaQueue,
    NamedBarrier,
    ProtocolError,
    Region,
    Scheduler,
    assert_all_right,
    assert_noticed,
    bulk_load,
    bulk_store,
)

SEEDS, GROUPS = 720, 12
MUTANT_SEEDS = 400  # the most that a mutation may need
WARPS = range(4)
ROWS, KEYS, LEAST_TURNS, AHEAD, SLOTS = (
    2,
    2,
    2,
    2,
    4,
)  # rows of a warpgroup, keys of a block: small, so that masks matter

WAITED = ("key_full", "value_full", "query_full", "key_empty", "value_empty", "query_empty", "tile_full", "tile_empty")
MUTATIONS = (
    *(f"no wait for {name}" for name in (*WAITED, "S", "O", "stores before Q is given back", "stores at the end")),
    *("no fence after O", "no sync before the store", "no first turn", "always the turn of warpgroup 0"),
    *("key_empty before S", "value_empty before O", "unread blocks are kept", "slot released before the store"),
    *("rows of a warpgroup without any use a buffer", "turns wherever a warpgroup has no mask"),
)


class Range(NamedTuple):
    """KeyRange of geometry.h."""

    begin: int
    end: int
    unmasked_begin: int
    unmasked_end: int


class Walk(NamedTuple):
    """ForwardWalk of config.h, and the rows that go with it."""

    keys: Range
    above: int
    below: int
    turns_begin: int
    turns_end: int
    last_in_turn: bool
    rows: int


class Case:
    """A kernel and a problem."""

    def __init__(self, pick: random.Random):
        self.warpgroups = pick.choice((2, 3))
        self.key_stages, self.value_stages = pick.choice(((4, 4), (2, 2), (2, 2), (3, 1), (1, 2)))
        self.query_buffers = pick.choice((1, 2))
        self.over_query = self.query_buffers == 2 or pick.random() < 0.5
        self.collective = pick.random() < 0.5  # an MMA group starts when all warps have issued it
        self.ctas = pick.choice((1, 1, 2))
        self.dynamic, self.packed = pick.random() < 0.5, pick.random() < 0.5
        self.capped = pick.random() < 0.2
        self.tiles = []  # (first row, queries, keys, left, right)
        for _ in range(pick.choice((1, 2, 4, 6))):
            queries, keys = pick.randint(1, self.warpgroups * ROWS), pick.choice((0, 1, 3, 8, 14))
            first = pick.choice((0, 0, 4))
            left = pick.choice((99, 99, 3))
            self.tiles.append((first, first + queries, keys, left, pick.choice((99, 99, 0, 1))))

    def seen(self, tile: int, row: int) -> tuple[int, int]:
        _, queries, keys, left, right = self.tiles[tile]
        position = row + keys - queries
        return max(0, position - left), max(0, min(keys, position + right + 1))

    def key_range(self, tile: int, begin: int, end: int) -> Range:
        queries = self.tiles[tile][1]
        if begin >= queries:
            return Range(0, 0, 0, 0)
        first, last = self.seen(tile, begin), self.seen(tile, min(end, queries) - 1)
        if last[1] <= first[0]:
            return Range(0, 0, 0, 0)
        stop = -(-last[1] // KEYS)
        unmasked = min(stop, -(-last[0] // KEYS))
        return Range(first[0] // KEYS, stop, unmasked, max(unmasked, first[1] // KEYS))

    def rows(self, tile: int, rows: int) -> Range:
        begin = self.tiles[tile][0] + rows * ROWS
        return self.key_range(tile, begin, begin + ROWS)

    def active(self, tile: int) -> int:
        return -(-(self.tiles[tile][1] - self.tiles[tile][0]) // ROWS)

    def walks(self, tile: int, count: int, too_many_turns: bool) -> list[Walk]:
        """TileGiver::give_walks."""
        first = self.tiles[tile][0]
        whole = self.key_range(tile, first, first + self.warpgroups * ROWS)
        turns_end = min(whole.unmasked_end, self.rows(tile, 0).end - 1)
        turns = self.active(tile) > 1 and whole.unmasked_begin + LEAST_TURNS <= turns_end
        rotation = 0 if turns else count % self.warpgroups
        result = {}
        for rows in range(self.warpgroups):
            keys = self.rows(tile, rows)
            if keys.begin == keys.end:
                keys = keys._replace(begin=whole.begin, end=whole.begin)
            begin, end = (whole.unmasked_begin, turns_end) if turns else (keys.unmasked_begin, 0)
            if too_many_turns and turns:
                begin, end = keys.unmasked_begin, keys.unmasked_end
            result[(rows + rotation) % self.warpgroups] = Walk(
                keys, whole.end - keys.end, keys.begin - whole.begin, begin, end, rows == self.active(tile) - 1, rows
            )
        return [result[w] for w in range(self.warpgroups)]


class Device:
    def __init__(self, case: Case, mutation: str, seed: int):
        pick = random.Random(seed)
        slow, even = pick.choice((("", True), ("", False), ("", False), ("mma", False), ("copy", False)))
        self.case, self.mutation = case, mutation
        self.scheduler = Scheduler(pick, slow, even, reshuffle=pick.choice((50, 300, 2000)))
        self.counter = 0
        self.outputs: list[tuple] = []
        self.ctas = [Cta(self, index) for index in range(case.ctas)]

    def check(self) -> None:
        case, expected = self.case, []
        for tile in range(len(case.tiles)):
            for rows, warp in product(range(case.active(tile)), WARPS):
                keys = case.rows(tile, rows)
                blocks = tuple(range(keys.end - 1, keys.begin - 1, -1))
                rounds = 1 if case.over_query else 2
                expected += [(tile, rows, warp, blocks, number) for number in range(rounds)]
        assert sorted(self.outputs) == sorted(expected)


class Cta:
    """Shared memory and the producer warps."""

    def __init__(self, device: Device, index: int):
        self.device, self.case, self.index = device, device.case, index
        case, warpgroups, slots = device.case, range(device.case.warpgroups), range(SLOTS)
        buffers, keys, values = range(case.query_buffers), range(case.key_stages), range(case.value_stages)
        self.k, self.v = [Region("K") for _ in keys], [Region("V") for _ in values]
        # Of 16 rows: what a warp multiplies, and writes.
        self.q = {place: Region(f"Q {place}") for place in product(buffers, warpgroups, WARPS)}
        self.o = {place: Region(f"O {place}") for place in product(warpgroups, WARPS)}
        self.key_full = [Mbarrier("key_full", 1) for _ in keys]
        self.value_full = [Mbarrier("value_full", 1) for _ in values]
        self.key_empty = [Mbarrier("key_empty", 4 * case.warpgroups) for _ in keys]
        self.value_empty = [Mbarrier("value_empty", 4 * case.warpgroups) for _ in values]
        self.query_full = {place: Mbarrier("query_full", 1) for place in product(buffers, warpgroups)}
        arrivals = 1 if case.over_query else 4
        self.query_empty = {place: Mbarrier("query_empty", arrivals) for place in product(buffers, warpgroups)}
        self.nearly_loaded = Mbarrier("nearly_loaded", 1)
        self.tile_full = [Mbarrier("tile_full", 1 + case.warpgroups) for _ in slots]
        self.tile_empty = [Mbarrier("tile_empty", 4 * case.warpgroups + 2) for _ in slots]
        self.slots: list[tuple] = [()] * SLOTS  # (tile or None, walks)
        self.own = [NamedBarrier(f"warpgroup {w}", 4) for w in warpgroups]
        self.turn = [NamedBarrier(f"turn {w}", 8) for w in warpgroups]
        self.stores = [0] * case.warpgroups  # that still read shared memory
        self.keys_loaded = self.values_loaded = 0
        for agent in (self.give(), self.load_keys_and_values(), self.load_queries()):
            device.scheduler.spawn(agent, "producer")
        for w in warpgroups:
            warps = [Consumer(self, w, warp) for warp in WARPS]
            for consumer in warps:
                peers = [warp.mma for warp in warps] if case.collective else []
                device.scheduler.spawn(consumer.run(), "consumer")
                device.scheduler.spawn(consumer.mma.run(peers), "mma", daemon=True)

    def mutated(self, name: str) -> bool:
        return self.device.mutation == name

    def wait(self, barrier: Mbarrier, phase: int) -> Condition | None:
        return None if self.mutated(f"no wait for {barrier.name}") else barrier.wait(phase)

    def look(self, tiles: int) -> Condition | None:
        return self.wait(self.tile_full[tiles % SLOTS], tiles // SLOTS)

    def slot(self, tiles: int) -> tuple:
        if not self.slots[tiles % SLOTS]:
            raise ProtocolError("a slot is read before it is filled")
        return self.slots[tiles % SLOTS]

    def give(self) -> Agent:
        """TileGiver::run."""
        case, tiles = self.case, 0
        while True:
            yield self.nearly_loaded.wait(tiles - 1)
            if case.dynamic and not case.packed and tiles >= 2:
                yield self.tile_empty[(tiles - 2) % SLOTS].wait((tiles - 2) // SLOTS)
            position = tiles * case.ctas + (case.ctas - 1 - self.index if tiles % 2 else self.index)
            if case.dynamic:
                position, self.device.counter = self.device.counter, self.device.counter + 1
            tile = position if position < len(case.tiles) else None
            too_many_turns = self.mutated("turns wherever a warpgroup has no mask")
            walks = [] if tile is None else case.walks(tile, tiles, too_many_turns)
            yield self.wait(self.tile_empty[tiles % SLOTS], tiles // SLOTS - 1)
            self.slots[tiles % SLOTS] = (tile, walks)
            for _ in range(1 + case.warpgroups):
                self.tile_full[tiles % SLOTS].arrive()
                yield None
            tiles += 1
            if tile is None:
                return

    def load_keys_and_values(self) -> Agent:
        """KeyLoader::run."""
        tiles = 0
        while True:
            yield self.look(tiles)
            tile, walks = self.slot(tiles)
            if tile is None:
                return
            begin, end = walks[0].keys.begin - walks[0].below, walks[0].keys.end + walks[0].above
            self.tile_empty[tiles % SLOTS].arrive()
            for block in range(end, begin - 1, -1):
                if block > begin:
                    use, stage = divmod(self.keys_loaded, self.case.key_stages)
                    yield self.wait(self.key_empty[stage], use - 1)
                    yield from self.copy(self.key_full[stage], (tile, block - 1), self.k[stage])
                    self.keys_loaded += 1
                if block < end:
                    use, stage = divmod(self.values_loaded, self.case.value_stages)
                    yield self.wait(self.value_empty[stage], use - 1)
                    yield from self.copy(self.value_full[stage], (tile, block), self.v[stage])
                    self.values_loaded += 1
                if block == min(end, begin + AHEAD):
                    self.nearly_loaded.arrive()
            tiles += 1

    def load_queries(self) -> Agent:
        """QueryLoader::run."""
        tiles, uses = 0, [0] * self.case.warpgroups
        while True:
            yield self.look(tiles)
            tile, walks = self.slot(tiles)
            if tile is None:
                return
            for w, walk in enumerate(walks):
                if walk.rows >= self.case.active(tile):
                    continue
                use, buffer = divmod(uses[w], self.case.query_buffers)
                uses[w] += 1
                yield self.wait(self.query_empty[buffer, w], use - 1)
                quarters = [self.q[buffer, w, warp] for warp in WARPS]
                yield from self.copy(self.query_full[buffer, w], (tile, walk.rows), *quarters)
            self.tile_empty[tiles % SLOTS].arrive()
            tiles += 1

    def copy(self, full: Mbarrier, tag, *regions: Region) -> Agent:
        full.arrive(len(regions))
        for region in regions:
            self.device.scheduler.start(bulk_load(region, tag, full), "copy")
            yield None


class Consumer:
    """A warp of Consumer."""

    def __init__(self, cta: Cta, warpgroup: int, warp: int):
        self.cta, self.case, self.warpgroup, self.warp = cta, cta.case, warpgroup, warp
        self.id = (warpgroup, warp)
        self.mma = MmaQueue()
        self.keys_used = self.values_used = self.tiles = self.queries = 0
        self.output_leaving = False
        self.o: tuple = ()

    def look_again(self, tile: int) -> list[Walk]:
        if self.cta.slots[self.tiles % SLOTS][0] != tile:
            raise ProtocolError("the tile's slot is overwritten")
        return self.cta.slots[self.tiles % SLOTS][1]

    def wait_keys(self) -> Condition | None:
        use, stage = divmod(self.keys_used, self.case.key_stages)
        return self.cta.wait(self.cta.key_full[stage], use)

    def wait_values(self) -> Condition | None:
        use, stage = divmod(self.values_used, self.case.value_stages)
        return self.cta.wait(self.cta.value_full[stage], use)

    def release_keys(self) -> None:
        self.cta.key_empty[self.keys_used % self.case.key_stages].arrive()
        self.keys_used += 1

    def release_values(self) -> None:
        self.cta.value_empty[self.values_used % self.case.value_stages].arrive()
        self.values_used += 1

    def release_unread(self, count: int) -> Agent:
        for _ in range(0 if self.cta.mutated("unread blocks are kept") else count):
            yield self.wait_keys()
            self.release_keys()
            yield self.wait_values()
            self.release_values()

    def stores_left(self, when: str) -> Condition | None:
        left = Condition("stores that still read", lambda: self.cta.stores[self.warpgroup] == 0)
        return None if self.cta.mutated(f"no wait for stores {when}") else left

    def release_left_queries(self) -> Agent:
        if self.output_leaving and self.warp == 0:
            yield self.stores_left("before Q is given back")
            self.cta.query_empty[(self.queries + 1) % self.case.query_buffers, self.warpgroup].arrive()
        self.output_leaving = False

    def release_read_queries(self) -> None:
        if not self.case.over_query:
            self.cta.query_empty[self.queries % self.case.query_buffers, self.warpgroup].arrive()

    def run(self) -> Agent:
        cta = self.cta
        if self.warpgroup == self.case.warpgroups - 1 and not cta.mutated("no first turn"):
            cta.turn[0].arrive(self.id)
        while True:
            yield cta.look(self.tiles)
            tile = cta.slot(self.tiles)[0]
            if tile is None:
                break
            yield from self.process(tile)
            self.tiles += 1
        if self.warp == 0:
            yield self.stores_left("at the end")
            if cta.stores[self.warpgroup]:
                raise ProtocolError("the CTA exits before its stores")
        if self.mma.groups:
            raise ProtocolError("the warp exits before its MMA groups")

    def process(self, tile: int) -> Agent:
        cta, case = self.cta, self.case
        walk, empty = self.look_again(tile)[self.warpgroup], cta.tile_empty[self.tiles % SLOTS]
        yield from self.release_unread(walk.above)
        if walk.rows >= case.active(tile):
            self.queries += cta.mutated("rows of a warpgroup without any use a buffer")
            empty.arrive()
            return
        use, buffer = divmod(self.queries, case.query_buffers)
        yield cta.wait(cta.query_full[buffer, self.warpgroup], use)
        self.o = ()
        if walk.keys.begin < walk.keys.end:
            yield from self.attend(tile, walk)
        else:
            self.release_read_queries()
        if cta.mutated("slot released before the store"):
            empty.arrive()
            yield None
        yield from self.store(tile)
        self.queries += 1
        below = self.look_again(tile)[self.warpgroup].below
        if not cta.mutated("slot released before the store"):
            empty.arrive()
        yield from self.release_unread(below)

    def issue_qk(self, tile: int, block: int, rows: int) -> None:
        queries = self.cta.q[self.queries % self.case.query_buffers, self.warpgroup, self.warp]
        keys = self.cta.k[self.keys_used % self.case.key_stages]
        self.mma.issue([(queries, (tile, rows)), (keys, (tile, block))], "s")

    def issue_pv(self, tile: int, block: int) -> None:
        self.mma.issue([(self.cta.v[self.values_used % self.case.value_stages], (tile, block))], "o", "p")
        self.o = (*self.o, block)

    def softmax(self) -> None:
        self.mma.check_readable("s")
        self.mma.check_readable("o")
        self.mma.check_writable("p")

    def attend(self, tile: int, walk: Walk) -> Agent:
        keys, mutated = walk.keys, self.cta.mutated
        block = keys.end - 1
        yield self.wait_keys()
        self.issue_qk(tile, block, walk.rows)
        yield None
        yield from self.release_left_queries()
        if mutated("key_empty before S"):
            self.release_keys()
        yield None if mutated("no wait for S") else self.mma.wait(0)
        if not mutated("key_empty before S"):
            self.release_keys()
        self.look_again(tile)  # for the mask
        self.softmax()
        masked_to, to, turns_end = keys.unmasked_end, walk.turns_begin, walk.turns_end
        last = to == keys.begin
        block -= 1
        while self.case.capped and block >= keys.begin:
            yield from self.multiply_both(tile, block, walk, False)
            block -= 1
        while not self.case.capped:
            while block >= masked_to:
                yield from self.multiply_both(tile, block, walk, False)
                block -= 1
            while block >= to:
                yield from self.multiply_both(tile, block, walk, block < turns_end)
                block -= 1
            if last:
                break
            left = self.look_again(tile)[self.warpgroup].keys
            last = block < left.unmasked_begin
            masked_to = left.begin if last else block + 1
            to = left.begin if last else left.unmasked_begin
            turns_end = 0
        self.release_read_queries()
        yield self.wait_values()
        self.issue_pv(tile, block + 1)
        yield None
        yield None if mutated("no wait for O") else self.mma.wait(0)
        self.mma.check_readable("o")
        self.release_values()

    def multiply_both(self, tile: int, block: int, walk: Walk, in_turn: bool) -> Agent:
        cta, mutated = self.cta, self.cta.mutated
        yield self.wait_values()
        yield self.wait_keys()
        if in_turn:
            yield cta.turn[self.warpgroup].sync(self.id)
        self.issue_pv(tile, block + 1)
        yield None
        self.issue_qk(tile, block, walk.rows)
        if in_turn:
            to_first = walk.last_in_turn or mutated("always the turn of warpgroup 0")
            cta.turn[0 if to_first else self.warpgroup + 1].arrive(self.id)
        if mutated("value_empty before O"):
            self.release_values()
        yield self.mma.wait(1)
        if not mutated("value_empty before O"):
            self.release_values()
        yield None if mutated("no wait for S") else self.mma.wait(0)
        self.release_keys()
        self.softmax()

    def store(self, tile: int) -> Agent:
        cta, case, rows = self.cta, self.case, self.look_again(tile)[self.warpgroup].rows
        buffer, own = self.queries % case.query_buffers, cta.own[self.warpgroup]
        for number in range(1 if case.over_query else 2):
            if case.over_query:
                yield from self.release_left_queries()
            else:
                if self.warp == 0:
                    yield self.stores_left("before Q is given back")
                yield own.sync(self.id)
            regions = [
                cta.q[buffer, self.warpgroup, warp] if case.over_query else cta.o[self.warpgroup, warp]
                for warp in WARPS
            ]
            region = regions[self.warp]
            region.write((tile, rows, self.warp, self.o, number))
            yield None
            region.unfenced = cta.mutated("no fence after O")
            if not cta.mutated("no sync before the store"):
                yield own.sync(self.id)
            if self.warp == 0:
                for warp, quarter in enumerate(regions):
                    if quarter.tag is None or quarter.tag[:3] != (tile, rows, warp):
                        raise ProtocolError(f"a store finds {quarter.tag}")
                    cta.stores[self.warpgroup] += 1
                    cta.device.scheduler.start(bulk_store(quarter, quarter.tag, self.stored(quarter.tag)), "copy")
                yield None
        self.output_leaving = case.over_query
        if case.query_buffers == 1:
            yield from self.release_left_queries()

    def stored(self, tag):
        def done():
            self.cta.stores[self.warpgroup] -= 1
            self.cta.device.outputs.append(tag)

        return done


def run(seed: int, mutation: str = "") -> None:
    case = Case(random.Random(seed))
    device = Device(case, mutation, seed)
    device.scheduler.run()
    device.check()


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_schedules(group):
    assert_all_right(run, range(group, SEEDS, GROUPS))


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(mutation):
    assert_noticed(lambda seed: run(seed, mutation), MUTANT_SEEDS)
