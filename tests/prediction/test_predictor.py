"""Predicted energies: the same in any company and from any kind of input, with notes on what is unusual."""

import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import fcc111, molecule
from ase.io import read

from molflt.build import build_transform
from molflt.checkpoint import (
    Checkpoint,
    CheckpointMetadata,
    load_checkpoint,
    model_from_config,
    save_checkpoint,
)
from molflt.config import Config
from molflt.data.datasets import OC20IS2RE
from molflt.data.fields import StructureData
from molflt.data.structures import iter_structures, read_structures, structure_from_atoms
from molflt.errors import InputError
from molflt.models.graphormer3d import Graphormer3D
from molflt.nn.frequencies import resample_
from molflt.prediction import Predictor, model_input
from molflt.prediction import predictor as predictor_module
from molflt.prediction.member import Member
from molflt.prediction.redraws import SEED

STRUCTURES = sorted((Path(__file__).parents[2] / "datasets" / "fcc111" / "structures").iterdir())
EXTXYZ = next(path for path in STRUCTURES if path.suffix == ".extxyz")


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory):
    """The default FLT network, untrained, with energies spread as fcc111's."""
    torch.manual_seed(0)
    config = Config()
    model = model_from_config(config)
    model.energy_mean.fill_(-9.0)
    model.energy_std.fill_(5.7)
    metadata = CheckpointMetadata(energy_meaning="a test", elements=[1, 6, 79], num_atoms_range=[17, 20])
    path = tmp_path_factory.mktemp("checkpoint") / "model.ckpt"
    save_checkpoint(path, Checkpoint(config, model, metadata))
    return path


@pytest.fixture(scope="module")
def predictor(checkpoint_path):
    return Predictor.from_checkpoint(checkpoint_path)


@pytest.fixture(scope="module")
def structures():
    assert len(STRUCTURES) == 10
    return [structure for path in STRUCTURES for structure in read_structures(path)]


def test_a_structure_alone_in_a_batch_and_after_a_reload_has_one_energy(
    predictor, checkpoint_path, structures
):
    """To 1e-10 eV for each of ten files, with nine others, in another order, in batches of 1, 3 and 10."""
    alone = [predictor.predict([structure])[0].energy for structure in structures]
    together = [row.energy for row in predictor.predict(structures)]
    threes = [row.energy for row in predictor.predict(structures, batch_size=3)]
    turned = [row.energy for row in predictor.predict(structures[::-1])][::-1]
    reloaded = [row.energy for row in Predictor.from_checkpoint(checkpoint_path).predict(structures)]
    for energies in (together, threes, turned, reloaded):
        assert energies == pytest.approx(alone, abs=1e-10)
    assert max(alone) - min(alone) > 1e-2, "the ten differ by more than the tolerance"


def test_every_kind_of_input_gives_the_same_energy(predictor):
    """ASE, pymatgen, what read_structures returns, and a PyG Data of one slab with tags."""
    from pymatgen.io.ase import AseAtomsAdaptor

    atoms = read(EXTXYZ)
    [structure] = read_structures(EXTXYZ)
    kinds = [atoms, AseAtomsAdaptor.get_structure(atoms), structure, structure.data]
    rows = predictor.predict(kinds)
    assert [row.energy for row in rows] == pytest.approx([rows[0].energy] * 4, abs=1e-5)
    assert {row.formula for row in rows} == {"C2Au16"} | {row.formula for row in rows[:1]}
    assert {row.n_atoms for row in rows} == {18}
    assert rows[2].source == str(EXTXYZ)
    assert rows[0].tag_source == "given"


def test_molecules_and_slabs_share_a_batch(predictor, structures):
    """A molecule without cell, tags or pbc beside a slab changes neither energy."""
    water = molecule("H2O")
    mixed = predictor.predict([water, structures[0], water])
    assert mixed[0].energy == pytest.approx(predictor.predict([water])[0].energy, abs=1e-5)
    assert mixed[1].energy == pytest.approx(predictor.predict(structures[:1])[0].energy, abs=1e-5)
    assert mixed[0].energy == pytest.approx(mixed[2].energy, abs=1e-12)
    assert mixed[0].tag_source == "none"


