"""Primitives for models of a kernel's barrier protocol: what waits for what, without the arithmetic.

An agent (a warp, a copy in flight, the MMA groups of a warp) is a generator. It acts at once between two yields, and
yields None where others may act in between, or a Condition that has to hold before it goes on. The scheduler picks
agents at random, some a hundred times as often as others, so that a run is one interleaving of many.

Modelled: mbarriers with arrivals and transactions, whose phases are numbered from 0, so that a parity that is right by
chance is an error; named barriers; regions of shared memory with a tag that says what they hold, readers and writers
that take time, and writes that the asynchronous proxy does not see before a fence; MMA groups that use shared memory
and registers until they retire; bulk copies in both directions. Deadlock and livelock are errors.

Not modelled: values, addresses, byte counts, the order in which writes to global memory become visible, lanes of a warp
that diverge, and what the compiler moves.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Generator, Hashable, Iterable
from itertools import accumulate
from typing import NamedTuple


class ProtocolError(Exception):
    pass


class Condition(NamedTuple):
    what: str
    holds: Callable[[], bool]


Agent = Generator[Condition | None, None, None]


class Mbarrier:
    """Phase `phase` is going on; those before it are complete."""

    def __init__(self, name: str, arrivals: int):
        self.name, self.arrivals = name, arrivals
        self.pending, self.transactions, self.phase = arrivals, 0, 0

    def arrive(self, transactions: int = 0) -> None:
        if self.pending == 0:
            raise ProtocolError(f"{self.name}: too many arrivals in phase {self.phase}")
        self.pending -= 1
        self.complete(-transactions)

    def complete(self, transactions: int) -> None:
        self.transactions -= transactions
        if self.pending == self.transactions == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals

    def test(self, phase: int) -> bool:
        """Whether `phase` is complete. The kernel asks for its parity, which answers the question only while that
        phase or the next one goes on; -1 is complete from the beginning."""
        if self.phase not in (phase, phase + 1):
            raise ProtocolError(f"{self.name}: parity of phase {phase} is tested in phase {self.phase}")
        return self.phase == phase + 1

    def wait(self, phase: int) -> Condition:
        return Condition(f"{self.name} phase {phase}", lambda: self.test(phase))


class NamedBarrier:
    def __init__(self, name: str, warps: int):
        self.name, self.warps = name, warps
        self.arrived, self.generation = set(), 0

    def arrive(self, warp: Hashable) -> None:
        if warp in self.arrived:
            raise ProtocolError(f"{self.name}: {warp} arrives twice in generation {self.generation}")
        self.arrived.add(warp)
        if len(self.arrived) == self.warps:
            self.arrived, self.generation = set(), self.generation + 1

    def sync(self, warp: Hashable) -> Condition:
        generation = self.generation
        self.arrive(warp)
        return Condition(f"{self.name} generation {generation}", lambda: self.generation > generation)


class Region:
    """A piece of shared memory that one writer fills. `unfenced`: the asynchronous proxy may still see what was there
    before."""

    def __init__(self, name: str):
        self.name, self.tag = name, None
        self.readers, self.filling, self.unfenced = 0, False, False

    def write(self, tag: Hashable) -> None:
        """By a warp, at once."""
        self.check_writable(tag)
        self.tag, self.unfenced = tag, True

    def check_writable(self, tag: Hashable) -> None:
        if self.readers or self.filling:
            raise ProtocolError(f"{self.name}: written with {tag} while {self.tag} is read or written")

    def read(self, wanted: Hashable) -> None:
        if self.filling or self.tag != wanted:
            raise ProtocolError(f"{self.name}: holds {self.tag}{', being overwritten' * self.filling}, not {wanted}")

    def begin_read(self, wanted: Hashable) -> None:
        """By the asynchronous proxy, until end_read."""
        self.read(wanted)
        if self.unfenced:
            raise ProtocolError(f"{self.name}: no proxy fence after the write of {self.tag}")
        self.readers += 1

    def end_read(self) -> None:
        self.readers -= 1


class MmaQueue:
    """The asynchronous MMA groups of a warp, which retire in order. Registers have names; `peers` are the queues of the
    warps without which a group does not start."""

    def __init__(self):
        self.groups: deque[tuple[list[Region], str, str | None]] = deque()
        self.issued, self.retired = 0, 0
        self.reading, self.writing = Counter(), Counter()

    def issue(self, reads: Iterable[tuple[Region, Hashable]], accumulator: str, operand: str | None = None) -> None:
        regions = []
        for region, wanted in reads:
            region.begin_read(wanted)
            regions.append(region)
        self.check_writable(accumulator)
        if operand:
            self.check_readable(operand)
            self.reading[operand] += 1
        self.writing[accumulator] += 1
        self.groups.append((regions, accumulator, operand))
        self.issued += 1

    def run(self, peers: Iterable["MmaQueue"]) -> Agent:
        while True:
            yield Condition("MMA", lambda: self.groups and all(peer.issued > self.retired for peer in peers))
            regions, accumulator, operand = self.groups.popleft()
            self.retired += 1
            for region in regions:
                region.end_read()
            self.writing[accumulator] -= 1
            self.reading[operand] -= 1

    def wait(self, groups: int) -> Condition:
        return Condition(f"at most {groups} MMA groups", lambda: len(self.groups) <= groups)

    def check_readable(self, register: str) -> None:
        if self.writing[register]:
            raise ProtocolError(f"register {register} is read while an MMA group writes it")

    def check_writable(self, register: str) -> None:
        if self.writing[register] or self.reading[register]:
            raise ProtocolError(f"register {register} is written while an MMA group uses it")


def bulk_load(region: Region, tag: Hashable, full: Mbarrier) -> Agent:
    """A copy into shared memory, of one transaction. It writes from the first next() on."""
    region.check_writable(tag)
    region.filling = True
    yield None
    region.tag, region.filling, region.unfenced = tag, False, False
    full.complete(1)


def bulk_store(region: Region, tag: Hashable, done: Callable[[], None]) -> Agent:
    """A copy out of shared memory. It reads from the first next() on."""
    region.begin_read(tag)
    yield None
    region.end_read()
    done()


class Scheduled:
    def __init__(self, agent: Agent, kind: str, weight: float, daemon: bool):
        self.agent, self.kind, self.weight, self.daemon = agent, kind, weight, daemon
        self.condition: Condition | None = None

    def ready(self) -> bool:
        return self.condition is None or self.condition.holds()


class Scheduler:
    """Runs agents until all but the daemons are through. `slow` is a kind of agent that lags behind; `even` gives all
    the same weight; every `reshuffle` events a few agents get another weight."""

    def __init__(self, pick: random.Random, slow: str = "", even: bool = False, reshuffle: int = 300):
        self.pick, self.slow, self.even, self.reshuffle = pick, slow, even, reshuffle
        self.agents: list[Scheduled] = []
        self.cumulative: list[float] = []  # of the weights; empty when they have changed

    def weight(self, kind: str) -> float:
        weight = 1.0 if self.even else self.pick.choice((0.002, 0.02, 0.2, 1.0))
        return weight / 100 if kind == self.slow else weight

    def spawn(self, agent: Agent, kind: str, daemon: bool = False) -> None:
        self.agents.append(Scheduled(agent, kind, self.weight(kind), daemon))
        self.cumulative = []

    def start(self, agent: Agent, kind: str) -> None:
        """The same for a copy, whose first action is now."""
        next(agent)
        self.spawn(agent, kind)

    def choose(self) -> Scheduled:
        self.cumulative = self.cumulative or list(accumulate(agent.weight for agent in self.agents))
        for _ in range(4):
            agent = self.pick.choices(self.agents, cum_weights=self.cumulative)[0]
            if agent.ready():
                return agent
        ready = [agent for agent in self.agents if agent.ready()]
        if not ready:
            waiting = {agent.condition.what for agent in self.agents if not agent.daemon}
            raise ProtocolError(f"deadlock: {', '.join(sorted(waiting))}")
        return self.pick.choices(ready, [agent.weight for agent in ready])[0]

    def run(self, limit: int = 500_000) -> None:
        for event in range(limit):
            if all(agent.daemon for agent in self.agents):
                return
            if event % self.reshuffle == 0:
                for agent in self.pick.choices(self.agents, k=3):
                    agent.weight = self.weight(agent.kind)
                self.cumulative = []
            chosen = self.choose()
            try:
                chosen.condition = next(chosen.agent)
            except StopIteration:
                self.agents.remove(chosen)
                self.cumulative = []
        raise ProtocolError("livelock")


def assert_all_right(run: Callable[[int], None], seeds: Iterable[int]) -> None:
    """`run` is a model under the interleaving of a seed; it raises what it finds."""
    for seed in seeds:
        try:
            run(seed)
        except (ProtocolError, AssertionError) as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def assert_noticed(run: Callable[[int], None], seeds: int) -> None:
    """The same for a model with a mistake, which one of the first `seeds` interleavings has to show."""
    for seed in range(seeds):
        try:
            run(seed)
        except (ProtocolError, AssertionError):
            return
    raise AssertionError(f"{seeds} runs do not notice the mistake")
