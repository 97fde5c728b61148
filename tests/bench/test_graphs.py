"""The comparison of radius graphs: it runs, says what it measured, and notices other edges."""

import json

import pytest

from molflt import cli
from molflt.bench import graphs
from molflt.bench.graphs import bench_graphs, crystal
from molflt.errors import InputError


def test_the_command_prints_both_times_and_their_ratio(capsys):
    """As JSON: positive times, min <= median <= max, a ratio within what the times allow."""
    assert cli.main(["bench", "graphs", "--atoms", "23", "--radius", "3", "--repeats", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_atoms"], result["radius"], result["clock"]) == (23, 3.0, "cpu")
    assert result["num_edges"] > 23
    for name in ("molflt", "ase", "ratio"):
        assert 0 < result[name]["minimum"] <= result[name]["median"] <= result[name]["maximum"]
    assert result["ratio"]["maximum"] <= result["ase"]["maximum"] / result["molflt"]["minimum"]
    assert cli.main(["bench", "graphs", "--atoms", "7", "--radius", "3", "--repeats", "1"]) == 0
    assert "7 atoms" in capsys.readouterr().out


def test_the_crystal_has_the_atoms_asked_for():
    """Periodic, at copper's density but for what a whole number of cells leaves over."""
    for number in (1, 4, 23, 1000):
        atoms = crystal(number)
        assert len(atoms) == number
        assert atoms.pbc.all()
    assert crystal(1000).get_volume() / 1000 == pytest.approx(3.61**3 / 4, rel=0.01)


def test_other_edges_are_an_error(monkeypatch):
    """Here as one of the two searches less far."""
    shorter = graphs.radius_graph
    monkeypatch.setattr(graphs, "radius_graph", lambda pos, cell, pbc, radius: shorter(pos, cell, pbc, 2.9))
    with pytest.raises(InputError, match="find other edges"):
        bench_graphs(23, 4.0, 1)
