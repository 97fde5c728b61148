"""Growth, ratios and aims of made-up measurements."""

import pytest

from molflt.bench.attention_contenders import FLT, PERFORMER, PERFORMER_PYTORCH
from molflt.bench.attention_results import Aim, AttentionBench, Measurement
from molflt.bench.attention_settings import AttentionBenchSettings
from molflt.bench.measure import Spread

SETTINGS = AttentionBenchSettings(level="core", mode="forward")


def measurement(name: str, length: int, seconds: tuple[float, ...], memory: int = 1) -> Measurement:
    return Measurement("core", "forward", name, length, seconds, memory, matmul_flops=6000)


def bench(*measurements: Measurement, settings: AttentionBenchSettings = SETTINGS) -> AttentionBench:
    names = {m.contender: "" for m in measurements}
    return AttentionBench(settings, 1, measurements, names, {}, (1000.0, 3000.0, 2000.0))


def test_growth_is_fitted_by_round_from_1024_on() -> None:
    result = bench(
        measurement(FLT, 64, (9.0, 9.0, 9.0), 99),
        measurement(FLT, 4096, (4.0, 16.0, 8.0), 32),
        measurement(FLT, 1024, (1.0, 1.0, 1.0), 2),
    )
    growth = result.growth("core", "forward", FLT)
    assert growth is not None
    assert growth.time == pytest.approx(Spread(median=1.5, minimum=1.0, maximum=2.0))
    assert growth.memory == pytest.approx(2.0)
    assert result.growths() == [growth]


def test_growth_needs_two_lengths_from_1024_on() -> None:
    result = bench(measurement(FLT, 512, (1.0,)), measurement(FLT, 1024, (2.0,)))
    assert result.growth("core", "forward", FLT) is None
    assert result.growths() == []


def test_what_was_skipped_takes_part_in_nothing() -> None:
    skipped = Measurement("core", "forward", FLT, 4096, skipped="too large")
    result = bench(measurement(FLT, 1024, (1.0,)), skipped)
    assert [m.length for m in result.select("core", "forward", FLT)] == [1024]
    assert result.growth("core", "forward", FLT) is None


def test_the_worst_ratio_is_the_largest_median_from_the_start_on() -> None:
    result = bench(
        measurement(FLT, 512, (50.0, 50.0, 50.0)),
        measurement(PERFORMER, 512, (1.0, 1.0, 1.0)),
        measurement(FLT, 1024, (3.0, 2.0, 8.0)),
        measurement(PERFORMER, 1024, (1.0, 2.0, 4.0)),
        measurement(FLT, 2048, (6.0, 5.0, 30.0)),
        measurement(PERFORMER, 2048, (4.0, 4.0, 4.0)),
        measurement(FLT, 4096, (99.0, 99.0, 99.0)),
    )
    assert result.worst_ratio("core", "forward", FLT, PERFORMER, 1024) == 2.0
    assert result.worst_ratio("core", "forward", FLT, PERFORMER, 2048) == 1.5
    assert result.worst_ratio("core", "forward", PERFORMER, PERFORMER_PYTORCH, 2048) is None


def test_the_share_of_the_peak_compares_the_fastest_of_both() -> None:
    row = measurement(FLT, 64, (9.0, 4.0, 5.0))
    assert bench(row).matmul_share(row) == pytest.approx((6000 / 4) / 3000)


def test_aims_name_their_figures_and_say_whether_they_are_met() -> None:
    result = bench(
        measurement(FLT, 1024, (1.5,), 1),
        measurement(FLT, 4096, (6.0,), 8),
        measurement(PERFORMER, 1024, (1.0,)),
        measurement(PERFORMER, 4096, (5.0,)),
        measurement(PERFORMER_PYTORCH, 4096, (5.0,)),
    )
    time, memory, rpe, package = result.aims()
    assert (time.figure, time.limit, time.met) == (pytest.approx(1.0), 1.1, True)
    assert (memory.figure, memory.limit, memory.met) == (pytest.approx(1.5), 1.1, False)
    assert (rpe.figure, rpe.limit, rpe.met) == (pytest.approx(1.5), 1.4, False)
    assert (package.figure, package.limit, package.met) == (pytest.approx(1.0), 1.0, True)
    assert [aim.text for aim in (rpe, package)] == [
        "time of molflt FLT / molflt Performer, worst N ≥ 1,024",
        "time of molflt Performer / performer-pytorch, worst N ≥ 2,048",
    ]


def test_an_aim_without_a_figure_is_neither_met_nor_missed() -> None:
    assert Aim("core", "forward", "", None, 1.0).met is None
    assert [aim.figure for aim in bench().aims()] == [None] * 4


def test_ratios_are_aims_of_the_core_alone() -> None:
    settings = AttentionBenchSettings(level="both", mode="both")
    aims = bench(settings=settings).aims()
    assert [aim.level for aim in aims] == ["core"] * 8 + ["layer"] * 4
