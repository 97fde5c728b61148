"""`molflt bench attention`: FLT beside the Performers and exact softmax, in time, memory and matrix products.

All contenders run in one process on the same inputs, at all lengths in every round
(`measure.time_alternating`), with them one large matrix product, whose rate is the peak that shares refer to.
Two modes are measured: `forward` without gradients, and `training`, forward and backward to the inputs
(positions excepted) and the parameters.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from molflt.bench.attention_contenders import AttentionInputs, Contender, make_contenders, make_inputs
from molflt.bench.attention_results import AttentionBench, Measurement
from molflt.bench.attention_settings import AttentionBenchSettings, Level, Mode
from molflt.bench.measure import (
    SquareMatmul,
    keep_freed_memory,
    matmul_flops,
    peak_memory,
    thread_count,
    time_alternating,
)
from molflt.bench.options import read_options
from molflt.errors import InputError

MATMUL_SIZE = 1536
PROBE_LENGTHS = (512, 1024)
"""Where N x N tensors outweigh the gradients of a layer's weights, which do not grow with N; shorter ones if
no longer ones are asked for."""

GIB = 2**30


def bench_attention(
    settings: AttentionBenchSettings, progress: Callable[[str], None] = lambda _: None
) -> AttentionBench:
    """Measures all that the settings ask for.

    On a CPU, `freed_memory="kept"` changes how the process allocates until it ends (`keep_freed_memory`).

    Args:
        settings: sizes and conditions.
        progress: receives a line of text before each part.

    Returns:
        What was found; its settings say what became of freed memory, whatever was asked for.

    Raises:
        InputError: the device is not there.
    """
    device = resolve_device(settings.device)
    settings = replace(settings, freed_memory=_freed_memory(settings, device))
    measurements: list[Measurement] = []
    rates: list[float] = []
    descriptions: dict[str, str] = {}
    absent: dict[str, str] = {}
    with thread_count(settings.threads) as threads:
        for level in settings.levels:
            contenders, absent = make_contenders(settings, level)
            descriptions = {contender.name: contender.description for contender in contenders}
            for mode in settings.modes:
                found, found_rates = _measure(settings, level, mode, contenders, device, progress)
                measurements += found
                rates += found_rates
    return AttentionBench(settings, threads, tuple(measurements), descriptions, absent, tuple(rates))


def _freed_memory(settings: AttentionBenchSettings, device: torch.device) -> Literal["kept", "returned"]:
    """What becomes of freed memory, which is kept from here on where that is asked for and possible."""
    if device.type == "cuda":  # Its allocator always keeps it.
        return "kept"
    return "kept" if settings.freed_memory == "kept" and keep_freed_memory() else "returned"


def _measure(
    settings: AttentionBenchSettings,
    level: Level,
    mode: Mode,
    contenders: Sequence[Contender],
    device: torch.device,
    progress: Callable[[str], None],
) -> tuple[list[Measurement], list[float]]:
    """Measurements of one level and mode, and the rates of the large matrix product meanwhile."""
    progress(f"{level}, {mode}: memory")
    reasons = _skips(settings, level, mode, contenders, device)
    matmul = SquareMatmul(MATMUL_SIZE, device)
    calls: dict[tuple[str, int], Callable[[], object]] = {}
    memory: dict[tuple[str, int], int] = {}
    flops: dict[tuple[str, int], int] = {}
    for length in settings.lengths:
        inputs = make_inputs(settings, level, length)
        for contender in contenders:
            key = (contender.name, length)
            if key not in reasons:
                calls[key] = _call(contender, mode, inputs)
                # The first call fills caches, which are no part of the peak.
                flops[key] = matmul_flops(calls[key])
                memory[key] = peak_memory(calls[key], device)
        calls["matmul", length] = matmul

    def tell(turn: int) -> None:
        progress(f"{level}, {mode}: round {turn} of {settings.repeats}")

    clock = time.process_time if settings.clock == "cpu" else time.perf_counter
    seconds = time_alternating(calls, settings.repeats, device, clock, tell)
    rates = [matmul.flops / s for (name, _), samples in seconds.items() if name == "matmul" for s in samples]
    measurements = []
    for length in settings.lengths:
        for contender in contenders:
            key = (contender.name, length)
            if key in reasons:
                measurements.append(Measurement(level, mode, *key, skipped=reasons[key]))
            else:
                samples = tuple(seconds[key])
                measurements.append(Measurement(level, mode, *key, samples, memory[key], flops[key]))
    return measurements, rates


def _call(contender: Contender, mode: Mode, inputs: AttentionInputs) -> Callable[[], object]:
    return partial(contender.forward if mode == "forward" else contender.train, inputs)


def _skips(
    settings: AttentionBenchSettings,
    level: Level,
    mode: Mode,
    contenders: Sequence[Contender],
    device: torch.device,
) -> dict[tuple[str, int], str]:
    """Which contenders not to run at which lengths, and why."""
    reasons = {}
    for contender in contenders:
        if not contender.quadratic:
            continue

        def peak_at(length: int, contender: Contender = contender) -> int:
            call = _call(contender, mode, make_inputs(settings, level, length))
            call()
            return peak_memory(call, device)

        peaks = probe(peak_at, max(settings.lengths), settings.memory_budget * GIB)
        for length in settings.lengths:
            need = predicted_peak(peaks, length) / GIB
            if need > settings.memory_budget:
                reasons[contender.name, length] = (
                    f"needs about {need:.3g} GiB, above the budget of {settings.memory_budget:g} GiB"
                )
    return reasons


def probe(peak_at: Callable[[int], float], longest: int, budget: float) -> dict[int, float]:
    """Peak memory at `PROBE_LENGTHS`, of which none is above `longest`.

    The second is left out where quadratic growth from the first would take it above the budget. A shorter
    length that is measured later needs no more than the first probe did, whatever the prediction for it.

    Args:
        peak_at: measures the peak, in bytes, at a length.
        longest: the longest length that is of interest.
        budget: bytes.
    """
    first, second = (min(length, longest) for length in PROBE_LENGTHS)
    peaks = {first: peak_at(first)}
    if first < second and predicted_peak(peaks, second) <= budget:
        peaks[second] = peak_at(second)
    return peaks


def predicted_peak(peaks: Mapping[int, float], length: int) -> float:
    """Peak memory at `length` from that at one or two lengths: the parabola through them and through 0 at 0.

    Through one alone it goes with its vertex at 0, which is too much for longer lengths and never too little.
    """
    if len(peaks) == 1:
        ((n, p),) = peaks.items()
        return p * (length / n) ** 2
    (n, p), (m, q) = peaks.items()
    square = (q / m - p / n) / (m - n)
    return square * length**2 + (p / n - square * n) * length


def resolve_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        InputError: it is neither a CPU nor a CUDA device that is there.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"--device {name} is unknown; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device {name} can not be measured; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"--device {name} is not there: torch finds no CUDA device; use cpu")
    return device


def run(arguments: argparse.Namespace) -> int:
    """The command: measures, prints the tables, writes attention.json and attention.png."""
    from rich.console import Console

    from molflt.bench.attention_report import print_report, write_report

    settings = read_options(AttentionBenchSettings, arguments)
    resolve_device(settings.device)
    try:
        Path(settings.output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output {settings.output} can not be made: {error.strerror}") from None
    with Console(stderr=True).status("starting") as status:
        result = bench_attention(settings, progress=status.update)
    console = Console(width=None if sys.stdout.isatty() else 120)
    print_report(result, console)
    for path in write_report(result, settings.output):
        console.print(f"written: {path}", soft_wrap=True, markup=False)
    return 0
