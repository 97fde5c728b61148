"""Reading, checking and writing configurations."""

import dataclasses
import subprocess
import sys

import pytest
import yaml

from molflt.config import (
    Config,
    add_config_arguments,
    config_from_dict,
    config_keys,
    config_to_dict,
    load_config,
    save_config,
)
from molflt.errors import InputError


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_saved_configuration_reads_back_the_same_and_is_complete(tmp_path):
    config = Config(seed=7)
    config.data.val_splits = ["val_id", "val_ood_ads"]
    config.data.max_neighbors = 23
    config.optim.betas = (0.8, 0.95)
    config.optim.weight_decay = 1e-5
    config.model.attention.kind = "performer"
    config.training.output = "Läufe/Δ 1"
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    written = yaml.safe_load((tmp_path / "config.yaml").read_text(encoding="utf-8"))
    assert {section: set(keys) for section, keys in written.items() if isinstance(keys, dict)} == {
        field.name: {inner.name for inner in dataclasses.fields(getattr(config, field.name))}
        for field in dataclasses.fields(config)
        if dataclasses.is_dataclass(getattr(config, field.name))
    }
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_dictionary_form_is_plain_and_goes_back():
    config = Config(seed=3)
    config.optim.delta_pos_weight = (5.0, 0.0)
    plain = config_to_dict(config)
    assert plain["optim"]["delta_pos_weight"] == [5.0, 0.0]
    assert config_from_dict(plain) == config


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    save_config(Config(seed=1), tmp_path / "config.yaml")

    def full_disk(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_config(Config(seed=2), tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml").seed == 1
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_file_wins_over_defaults_and_command_line_over_file(yaml_file):
    path = yaml_file("optim: {lr: 1e-2, weight_decay: 0.5}\ndata: {val_splits: [a]}\n")
    assert load_config(path).optim.lr == 0.01
    config = load_config(path, ["--optim.lr", "3e-3", "--model.channels=48", "--data.val_splits+", "b"])
    assert config.optim.lr == 0.003
    assert config.optim.weight_decay == 0.5
    assert config.model.channels == 48
    assert config.data.val_splits == ["a", "b"]
    assert config.optim.betas == Config().optim.betas


def test_an_empty_mapping_is_all_defaults(yaml_file):
    assert load_config(yaml_file("# nothing\n{}\n")) == Config()


@pytest.mark.parametrize("text", ["", "# optim: {lr: 1}\n", "---\n"])
def test_an_empty_file_is_refused(yaml_file, text):
    with pytest.raises(InputError, match=r"\.yaml is empty; start from a file in configs/"):
        load_config(yaml_file(text), ["--seed=3"])


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("optim: {lrr: 1}", "optim.lrr", "optim.lr"),
        ("optimiser: {lr: 1}", "optimiser", "optim"),
        ("train: {epochs: 1}", "train", "training"),
        ("lr: 1", "lr", "optim.lr"),
        ("model: {attention: {frequencies: 3}}", "model.attention.frequencies", "num_frequencies"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_valid_one(yaml_file, text, key, nearest):
    path = yaml_file(text)
    with pytest.raises(InputError) as caught:
        load_config(path)
    assert f"{path}: unknown key {key};" in str(caught.value)
    assert str(caught.value).endswith(nearest)


@pytest.mark.parametrize("word", ["--optim.lrr", "--optim.lrr=3"])
def test_unknown_option_is_refused_with_the_nearest_valid_one(yaml_file, word):
    with pytest.raises(InputError, match=r"unknown key --optim\.lrr; .* --optim\.lr$"):
        load_config(yaml_file("{}"), [word, "3"])


def test_abbreviated_option_is_not_guessed(yaml_file):
    with pytest.raises(InputError, match=r"unknown key --data\.roo; .* --data\.root$"):
        load_config(yaml_file("{}"), ["--data.roo", "x"])


@pytest.mark.parametrize(
    ("text", "key", "got"),
    [
        ("optim: {lr: fast}", "optim.lr must be a number", "got 'fast'"),
        ("optim: {lr: true}", "optim.lr must be a number", "got True"),
        ("data: {batch_size: 3.5}", "data.batch_size must be an integer", "got 3.5"),
        ("data: {val_splits: val_id}", "data.val_splits must be a list, each item a text", "got 'val_id'"),
        ("data: {root: 3}", "data.root must be a text", "got 3"),
        ("optim: {betas: [0.9]}", "optim.betas must be a list of 2, each item a number", "got [0.9]"),
        ("model: {attention: {kind: linear}}", "model.attention.kind must be one of flt, ", "got 'linear'"),
        ("training: {precision: 64}", "training.precision must be one of 32, bf16, fp16", "got 64"),
        ("data: {max_atoms: few}", "data.max_atoms must be null or an integer", "got 'few'"),
        ("optim: 3", "optim", "3"),
        ("[1, 2]", "the configuration", "[1, 2]"),
        ("data: {batch_size: }", "data.batch_size", "no value"),
        ("seed: ", "seed", "no value"),
    ],
)
def test_wrong_type_is_refused_in_one_line_naming_file_key_and_value(yaml_file, text, key, got):
    path = yaml_file(text)
    with pytest.raises(InputError) as caught:
        load_config(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    assert key in message
    assert got in message


INVALID = {
    "seed": -1,
    "data.root": " ",
    "data.train_split": "",
    "data.val_splits": [],
    "data.radius": 0.0,
    "data.max_neighbors": 0,
    "data.batch_size": 0,
    "data.num_workers": -1,
    "model.channels": 0,
    "model.num_heads": 7,
    "model.num_layers": 0,
    "model.num_blocks": 0,
    "model.ffn_channels": 0,
    "model.num_gaussians": 0,
    "model.displacement_channels": 12,
    "model.dropout": 1.0,
    "model.attention.num_random_features": 0,
    "model.attention.num_frequencies": 0,
    "model.attention.num_basis": 0,
    "model.attention.basis_width_range": [2.0, 1.0],
    "model.attention.use_rpe": False,
    "model.attention.quadrature_extent": 0.0,
    "model.attention.far_cutoff": 0.0,
    "model.attention.far_basis": 0,
    "model.attention.far_peak": 0.0,
    "model.attention.far_widths": [3.0, 3.0],
    "model.attention.max_frequencies": 0,
    "model.attention.near": False,
    "model.attention.far": False,
    "model.attention.separate_normalizers": True,
    "model.attention.element_rank": -1,
    "model.geometry": "all_pairs",
    "model.image_radius": 0.0,
    "model.input_dropout": 1.0,
    "model.activation_dropout": -0.1,
    "model.attention_dropout": 0.1,
    "model.drop_path": 1.0,
    "optim.lr": 0.0,
    "optim.betas": [0.9, 1.0],
    "optim.weight_decay": -0.1,
    "optim.warmup_fraction": 1.0,
    "optim.grad_clip": 0.0,
    "optim.delta_pos_weight": [1.0, -1.0],
    "training.epochs": 0,
    "training.output": "",
    "training.redraw_every": -1,
    "training.validate_every": 0,
    "training.cache_gib": -1.0,
    "optim.ema_decay": 1.0,
    "training.checkpoint_every": -1,
    "training.devices": 0,
    "training.num_nodes": 0,
    "training.init_from": "",
    "training.init_skip": ["energy_head.*"],
    "training.wandb": " ",
    "data.max_atoms": 0,
    "data.max_edges": 0,
    "data.interpolate_fraction": 1.5,
    "data.noise_std": -0.1,
    "data.energy_mean": float("inf"),
    "data.energy_std": 0.0,
    "optim.power": 0.0,
}
FREE = {
    "data.random_rotation",
    "data.element_references",
    "optim.optimizer",
    "optim.schedule",
    "training.precision",
    "model.attention.kind",
    "model.attention.share_rpe",
    "training.accelerator",
    "data.energy_meaning",
    "training.on_nonfinite",
    "training.strategy",
    "training.tensorboard",
    "model.attention.coupling",
    "model.attention.sampler",
    "model.gradient_checkpointing",
}


def nested(key: str, value: object) -> dict:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value  # type: ignore[return-value]


@pytest.mark.parametrize(("key", "value"), INVALID.items())
def test_value_out_of_range_is_refused_naming_key_and_value(key, value):
    with pytest.raises(InputError) as caught:
        config_from_dict(nested(key, value), source="run.yaml")
    assert str(caught.value).startswith(f"run.yaml: {key} must be ")
    assert f", got {value!r}" in str(caught.value)


def test_every_setting_has_a_refused_value_above():
    assert {key for key, _, _ in config_keys()} == INVALID.keys() | FREE


def test_only_one_budget_fills_batches():
    with pytest.raises(InputError, match=r"data\.max_edges must be null where data\.max_atoms is set, got 7"):
        config_from_dict({"data": {"max_atoms": 5, "max_edges": 7}})


def test_precision_is_given_as_a_number_or_a_name():
    assert config_from_dict({}, overrides=["--training.precision", "32"]).training.precision == 32
    assert config_from_dict({"training": {"precision": "bf16"}}).training.precision == "bf16"


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(InputError, match=r"attention\.far must be true where .*near is false, got False"):
        config_from_dict({"model": {"attention": {"near": False, "far": False}}})
    with pytest.raises(InputError, match=r"attention\.near must be true with kind softmax, got False"):
        config_from_dict({"model": {"attention": {"kind": "softmax", "near": False}}})
    with pytest.raises(InputError, match="num_frequencies must be at least 2 with sampler lattice, got 1"):
        config_from_dict({"model": {"attention": {"sampler": "lattice", "num_frequencies": 1}}})
    with pytest.raises(InputError, match="element_rank must be 0 but with kind flt, coupling additive"):
        config_from_dict({"model": {"attention": {"kind": "softmax", "element_rank": 2}}})
    with pytest.raises(InputError, match="image_radius must be null with attention that is periodic"):
        config_from_dict({"model": {"image_radius": 8.0, "attention": {"kind": "range_separated"}}})
    softmax = config_from_dict({"model": {"attention": {"kind": "softmax", "use_rpe": False}}})
    assert not softmax.model.attention.use_rpe


@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_numbers_that_are_not_finite_are_refused(value):
    for key in ("data.radius", "optim.lr", "optim.weight_decay"):
        with pytest.raises(InputError, match=key):
            config_from_dict({}, overrides=[f"--{key}", value])


def test_error_from_the_command_line_names_it_beside_the_file(yaml_file):
    path = yaml_file("{}")
    with pytest.raises(InputError) as caught:
        load_config(path, ["--data.radius", "-2"])
    assert (
        str(caught.value)
        == f"{path} with --data.radius -2: data.radius must be above 0 Å and finite, got -2.0"
    )


@pytest.mark.parametrize("overrides", [["extra"], ["--optim.lr"], ["--optim.lr", "1", "2"]])
def test_malformed_command_line_is_refused(overrides):
    with pytest.raises(InputError, match=f"with {overrides[0]}"):
        config_from_dict({}, overrides=overrides)


def test_missing_and_unreadable_files_are_refused(tmp_path, yaml_file):
    with pytest.raises(InputError, match=r"cannot read .*absent\.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")
    with pytest.raises(InputError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\x80\x02\xff")
    with pytest.raises(InputError, match=r"binary\.yaml: it is no UTF-8 text"):
        load_config(tmp_path / "binary.yaml")
    with pytest.raises(InputError, match="is not valid YAML") as caught:
        load_config(yaml_file("optim: [1, 2\n"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [("optim: [1, 2\n", "at line 2, column 1"), ("a: 1\na: 1", "at line 1"), ("a\0", "at position 1")],
)
def test_broken_yaml_is_placed_by_line_and_column(yaml_file, text, place):
    with pytest.raises(InputError, match=place) as caught:
        load_config(yaml_file(text))
    assert "unicode string" not in str(caught.value)


def test_key_given_twice_is_refused(yaml_file):
    with pytest.raises(InputError, match="'lr' is given twice"):
        load_config(yaml_file("optim:\n  lr: 1\n  lr: 2\n"))


def test_every_setting_is_documented_and_offered_as_an_option():
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="molflt train")
    add_config_arguments(parser)
    text = " ".join(parser.format_help().split())
    for key, _, doc in config_keys():
        assert f"--{key}" in text
        assert len(doc) > 10
    assert "Peak learning rate." in text


def test_reading_a_configuration_imports_no_torch(yaml_file):
    path = yaml_file("seed: 1")
    program = (
        "import sys; from molflt.config import load_config; load_config(sys.argv[1], ['--seed', '2']); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--data.radius=inf", r"data.radius must be a number, got 'inf' \(YAML writes \.inf\)$"),
        ("--optim.lr=nan", r"optim.lr must be a number, got 'nan' \(YAML writes \.nan\)$"),
        ("--optim.lr=fast", "optim.lr must be a number, got 'fast'$"),
    ],
)
def test_infinity_and_nan_are_told_their_yaml_spelling(word, message):
    """As a word they are texts; `.inf` is the number, where a setting allows it."""
    with pytest.raises(InputError, match=message):
        config_from_dict({}, overrides=[word])
    assert config_from_dict({}, overrides=["--optim.grad_clip=.inf"]).optim.grad_clip == float("inf")


def test_a_run_does_not_validate_on_what_it_trains_on(yaml_file):
    """The best checkpoint would be that of the training error."""
    with pytest.raises(InputError, match=r"data\.val_splits must be without data\.train_split = 'train'"):
        load_config(yaml_file("data: {val_splits: [val_id, train]}"))
