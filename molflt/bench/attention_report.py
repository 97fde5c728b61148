"""Results of `molflt bench attention` as tables, JSON and a plot."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from molflt.bench.attention_results import GROWTH_START, AttentionBench, Measurement
from molflt.bench.attention_settings import Level, Mode
from molflt.bench.measure import Spread, spread
from molflt.replacing import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table

FORMAT = "molflt attention bench"
VERSION = 1
MISSING_FIGURE = (
    f"An exponent needs two lengths N ≥ {GROWTH_START:,}; a ratio needs both contenders at a length it names."
)
PACKAGES = ("molflt", "torch", "torch-geometric", "performer-pytorch")


def print_report(result: AttentionBench, console: Console) -> None:
    """Tables of all measurements, growth exponents and aims."""
    settings = result.settings
    console.print(_conditions(result))
    for level in settings.levels:
        for mode in settings.modes:
            console.print(measurement_table(result, level, mode))
    if result.growths():
        console.print(growth_table(result))
    console.print(aim_table(result))
    rate = spread(result.matmul_rate)
    console.print(f"large matrix product: {_spread_text(rate, 1e9)} GFLOP/s, the peak that shares refer to")


def _conditions(result: AttentionBench) -> str:
    settings = result.settings
    return (
        f"B={settings.batch_size} H={settings.heads} D={settings.head_dim} M={settings.features} "
        f"R={settings.frequencies}, float32, {settings.device}, {result.threads} CPU threads, "
        f"{settings.repeats} rounds, {settings.clock} time, freed memory {settings.freed_memory}"
    )


def measurement_table(result: AttentionBench, level: Level, mode: Mode) -> Table:
    """Time, peak memory and share of the matrix-product peak, a section per length; last, who is absent."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{level}, {mode}: median (min to max)")
    share = "share of matmul peak,\nfastest round (%)"
    for heading in ("N", "contender", "time (ms)", "peak memory (MiB)", share):
        table.add_column(heading, justify="left" if heading == "contender" else "right")
    rows = [m for m in result.measurements if (m.level, m.mode) == (level, mode)]
    for number, row in enumerate(rows):
        first = number == 0 or rows[number - 1].length != row.length
        if number and first:
            table.add_section()
        table.add_row(f"{row.length:,}" if first else "", row.contender, *_cells(result, row))
    table.add_section()
    for name, reason in result.absent.items():
        table.add_row("", name, f"absent: {escape(reason)}")
    return table


def _cells(result: AttentionBench, row: Measurement) -> tuple[str, str, str]:
    if row.skipped is not None:
        return f"skipped: {row.skipped}", "", ""
    share = f"{100 * result.matmul_share(row):.0f}"
    return _spread_text(spread(row.seconds), 1e-3), f"{row.peak_memory / 2**20:,.1f}", share


def _spread_text(values: Spread, unit: float) -> str:
    median, minimum, maximum = (
        f"{value / unit:.3g}" if value < 100 * unit else f"{value / unit:,.0f}" for value in values
    )
    return f"{median} ({minimum} to {maximum})"


def growth_table(result: AttentionBench) -> Table:
    """Exponents of time and memory in N."""
    from rich.table import Table

    table = Table(title=f"growth from N = {GROWTH_START:,} on: exponents of N")
    for heading in ("level", "mode", "contender"):
        table.add_column(heading)
    for heading in ("time", "peak memory"):
        table.add_column(heading, justify="right")
    for row in result.growths():
        table.add_row(row.level, row.mode, row.contender, _spread_text(row.time, 1), f"{row.memory:.2f}")
    return table


def aim_table(result: AttentionBench) -> Table:
    """What the library aims at, and whether this run got there."""
    from rich.table import Table

    aims = result.aims()
    unmeasured = any(aim.figure is None for aim in aims)
    table = Table(title="aims", caption=MISSING_FIGURE if unmeasured else None)
    for heading in ("level", "mode", "figure"):
        table.add_column(heading)
    for heading in ("measured", "aim", "met"):
        table.add_column(heading, justify="right")
    for aim in aims:
        figure = "not measured" if aim.figure is None else f"{aim.figure:.2f}"
        met = {True: "yes", False: "no", None: ""}[aim.met]
        table.add_row(aim.level, aim.mode, aim.text, figure, f"≤ {aim.limit:g}", met)
    return table


