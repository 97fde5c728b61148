"""Steps whose loss or gradient is not finite: stopped at with a file to repeat them, or left out."""

import csv
import math
from dataclasses import replace

import pytest
import torch

from molflt import cli
from molflt.errors import InputError
from molflt.training import module, step, train
from molflt.training.nonfinite import NonFiniteStep, describe, suspects
from molflt.training.objective import energy_loss
from molflt.training.replay import replay

BAD_SID = 1004


def rows_of(output):
    with (output / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def poisoned(monkeypatch):
    """Makes the gradient of each batch with one system NaN, or its loss infinite."""

    def poison(factor):
        step_result = module.step_result

        def poisoned_result(model, batch, *others):
            result = step_result(model, batch, *others)
            return result._replace(loss=result.loss * factor) if BAD_SID in batch.sid else result

        monkeypatch.setattr(module, "step_result", poisoned_result)

    return poison


def test_a_run_that_diverges_stops_and_its_step_can_be_repeated(tiny_config, tmp_path, capsys):
    """A learning rate of 10^30 cannot end well: the second step's first output is not finite any more."""
    config = tiny_config(
        tmp_path / "run", **{"optim.lr": 1e30, "optim.grad_clip": ".inf", "model.dropout": 0.1}
    )
    with pytest.raises(
        InputError, match=r"the loss is nan at step 1 \(sids 10\d\d, .*molflt replay"
    ) as caught:
        train(config, progress=False)
    [path] = (tmp_path / "run" / "nonfinite").iterdir()
    assert str(path) in str(caught.value)
    result = replay(path)
    assert (result.step.step, result.step.rank) == (1, 0)
    assert math.isnan(result.loss)
    assert result.first_module.startswith("embedding")
    assert set(result.energies) == set(result.step.sids)
    assert result.gradients
    assert result.weights == result.fields == []
    assert cli.main(["replay", str(path)]) == 0
    out = capsys.readouterr().out
    assert result.first_module in out
    more = len(result.gradients) - 8
    assert more > 1
    assert f"{result.gradients[7]}, {more} more" in out
    assert result.gradients[8] not in out


def test_an_infinite_loss_is_said_to_be_infinite(tiny_config, tmp_path, monkeypatch):
    """Not to be NaN, which only its gradients are made, that all processes see it."""
    monkeypatch.setattr(step, "energy_loss", lambda *arguments: energy_loss(*arguments) * torch.inf)
    with pytest.raises(InputError, match="the loss is inf at step 0"):
        train(tiny_config(tmp_path / "run"), progress=False)
    [path] = (tmp_path / "run" / "nonfinite").iterdir()
    result = replay(path)
    assert result.step.loss == result.loss == math.inf
    assert result.gradients
    assert result.energies == {}


def test_a_repeated_step_is_the_same_step(tiny_config, tmp_path, poisoned):
    """With dropout on, what the saved batch and weights give is the loss that training had before it was
    made infinite."""
    losses = []
    step_result = module.step_result

    def recorded(*arguments):
        result = step_result(*arguments)
        losses.append(result.loss.item())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "step_result", recorded)
        poisoned(torch.inf)
        config = tiny_config(tmp_path / "run", **{"data.batch_size": 2, "model.dropout": 0.1})
        with pytest.raises(InputError, match=f"the loss is inf at step .*{BAD_SID}"):
            train(config, progress=False)
    [path] = (tmp_path / "run" / "nonfinite").iterdir()
    assert len(losses) > 1
    assert replay(path).loss == losses[-1]


def test_steps_that_are_not_finite_can_be_left_out(tiny_config, tmp_path, poisoned, capfd):
    """Once an epoch, each said to be wrong; the metrics are those of the other steps."""
    poisoned(torch.nan)
    config = tiny_config(tmp_path / "run", **{"training.on_nonfinite": "skip", "training.epochs": 3})
    result = train(config, progress=False)
    assert len(result.skipped) == 3
    assert all(str(BAD_SID) in what for what in result.skipped)
    rows = rows_of(result.output)
    assert all(
        math.isfinite(float(row[name]))
        for row in rows
        for name in ("train/loss", "val_a/energy_mae")
        if row[name]
    )
    assert [int(row["step"]) for row in rows] == [3, 6, 9]


def test_leaving_steps_out_does_not_mend_weights_that_are_not_finite(tiny_config, tmp_path):
    """The run ends instead of passing over all that is left of it."""
    settings = {"optim.lr": 1e38, "optim.grad_clip": ".inf", "training.on_nonfinite": "skip"}
    settings |= {"optim.weight_decay": 1e38}
    with pytest.raises(InputError, match="no later step can mend that"):
        train(tiny_config(tmp_path / "run", **settings), progress=False)


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_last_step_that_leads_to_no_energies_is_said(tiny_config, tmp_path, on_nonfinite):
    """There is no step after it to find out."""
    settings = {"optim.lr": 1e30, "optim.grad_clip": ".inf", "training.on_nonfinite": on_nonfinite}
    settings |= {"training.epochs": 1, "data.batch_size": 11}
    with pytest.raises(InputError, match=r"MAE on val_a is nan after the last step: .* lower optim"):
        train(tiny_config(tmp_path / "run", **settings), progress=False)
    [row] = rows_of(tmp_path / "run")
    assert math.isfinite(float(row["train/loss"]))


def test_the_processes_at_fault_are_named():
    """Those whose loss is not finite; all where only gradients are not."""
    first = NonFiniteStep(step=3, rank=0, loss=1.5, sids=[7, 11])
    second = replace(first, rank=1, loss=math.nan, sids=[13])
    assert suspects([first, second]) == [second]
    assert describe([first, second]) == "the loss is nan at step 3 (sids 13)"
    assert suspects([first, first]) == [first, first]
    assert describe([first]) == "a gradient is not finite at step 3 (sids 7, 11)"


def test_only_a_saved_step_is_repeated(tiny_config, tmp_path):
    """One line for what is none."""
    torch.save({"format": "other"}, tmp_path / "other.pt")
    with pytest.raises(InputError, match="is no step that molflt saved"):
        replay(tmp_path / "other.pt")