def test_the_result_says_what_is_unlike_the_training_data(predictor):
    """Unseen elements by symbol and a size outside the range; nothing where neither holds."""
    copper = read(next(path for path in STRUCTURES if path.name.startswith("Cu-S")))
    carbon = read(next(path for path in STRUCTURES if path.name.startswith("Au-C")))
    rows = predictor.predict([copper, molecule("CH4"), carbon])
    assert "not in the training data: S, Cu" in rows[0].notes
    assert "training systems have 17 to 20 atoms" in rows[1].notes
    assert rows[2].notes == ()


def test_a_bad_structure_is_refused_and_named(predictor):
    """Overlapping atoms, and a Data without positions or elements."""
    with pytest.raises(InputError, match="structure 1"):
        predictor.predict([molecule("H2O"), Atoms("H2", positions=[[0, 0, 0], [0, 0, 0.01]])])
    with pytest.raises(InputError, match="structure 0 has no atomic_numbers"):
        predictor.predict([StructureData(pos=torch.zeros(2, 3))])
    for numbers in ([1, 119], [0, 8], [1, 1]):
        with pytest.raises(InputError, match="sid 7: "):
            predictor.predict(
                [
                    StructureData(
                        pos=torch.zeros(2, 3), atomic_numbers=torch.tensor(numbers), sid=torch.tensor([7])
                    )
                ]
            )


@pytest.mark.parametrize("wrong", [molecule("H2O"), StructureData(pos=torch.zeros(1, 3)), "slab.cif"])
def test_what_is_no_list_of_structures_is_a_type_error(predictor, wrong):
    """One Atoms is itself iterable, over atoms: it must not be taken for a list."""
    with pytest.raises(TypeError, match="put it in a list"):
        predictor.predict(wrong)
    if isinstance(wrong, str):
        with pytest.raises(TypeError, match="structure 0 is a str"):
            predictor.predict([wrong])


def test_a_stream_keeps_its_order_and_passes_errors_through(predictor, structures):
    """Errors stand where they came, before, between and after batches of two."""
    errors = [InputError(str(number)) for number in range(3)]
    stream = [errors[0], structures[0], structures[1], errors[1], structures[2], errors[2]]
    outcomes = list(predictor.iter_predict(iter(stream), batch_size=2))
    assert [outcomes[0], outcomes[3], outcomes[5]] == errors
    assert [outcomes[place].source for place in (1, 2, 4)] == [
        structure.source for structure in structures[:3]
    ]


def test_absent_fields_are_filled_as_documented():
    """No cell: open; a cell without pbc: periodic, as in OC20; no tags: zeros."""
    data = StructureData(pos=torch.ones(3, 3, dtype=torch.float64), atomic_numbers=torch.tensor([1.0, 6, 8]))
    filled = model_input(data)
    assert filled.cell.tolist() == torch.zeros(1, 3, 3).tolist()
    assert filled.pbc.tolist() == [[False] * 3]
    assert filled.tags.tolist() == [0, 0, 0]
    assert (filled.pos.dtype, filled.atomic_numbers.dtype) == (torch.float32, torch.int64)
    data.cell = torch.eye(3)
    assert model_input(data).pbc.tolist() == [[True] * 3]


def test_a_trained_checkpoint_predicts_what_was_evaluated(finished_run, toy_root):
    """A labelled record given as Data has the energy that evaluation finds for it."""
    from molflt.build import build_dataset
    from molflt.data.datasets import OC20IS2RE
    from molflt.evaluation import predict_split

    checkpoint = load_checkpoint(finished_run.best_checkpoint)
    evaluated = predict_split(checkpoint.model, build_dataset(checkpoint.config.data, "val_a"), 7)
    rows = Predictor(checkpoint).predict(OC20IS2RE(toy_root, "val_a"))
    assert [row.energy for row in rows] == pytest.approx(evaluated.energy.tolist(), abs=1e-5)
    assert [row.source for row in rows] == [f"sid {sid}" for sid in evaluated.sid.tolist()]