def to_dict(result: AttentionBench) -> dict[str, Any]:
    """All results as plain values; times in seconds, memory in bytes, rates in 1/s."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "settings": asdict(result.settings),
        "environment": {
            "device": _device_name(result.settings.device),
            "python": platform.python_version(),
            "threads": result.threads,
            "packages": {name: _version(name) for name in PACKAGES},
        },
        "contenders": result.descriptions,
        "absent": result.absent,
        "matmul_rate": spread(result.matmul_rate)._asdict(),
        "measurements": [_measurement_dict(result, m) for m in result.measurements],
        "growth": [{**asdict(growth), "time": growth.time._asdict()} for growth in result.growths()],
        "aims": [{**asdict(aim), "met": aim.met} for aim in result.aims()],
    }


def _measurement_dict(result: AttentionBench, row: Measurement) -> dict[str, Any]:
    head = {name: getattr(row, name) for name in ("level", "mode", "contender", "length", "skipped")}
    if row.skipped is not None:
        return head
    return {
        **head,
        "seconds": {**spread(row.seconds)._asdict(), "samples": list(row.seconds)},
        "peak_memory": row.peak_memory,
        "matmul_flops": row.matmul_flops,
        "matmul_share": result.matmul_share(row),
    }


def _device_name(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def plot(result: AttentionBench) -> Figure:
    """Time and peak memory against N in log-log axes, a row per level and mode.

    Each contender has a marker of its own, smaller from one to the next, so that equal curves all show.
    """
    from matplotlib.figure import Figure

    settings = result.settings
    parts: list[tuple[Level, Mode]] = [(level, mode) for level in settings.levels for mode in settings.modes]
    figure = Figure(figsize=(11, 1.2 + 4 * len(parts)), layout="constrained")
    figure.suptitle(f"{_conditions(result)}\nerror bars: fastest to slowest round about the median")
    axes = figure.subplots(len(parts), 2, squeeze=False)
    for (level, mode), (time_axes, memory_axes) in zip(parts, axes, strict=True):
        for name, style in zip(result.descriptions, _styles(len(result.descriptions)), strict=True):
            rows = result.select(level, mode, name)
            lengths = [m.length for m in rows]
            spreads = [spread(m.seconds) for m in rows]
            medians = [1e3 * s.median for s in spreads]
            below = [1e3 * (s.median - s.minimum) for s in spreads]
            above = [1e3 * (s.maximum - s.median) for s in spreads]
            time_axes.errorbar(lengths, medians, yerr=[below, above], capsize=2, label=name, **style)
            memory_axes.plot(lengths, [m.peak_memory / 2**20 for m in rows], label=name, **style)
        for axis, quantity, unit in ((time_axes, "time", "ms"), (memory_axes, "peak memory", "MiB")):
            axis.set(xscale="log", yscale="log", xlabel="tokens N", ylabel=f"{quantity} ({unit})")
            axis.set_title(f"{level}, {mode}: {quantity}")
            axis.xaxis.set_ticks(settings.lengths, [f"{n:,}" for n in settings.lengths])
            axis.xaxis.set_ticks([], minor=True)
            axis.grid(alpha=0.3)
    handles, names = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), fontsize="small")
    return figure


def _styles(number: int) -> list[dict[str, Any]]:
    """Lines and open markers of that many curves, the later ones smaller, thinner and with longer gaps."""
    markers = "osD^xvP"
    return [
        {
            "marker": markers[index % len(markers)],
            "markersize": 12 - 7 * index / max(number - 1, 1),
            "markerfacecolor": "none",
            "linewidth": 3 - 2 * index / max(number - 1, 1),
            "linestyle": (0, (4, index)) if index else "-",
        }
        for index in range(number)
    ]


def write_report(result: AttentionBench, folder: str | os.PathLike[str]) -> list[Path]:
    """Writes attention.json and attention.png into a folder, whole or not at all; returns their paths."""
    folder = Path(folder)
    paths = [folder / "attention.json", folder / "attention.png"]
    with replacing(paths[0]) as text, replacing(paths[1]) as image:
        text.write_text(json.dumps(to_dict(result), indent=1) + "\n", encoding="utf-8")
        plot(result).savefig(image, dpi=150, format="png")
    return paths
