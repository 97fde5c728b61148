"""`molflt bench training`: training speed, waiting for data, and what the loop adds to the bare model.

Two runs of the ordinary training loop on each kind of data, without validation and checkpoints in the timed
part. The first is left alone; it gives systems per second and the wait for the loader: the time within its
`next`, taking the batch out of its parcel included.

In the second each batch also goes forward and backward, to loss and gradients, through a copy of the network,
just before its training step. What the loop takes beyond that, from there to the next batch being there, is
its overhead, all of it: that wait once more, the optimiser's step, zeroing, measuring and clipping gradients,
the check that they are finite, the average of the weights, seeding, metrics, and Lightning's own work. The
ratio of the two is free of what slows the machine for a while. The progress bar is not there.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import Dataset
from torch_geometric.data import Data

from molflt.bench.measure import Spread, paired_ratio, spread, synchronize, thread_count
from molflt.bench.options import read_options
from molflt.bench.training_settings import Clock, TrainingBenchSettings
from molflt.config import Config, load_config
from molflt.errors import InputError
from molflt.run_folder import write_text
from molflt.terminal import print_tables, print_text
from molflt.training.loaders import build_loader
from molflt.training.run import prepare_training
from molflt.training.step import shares_of, step_result
from molflt.training.trainer import make_loggers, make_trainer, quiet_libraries, resolve_accelerator

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class TrainingMeasurement:
    """One kind of data; times are per step, in seconds on the clock of the settings."""

    data: str
    batch_size: int
    atoms: float
    """Atoms per batch, mean."""
    edges: float
    """Edges per batch, mean."""
    systems_per_second: float
    """Over the timed steps of the run that was left alone, by the wall clock."""
    step: Spread
    """A step of it, the wait included."""
    wait_share: float
    """Share of its time within the loader's `next`, by the wall clock."""
    bare: Spread
    """Forward and backward of the bare model."""
    overhead: Spread
    """Time of a step of the loop over that of the bare model on the same batch, less 1."""


class Repeated(Dataset[Data]):
    """The samples over and over, up to `length`."""

    def __init__(self, samples: Sequence[Data], length: int) -> None:
        self.samples = samples
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Data:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.samples[index % len(self.samples)]


class Instant(NamedTuple):
    """A point in time, in seconds on two clocks."""

    wall: float
    cpu: float
    """The process's, without its workers'."""


def now() -> Instant:
    """This one."""
    return Instant(time.perf_counter(), time.process_time())


