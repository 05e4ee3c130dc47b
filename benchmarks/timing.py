"""Timing of several providers on one problem: rounds interleaved in one process, in alternating order; the median.

A round repeats the call until its time is worth measuring and divides. On CUDA the stream's time between two events is
taken, so gaps in which the GPU waits for the host count, as they do for a user; with `graph` the calls are captured
first.
"""

import statistics
import time
from collections.abc import Callable

import torch

CALLS_A_GRAPH = 10


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def elapsed_ms(call: Callable[[], object], calls: int, device: str, lead: int = 0) -> float:
    """Milliseconds a call over `calls` calls, after `lead` calls that are not timed."""
    for _ in range(lead):
        call()
    if device == "cpu":
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - begin) * 1e3 / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A CUDA graph of CALLS_A_GRAPH calls."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_A_GRAPH):
            call()
    return graph.replay


def interleaved_ms(
    calls: dict[str, Callable[[], object]],
    contexts: dict[str, Callable],
    device: str,
    rounds: int,
    round_ms: float,
    graph: bool = False,
) -> dict[str, float]:
    """Median milliseconds a call of each provider. `calls` are warm: each has run before."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    divisor = CALLS_A_GRAPH if graph else 1
    runs, repeats = {}, {}
    for name, call in calls.items():
        with contexts[name]():
            runs[name] = captured(call) if graph else call
            first = elapsed_ms(runs[name], 2, device)
            repeats[name] = max(2, int(round_ms / first) + 1)
    for turn in range(rounds):
        order = list(calls) if turn % 2 == 0 else list(calls)[::-1]
        for name in order:
            with contexts[name]():
                # Clocks follow the power of the last tens of milliseconds: the lead makes them this provider's own.
                lead = repeats[name] // 2
                times[name].append(elapsed_ms(runs[name], repeats[name], device, lead) / divisor)
    return {name: statistics.median(values) for name, values in times.items()}


def host_us(calls: dict[str, Callable[[], object]], contexts: dict[str, Callable], device: str, count: int = 500):
    """Microseconds that the host spends on a call, median of 5 interleaved rounds that start with an idle GPU."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(5):
        order = list(calls) if turn % 2 == 0 else list(calls)[::-1]
        for name in order:
            with contexts[name]():
                for _ in range(20):
                    calls[name]()
                synchronize(device)
                begin = time.perf_counter()
                for _ in range(count):
                    calls[name]()
                times[name].append((time.perf_counter() - begin) * 1e6 / count)
                synchronize(device)
    return {name: statistics.median(values) for name, values in times.items()}


def ceilings(device: str, size: int = 8192, copy_bytes: int = 2**32, round_ms: float = 60) -> dict[str, float]:
    """Rates of the machine in this run: bf16 and fp8 matmuls of N(0, 1), and a copy (bytes read and written)."""

    def ms(call: Callable[[], object]) -> float:
        call()
        return interleaved_ms({"": call}, {"": torch.no_grad}, device, 3, round_ms)[""]

    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    result = {"bf16_matmul_tflops": round(2 * size**3 / ms(lambda: a @ b) / 1e9, 1)}
    a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T, torch.ones((), device=device)
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    try:
        result["fp8_matmul_tflops"] = round(2 * size**3 / ms(lambda: torch._scaled_mm(a8, b8, **options)) / 1e9, 1)
    except (RuntimeError, AttributeError, TypeError, ValueError) as error:
        print(f"no fp8 matmul here: {str(error).strip().splitlines()[0]}")
    source = torch.ones(copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    result["copy_tb_s"] = round(2 * copy_bytes / ms(lambda: target.copy_(source)) / 1e9, 2)
    return result
