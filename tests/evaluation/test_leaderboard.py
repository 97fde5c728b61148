"""Leaderboard files: made for four splits, every fault found by the check, and scored as the splits are."""

import shutil

import numpy as np
import pytest

from molflt.errors import InputError
from molflt.evaluation import check_leaderboard, evaluate, make_leaderboard, score_leaderboard
from molflt.testing import write_toy_lmdb

SIZES = {"id": 5, "ood_ads": 3, "ood_cat": 2, "ood_both": 4}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Labelled val splits and unlabelled test splits of the same systems."""
    folder = tmp_path_factory.mktemp("oc20")
    for number, (domain, size) in enumerate(SIZES.items()):
        write_toy_lmdb(folder / f"val_{domain}.lmdb", size, first_seed=100 * number)
        write_toy_lmdb(folder / f"test_{domain}.lmdb", size, first_seed=100 * number, labels=False)
    return folder


@pytest.fixture(scope="module")
def made(root, finished_run, tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "out.npz"
    assert make_leaderboard([finished_run.best_checkpoint], root, path) == SIZES
    return path


def changed(path, tmp_path, **arrays):
    """A copy of a file with some entries replaced; None leaves one out."""
    with np.load(path) as archive:
        content = {name: archive[name] for name in archive.files} | arrays
    copy = tmp_path / "changed.npz"
    np.savez(copy, **{name: array for name, array in content.items() if array is not None})
    return copy


def test_a_made_file_is_right_and_scores_as_evaluation_does(made, root, finished_run):
    """Eight entries, ids as strings, float32; the MAE of each split is that of `evaluate`."""
    with np.load(made) as archive:
        assert sorted(archive.files) == sorted(f"{d}_{w}" for d in SIZES for w in ("ids", "energy"))
        assert archive["ood_ads_ids"].tolist() == ["1100", "1101", "1102"]
        assert archive["id_energy"].dtype == np.float32
    assert check_leaderboard(made, root) == []
    scores = score_leaderboard(made, root)
    splits = [f"val_{domain}" for domain in SIZES]
    expected = evaluate(finished_run.best_checkpoint, root, splits)
    assert [row.split for row in scores] == splits
    assert [row.energy_mae for row in scores] == pytest.approx([r.energy_mae for r in expected], abs=1e-6)
    assert all(row.intervals for row in scores)


def test_several_checkpoints_are_averaged(made, root, finished_run, tmp_path):
    """Twice the same gives the same; the file appears under its name only."""
    path = tmp_path / "two.npz"
    make_leaderboard([finished_run.best_checkpoint] * 2, root, path)
    with np.load(made) as one, np.load(path) as two:
        for domain in SIZES:
            np.testing.assert_allclose(one[f"{domain}_energy"], two[f"{domain}_energy"], atol=1e-5)
    assert [item.name for item in tmp_path.iterdir()] == ["two.npz"]


def test_ids_may_come_in_any_order_and_as_integers(made, root, tmp_path):
    """Energies follow their ids."""
    with np.load(made) as archive:
        ids, energy = archive["id_ids"][::-1].astype(np.int64), archive["id_energy"][::-1]
    turned = changed(made, tmp_path, id_ids=ids, id_energy=energy)
    assert check_leaderboard(turned, root) == []
    assert score_leaderboard(turned, root)[0].energy_mae == score_leaderboard(made, root)[0].energy_mae


FAULTS = {
    "missing entry": ({"ood_cat_energy": None}, ["entry ood_cat_energy is missing"]),
    "foreign entry": ({"x": np.zeros(1)}, ["entry x is not one of the leaderboard's"]),
    "missing id": (
        {"ood_cat_ids": np.array(["1200"]), "ood_cat_energy": np.zeros(1, np.float32)},
        ["ood_cat: 1 ids are missing (1201)"],
    ),
    "repeated and so missing": (
        {"ood_cat_ids": np.array(["1200", "1200"])},
        ["ood_cat: 1 ids are missing (1201)", "ood_cat: 1 ids are there more than once (1200)"],
    ),
    "extra ids": (
        {"ood_cat_ids": np.arange(1200, 1207), "ood_cat_energy": np.zeros(7, np.float32)},
        ["ood_cat: 5 ids are not in the data (1202, 1203, 1204, ...)"],
    ),
    "no ids": ({"ood_cat_ids": np.array(["a", "b"])}, ["ood_cat: ids are <U1 and not integers"]),
    "ids beyond 64 bits": (
        {"ood_cat_ids": np.array(["1200", "1201", str(2**64)]), "ood_cat_energy": np.zeros(3, np.float32)},
        ["ood_cat: 1 ids are not in the data (18446744073709551616)"],
    ),
    "ids of a thousand digits": (
        {"ood_cat_ids": np.array(["1200", "9" * 5000])},
        ["ood_cat: ids are <U5000 and not integers"],
    ),
    "half precision": ({"ood_cat_energy": np.zeros(2, np.float16)}, ["ood_cat: energies are float16"]),
    "NaN": (
        {"ood_cat_energy": np.array([np.nan, np.inf], np.float32)},
        ["ood_cat: 2 energies are NaN or infinite"],
    ),
    "too few": ({"ood_cat_energy": np.zeros(1, np.float32)}, ["ood_cat: 2 ids but 1 energies"]),
    "column": (
        {"ood_cat_energy": np.zeros((2, 1), np.float32)},
        ["ood_cat: energies have the shape (2, 1)", "ood_cat: 2 ids but 2 energies"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named_and_not_scored(fault, made, root, tmp_path):
    """One or two lines, and no score."""
    arrays, expected = FAULTS[fault]
    path = changed(made, tmp_path, **arrays)
    problems = check_leaderboard(path, root)
    assert len(problems) == len(expected)
    for problem, start in zip(problems, expected, strict=True):
        assert problem.startswith(start)
    with pytest.raises(InputError, match="see `molflt leaderboard check`"):
        score_leaderboard(path, root)


def test_what_is_no_leaderboard_file_is_refused(root, tmp_path, made):
    """Absent, text, cut, a single array, and pickled objects, which are not loaded."""
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "cut.npz").write_bytes(made.read_bytes()[:-100])
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "pickled.npz", id_ids=np.array([{"a": 1}], dtype=object))
    with pytest.raises(InputError, match="no file"):
        check_leaderboard(tmp_path / "absent.npz", root)
    for name in ("text.npz", "cut.npz", "array.npy", "pickled.npz"):
        with pytest.raises(InputError, match="is no leaderboard file"):
            check_leaderboard(tmp_path / name, root)


def test_nothing_is_made_of_incomplete_data(root, finished_run, tmp_path):
    """A missing split, ids that occur twice, an output without its suffix, and labels that are not there."""
    best = [finished_run.best_checkpoint]
    with pytest.raises(InputError, match="has no split 'train_id'"):
        make_leaderboard(best, root, tmp_path / "out.npz", part="train")
    shutil.copytree(root, tmp_path / "twice")
    (tmp_path / "twice" / "test_id").mkdir()
    (tmp_path / "twice" / "test_id.lmdb").unlink()
    for shard in ("0", "1"):
        write_toy_lmdb(tmp_path / "twice" / "test_id" / f"data.{shard}.lmdb", 2, labels=False)
    with pytest.raises(InputError, match="2 ids more than once"):
        make_leaderboard(best, tmp_path / "twice", tmp_path / "out.npz")
    with pytest.raises(InputError, match=r"ends in \.npz"):
        make_leaderboard(best, root, tmp_path / "out.csv")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["twice"]
    make_leaderboard(best, root, tmp_path / "out.npz")
    with pytest.raises(InputError, match="has no y_relaxed"):
        score_leaderboard(tmp_path / "out.npz", root, part="test")
