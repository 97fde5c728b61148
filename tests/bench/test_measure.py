"""Clocks, allocations and operation counts whose true values are known."""

import gc
import platform
import subprocess
import sys

import pytest
import torch

from molflt.bench import measure
from molflt.bench.measure import (
    Spread,
    SquareMatmul,
    growth_exponent,
    matmul_flops,
    paired_ratio,
    peak_memory,
    spread,
    thread_count,
    time_alternating,
)

CPU = torch.device("cpu")
MILLION_FLOATS = 4_000_000


class FakeClock:
    """A clock that only its own calls advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: float) -> None:
        self.log.append(name)
        self.now += seconds


def test_spread_is_median_minimum_and_maximum() -> None:
    assert spread([5.0, 1.0, 2.0, 9.0]) == Spread(median=3.5, minimum=1.0, maximum=9.0)


def test_ratios_are_taken_within_a_round() -> None:
    # Medians would give 2/4; round by round the ratio is always 1/2, 2/2 or 8/4.
    assert paired_ratio([1.0, 2.0, 8.0], [2.0, 2.0, 4.0]) == Spread(1.0, 0.5, 2.0)


def test_ratios_of_unequal_numbers_of_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([1.0, 2.0], [1.0])


def test_samples_are_seconds_per_call() -> None:
    clock = FakeClock()
    durations = iter([9.0, 0.25, 0.75, 0.125])
    samples = time_alternating({"a": lambda: clock.call("a", next(durations))}, 3, CPU, clock)
    assert samples == {"a": [0.25, 0.75, 0.125]}


def test_all_callables_run_once_a_round_in_all_orders() -> None:
    clock = FakeClock()
    calls = {name: lambda name=name: clock.call(name, 1.0) for name in "abc"}
    time_alternating(calls, 40, CPU, clock)
    log = "".join(clock.log)
    rounds = [log[start : start + 3] for start in range(0, len(log), 3)]
    assert rounds[0] == "abc"
    assert set(rounds[1:]) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    again = FakeClock()
    time_alternating({name: lambda name=name: again.call(name, 1.0) for name in "abc"}, 40, CPU, again)
    assert again.log == clock.log


def test_short_calls_are_repeated_within_a_sample_after_one_that_does_not_count() -> None:
    clock = FakeClock()
    short = measure.SHORTEST_SAMPLE / 2.5
    durations = iter([short, 9.0, short, short, short, 7.0, short, short, short])
    samples = time_alternating({"short": lambda: clock.call("short", next(durations))}, 2, CPU, clock)
    assert len(clock.log) == 1 + 2 * (1 + 3)
    assert samples["short"] == pytest.approx([short] * 2, rel=1e-12)


def test_a_call_that_takes_no_time_is_repeated_a_bounded_number_of_times() -> None:
    clock = FakeClock()
    time_alternating({"instant": lambda: clock.call("instant", 0.0)}, 1, CPU, clock)
    assert len(clock.log) == 1 + 1 + measure.MOST_CALLS


def test_garbage_collection_is_off_while_timing_and_on_again_after_an_error() -> None:
    collecting = []

    def call() -> None:
        collecting.append(gc.isenabled())
        if len(collecting) == 3:
            raise RuntimeError("third call")

    clock = FakeClock()
    with pytest.raises(RuntimeError, match="third call"):
        time_alternating({"a": lambda: (clock.call("a", 1.0), call())}, 3, CPU, clock)
    assert collecting == [True, False, False]
    assert gc.isenabled()


def test_progress_hears_of_each_round_before_it_starts() -> None:
    clock = FakeClock()
    seen = []
    time_alternating(
        {"a": lambda: clock.call("a", 1.0)}, 2, CPU, clock, lambda turn: seen.append((turn, len(clock.log)))
    )
    assert seen == [(1, 1), (2, 2)]


def test_the_number_of_threads_is_set_and_restored() -> None:
    before = torch.get_num_threads()
    with thread_count(before + 1) as threads:
        assert threads == torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with thread_count(None) as threads:
        assert threads == before


def test_peak_memory_counts_tensors_alive_at_the_same_time() -> None:
    def call() -> torch.Tensor:
        first = torch.ones(3_000_000)
        second = torch.ones(2_000_000)
        del first
        third = torch.ones(2_000_000)
        return second + third

    assert peak_memory(call, CPU) == pytest.approx(6 * MILLION_FLOATS, rel=1e-3)


def test_peak_memory_of_consecutive_temporaries_is_that_of_the_largest() -> None:
    def call() -> None:
        for millions in (1, 5, 2):
            torch.ones(1_000_000 * millions)

    assert peak_memory(call, CPU) == pytest.approx(5 * MILLION_FLOATS, rel=1e-3)


def test_peak_memory_counts_neither_inputs_nor_views_nor_work_in_place() -> None:
    x = torch.ones(2_000_000)

    def call() -> torch.Tensor:
        return x.view(2, -1).transpose(0, 1)[1:].mul_(2)

    assert peak_memory(call, CPU) < 1000


def test_peak_memory_sees_what_backward_allocates() -> None:
    x = torch.ones(1_000_000, requires_grad=True)

    def forward() -> torch.Tensor:
        return x.sin().sum()

    # Forward holds sin x; backward, when that is gone, cos x and its product with the expanded gradient.
    assert peak_memory(forward, CPU) == pytest.approx(MILLION_FLOATS, rel=1e-3)
    backward = peak_memory(lambda: torch.autograd.grad(forward(), x), CPU)
    assert backward == pytest.approx(2 * MILLION_FLOATS, rel=1e-3)


def test_peak_memory_sees_temporaries_within_an_operator() -> None:
    # bmm of a factor without unit stride copies it inside the operator.
    left = torch.ones(1, 2000, 2000)[:, ::2, ::2]
    right = torch.ones(1, 1000, 1)
    assert peak_memory(lambda: left @ right, CPU) >= MILLION_FLOATS


def test_peak_memory_is_the_same_when_measured_again() -> None:
    def call() -> torch.Tensor:
        return torch.ones(1_000_000).exp().cos()

    assert peak_memory(call, CPU) == peak_memory(call, CPU) == 2 * MILLION_FLOATS


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_agrees_with_the_growth_of_a_process() -> None:
    program = """
