"""Time, peak memory and matrix products of callables, and how they grow with the size of their input.

Timings that are to be compared are taken in rounds: every callable runs once a round, in an order that
changes from round to round, and ratios are taken round by round. What slows the machine for a while slows all
of a round, and no callable always follows one that leaves it the caches as it wants them.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

Key = TypeVar("Key", bound=Hashable)

SHORTEST_SAMPLE = 0.02
"""Seconds; shorter calls are repeated within a sample, after one that does not count."""

MOST_CALLS = 1000
"""Calls within a sample at most."""


class Spread(NamedTuple):
    """Median of samples, with the smallest and the largest."""

    median: float
    minimum: float
    maximum: float


def spread(samples: Sequence[float]) -> Spread:
    """Median, smallest and largest of `samples`."""
    return Spread(statistics.median(samples), min(samples), max(samples))


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """Spread of the ratios of samples that were taken in the same round."""
    return spread([a / b for a, b in zip(numerator, denominator, strict=True)])


def synchronize(device: torch.device) -> None:
    """Waits for work queued on `device`; nothing is queued on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def thread_count(threads: int | None) -> Iterator[int]:
    """Has torch's CPU operators use `threads` threads (None: as many as before); yields their number."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def time_call(
    call: Callable[[], object],
    device: torch.device,
    number: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Mean seconds per call over `number` calls in a row."""
    synchronize(device)
    start = clock()
    for _ in range(number):
        call()
    synchronize(device)
    return (clock() - start) / number


def time_alternating(
    calls: Mapping[Key, Callable[[], object]],
    rounds: int,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int], None] = lambda _: None,
) -> dict[Key, list[float]]:
    """Seconds per call of each callable, a sample a round, in a random order that is the same in every run.

    One call of each comes first and does not count; it sets how many calls make a sample of about
    `SHORTEST_SAMPLE` at least. Samples of several calls begin with one more that does not count. Python's
    garbage collector is off meanwhile.

    Args:
        calls: what to time.
        rounds: samples of each.
        device: where they queue their work.
        clock: seconds.
        progress: receives the number of each round, from 1, before it starts.
    """
    numbers = {}
    for name, call in calls.items():
        seconds = time_call(call, device, clock=clock)
        numbers[name] = math.ceil(SHORTEST_SAMPLE / max(seconds, SHORTEST_SAMPLE / MOST_CALLS))
    samples: dict[Key, list[float]] = {name: [] for name in calls}
    names, order = list(calls), random.Random(0)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds):
            progress(turn + 1)
            order.shuffle(names)
            for name in names:
                if numbers[name] > 1:
                    calls[name]()
                samples[name].append(time_call(calls[name], device, numbers[name], clock))
    finally:
        if collecting:
            gc.enable()
    return samples


def keep_freed_memory() -> bool:
    """Has the C library keep what tensors free until the process ends; says whether it could (glibc only).

    Otherwise glibc returns large blocks to the system, by rules that depend on all that ran before, and takes
    them back by page faults. Of attention over 8,192 tokens with gradients that is a quarter of the time, and
    it differs from round to round more than the contenders do. CUDA's allocator keeps memory likewise.
    """
    trim_threshold, most_mapped_blocks = -1, -4
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return mallopt(trim_threshold, -1) == 1 and mallopt(most_mapped_blocks, 0) == 1


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Largest number of bytes that `call` holds at one time in tensors it allocates, its result included.

    What lives before the call (inputs, parameters) does not count. On a CPU the figure comes from the events
    of torch's allocator, so temporaries within operators count too; memory that libraries take past it does
    not.
    Call it once beforehand: first calls may fill caches.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        del result
        return torch.cuda.max_memory_allocated(device) - before
    with _silent_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        # The result has to die here: a block freed later would be taken for a new one at its address.
        result = call()
        del result
    held = peak = 0
    for _, size in sorted(_allocations(recorded), key=lambda event: event[0]):
        held += size
        peak = max(peak, held)
    return peak


def _allocations(recorded: Any) -> list[tuple[int, int]]:
    """(time, bytes) of each allocation, negative where memory is freed."""
    events = recorded.profiler.kineto_results.events()
    return [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]


@contextmanager
def _silent_profiler() -> Iterator[None]:
    """Keeps the profiler's own messages off stderr."""
    variable = "KINETO_LOG_LEVEL"
    before = os.environ.get(variable)
    os.environ.setdefault(variable, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]


def _baddbmm_flops(_: object, left: Sequence[int], right: Sequence[int], **__: object) -> int:
    batch, rows, inner = left
    return 2 * batch * rows * inner * right[-1]


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], **_: object) -> int:
    *batch, rows, width = query
    return 2 * math.prod(batch) * rows * key[-2] * (width + value[-1])


def _attention_backward_flops(
    _: object, query: Sequence[int], key: Sequence[int], value: Sequence[int], *__: object, **___: object
) -> int:
    # The weights anew and the gradients of query and key, as wide as query; two products as wide as value.
    *batch, rows, width = query
    return 2 * math.prod(batch) * rows * key[-2] * (3 * width + 2 * value[-1])


def matmul_flops(call: Callable[[], object]) -> int:
    """Floating-point operations in the matrix products that `call` executes, two per multiply-add."""
    aten = torch.ops.aten
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            aten.baddbmm_: _baddbmm_flops,
            aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
        },
    )
    with counter:
        call()
    return counter.get_total_flops()


class SquareMatmul:
    """One large float32 matrix product, whose rate is the machine's peak.

    Args:
        size: rows and columns of both factors.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.left: Tensor = torch.randn(size, size, generator=generator).to(device)
        self.right: Tensor = torch.randn(size, size, generator=generator).to(device)
        self.flops = 2 * size**3

    def __call__(self) -> Tensor:
        return self.left @ self.right


def growth_exponent(sizes: Sequence[float], values: Sequence[float], start: float = 0.0) -> float:
    """Exponent a of the least-squares fit value = c size^a in logarithms, over sizes from `start` on.

    Raises:
        ValueError: fewer than two different sizes remain.
    """
    points = [(math.log(s), math.log(v)) for s, v in zip(sizes, values, strict=True) if s >= start]
    if len({size for size, _ in points}) < 2:
        raise ValueError(f"sizes must hold two different ones from {start:g} on, got {list(sizes)}")
    return statistics.linear_regression(*zip(*points, strict=True)).slope