def test_padding_does_not_change_an_energy(predictor, structures):
    """Beside a slab of 100 atoms, a slab of 18 has its energy and Δpos to 1e-10, its spread to 1e-6."""
    large = structure_from_atoms(fcc111("Cu", (5, 5, 4), vacuum=8.0))
    [alone] = predictor.predict(structures[:1])
    [_, beside] = predictor.predict([large, structures[0]])
    assert beside.energy == pytest.approx(alone.energy, abs=1e-10)
    assert beside.uncertainty == pytest.approx(alone.uncertainty, abs=1e-6)
    np.testing.assert_allclose(beside.delta_pos, alone.delta_pos, atol=1e-10)
    assert np.abs(alone.delta_pos).max() > 1e-3


def test_neighbours_found_by_the_reader_make_the_networks_graph(checkpoint_path):
    """Edges, offsets and distances are those of the transform, with and without a cap, bit for bit."""
    config = Config()
    for cap in (None, 7):
        config.data.max_neighbors = cap
        torch.manual_seed(0)
        checkpoint = Checkpoint(config, model_from_config(config).eval(), CheckpointMetadata())
        member = Member(checkpoint, torch.device("cpu"), torch.float64, 0)
        for path in (STRUCTURES[0], EXTXYZ):
            [shared] = iter_structures(path, radius=6.5)
            [plain] = iter_structures(path)
            assert shared.neighbors.radius >= 6.5
            assert plain.neighbors is None
            one, two = member.prepare(shared), member.prepare(plain)
            assert one.edge_index.shape[1] > 100
            for name in ("edge_index", "cell_offsets", "distances", "pos", "tags"):
                assert torch.equal(one[name], two[name]), name


def test_large_structures_are_not_batched_with_many(predictor, monkeypatch):
    """A batch is closed before its padded atoms exceed the limit; all come out, in order."""
    sizes = []
    predict = Member.predict
    monkeypatch.setattr(predictor_module, "MAX_BATCH_ATOMS", 12)
    monkeypatch.setattr(
        Member, "predict", lambda self, samples: sizes.append(len(samples)) or predict(self, samples)
    )
    molecules = [molecule(name) for name in ("H2O", "H2O", "CH4", "CH4", "CH4", "C6H6", "H2O")]
    rows = predictor.predict(molecules)
    assert [row.formula for row in rows] == ["H2O", "H2O", "CH4", "CH4", "CH4", "C6H6", "H2O"]
    assert sizes == [2, 2, 1, 1, 1]


def test_the_redraw_spread_is_that_of_networks_redrawn_by_hand(checkpoint_path, structures):
    """Standard deviation over the network's own draw and three others; the own one is in place afterwards."""
    predictor = Predictor.from_checkpoint(checkpoint_path, redraws=3)
    [row] = predictor.predict(structures[:1])
    model = load_checkpoint(checkpoint_path).model
    sample = build_transform(Config().data, False)(model_input(structures[0].data))
    with torch.inference_mode():
        energies = [float(copy.deepcopy(model).double()(sample).energy)]
        for number in range(3):
            resample_(model, torch.Generator().manual_seed(SEED + number))
            energies.append(float(model(sample).energy))
            exact = float(copy.deepcopy(model).double()(sample).energy)
            assert energies[-1] == pytest.approx(exact, abs=1e-5), "single precision is enough for these"
    assert row.energy == pytest.approx(energies[0], abs=1e-10)
    assert row.uncertainty == pytest.approx(np.std(energies, ddof=1), abs=1e-6)
    assert (row.uncertainty_kind, row.uncertainty > 1e-5) == ("redraws", True)
    again = predictor.predict(structures[:1])[0]
    assert (again.energy, again.uncertainty) == (row.energy, row.uncertainty)


