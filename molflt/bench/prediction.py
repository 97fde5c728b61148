"""`molflt bench prediction`: structures per second from files on disk to a file of results, and start-up.

The files hold fcc(111) slabs with an adsorbate, 17 atoms each, in several formats. A run reads a format's
files, checks the structures, predicts them as `molflt predict` does and writes the table as CSV. Batch sizes
take turns, and their ratio is taken round by round. Start-up is a process of its own: `molflt --help`, and
`molflt predict` of one file.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ase.build
import numpy as np
import torch
from ase import Atoms
from ase.io import write
from rich.table import Table

from molflt.bench.measure import Spread, paired_ratio, spread, thread_count, time_alternating
from molflt.data.convert import convert
from molflt.prediction import Predictor, expand_paths, iter_inputs, open_writer

FORMATS = ("extxyz", "cif", "lmdb")
METALS = ("Ag", "Au", "Cu", "Ir", "Ni", "Pd", "Pt", "Rh")
ADSORBATES = ("C", "N", "O", "H", "S")


@dataclass(frozen=True)
class Throughput:
    """Structures per second from one format."""

    form: str
    single: Spread
    """Batch size 1."""
    batched: Spread
    ratio: Spread
    """Batched over batch size 1, of the same rounds."""


@dataclass(frozen=True)
class PredictionBench:
    """What was measured, and how."""

    checkpoint: str
    num_structures: int
    batch_size: int
    redraws: int
    threads: int
    clock: str
    throughput: list[Throughput]
    help_seconds: Spread
    """`molflt --help`."""
    first_result_seconds: Spread
    """`molflt predict` of one structure, from the start of the process to its end."""


def slabs(number: int, seed: int = 0) -> Iterator[Atoms]:
    """Slabs of 16 metal atoms and an adsorbate, all a little different."""
    generator = np.random.default_rng(seed)
    for index in range(number):
        atoms = ase.build.fcc111(METALS[index % len(METALS)], (2, 2, 4), vacuum=7.0)
        symbol = ADSORBATES[index // len(METALS) % len(ADSORBATES)]
        ase.build.add_adsorbate(atoms, symbol, 1.6, "fcc")
        atoms.positions += generator.normal(scale=0.02, size=(len(atoms), 3))
        atoms.pbc = (True, True, False)
        atoms.info.clear()
        yield atoms


def write_inputs(folder: Path, number: int) -> dict[str, str]:
    """Write the structures in each format, and return what to read."""
    structures = list(slabs(number))
    write(folder / "slabs.extxyz", structures)
    (folder / "cif").mkdir()
    for index, atoms in enumerate(structures):
        write(folder / "cif" / f"{index:05d}.cif", atoms, wrap=False)
    convert(folder / "slabs.extxyz", folder / "slabs.lmdb")
    return {name: str(folder / part) for name, part in zip(FORMATS, INPUTS, strict=True)}


INPUTS = ("slabs.extxyz", "cif", "slabs.lmdb")


def predict_files(predictor: Predictor, path: str, output: Path, batch_size: int) -> int:
    """From files to a file, and how many structures it was; an error among them is raised."""
    count = 0
    with open_writer(output, predictor.energy_meaning) as writer:
        outcomes = predictor.iter_predict(iter_inputs(expand_paths([path]), predictor.radius), batch_size)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
            writer.write(outcome)
            count += 1
    return count


def command_seconds(words: Sequence[str], repeats: int, clock: str) -> Spread:
    """Seconds of a `molflt` command in a process of its own."""

    def spent() -> float:
        times = os.times()
        return times.children_user + times.children_system if clock == "cpu" else time.perf_counter()

    samples = []
    for _ in range(repeats):
        start = spent()
        subprocess.run([sys.executable, "-m", "molflt", *words], check=True, capture_output=True)
        samples.append(spent() - start)
    return spread(samples)


def bench_prediction(
    checkpoint: str,
    *,
    number: int,
    batch_size: int,
    redraws: int,
    repeats: int,
    clock: str = "wall",
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> PredictionBench:
    """Measure all of it.

    Args:
        checkpoint: file or shipped name.
        number: structures per format.
        batch_size: of the batched runs.
        redraws: as in `molflt predict`.
        repeats: rounds.
        clock: `cpu` for CPU time, `wall` for time passed.
        threads: of torch; None for its own choice.
        progress: receives a line of text before each part.
    """
    predictor = Predictor.from_checkpoint(checkpoint, redraws=redraws, displacements=False)
    clocks = {"cpu": time.process_time, "wall": time.perf_counter}
    found = []
    with tempfile.TemporaryDirectory() as name, thread_count(threads) as used:
        folder = Path(name)
        progress("writing structures")
        inputs = write_inputs(folder, number)
        for form, path in inputs.items():
            calls: dict[int, Callable[[], Any]] = {
                size: partial(predict_files, predictor, path, folder / "out.csv", size)
                for size in (1, batch_size)
            }
            rounds = partial(_tell, progress, form, repeats)
            seconds = time_alternating(calls, repeats, torch.device("cpu"), clocks[clock], rounds)
            single, batched = ([number / s for s in seconds[size]] for size in (1, batch_size))
            found.append(Throughput(form, spread(single), spread(batched), paired_ratio(batched, single)))
        progress("start-up")
        write(folder / "one.extxyz", next(slabs(1)))
        help_seconds = command_seconds(["--help"], repeats, clock)
        first = command_seconds(["predict", checkpoint, str(folder / "one.extxyz")], repeats, clock)
    return PredictionBench(checkpoint, number, batch_size, redraws, used, clock, found, help_seconds, first)


def _tell(progress: Callable[[str], None], form: str, repeats: int, turn: int) -> None:
    progress(f"{form}: round {turn} of {repeats}")


def prediction_tables(result: PredictionBench) -> list[Table]:
    """The result as tables."""
    rates = Table(
        title=f"structures/s of {result.num_structures}, {result.redraws} redraws, {result.threads} threads, "
        f"{result.clock} time: median [min, max]"
    )
    for heading in ("files", "batch 1", f"batch {result.batch_size}", "ratio"):
        rates.add_column(heading, justify="left" if heading == "files" else "right")
    for row in result.throughput:
        rates.add_row(row.form, _shown(row.single), _shown(row.batched), _shown(row.ratio, 2))
    start = Table(title=f"start-up, {result.clock} seconds: median [min, max]")
    start.add_column("command")
    start.add_column("s", justify="right")
    start.add_row("molflt --help", _shown(result.help_seconds, 2))
    start.add_row("molflt predict, one structure", _shown(result.first_result_seconds, 2))
    return [rates, start]


def _shown(values: Spread, digits: int = 1) -> str:
    return f"{values.median:.{digits}f} [{values.minimum:.{digits}f}, {values.maximum:.{digits}f}]"


def prediction_json(result: PredictionBench) -> dict[str, Any]:
    """The result as plain values."""

    def plain(value: Any) -> Any:
        if isinstance(value, Spread):
            return value._asdict()
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return plain(asdict(result))
