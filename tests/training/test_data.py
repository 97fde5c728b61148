"""Statistics of a split against direct computation, and the samples kept in memory."""

import statistics

import pytest
import torch

from molflt.data import transforms
from molflt.data.fields import StructureData
from molflt.data.statistics import DataStatistics, dataset_statistics
from molflt.errors import InputError, InputWarning
from molflt.testing import write_toy_lmdb
from molflt.training import data
from molflt.training.data import (
    DataFit,
    SplitStatistics,
    cached,
    check_fields,
    data_fit_from_state,
    fit_data,
    fit_references,
    sample_bytes,
    split_statistics,
    warn_of_total_energies,
)


def sample(number: int, **changes: torch.Tensor | None) -> StructureData:
    """Structure `number` with number + 2 atoms."""
    generator = torch.Generator().manual_seed(number)
    atoms = number + 2
    fields = {
        "pos": torch.randn(atoms, 3, generator=generator),
        "pos_relaxed": torch.randn(atoms, 3, generator=generator),
        "atomic_numbers": torch.full((atoms,), 29 + number),
        "fixed": torch.arange(atoms) % 2 == 0,
        "sid": torch.tensor([100 + number]),
        "natoms": torch.tensor([atoms]),
        "y_relaxed": 1e4 + torch.randn(1, generator=generator),
    }
    return StructureData(**{name: value for name, value in (fields | changes).items() if value is not None})


COMPOSITIONS = [
    torch.tensor([29] * a + [31] * b + [37] * c)
    for a, b, c in ((2, 0, 1), (1, 3, 0), (0, 2, 5), (3, 1, 2), (4, 0, 0), (1, 1, 7))
]


class Counted(torch.utils.data.Dataset):
    """Counts how often it is read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> StructureData:
        self.reads += 1
        return sample(index)


def measured(samples) -> DataStatistics:
    statistics = DataStatistics()
    for item in samples:
        statistics.add(item)
    return statistics


def test_statistics_equal_direct_computation():
    """Mean and spread of the energies (with a large offset) and the RMS of free atoms' Δpos."""
    samples = [sample(number) for number in range(7)]
    found = measured(samples)
    statistics = split_statistics(found, found.moments["y_relaxed"])
    energies = torch.cat([item.y_relaxed for item in samples]).double()
    shifts = torch.cat([(item.pos_relaxed - item.pos)[~item.fixed] for item in samples]).double()
    assert statistics.energy_mean == pytest.approx(energies.mean().item(), abs=1e-9)
    assert statistics.energy_std == pytest.approx(energies.std(correction=0).item(), rel=1e-9)
    assert statistics.delta_pos_std == pytest.approx(shifts.square().mean().sqrt().item(), rel=1e-12)
    assert statistics.num_systems == 7
    assert statistics.elements == [29, 30, 31, 32, 33, 34, 35]
    assert statistics.num_atoms_range == [2, 8]


def test_scales_are_one_where_nothing_varies():
    """One system has no spread, and atoms that are fixed or not relaxed no Δpos: no scale may be zero."""
    for changes in ({"fixed": torch.ones(5, dtype=torch.bool)}, {"pos_relaxed": None}):
        found = measured([sample(3, **changes)])
        statistics = split_statistics(found, found.moments["y_relaxed"])
        assert (statistics.energy_std, statistics.delta_pos_std) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("without", "name", "message"),
    [
        (1, "y_relaxed", "1 of 3 systems of split 'train' have no y_relaxed; train and validate on labelled"),
        (3, "y_relaxed", "split 'train' has no y_relaxed; train"),
        (2, "pos_relaxed", r"2 of 3 systems .* have no pos_relaxed; .*delta_pos_weight to \[0, 0\]"),
        (2, "fixed", "1 of 3 systems of split 'train' have fixed and the others do not; .* one set for each"),
    ],
)
def test_what_systems_lack_is_named(without, name, message):
    """The error counts them and says what to do."""
    samples = [sample(number, **({name: None} if number < without else {})) for number in range(3)]
    with pytest.raises(InputError, match=message):
        check_fields(measured(samples), "train", with_delta_pos=True)


def test_delta_pos_is_not_asked_for_without_its_loss():
    """Energies alone train on sets without relaxed positions."""
    check_fields(measured([sample(1, pos_relaxed=None)]), "train", with_delta_pos=False)


class Unread:
    """Samples that must not be looked at."""

    def __getitem__(self, index):
        raise AssertionError("read")


def no_graph(*arguments, **options):
    raise AssertionError("a graph is made")