def test_draws_share_what_no_draw_changes(structures, monkeypatch):
    """The shipped network's draws are of features alone: one embedding for all, and the spread by hand."""
    checkpoint = load_checkpoint("fcc111-flt")
    predictor, model = Predictor(checkpoint, redraws=3), checkpoint.model
    prepared = []
    original = Graphormer3D.prepare
    monkeypatch.setattr(Graphormer3D, "prepare", lambda *of: prepared.append(of[0]) or original(*of))
    [row] = predictor.predict(structures[:1])
    assert [weights.energy_mean.dtype for weights in prepared] == [torch.float64, torch.float32]
    sample = build_transform(checkpoint.config.data, False)(model_input(structures[0].data))
    energies = [row.energy]
    with torch.inference_mode():
        for number in range(3):
            resample_(model, torch.Generator().manual_seed(SEED + number))
            energies.append(float(model(sample).energy))
    assert len({*energies}) == 4
    assert row.uncertainty == pytest.approx(np.std(energies, ddof=1), abs=2e-6)


def test_without_redraws_or_random_numbers_there_is_no_uncertainty(checkpoint_path, structures):
    """Nothing asked for, and a softmax network, whose energies no draw changes: not known, and not zero."""
    [row] = Predictor.from_checkpoint(checkpoint_path, redraws=0).predict(structures[:1])
    assert (row.uncertainty, row.uncertainty_kind) == (None, "none")
    config = Config()
    config.model.attention.kind = "softmax"
    torch.manual_seed(1)
    exact = Checkpoint(config, model_from_config(config).eval(), CheckpointMetadata())
    [row] = Predictor(exact).predict(structures[:1])
    assert (row.uncertainty, row.uncertainty_kind) == (None, "none")


def test_an_ensemble_gives_mean_and_spread_of_its_members(checkpoint_path, structures, tmp_path):
    """Energies, displacements and standard deviation of two networks, one with another radius."""
    torch.manual_seed(2)
    config = Config()
    config.data.radius = 4.0
    metadata = CheckpointMetadata(energy_meaning="a test", elements=[1], num_atoms_range=[17, 20])
    other = Checkpoint(config, model_from_config(config).eval(), metadata)
    save_checkpoint(tmp_path / "other.ckpt", other)
    paths = [checkpoint_path, tmp_path / "other.ckpt"]
    single = [Predictor.from_checkpoint(path).predict(structures[:3]) for path in paths]
    for one, two, both in zip(*single, Predictor.from_checkpoint(paths).predict(structures[:3]), strict=True):
        assert both.energy == pytest.approx((one.energy + two.energy) / 2, abs=1e-10)
        assert both.uncertainty == pytest.approx(abs(one.energy - two.energy) / 2**0.5, abs=1e-10)
        assert both.uncertainty_kind == "ensemble"
        np.testing.assert_allclose(both.delta_pos, (one.delta_pos + two.delta_pos) / 2, atol=1e-12)
        assert both.unlike_training, "to the second, which knows hydrogen alone"


def test_an_ensemble_of_different_targets_is_refused(checkpoint_path, tmp_path):
    """The two meanings are named."""
    checkpoint = load_checkpoint(checkpoint_path)
    metadata = replace(checkpoint.metadata, energy_meaning="formation energy")
    save_checkpoint(tmp_path / "other.ckpt", replace(checkpoint, metadata=metadata))
    with pytest.raises(InputError, match=r"different energies \(a test / formation energy\)"):
        Predictor.from_checkpoint([checkpoint_path, tmp_path / "other.ckpt"])


def test_the_callers_network_is_left_alone(checkpoint_path, structures):
    """Precision and random draws of the checkpoint in memory do not change."""
    checkpoint = load_checkpoint(checkpoint_path)
    before = {name: value.clone() for name, value in checkpoint.model.state_dict().items()}
    Predictor(checkpoint).predict(structures[:1])
    for name, value in checkpoint.model.state_dict().items():
        assert value.dtype == before[name].dtype
        assert torch.equal(value, before[name]), name


