"""What `molflt bench attention` finds: measurements, growth with N, and the aims they are held against."""

from __future__ import annotations

from dataclasses import dataclass

from molflt.bench.attention_contenders import FLT, PERFORMER, PERFORMER_PYTORCH
from molflt.bench.attention_settings import AttentionBenchSettings, Level, Mode
from molflt.bench.measure import Spread, growth_exponent, paired_ratio, spread

GROWTH_START = 1024
"""Shorter lengths do not count for the growth: fixed costs rule there."""

GROWTH_LIMIT = 1.1
RPE_COST_LIMIT = 1.4
PERFORMER_PYTORCH_START = 2048
PERFORMER_PYTORCH_LIMIT = 1.0


@dataclass(frozen=True)
class Measurement:
    """One contender at one length.

    Attributes:
        level, mode: what was measured.
        contender: its name.
        length: N.
        seconds: per call, a sample a round; empty where skipped.
        peak_memory: bytes of tensors alive at one time, inputs and parameters not counted.
        matmul_flops: floating-point operations in matrix products, per call.
        skipped: why it was not run; None where it was.
    """

    level: Level
    mode: Mode
    contender: str
    length: int
    seconds: tuple[float, ...] = ()
    peak_memory: int = 0
    matmul_flops: int = 0
    skipped: str | None = None


@dataclass(frozen=True)
class Growth:
    """Exponents of time (by round) and of peak memory as power laws of N, from `GROWTH_START` on."""

    level: Level
    mode: Mode
    contender: str
    time: Spread
    memory: float


@dataclass(frozen=True)
class Aim:
    """A figure that should stay within a limit.

    Attributes:
        level, mode: what was measured.
        text: what the figure is.
        figure: its value, None where nothing was measured.
        limit: the largest that meets the aim.
    """

    level: Level
    mode: Mode
    text: str
    figure: float | None
    limit: float

    @property
    def met(self) -> bool | None:
        """Whether the figure is within the limit; None without a figure."""
        return None if self.figure is None else self.figure <= self.limit


@dataclass(frozen=True)
class AttentionBench:
    """All results of one run.

    Attributes:
        settings: what was asked for.
        threads: CPU threads used.
        measurements: by level, mode, length and contender.
        descriptions: contender to what it computes.
        absent: contender to why it is missing.
        matmul_rate: floating-point operations per second of a large matrix product, several samples a round.
    """

    settings: AttentionBenchSettings
    threads: int
    measurements: tuple[Measurement, ...]
    descriptions: dict[str, str]
    absent: dict[str, str]
    matmul_rate: tuple[float, ...]

    def select(self, level: Level, mode: Mode, contender: str, start: int = 0) -> list[Measurement]:
        """What was measured of one contender from N = `start` on, by length."""
        key = (level, mode, contender)
        rows = [m for m in self.measurements if (m.level, m.mode, m.contender) == key and m.skipped is None]
        return sorted((m for m in rows if m.length >= start), key=lambda m: m.length)

    def matmul_share(self, measurement: Measurement) -> float:
        """Rate of a contender's matrix products over that of the large one, each at its fastest."""
        return measurement.matmul_flops / min(measurement.seconds) / max(self.matmul_rate)

    def growth(self, level: Level, mode: Mode, contender: str) -> Growth | None:
        """Exponents of one contender; None with fewer than two lengths from `GROWTH_START` on."""
        rows = self.select(level, mode, contender, GROWTH_START)
        if len(rows) < 2:
            return None
        lengths = [m.length for m in rows]
        rounds = zip(*(m.seconds for m in rows), strict=True)
        time = spread([growth_exponent(lengths, seconds) for seconds in rounds])
        memory = growth_exponent(lengths, [m.peak_memory for m in rows])
        return Growth(level, mode, contender, time, memory)

    def growths(self) -> list[Growth]:
        """Exponents of all contenders."""
        found = (
            self.growth(level, mode, name)
            for level in self.settings.levels
            for mode in self.settings.modes
            for name in self.descriptions
        )
        return [growth for growth in found if growth is not None]

    def worst_ratio(
        self, level: Level, mode: Mode, numerator: str, denominator: str, start: int
    ) -> float | None:
        """Largest ratio of times from N = `start` on: median over rounds, maximum over lengths."""
        below = {m.length: m for m in self.select(level, mode, denominator, start)}
        ratios = [
            paired_ratio(m.seconds, below[m.length].seconds).median
            for m in self.select(level, mode, numerator, start)
            if m.length in below
        ]
        return max(ratios, default=None)

    def aims(self) -> list[Aim]:
        """What the library aims at, with the figures of this run."""
        found = []
        for level in self.settings.levels:
            for mode in self.settings.modes:
                growth = self.growth(level, mode, FLT)
                time, memory = (None, None) if growth is None else (growth.time.median, growth.memory)
                found += [
                    Aim(level, mode, "growth exponent of FLT's time", time, GROWTH_LIMIT),
                    Aim(level, mode, "growth exponent of FLT's peak memory", memory, GROWTH_LIMIT),
                ]
                if level == "core":
                    found += [
                        self._ratio_aim(level, mode, FLT, PERFORMER, GROWTH_START, RPE_COST_LIMIT),
                        self._ratio_aim(
                            level,
                            mode,
                            PERFORMER,
                            PERFORMER_PYTORCH,
                            PERFORMER_PYTORCH_START,
                            PERFORMER_PYTORCH_LIMIT,
                        ),
                    ]
        return found

    def _ratio_aim(
        self, level: Level, mode: Mode, numerator: str, denominator: str, start: int, limit: float
    ) -> Aim:
        text = f"time of {numerator} / {denominator}, worst N ≥ {start:,}"
        return Aim(level, mode, text, self.worst_ratio(level, mode, numerator, denominator, start), limit)