def test_statistics_kept_beside_the_data_are_used_as_long_as_they_are_of_these_data(
    tiny_config, tmp_path, monkeypatch
):
    """Read at first without making a graph; not at all once they are kept; anew after a change."""
    root = tmp_path / "data"
    for split, first in (("train", 0), ("val_a", 50)):
        write_toy_lmdb(root / split / "data.lmdb", 5, first_seed=first)
    config = tiny_config(tmp_path / "run", **{"data.root": root, "data.val_splits": "[val_a]"})
    monkeypatch.setattr(transforms, "radius_graph", no_graph)
    first = fit_data(config, Unread())
    assert first.splits == {"train": 5, "val_a": 5}
    assert first.source == "train measured on 5 systems; val_a measured on 5 systems"
    assert not list(root.rglob("*.json"))
    dataset_statistics(root / "train")
    again = fit_data(config, Unread())
    assert again.source.startswith("train as kept beside the data, 5 systems; val_a measured")
    assert again.train == first.train
    write_toy_lmdb(root / "train" / "data.lmdb", 5, first_seed=100)
    changed = fit_data(config, Unread())
    assert changed.source == first.source
    assert changed.train.energy_mean != first.train.energy_mean


def test_statistics_of_large_files_are_kept_for_the_next_run(tiny_config, tmp_path, monkeypatch):
    """As `molflt data stats` does with all; a file of 3 is large here, one of 2 is not."""
    root = tmp_path / "data"
    for split, count in (("train", 3), ("val_a", 2)):
        write_toy_lmdb(root / split / "data.lmdb", count)
    monkeypatch.setattr(data, "KEEP_FROM", 3)
    config = tiny_config(tmp_path / "run", **{"data.root": root, "data.val_splits": "[val_a]"})
    first, again = fit_data(config, Unread()), fit_data(config, Unread())
    assert (first.train, first.splits) == (again.train, again.splits)
    assert again.source == "train as kept beside the data, 3 systems; val_a measured on 2 systems"


@pytest.mark.parametrize("references", [None, torch.arange(119, dtype=torch.float64)])
def test_a_fit_comes_back_from_its_state(references):
    """Through a file of plain values and tensors."""
    train = SplitStatistics(3, [1, 29], [2, 7], -0.1, 0.7, 0.3)
    fit = data_fit_from_state(DataFit({"train": 3, "val": 2}, train, references).state())
    assert (fit.splits, fit.train, fit.source) == ({"train": 3, "val": 2}, train, "kept with the run")
    assert fit.references is references


def test_a_small_set_is_read_once_and_kept():
    """Three passes over the cached set read each of 11 samples once (after the probes)."""
    dataset = Counted(11)
    kept = cached(dataset, limit_bytes=1e6, probe=4)
    reads = dataset.reads
    for _ in range(3):
        for index in range(11):
            assert torch.equal(kept[index].pos, sample(index).pos)
    assert isinstance(kept, list)
    assert dataset.reads == reads


def test_a_set_above_the_limit_is_left_on_disk():
    """The estimate decides: one byte less than the set's size is too little, and 0 turns it off."""
    total = sum(sample_bytes(sample(index)) for index in range(5))
    assert isinstance(cached(Counted(5), total, probe=5), list)
    dataset = Counted(5)
    assert cached(dataset, total - 1, probe=5) is dataset
    assert cached(dataset, 0, probe=5) is dataset


def test_only_a_mean_below_minus_50_ev_looks_like_total_energies():
    """OC20's own mean is -1.5 eV; warnings are errors here."""
    for mean in (-1.5, -50.0, 1e5):
        warn_of_total_energies(mean, "train")
    with pytest.warns(InputWarning, match=r"split 'train' are -50\.1 eV per system"):
        warn_of_total_energies(-50.1, "train")


def test_references_are_taken_from_the_energies_before_they_are_measured():
    """What is left of energies that are a sum over elements, plus one, minus one or nothing."""
    references = torch.zeros(119, dtype=torch.float64)
    references[[29, 31, 37]] = torch.tensor([-100.0, -200.0, -700.0], dtype=torch.float64)
    rests = [1.0, -1.0, 0.0, 0.0, -1.0, 1.0]
    samples = [sample(number // 2, atomic_numbers=numbers) for number, numbers in enumerate(COMPOSITIONS)]
    for item, rest in zip(samples, rests, strict=True):
        item.y_relaxed = torch.tensor([references[item.atomic_numbers].sum().item() + rest])
    found, left = fit_references(iter(samples), "train")
    fitted = [float(item.y_relaxed) - float(found[item.atomic_numbers].sum()) for item in samples]
    assert (left.mean, left.std) == pytest.approx((statistics.fmean(fitted), statistics.pstdev(fitted)))
    torch.testing.assert_close(found, references, rtol=0, atol=1.0)
    assert 0.1 < left.std <= (4 / 6) ** 0.5


def test_references_say_where_float32_is_coarse():
    """131,073 eV has steps of 0.016 eV; 16,383 eV of 0.001 eV."""
    fit_references([sample(0, y_relaxed=torch.tensor([-16_383.0]))], "train")
    with pytest.warns(
        InputWarning, match=r"reach 131073 eV, where the data's float32 has steps of 0\.016 eV"
    ):
        references, _ = fit_references([sample(0, y_relaxed=torch.tensor([-131_073.0]))], "train")
    assert references[29].item() == pytest.approx(-131_073 / 2)
