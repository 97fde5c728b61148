"""The training module apart from a trainer: what goes into a checkpoint."""

import pytest
import torch

from molflt.checkpoint import CheckpointMetadata, load_checkpoint, model_from_config
from molflt.training.averaging import WeightAverage
from molflt.training.module import RelaxedEnergyTraining


@pytest.mark.parametrize("during_validation", [False, True])
def test_a_checkpoint_holds_the_average_whenever_it_is_written(tiny_config, tmp_path, during_validation):
    """Also outside of validation and for each name of a shared parameter; training goes on unchanged."""
    torch.manual_seed(0)
    config = tiny_config(tmp_path / "run")
    model = model_from_config(config)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert len(names) > len(dict(model.named_parameters())), "the layers share an RPE"
    module = RelaxedEnergyTraining(config, model, CheckpointMetadata(elements=[1]))
    module.average = WeightAverage(model.parameters(), decay=0.5)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    module.average.update()
    if during_validation:
        module.on_validation_start()
    content = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(content)
    torch.save(content, tmp_path / "saved.ckpt")
    if during_validation:
        module.on_validation_end()
    saved = load_checkpoint(tmp_path / "saved.ckpt").model.state_dict()
    for name in names:
        torch.testing.assert_close(saved[name], before[name] + 0.9, rtol=0, atol=1e-6)
        torch.testing.assert_close(model.state_dict()[name], before[name] + 1.0, rtol=0, atol=1e-6)