class WaitClock(Profiler):
    """How long the loop waited for each batch of training, in seconds by the wall clock."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []
        self._start = 0.0

    def start(self, action_name: str) -> None:
        if action_name.endswith(".train_dataloader_next"):
            self._start = time.perf_counter()

    def stop(self, action_name: str) -> None:
        if action_name.endswith(".train_dataloader_next"):
            self.waits.append(time.perf_counter() - self._start)


class StepClock(Callback):
    """When each batch arrives and its step starts; with `bare`, a copy of the network has it first."""

    def __init__(self, bare: bool) -> None:
        self.bare = bare
        self.loader = WaitClock()
        self.arrivals: list[Instant] = []
        self.starts: list[Instant] = []
        self.sizes: list[tuple[int, int, int]] = []
        self._copy: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.bare:
            self._copy = copy.deepcopy(pl_module.model)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        synchronize(pl_module.device)
        self.arrivals.append(now())
        self.sizes.append((batch.num_graphs, batch.num_nodes, batch.edge_index.shape[1]))
        if self.bare:
            self._copy.zero_grad(set_to_none=True)
            step_result(self._copy, batch, 1.0, shares_of(batch, 1, repeated=False)).loss.backward()
            synchronize(pl_module.device)
        self.starts.append(now())


def bench_training(
    settings: TrainingBenchSettings, progress: Callable[[str], None] = lambda _: None
) -> list[TrainingMeasurement]:
    """Measure training on the configuration's own data, and on batches of OC20's sizes.

    Args:
        settings: sizes and conditions.
        progress: receives a line of text before each part.

    Raises:
        InputError: as training does.
    """
    own = load_config(settings.config)
    oc20 = Path(settings.oc20)
    data = replace(own.data, num_workers=settings.workers)
    large = replace(
        data,
        root=str(oc20.parent),
        train_split=oc20.name,
        val_splits=[oc20.name],
        batch_size=settings.oc20_batch_size,
        max_atoms=None,
        max_edges=None,
    )
    # Sets of that size are not kept in memory: their graphs are made anew each time.
    configs = {
        Path(own.data.root).name: replace(own, data=data),
        "OC20-sized": replace(own, data=large, training=replace(own.training, cache_gib=0.0)),
    }
    with thread_count(settings.threads):
        return [_measure(name, config, settings, progress) for name, config in configs.items()]


def _measure(
    name: str, config: Config, settings: TrainingBenchSettings, progress: Callable[[str], None]
) -> TrainingMeasurement:
    progress(f"{name}: the loop alone")
    alone = _run(config, settings, bare=False)
    progress(f"{name}: beside the bare model")
    paired = _run(config, settings, bare=True)
    first, last = settings.warmup, settings.warmup + settings.steps
    counted = alone.sizes[first:last]
    clock = settings.clock

    def between(starts: Sequence[Instant], ends: Sequence[Instant], clock: Clock = clock) -> list[float]:
        pairs = zip(starts[first:last], ends, strict=False)
        return [getattr(end, clock) - getattr(start, clock) for start, end in pairs]

    # A step lasts from its own batch being there to the next one's.
    steps = between(alone.starts, alone.arrivals[first + 1 :])
    waits = alone.loader.waits[first + 1 : last + 1]
    whole = between(alone.starts, alone.arrivals[first + 1 :], "wall")
    bare = between(paired.arrivals, paired.starts[first:])
    loop = between(paired.starts, paired.arrivals[first + 1 :])
    systems, atoms, edges = (sum(column) / len(counted) for column in zip(*counted, strict=True))
    return TrainingMeasurement(
        data=name,
        batch_size=round(systems),
        atoms=atoms,
        edges=edges,
        systems_per_second=systems * len(counted) / sum(whole),
        step=spread(steps),
        wait_share=sum(waits) / sum(whole),
        bare=spread(bare),
        overhead=Spread(*(value - 1.0 for value in paired_ratio(loop, bare))),
    )


def _run(config: Config, settings: TrainingBenchSettings, bare: bool) -> StepClock:
    """Train for the steps that are asked for, and one more, whose arrival ends the last."""
    count = settings.warmup + settings.steps + 1
    clock = StepClock(bare)
    with tempfile.TemporaryDirectory() as folder, isolate_rng(), quiet_libraries():
        training = replace(config.training, epochs=1, output=folder, devices=1, num_nodes=1, strategy="auto")
        config = replace(config, training=training)
        seed_everything(config.seed, verbose=False)
        warnings.filterwarnings("ignore", ".*have no `val_dataloader`", PossibleUserWarning)
        module, samples, *_ = prepare_training(config)
        repeated = cast("Sequence[Data]", Repeated(samples, count * config.data.batch_size))
        loader = build_loader(repeated, config, training=True)
        if len(loader) < count:
            raise InputError("the budget of a batch leaves too few steps to time; take a smaller --steps")
        accelerator, loggers = resolve_accelerator(config), make_loggers(config, Path(folder), 0)
        trainer = make_trainer(config, accelerator, "32-true", loggers, [clock], clock.loader)
        trainer.fit(module, loader)
    return clock


def training_table(measurements: Sequence[TrainingMeasurement], clock: Clock) -> Table:
    """What was measured, for the terminal."""
    from rich.table import Table

    table = Table(caption=f"step, bare, overhead: medians, {clock} clock; overhead: loop over bare, less 1")
    for heading in ("data", "systems", "atoms", "edges", "systems/s", "step (ms)", "wait (%)", "bare (ms)"):
        table.add_column(heading, justify="left" if heading == "data" else "right")
    table.add_column("overhead (%)", justify="right")
    for row in measurements:
        table.add_row(
            row.data,
            str(row.batch_size),
            f"{row.atoms:.0f}",
            f"{row.edges:.0f}",
            f"{row.systems_per_second:.1f}",
            f"{1e3 * row.step.median:.1f}",
            f"{100 * row.wait_share:.1f}",
            f"{1e3 * row.bare.median:.1f}",
            f"{100 * row.overhead.median:.1f}",
        )
    return table


def run(arguments: argparse.Namespace) -> int:
    """The command: measures, prints the table, writes training.json."""
    from rich.console import Console

    settings = read_options(TrainingBenchSettings, arguments)
    with Console(stderr=True).status("starting") as status:
        measurements = bench_training(settings, progress=status.update)
    print_tables(training_table(measurements, settings.clock))
    path = Path(settings.output) / "training.json"
    content = {
        "settings": asdict(settings),
        "threads": settings.threads or torch.get_num_threads(),
        "measurements": [
            {key: value._asdict() if isinstance(value, Spread) else value for key, value in vars(row).items()}
            for row in measurements
        ],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another --output") from error
    write_text(path, json.dumps(content, indent=1) + "\n")
    print_text(f"written: {path}\n")
    return 0
