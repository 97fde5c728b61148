"""Statistics of a split against direct computation, and the samples kept in memory."""

import pytest
import torch

from molflt.data.fields import StructureData
from molflt.errors import InputError, InputWarning
from molflt.training.data import (
    cached,
    check_labels,
    fit_references,
    measure_statistics,
    sample_bytes,
    warn_of_total_energies,
)


def sample(number: int, **changes: torch.Tensor | None) -> StructureData:
    """Structure `number` with number + 2 atoms."""
    generator = torch.Generator().manual_seed(number)
    atoms = number + 2
    fields = {
        "pos": torch.randn(atoms, 3, generator=generator),
        "delta_pos": torch.randn(atoms, 3, generator=generator),
        "atomic_numbers": torch.full((atoms,), 29 + number),
        "fixed": torch.arange(atoms) % 2 == 0,
        "sid": torch.tensor([100 + number]),
        "y_relaxed": 1e4 + torch.randn(1, generator=generator),
    }
    return StructureData(**{name: value for name, value in (fields | changes).items() if value is not None})


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


def test_statistics_equal_direct_computation():
    """Mean and spread of the energies (with a large offset) and the RMS of free atoms' Δpos."""
    samples = [sample(number) for number in range(7)]
    statistics = measure_statistics(samples, "train", with_delta_pos=True)
    energies = torch.cat([item.y_relaxed for item in samples]).double()
    shifts = torch.cat([item.delta_pos[~item.fixed] for item in samples]).double()
    assert statistics.energy_mean == pytest.approx(energies.mean().item(), abs=1e-9)
    assert statistics.energy_std == pytest.approx(energies.std(correction=0).item(), rel=1e-9)
    assert statistics.delta_pos_std == pytest.approx(shifts.square().mean().sqrt().item(), rel=1e-12)
    assert statistics.num_systems == 7
    assert statistics.elements == [29, 30, 31, 32, 33, 34, 35]
    assert statistics.num_atoms_range == [2, 8]


def test_scales_are_one_where_nothing_varies():
    """One system has no spread, and fixed atoms no Δpos: neither scale may be zero."""
    statistics = measure_statistics([sample(3, fixed=torch.ones(5, dtype=torch.bool))], "train", True)
    assert (statistics.energy_std, statistics.delta_pos_std) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_relaxed": None}, "sid 101 of split 'train' has no y_relaxed"),
        ({"y_relaxed": torch.tensor([torch.nan])}, "sid 101 of split 'train' has y_relaxed = nan"),
        ({"delta_pos": None}, r"sid 101 of split 'train' has no pos_relaxed.*delta_pos_weight to \[0, 0\]"),
    ],
)
def test_a_missing_or_bad_label_is_named(changes, message):
    """The error names the system and what to do."""
    samples = [sample(0), sample(1, **changes), sample(2)]
    with pytest.raises(InputError, match=message):
        measure_statistics(samples, "train", with_delta_pos=True)
    if "y_relaxed" in changes:
        with pytest.raises(InputError, match=message):
            check_labels(samples, "train")


def test_delta_pos_is_not_asked_for_without_its_loss():
    """Energies alone train on sets without relaxed positions."""
    statistics = measure_statistics([sample(1, delta_pos=None)], "train", with_delta_pos=False)
    assert statistics.num_systems == 1


def test_an_empty_split_is_refused():
    """There is no mean of nothing."""
    with pytest.raises(InputError, match="split 'train' is empty"):
        measure_statistics([], "train", with_delta_pos=False)


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
    references[29:36] = -100.0 * torch.arange(1, 8, dtype=torch.float64)
    rests = [1.0, -1.0, 0.0]
    samples = [sample(number) for number in range(3)]
    for item, rest in zip(samples, rests, strict=True):
        item.y_relaxed = torch.tensor([references[item.atomic_numbers].sum().item() + rest])
    statistics = measure_statistics(samples, "train", False, references)
    assert statistics.energy_mean == pytest.approx(0.0, abs=1e-12)
    assert statistics.energy_std == pytest.approx((2 / 3) ** 0.5, rel=1e-12)


def test_references_need_labels_and_say_where_float32_is_coarse():
    """131,073 eV has steps of 0.016 eV; 16,383 eV of 0.001 eV."""
    with pytest.raises(InputError, match="split 'train' is empty"):
        fit_references([], "train")
    with pytest.raises(InputError, match="sid 101 of split 'train' has no y_relaxed"):
        fit_references([sample(0), sample(1, y_relaxed=None)], "train")
    fit_references([sample(0, y_relaxed=torch.tensor([-16_383.0]))], "train")
    with pytest.warns(
        InputWarning, match=r"reach 131073 eV, where the data's float32 has steps of 0\.016 eV"
    ):
        references = fit_references([sample(0, y_relaxed=torch.tensor([-131_073.0]))], "train")
    assert references[29].item() == pytest.approx(-131_073 / 2)