def test_relaxed_atoms_move_where_they_are_free(predictor, structures):
    """By the predicted Δpos; atoms that the file fixes stay; cell, pbc and tags are kept."""
    path = next(path for path in STRUCTURES if path.suffix == ".vasp")
    [structure] = read_structures(path)
    [row] = predictor.predict([structure])
    initial, relaxed = row.initial_atoms(), row.relaxed_atoms()
    fixed = structure.data.fixed.numpy()
    assert 0 < fixed.sum() < len(fixed)
    moved = relaxed.positions - initial.positions
    assert (moved[fixed] == 0).all()
    np.testing.assert_allclose(moved[~fixed], row.delta_pos[~fixed], atol=1e-12)
    assert (np.abs(moved[~fixed]).max(axis=1) > 1e-6).all()
    np.testing.assert_array_equal(relaxed.get_tags(), structure.data.tags.numpy())
    assert relaxed.pbc.tolist() == structure.data.pbc[0].tolist()
    np.testing.assert_allclose(relaxed.cell.array, structure.data.cell[0].numpy())


def test_displacements_are_left_out_on_request(checkpoint_path, predictor, structures):
    """The energies stay the same bits, and there are no relaxed atoms."""
    without = Predictor.from_checkpoint(checkpoint_path, displacements=False)
    assert predictor.predicts_positions
    assert not without.predicts_positions
    for row, other in zip(without.predict(structures), predictor.predict(structures), strict=True):
        assert (row.energy, row.uncertainty) == (other.energy, other.uncertainty)
        assert row.delta_pos is None
    with pytest.raises(ValueError, match="no Δpos was predicted"):
        row.relaxed_atoms()


def test_a_row_says_what_was_computed(predictor, structures):
    """Id from the sid or the file, and the directions that repeat."""
    [slab] = predictor.predict(structures[:1])
    assert slab.id == f"{STRUCTURES[0].name}:0"
    assert slab.pbc == "".join("FT"[int(flag)] for flag in structures[0].data.pbc[0])
    data = StructureData(
        pos=torch.tensor([[0.0, 0, 0], [0, 0, 1]]),
        atomic_numbers=torch.tensor([1, 1]),
        sid=torch.tensor([31]),
    )
    [row] = predictor.predict([data])
    assert (row.id, row.pbc) == ("31", "FFF")
    data.cell = 9 * torch.eye(3)[None]
    assert predictor.predict([data])[0].pbc == "TTT"


def test_a_checkpoint_says_what_it_was_trained_on(finished_run):
    """Number, sizes and elements of its training systems."""
    predictor = Predictor.from_checkpoint(finished_run.best_checkpoint)
    assert predictor.domain.startswith("trained on 11 systems of 5 to 17 atoms, of H, C, O, Al, ")


def test_training_systems_are_like_training_and_shuffled_ones_are_not(finished_run, toy_root):
    """Of eleven, at most one is beyond their own 99th percentile; with cells half as wide all are."""
    predictor = Predictor.from_checkpoint(finished_run.best_checkpoint)
    samples = list(OC20IS2RE(toy_root, "train"))
    rows = predictor.predict(samples)
    assert sum(row.unlike_training for row in rows) <= 1
    for sample in samples:
        sample.pos, sample.cell = 0.6 * sample.pos, 0.6 * sample.cell
    squeezed = predictor.predict(samples)
    assert all("embedding distance" in row.notes[-1] for row in squeezed)
    only_one = StructureData(
        pos=torch.zeros(1, 3) + torch.arange(7)[:, None], atomic_numbers=torch.full((7,), 29)
    )
    [row] = predictor.predict([only_one])
    assert any(note.startswith("Cu is 100.0 % of the atoms") for note in row.notes)


def test_an_energy_that_is_no_number_is_an_error(checkpoint_path, structures):
    """Named, in its place, with the others going on; a list as a whole is refused."""
    checkpoint = load_checkpoint(checkpoint_path)
    with torch.no_grad():
        checkpoint.model.embedding.element.weight[79] = float("nan")
    predictor = Predictor(checkpoint, redraws=0)
    gold = read_structures(EXTXYZ)[0]
    other = next(structure for structure in structures if "Au" not in structure.formula)
    bad, good = predictor.iter_predict([gold, other])
    assert str(bad).startswith(f"{EXTXYZ}, frame 0: the predicted energy is nan")
    assert good.energy == pytest.approx(
        Predictor.from_checkpoint(checkpoint_path, redraws=0).predict([other])[0].energy
    )
    with pytest.raises(InputError, match="the predicted energy is nan"):
        predictor.predict([gold])
