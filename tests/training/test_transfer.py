"""Training that starts from the weights of another."""

from dataclasses import replace

import pytest
import torch

from molflt.checkpoint import load_checkpoint, model_from_config, save_checkpoint
from molflt.errors import InputError
from molflt.training import train
from molflt.training.transfer import DATA_SCALES, initialize_from, plan_transfer


def test_weights_and_frequencies_are_taken_over_and_scales_are_not(finished_run, tiny_config, tmp_path):
    """All of the checkpoint's but what belongs to its data."""
    torch.manual_seed(1)
    config = tiny_config(tmp_path)
    model = model_from_config(config)
    model.energy_mean.fill_(7.0)
    transfer = initialize_from(model, config, str(finished_run.best_checkpoint), [])
    old = load_checkpoint(finished_run.best_checkpoint).model.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, old[name]) == (name not in DATA_SCALES), name
    assert model.energy_mean.item() == 7.0
    assert set(transfer.loaded) == old.keys() - set(DATA_SCALES)
    assert transfer.new == transfer.unused == []
    assert transfer.differences == ()


def test_settings_that_give_the_weights_another_meaning_are_told(finished_run, tiny_config, tmp_path):
    """The weights fit, but were trained on another graph and with other dropout."""
    config = tiny_config(tmp_path, **{"data.radius": 4.25, "model.dropout": 0.5, "optim.lr": 0.1})
    transfer = initialize_from(model_from_config(config), config, str(finished_run.best_checkpoint), [])
    before = load_checkpoint(finished_run.best_checkpoint).config
    assert transfer.lines()[1:] == [
        f"trained otherwise: data.radius was {before.data.radius} and is 4.25",
        f"trained otherwise: model.dropout was {before.model.dropout} and is 0.5",
    ]


def test_training_starts_there_and_says_what_it_loaded(finished_run, tiny_config, tmp_path, capsys):
    """With hardly a learning rate the weights stay where they came from; a named head is new."""
    settings = {"training.init_from": finished_run.best_checkpoint, "training.init_skip": "[energy_head.*]"}
    settings |= {"optim.lr": 1e-12, "training.epochs": 1, "seed": 8}
    result = train(tiny_config(tmp_path / "run", **settings))
    old, new = (
        load_checkpoint(path).model.state_dict()
        for path in (finished_run.best_checkpoint, result.last_checkpoint)
    )
    for name in old:
        if name not in DATA_SCALES:
            close = torch.allclose(new[name], old[name], rtol=0, atol=1e-9)
            assert close == (not name.startswith("energy_head.")) or old[name].eq(1).all(), name
    err = capsys.readouterr().err
    assert "newly initialised: energy_head.mlp.0.weight" in err
    assert "left out of the checkpoint: energy_head.mlp.0.weight" in err
    assert f"{sum(not name.startswith('energy_head.') for name in old) - 3} weights and buffers loaded" in err


def test_another_architecture_is_refused_unless_what_differs_is_named(finished_run, tiny_config, tmp_path):
    """A layer more, a head less: the first few names and where they are missing."""
    config = tiny_config(tmp_path, **{"model.num_layers": 3, "optim.delta_pos_weight": "[0, 0]"})
    model, path = model_from_config(config), str(finished_run.best_checkpoint)
    with pytest.raises(InputError) as caught:
        initialize_from(model, config, path, [])
    message = str(caught.value)
    assert message.startswith(f"training.init_from {path}: weights do not fit: encoder.layers.2.")
    assert "(missing in the checkpoint)" in message
    assert "displacement_head." in message
    assert "(unknown to the new network)" in message
    transfer = initialize_from(model, config, path, ["encoder.layers.2.*", "displacement_head.*"])
    assert all(name.startswith("encoder.layers.2.") for name in transfer.new)
    assert all(name.startswith("displacement_head.") for name in transfer.unused)


def test_encodings_of_several_layers_do_not_become_one(finished_run, tiny_config, tmp_path):
    """They have the names of a shared one; the other way round each layer starts from the shared one."""
    config = tiny_config(tmp_path, **{"model.attention.share_rpe": "false"})
    model, path = model_from_config(config), tmp_path / "own.ckpt"
    save_checkpoint(path, replace(load_checkpoint(finished_run.best_checkpoint), config=config, model=model))
    shared = model_from_config(tiny_config(tmp_path))
    with pytest.raises(InputError, match=r"layers\.0\.attention\.rpe.* and .*layers\.1\..* are one weight"):
        initialize_from(shared, tiny_config(tmp_path), str(path), [])
    initialize_from(model, config, str(finished_run.best_checkpoint), [])
    first, second = (layer.attention.rpe.state_dict() for layer in model.encoder.layers)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_shape_is_named_and_a_pattern_without_a_weight_is_an_error():
    """A misspelt pattern would else go unnoticed."""
    new, old = (
        {"a.weight": torch.ones(2), "b": torch.ones(3)},
        {"a.weight": torch.ones(5), "b": torch.ones(3)},
    )
    with pytest.raises(InputError, match=r"a\.weight \(of another shape there\).*init_skip"):
        plan_transfer(new, old, [])
    with pytest.raises(InputError, match=r"'c\.\*', which is the name of no weight"):
        plan_transfer(new, old, ["a.*", "c.*"])
    assert plan_transfer(new, old, ["a.*"]).loaded == ["b"]
