"""Barriers of the kernels that hold keys, without a GPU: a model of csrc/kernels/backward/keys under random schedules.

The model mirrors producer.h, consumer.h and output.h by hand, function by function and under the same names. Who
changes the order of waits and arrivals there changes this file too. Each run is a random problem (tiles, some without
steps, some cut into parts, query heads of a group, causal order or not, softcap or not), a random kernel (dQ fused or
not, S^T early or not, stages, layout of dQ) and a random order of events; its end is compared with the steps written
out. So that this proves something, the same runs must fail when one wait, fence or arrival is taken out or moved
(MUTATIONS).

A tag (tile, head, block) stands for what a step computes; dK and dV are the list of the steps that they sum. Not here:
what protocol.py leaves out, so also whether global memory shows the parts of a cut tile to who sums them.
"""

import random
from collections import Counter
from itertools import chain, product
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

SEEDS, GROUPS = 320, 16
MUTANT_SEEDS = 400  # the most that a mutation may need
WARPGROUPS, WARPS = range(2), range(4)

FULL = ("key_full", "value_full", "query_full", "gradient_full", "score_full")
EMPTY = ("key_empty", "value_empty", "query_empty", "gradient_empty", "score_empty", "tile_empty")
OTHERS = ("S", "dP", "dV", "dK", "stores before a write", "stores at the end")
MUTATIONS = (
    *(f"no wait for {name}" for name in FULL + EMPTY + OTHERS),
    *(f"no sync {when}" for when in ("after old stores", "before new stores", "before the count", "after the count")),
    *("no fence after dS", "no fence after dV and dK", "no first turn"),
    *("key_empty before dQ", "query_empty before dK", "gradient_empty before dV", "score_empty before dQ"),
    *("score_empty in the first step", "phase flips without steps", "tile_empty before the second look"),
)


class Shape(NamedTuple):
    """Of a tile: query blocks first .. end - 1 for each head of the group, from `start` on and round."""

    first: int
    end: int
    start: int
    heads: int

    def steps(self) -> int:
        return self.heads * (self.end - self.first)


class Walk:
    """struct Walk of tile.h."""

    def __init__(self, shape: Shape, step: int):
        count = shape.end - shape.first
        self.head, self.block = step // count, shape.start + step % count
        if self.block >= shape.end:
            self.block -= count

    def advance(self, shape: Shape) -> None:
        self.block += 1
        if self.block == shape.end:
            self.block = shape.first
        if self.block == shape.start:
            self.head += 1


class Work(NamedTuple):
    """A tile, or part `part` of `parts` of it."""

    tile: int
    begin: int
    end: int
    part: int
    parts: int


class Case:
    """A kernel and a problem."""

    def __init__(self, pick: random.Random):
        self.fused = pick.random() < 0.6
        self.early_scores = not self.fused and pick.random() < 0.6
        stages = ((3, 2), (3, 1), (2, 2)) if self.early_scores else ((2, 2), (2, 2), (2, 1), (1, 1), (3, 2), (1, 2))
        self.query_stages, self.gradient_stages = pick.choice(stages)
        self.capped = not self.fused and pick.random() < 0.6
        self.transposed = pick.random() < 0.5
        self.collective = pick.random() < 0.5  # an MMA group starts when all warps have issued it
        self.chunks, self.places = pick.choice(((1, 1), (2, 1), (3, 2)))  # of dV and of dK; in a region
        self.ctas = pick.choice((1, 1, 2, 3))
        self.dynamic = pick.random() < 0.5
        heads, causal = pick.choice((1, 1, 2, 3)), pick.random() < 0.5
        self.shapes, self.order = [], []
        for tile in range(pick.choice((1, 2, 3, 4) if self.ctas == 1 else (2, 4, 5))):
            first, count = pick.choice((0, 2)), pick.choice((0, 1, 1, 2, 2, 3, 4, 5) if heads == 1 else (0, 1, 2))
            start = first if causal else first + pick.randrange(8) * count // 8
            shape = Shape(first, first + count, start, heads)
            parts = pick.choice((1, 1, 1, 2, 3))
            cuts = [0, *sorted(pick.randint(0, shape.steps()) for _ in range(parts - 1)), shape.steps()]
            self.shapes.append(shape)
            self.order += [Work(tile, cuts[i], cuts[i + 1], i if parts > 1 else -1, parts) for i in range(parts)]
        if pick.random() < 0.3:
            pick.shuffle(self.order)


