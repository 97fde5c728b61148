"""The measurement of prediction: every format is read and predicted, and the figures are there."""

import json

import pytest

from molflt import cli
from molflt.bench.prediction import (
    FORMATS,
    predict_files,
    prediction_json,
    prediction_tables,
    write_inputs,
)
from molflt.data.structures import read_structures
from molflt.prediction import Predictor
from molflt.terminal import print_tables


def test_every_format_holds_the_same_structures(tmp_path, finished_run):
    """Three slabs with an adsorbate each, with one energy in all formats."""
    predictor = Predictor.from_checkpoint(finished_run.best_checkpoint, redraws=0)
    inputs = write_inputs(tmp_path, 3)
    assert tuple(inputs) == FORMATS
    energies = {}
    for form, path in inputs.items():
        assert predict_files(predictor, path, tmp_path / "out.csv", 2) == 3
        rows = (tmp_path / "out.csv").read_text().splitlines()
        energies[form] = [float(row.split(",")[5]) for row in rows[1:]]
        assert len(energies[form]) == 3
    assert energies["lmdb"] == pytest.approx(energies["extxyz"], abs=1e-5)
    assert energies["cif"] == pytest.approx(energies["extxyz"], abs=1e-3)
    [slab, *_] = read_structures(inputs["extxyz"])
    assert (slab.formula, slab.tag_source) == ("CAg16", "ase-layers")


def test_the_command_prints_its_figures(finished_run, capsys, monkeypatch):
    """Rates of both batch sizes for each format; the processes of the start-up are not started here."""
    commands = []
    monkeypatch.setattr(
        "molflt.bench.prediction.subprocess.run", lambda words, **settings: commands.append(words[3:])
    )
    checkpoint = str(finished_run.best_checkpoint)
    results = []
    monkeypatch.setattr("molflt.bench.prediction.prediction_json", lambda result: results.append(result))
    words = ["bench", "prediction", "--checkpoint", checkpoint, "--structures", "2", "--batch-size", "2"]
    assert cli.main([*words, "--repeats", "1", "--redraws", "0", "--json"]) == 0
    assert capsys.readouterr().out == "null\n"
    monkeypatch.undo()
    result = json.loads(json.dumps(prediction_json(results[0])))
    assert [row["form"] for row in result["throughput"]] == list(FORMATS)
    for row in result["throughput"]:
        assert row["ratio"]["median"] == pytest.approx(row["batched"]["median"] / row["single"]["median"])
    assert [command[0] for command in commands] == ["--help", "predict"]
    print_tables(*prediction_tables(results[0]))
    assert "molflt predict, one structure" in capsys.readouterr().out
