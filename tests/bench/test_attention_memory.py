"""Memory foretold, so that nothing is run that does not fit; and what becomes of freed memory."""

from functools import partial

import pytest
import torch

from molflt.bench import attention, measure
from molflt.bench.attention import PROBE_LENGTHS, bench_attention, predicted_peak, probe
from molflt.bench.attention_contenders import (
    AttentionInputs,
    Contender,
    Contenders,
    make_contenders,
    make_inputs,
)
from molflt.bench.attention_settings import AttentionBenchSettings, Level
from molflt.bench.measure import peak_memory


@pytest.fixture(scope="module", autouse=True)
def _small_and_quick() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MATMUL_SIZE", 17)
        patch.setattr(measure, "SHORTEST_SAMPLE", 1e-9)
        yield


def test_the_predicted_peak_continues_a_parabola_through_zero() -> None:
    def peak(n: int) -> int:
        return 3 * n**2 + 17 * n

    assert predicted_peak({n: peak(n) for n in PROBE_LENGTHS}, 32768) == pytest.approx(peak(32768), rel=1e-12)


@pytest.mark.parametrize(
    ("longest", "budget", "probed"),
    [
        (32768, 4 * 512**2, [512, 1024]),
        (700, 4 * 512**2, [512, 700]),
        (700, 700**2 - 1, [512]),
        (32768, 4 * 512**2 - 1, [512]),
        (512, 1, [512]),
        (7, 1, [7]),
        (7, 2**40, [7]),
    ],
)
def test_probes_are_no_longer_than_what_is_asked_for_and_stop_at_the_budget(
    longest: int, budget: float, probed: list[int]
) -> None:
    lengths = []

    def peak_at(length: int) -> int:
        lengths.append(length)
        return length**2

    peaks = probe(peak_at, longest, budget)
    assert lengths == list(peaks) == probed
    for length in (5, 512, 700, 4096):
        assert predicted_peak(peaks, length) == pytest.approx(length**2, rel=1e-12)


def test_a_quadratic_contender_is_run_at_no_length_but_those_asked_for_and_the_probes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = []

    def attend(inputs: AttentionInputs) -> torch.Tensor:
        run.append(inputs.query.shape[2])
        return inputs.query @ inputs.key.transpose(-1, -2)

    found = Contenders([Contender("dense", "N x N", "core", attend, (), quadratic=True)], {})
    monkeypatch.setattr(attention, "make_contenders", lambda *_: found)

    def skipped(lengths: tuple[int, ...]) -> dict[int, str | None]:
        run.clear()
        settings = AttentionBenchSettings(
            lengths=lengths,
            heads=2,
            head_dim=3,
            repeats=1,
            level="core",
            mode="forward",
            freed_memory="returned",
            memory_budget=3 * 2**20 / 2**30,
        )
        return {m.length: m.skipped for m in bench_attention(settings).measurements}

    reason = "needs about 0.00781 GiB, above the budget of 0.00292969 GiB"
    assert skipped((7, 1024)) == {7: None, 1024: reason}
    assert set(run) == {512, 7}
    assert skipped((7, 11)) == {7: None, 11: None}
    assert set(run) == {7, 11}
    assert skipped((7, 523)) == {7: None, 523: None}
    assert set(run) == {512, 523, 7}


@pytest.mark.parametrize("level", ["core", "layer"])
@pytest.mark.parametrize("mode", ["forward", "train"])
def test_the_predicted_peak_of_softmax_is_its_measured_one(level: Level, mode: str) -> None:
    settings = AttentionBenchSettings(heads=6, head_dim=64, features=2, frequencies=2)
    device = torch.device("cpu")
    found = next(c for c in make_contenders(settings, level).present if c.quadratic)
    peaks = {}
    for length in (*PROBE_LENGTHS, 1537):
        call = partial(getattr(found, mode), make_inputs(settings, level, length))
        call()
        peaks[length] = peak_memory(call, device)
    predicted = predicted_peak({n: peaks[n] for n in PROBE_LENGTHS}, 1537)
    assert predicted == pytest.approx(peaks[1537], rel=0.05)


@pytest.mark.parametrize(
    ("asked", "possible", "recorded"),
    [("kept", True, "kept"), ("kept", False, "returned"), ("returned", True, "returned")],
)
def test_the_result_says_what_became_of_freed_memory(
    asked: str, possible: bool, recorded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(attention, "keep_freed_memory", lambda: calls.append("kept") or possible)
    monkeypatch.setattr(attention, "make_contenders", lambda *_: Contenders([], {}))
    found = bench_attention(AttentionBenchSettings(lengths=(5,), repeats=1, freed_memory=asked))
    assert found.settings.freed_memory == recorded
    assert calls == ([asked] if asked == "kept" else [])