class Device:
    """What CTAs share, and what they leave."""

    def __init__(self, case: Case, mutation: str, seed: int):
        pick = random.Random(seed)
        slow, even = pick.choice((("", True), ("", False), ("", False), ("mma", False), ("copy", False)))
        self.case, self.mutation = case, mutation
        self.scheduler = Scheduler(pick, slow, even, reshuffle=pick.choice((50, 300, 2000)))
        self.counter = 0
        self.partial, self.partial_counts = {}, Counter()
        self.outputs: list[tuple] = []
        self.added = Counter()  # to dq_sums
        self.ctas = [Cta(self, index) for index in range(case.ctas)]

    def check(self) -> None:
        added, outputs = Counter(), []
        for tile, shape in enumerate(self.case.shapes):
            walked = [Walk(shape, step) for step in range(shape.steps())]
            steps = tuple((tile, at.head, at.block) for at in walked)
            for warp in product(WARPGROUPS, WARPS):
                outputs += [(tile, name, i, warp, steps) for name in ("dv", "dk") for i in range(self.case.chunks)]
                added.update((step, step[1] * shape.end + step[2], warp) for step in steps)
        assert sorted(self.outputs) == sorted(outputs)
        assert self.added == (added if self.case.fused else Counter())


class Cta:
    """Shared memory and the producer."""

    def __init__(self, device: Device, index: int):
        self.device, self.case, self.index = device, device.case, index
        query_stages, gradient_stages = range(self.case.query_stages), range(self.case.gradient_stages)
        self.k, self.v = Region("K"), Region("V")
        self.q, self.lse = ([Region(name) for _ in query_stages] for name in ("Q", "LSE"))
        self.dout, self.delta = ([Region(name) for _ in gradient_stages] for name in ("dO", "delta"))
        # By buffer, half of it, warp that writes and place of an output chunk.
        places = product((0, 1), (0, 1), product(WARPGROUPS, WARPS), range(self.case.places))
        self.ds = {place: Region(f"dS {place}") for place in places}
        self.parts_before = [0, 0]
        self.slots: list[Work | None] = [None, None]
        self.key_full, self.value_full = Mbarrier("key_full", 1), Mbarrier("value_full", 1)
        self.key_empty, self.value_empty = Mbarrier("key_empty", 8), Mbarrier("value_empty", 8)
        self.query_full = [Mbarrier("query_full", 1) for _ in query_stages]
        self.query_empty = [Mbarrier("query_empty", 8) for _ in query_stages]
        self.gradient_full = [Mbarrier("gradient_full", 1) for _ in gradient_stages]
        self.gradient_empty = [Mbarrier("gradient_empty", 8) for _ in gradient_stages]
        self.score_full = [Mbarrier("score_full", 8) for _ in range(2)]
        self.score_empty = [Mbarrier("score_empty", 8) for _ in range(2)]
        self.tile_full = [Mbarrier("tile_full", 1) for _ in range(2)]
        self.tile_empty = [Mbarrier("tile_empty", 8) for _ in range(2)]
        self.own = [NamedBarrier(f"warpgroup {w}", 4) for w in WARPGROUPS]
        self.turn = [NamedBarrier(f"turn {w}", 8) for w in WARPGROUPS]
        self.stores = [0, 0]  # that still read shared memory
        self.loaded = self.loaded_queries = self.loaded_gradients = 0
        device.scheduler.spawn(self.produce(), "producer")
        consumers = [[Consumer(self, w, r) for r in WARPS] for w in WARPGROUPS]
        for consumer in chain(*consumers):
            peers = consumers[consumer.warpgroup] if self.case.collective else []
            device.scheduler.spawn(consumer.run(), "consumer")
            device.scheduler.spawn(consumer.mma.run([peer.mma for peer in peers]), "mma", daemon=True)

    def mutated(self, name: str) -> bool:
        return self.device.mutation == name

    def wait(self, barrier: Mbarrier, phase: int) -> Condition | None:
        return None if self.mutated(f"no wait for {barrier.name}") else barrier.wait(phase)

    def produce(self) -> Agent:
        """KeysProducer::run."""
        tiles = 0
        while True:
            yield None
            position = tiles * self.case.ctas + (self.case.ctas - 1 - self.index if tiles % 2 else self.index)
            if self.case.dynamic:
                position, self.device.counter = self.device.counter, self.device.counter + 1
            work = self.case.order[position] if position < len(self.case.order) else None
            yield self.wait(self.tile_empty[tiles % 2], tiles // 2 - 1)
            self.slots[tiles % 2] = work
            self.tile_full[tiles % 2].arrive()
            tiles += 1
            if work is None:
                return
            if work.begin < work.end:
                yield from self.load(work)

    def load(self, work: Work) -> Agent:
        shape = self.case.shapes[work.tile]
        at = Walk(shape, work.begin)
        for step in range(work.begin, work.end):
            tag = (work.tile, at.head, at.block)
            use, stage = divmod(self.loaded_queries, self.case.query_stages)
            yield self.wait(self.query_empty[stage], use - 1)
            yield from self.copy(self.query_full[stage], tag, self.q[stage], self.lse[stage])
            if step == work.begin:
                yield self.wait(self.value_empty, self.loaded - 1)
                yield from self.copy(self.value_full, work.tile, self.v)
            use, stage = divmod(self.loaded_gradients, self.case.gradient_stages)
            yield self.wait(self.gradient_empty[stage], use - 1)
            yield from self.copy(self.gradient_full[stage], tag, self.dout[stage], self.delta[stage])
            if step == work.begin:
                yield self.wait(self.key_empty, self.loaded - 1)
                yield from self.copy(self.key_full, work.tile, self.k)
            self.loaded_queries, self.loaded_gradients = self.loaded_queries + 1, self.loaded_gradients + 1
            at.advance(shape)
        self.loaded += 1

    def copy(self, full: Mbarrier, tag, *regions: Region) -> Agent:
        full.arrive(len(regions))
        for region in regions:
            self.device.scheduler.start(bulk_load(region, tag, full), "copy")
            yield None


class Consumer:
    """A warp of KeysConsumer."""

    def __init__(self, cta: Cta, warpgroup: int, warp: int):
        self.cta, self.case, self.warpgroup, self.warp = cta, cta.case, warpgroup, warp
        self.id = (warpgroup, warp)
        self.mma = MmaQueue()
        self.step = self.walked = 0  # tiles with steps
        self.dk = self.dv = ()

    def wait_mma(self, groups: int, name: str) -> Condition | None:
        return None if self.cta.mutated(f"no wait for {name}") else self.mma.wait(groups)

    def sync(self, when: str) -> Condition | None:
        return None if self.cta.mutated(f"no sync {when}") else self.cta.own[self.warpgroup].sync(self.id)

    def pass_turn(self) -> None:
        self.cta.turn[1 - self.warpgroup].arrive(self.id)

    def look(self, tiles: int) -> Condition:
        return self.cta.wait(self.cta.tile_full[tiles % 2], tiles // 2)

    def look_again(self, work: Work, tiles: int) -> None:
        if self.cta.slots[tiles % 2] != work:
            raise ProtocolError("the tile's slot is overwritten")

    def run(self) -> Agent:
        cta, tiles = self.cta, 0
        if self.warpgroup == 1 and not cta.mutated("no first turn"):
            self.pass_turn()
        while True:
            yield self.look(tiles)
            work, empty = cta.slots[tiles % 2], cta.tile_empty[tiles % 2]
            if work is None:
                break
            if cta.mutated("tile_empty before the second look"):
                empty.arrive()
            yield from self.walk(work, tiles)
            yield self.look(tiles)
            self.look_again(work, tiles)
            if work.part >= 0:
                yield from self.sum_parts(work)
            if work.part < 0 or cta.parts_before[self.warpgroup] == work.parts - 1:
                yield from self.store(work.tile)
            if not cta.mutated("tile_empty before the second look"):
                empty.arrive()
            tiles += 1
        if self.warp == 0:
            yield self.stores_left("at the end")
            if cta.stores[self.warpgroup]:
                raise ProtocolError("the CTA exits before its stores")
        if self.mma.groups:
            raise ProtocolError("the warp exits before its MMA groups")

    def walk(self, work: Work, tiles: int) -> Agent:
        cta, fused, mutated = self.cta, self.case.fused, self.cta.mutated
        self.dk = self.dv = ()
        if work.begin >= work.end:
            self.walked += mutated("phase flips without steps")
            return
        shape = self.case.shapes[work.tile]
        at = Walk(shape, work.begin)
        tag = tag_before = (work.tile, at.head, at.block)
        sums = at.head * shape.end + at.block
        yield cta.wait(cta.key_full, self.walked)
        yield from self.issue_scores(self.step, tag, False)
        if self.case.capped:
            yield from self.wait_left()
        there = yield from self.probabilities(self.step, tag, 0)
        self.look_again(work, tiles)  # for the mask
        for number in range(work.begin, work.end):
            first, last = number == work.begin, number == work.end - 1
            step, query = self.step, self.step % self.case.query_stages
            use, stage = divmod(step, self.case.gradient_stages)
            buffer, before = step % 2, (step - 1) % 2
            if not there:
                yield cta.wait(cta.gradient_full[stage], use)
            if first:
                yield cta.wait(cta.value_full, self.walked)
            self.mma.issue([(cta.v, work.tile), (cta.dout[stage], tag)], "dp")
            yield None
            self.mma.issue([(cta.dout[stage], tag)], "dv", "p")
            yield None
            cta.delta[stage].read(tag)
            yield self.wait_mma(1, "dP")
            self.mma.check_readable("dp")
            if last:
                cta.value_empty.arrive()
                if not fused:
                    cta.key_empty.arrive()
            empty = full = next_there = False
            if fused:
                empty = cta.score_empty[buffer].test(step // 2 - 1)
                yield None
                full = first or cta.score_full[before].test((step - 1) // 2)
            if self.case.early_scores:
                next_there = self.queries_there(step + 1)
            yield None
            cta.delta[stage].read(tag)  # dS = P (dP - delta)
            self.mma.check_readable("p")
            self.mma.check_writable("ds")
            if self.case.capped:  # uncap
                for region in (*self.own_regions(buffer, 0), *self.own_regions(buffer, 1)):
                    region.read(("factors", tag))
            if mutated("gradient_empty before dV"):
                cta.gradient_empty[stage].arrive()
            if self.case.early_scores:
                tag_before = tag
                if not last:
                    at.advance(shape)
                    tag = (work.tile, at.head, at.block)
                    yield from self.issue_scores(step + 1, tag, next_there)
                self.mma.issue([(cta.q[query], tag_before)], "dk", "ds")
                yield None
                yield self.wait_mma(1 if last else 2, "dV")
                self.mma.check_readable("dv")
                if not mutated("gradient_empty before dV"):
                    cta.gradient_empty[stage].arrive()
                if mutated("query_empty before dK"):
                    cta.query_empty[query].arrive()
                if not last:
                    there = yield from self.probabilities(step + 1, tag, 1)
                    self.look_again(work, tiles)
                yield self.wait_mma(0, "dK")
                self.mma.check_readable("dk")
                self.dv, self.dk = (*self.dv, tag_before), (*self.dk, tag_before)
                if not mutated("query_empty before dK"):
                    cta.query_empty[query].arrive()
                yield None
                if last:
                    break
                self.step += 1
                continue
            if fused:
                if first:
                    yield from self.wait_left()
                yield from self.publish(tag, empty)
                if not full:
                    yield cta.wait(cta.score_full[before], (step - 1) // 2)
                self.issue_queries(step - 1, tag_before, goes_nowhere=first)
                yield None
                if mutated("score_empty before dQ") and not first:
                    cta.score_empty[before].arrive()
            self.mma.issue([(cta.q[query], tag)], "dk", "ds")
            yield None
            yield self.wait_mma(1, "dV")
            self.mma.check_readable("dv")
            if not mutated("gradient_empty before dV"):
                cta.gradient_empty[stage].arrive()
            yield None
            next_there = self.queries_there(step + 1)
            if fused and first and mutated("score_empty in the first step"):
                cta.score_empty[before].arrive()
            if fused and not first:
                if not mutated("score_empty before dQ"):
                    cta.score_empty[before].arrive()
                yield None
                self.add(tag_before, sums)
            if mutated("query_empty before dK"):
                cta.query_empty[query].arrive()
            yield self.wait_mma(0, "dK")
            self.mma.check_readable("dk")
            self.dv, self.dk = (*self.dv, tag), (*self.dk, tag)
            if not mutated("query_empty before dK"):
                cta.query_empty[query].arrive()
            yield None
            if not first:  # from_the_step_before
                sums += (
                    1 - (at.block == shape.first) * (shape.end - shape.first) + (at.block == shape.start) * shape.end
                )
            tag_before = tag
            if last:
                break
            at.advance(shape)
            tag = (work.tile, at.head, at.block)
            yield from self.issue_scores(step + 1, tag, next_there)
            there = yield from self.probabilities(step + 1, tag, 0)
            self.look_again(work, tiles)
            self.step += 1
        if fused:
            yield cta.wait(cta.score_full[buffer], step // 2)
            self.issue_queries(step, tag)
            yield None
            if mutated("key_empty before dQ"):
                cta.key_empty.arrive()
            yield self.mma.wait(0)
            cta.score_empty[buffer].arrive()
            yield None
            if not mutated("key_empty before dQ"):
                cta.key_empty.arrive()
            self.add(tag, sums)
        self.step += 1
        self.walked += 1

    def issue_scores(self, step: int, tag, there: bool) -> Agent:
        cta, (use, stage) = self.cta, divmod(step, self.case.query_stages)
        if not there:
            yield cta.wait(cta.query_full[stage], use)
        self.mma.issue([(cta.k, tag[0]), (cta.q[stage], tag)], "s")
        yield None

    def queries_there(self, step: int) -> bool:
        use, stage = divmod(step, self.case.query_stages)
        return self.cta.query_full[stage].test(use)

    def probabilities(self, step: int, tag, in_flight: int) -> Agent:
        cta, lse = self.cta, self.cta.lse[step % self.case.query_stages]
        lse.read(tag)
        yield self.wait_mma(in_flight, "S")
        self.mma.check_readable("s")
        if self.case.capped:
            yield from self.cap(step, tag)
        use, stage = divmod(step, self.case.gradient_stages)
        there = cta.gradient_full[stage].test(use)
        yield cta.turn[self.warpgroup].sync(self.id)
        lse.read(tag)
        self.mma.check_writable("p")
        yield None
        lse.read(tag)
        self.pass_turn()
        return there

    def cap(self, step: int, tag) -> Agent:
        for half in (0, 1):
            for region in self.own_regions(step % 2, half):
                region.write(("factors", tag))
            yield None

    def issue_queries(self, step: int, tag, goes_nowhere: bool = False) -> None:
        reads = [(self.cta.k, tag[0])]
        if not goes_nowhere:
            halves = (0, 1) if self.case.transposed else (self.warpgroup,)
            reads += [(ds, tag) for place, ds in self.cta.ds.items() if place[0] == step % 2 and place[1] in halves]
        self.mma.issue(reads, "dq")

    def add(self, tag, sums: int) -> None:
        self.mma.check_readable("dq")
        self.cta.device.added[tag, sums, self.id] += 1

    def own_regions(self, buffer: int, half: int) -> list[Region]:
        return [self.cta.ds[buffer, half, self.id, place] for place in range(self.case.places)]

    def fence(self, what: str) -> None:
        """Of the proxies: for what this warp has written."""
        if not self.cta.mutated(f"no fence after {what}"):
            for place, region in self.cta.ds.items():
                region.unfenced &= place[2] != self.id

    def publish(self, tag, empty: bool) -> Agent:
        if not empty:
            yield self.wait_empty(self.step)
        for half in (0, 1):
            for region in self.own_regions(self.step % 2, half):
                region.write(tag)
            yield None
        self.fence("dS")
        self.cta.score_full[self.step % 2].arrive()
        yield None

    def wait_empty(self, step: int) -> Condition | None:
        return self.cta.wait(self.cta.score_empty[step % 2], step // 2 - 1)

    def sum_parts(self, work: Work) -> Agent:
        cta, device = self.cta, self.cta.device
        device.partial[work.tile, work.part, self.id] = (self.dk, self.dv)
        yield self.sync("before the count")
        if self.warp == 0:
            cta.parts_before[self.warpgroup] = device.partial_counts[work.tile, self.warpgroup]
            device.partial_counts[work.tile, self.warpgroup] += 1
        yield self.sync("after the count")
        if cta.parts_before[self.warpgroup] == work.parts - 1:
            sums = [device.partial.get((work.tile, part, self.id)) for part in range(work.parts)]
            if None in sums:
                raise ProtocolError(f"a part of tile {work.tile} is summed before it is there")
            self.dk, self.dv = (sum(parts, ()) for parts in zip(*sums, strict=True))

    def stores_left(self, when: str) -> Condition | None:
        left = Condition("stores that still read", lambda: self.cta.stores[self.warpgroup] == 0)
        return None if self.cta.mutated(f"no wait for stores {when}") else left

    def wait_left(self) -> Agent:
        if self.warp == 0:
            yield self.stores_left("before a write")
        yield self.sync("after old stores")

    def store(self, tile: int) -> Agent:
        cta, chunks = self.cta, self.case.chunks
        if self.case.fused:
            yield self.wait_empty(self.step)
            yield self.wait_empty(self.step + 1)
        yield from self.wait_left()
        placed = []
        for number in range(2 * chunks):
            name, sums = ("dv", self.dv) if number < chunks else ("dk", self.dk)
            region, place = divmod(number, self.case.places)
            cta.ds[region // 2, region % 2, self.id, place].write((tile, name, number % chunks, self.id, sums))
            placed.append((region // 2, region % 2, place, (tile, name, number % chunks)))
            yield None
        self.fence("dV and dK")
        yield self.sync("before new stores")
        if self.warp > 0:
            return
        for buffer, half, place, output in placed:
            for warp in WARPS:
                region = cta.ds[buffer, half, (self.warpgroup, warp), place]
                if region.tag is None or region.tag[:4] != (*output, (self.warpgroup, warp)):
                    raise ProtocolError(f"a store of {output} finds {region.tag}")
                cta.stores[self.warpgroup] += 1
                cta.device.scheduler.start(bulk_store(region, region.tag, self.stored(region.tag)), "copy")
            yield None

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