import torch
from molflt.bench.measure import peak_memory
def call(n):
    a = torch.ones(n); b = a.exp(); c = a + b; del a
    return (b * c).sum()
call(1000)
peak_memory(lambda: call(1000), torch.device("cpu"))
def resident(key):
    # Not from resource.getrusage: its peak includes that of the process which started this one.
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(key))
before = resident("VmRSS:")
call(30_000_000)
grown = resident("VmHWM:") - before
print(grown, peak_memory(lambda: call(30_000_000), torch.device("cpu")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    grown, peak = map(int, done.stdout.split())
    assert peak == pytest.approx(3 * 30 * MILLION_FLOATS, rel=1e-3)
    assert grown == pytest.approx(peak, rel=0.05)
    assert done.stderr == ""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")
def test_freed_memory_stays_with_the_process() -> None:
    program = """
import torch
from molflt.bench.measure import keep_freed_memory
def resident():
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmRSS:"))
def grown():
    before = resident()
    torch.ones(30_000_000)
    return resident() - before
print(grown(), keep_freed_memory(), grown())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    returned, could, kept = done.stdout.split()
    assert int(returned) < 30 * MILLION_FLOATS / 10
    assert could == "True"
    assert int(kept) == pytest.approx(30 * MILLION_FLOATS, rel=0.1)


def test_matrix_products_count_two_operations_per_multiply_add() -> None:
    a, b, c = torch.ones(2, 3, 5), torch.ones(2, 5, 7), torch.ones(2, 3, 7)
    product = 2 * 2 * 3 * 5 * 7
    assert matmul_flops(lambda: a @ b) == product
    assert matmul_flops(lambda: a[0] @ b[0]) == product // 2
    assert matmul_flops(lambda: torch.baddbmm(c, a, b)) == product
    assert matmul_flops(lambda: c.clone().baddbmm_(a, b)) == product
    assert matmul_flops(lambda: torch.einsum("bij,bjk->bik", a, b)) == product
    assert matmul_flops(lambda: a.exp() + a) == 0


def test_matrix_products_of_softmax_attention_are_two_forward_and_five_backward() -> None:
    query, key, value = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (11, 13, 13))
    bias = torch.randn(1, 2, 11, 13)
    pairs = 2 * 2 * 11 * 13 * 8

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    assert matmul_flops(forward) == 2 * pairs
    assert matmul_flops(lambda: torch.autograd.grad(forward().sum(), (query, key, value))) == 7 * pairs


def test_the_large_matrix_product_counts_its_own_operations() -> None:
    matmul = SquareMatmul(13, CPU)
    assert matmul_flops(matmul) == matmul.flops == 2 * 13**3
    torch.testing.assert_close(matmul(), torch.einsum("ij,jk->ik", matmul.left, matmul.right))


def test_the_growth_exponent_of_a_power_law_is_its_own() -> None:
    sizes = [64, 1024, 2048, 32768]
    assert growth_exponent(sizes, [3.7 * n**1.37 for n in sizes]) == pytest.approx(1.37, abs=1e-12)


def test_the_growth_exponent_is_the_least_squares_slope_of_logarithms() -> None:
    # log2: (0, 0), (1, 1), (2, 3) have slope 3/2.
    assert growth_exponent([1, 2, 4], [1, 2, 8]) == pytest.approx(1.5, abs=1e-12)


def test_sizes_below_the_start_do_not_count_for_the_growth_exponent() -> None:
    values = [1000.0, 1024.0, 2048.0]
    assert growth_exponent([64, 1024, 2048], values, start=1024) == pytest.approx(1.0, abs=1e-12)
    assert growth_exponent([64, 1024, 2048], values) < 0.5


def test_a_growth_exponent_needs_two_sizes() -> None:
    with pytest.raises(ValueError, match="two different ones from 1024"):
        growth_exponent([64, 1024, 1024], [1.0, 1.0, 2.0], start=1024)
