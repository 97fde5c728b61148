"""From configuration to models, transforms and data sets, and the shipped configurations themselves."""

from pathlib import Path

import pytest
import torch
import yaml
from torch_geometric.data import Batch, Data

from molflt.build import (
    build_augmentation,
    build_dataset,
    build_model,
    build_transform,
)
from molflt.build_attention import attention_builder
from molflt.config import AttentionConfig, DataConfig, ModelConfig, config_keys, load_config
from molflt.data.transforms import random_rotation
from molflt.errors import InputError
from molflt.nn.attention import FLTAttention
from molflt.nn.couplings import AdditiveCoupling, NoCoupling
from molflt.nn.element_pairs import ElementPairFLTAttention, ElementPairRPE
from molflt.nn.feature_maps import PositiveRandomFeatures
from molflt.nn.frequencies import (
    GaussianFrequencies,
    OrthogonalGaussianFrequencies,
    SobolGaussianFrequencies,
)
from molflt.nn.lattice_attention import LatticeFLTAttention, LatticeRPE
from molflt.nn.matched_frequencies import MatchedMixtureFrequencies
from molflt.nn.quadrature import SphericalQuadratureFrequencies
from molflt.nn.range_separated import RangeSeparatedAttention, RangeSeparatedRPE
from molflt.nn.rpe import FourierRPE
from molflt.nn.softmax import SoftmaxAttention

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
FCC111, OC20 = (sorted((ROOT / "configs" / name).glob("*.yaml")) for name in ("fcc111", "oc20_is2re"))
CHARGED = sorted((ROOT / "configs/charged_fragments").glob("*.yaml"))
LEARNABLE = [path for path in CONFIGS if path not in [*CHARGED, *OC20]]
"""Those of a small network whose systems a few steps can tell apart."""


def small_config(**attention) -> ModelConfig:
    return ModelConfig(
        channels=12,
        num_heads=3,
        num_layers=2,
        ffn_channels=17,
        num_gaussians=11,
        displacement_channels=6,
        attention=AttentionConfig(
            **{"num_random_features": 13, "num_frequencies": 5, "num_basis": 7, **attention}
        ),
    )


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def flattened(mapping: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in mapping.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def test_flt_layers_are_additive_and_share_one_rpe_of_the_given_sizes():
    model = build_model(small_config(basis_width_range=(0.7, 3.0)), radius=4.0)
    first, second = (layer.attention for layer in model.encoder.layers)
    assert isinstance(first, FLTAttention)
    assert isinstance(first.coupling, AdditiveCoupling)
    assert isinstance(first.feature_map, PositiveRandomFeatures)
    assert first.feature_map.num_random_features == 13
    assert first.rpe is second.rpe
    assert first.feature_map is not second.feature_map
    frequencies = first.rpe.sampler().frequencies
    assert frequencies.shape == (3, 5, 3)
    widths = first.rpe.spectrum.widths
    assert widths.shape == (3, 7)
    torch.testing.assert_close(widths.aminmax().min.detach(), torch.tensor(0.7))
    torch.testing.assert_close(widths.aminmax().max.detach(), torch.tensor(3.0))


def test_layers_have_an_rpe_each_when_it_is_not_shared():
    model = build_model(small_config(share_rpe=False), radius=4.0)
    first, second = (layer.attention for layer in model.encoder.layers)
    assert first.rpe is not second.rpe
    assert num_parameters(model) > num_parameters(build_model(small_config(), radius=4.0))


def test_performer_is_flt_without_any_rpe():
    model = build_model(small_config(kind="performer"), radius=4.0)
    for layer in model.encoder.layers:
        assert isinstance(layer.attention, FLTAttention)
        assert isinstance(layer.attention.coupling, NoCoupling)
        assert layer.attention.rpe is None
    flt = build_model(small_config(), radius=4.0)
    rpe = flt.encoder.layers[0].attention.rpe
    assert num_parameters(flt) - num_parameters(model) == num_parameters(rpe)


def test_softmax_twin_has_the_parameters_of_flt_and_trains_all_but_the_sampler():
    flt, softmax = (build_model(small_config(kind=kind), radius=4.0) for kind in ("flt", "softmax"))
    assert all(isinstance(layer.attention, SoftmaxAttention) for layer in softmax.encoder.layers)
    assert {name for name, _ in flt.named_parameters()} == {name for name, _ in softmax.named_parameters()}
    frozen = {name for name, parameter in softmax.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert all("rpe.sampler" in name for name in frozen)


def test_repeats_cost_no_parameters_and_change_the_output():
    config = small_config(kind="softmax")
    torch.manual_seed(0)
    once = build_model(config, radius=4.0)
    config.num_blocks = 3
    torch.manual_seed(0)
    thrice = build_model(config, radius=4.0)
    assert num_parameters(once) == num_parameters(thrice)
    data = build_transform(DataConfig(radius=4.0), training=False)(toy_slab())
    with torch.no_grad():
        assert (once(data).energy - thrice(data).energy).abs().item() > 1e-3


def test_one_seed_gives_one_model():
    def weights(seed):
        torch.manual_seed(seed)
        return build_model(small_config(), radius=4.0).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["energy_head.mlp.0.weight"], other["energy_head.mlp.0.weight"])


def test_displacement_head_is_optional():
    model = build_model(small_config(), radius=4.0, predict_delta_pos=False)
    data = build_transform(DataConfig(radius=4.0), training=False)(toy_slab())
    assert model(data).delta_pos is None
    assert not any("displacement" in name for name, _ in model.named_parameters())


def toy_slab() -> Data:
    generator = torch.Generator().manual_seed(0)
    return Data(
        pos=torch.rand(7, 3, generator=generator) * torch.tensor([4.1, 5.3, 6.0]),
        cell=torch.diag(torch.tensor([4.1, 5.3, 19.0]))[None],
        atomic_numbers=torch.tensor([29, 29, 29, 29, 8, 1, 1]),
        tags=torch.tensor([0, 0, 1, 1, 2, 2, 2]),
    )


def test_transform_makes_the_graph_and_delta_pos_where_there_is_a_relaxed_structure():
    transform = build_transform(DataConfig(radius=3.1), training=True)
    data = transform(toy_slab())
    sender, receiver = data.edge_index
    lengths = (data.pos[sender] - data.pos[receiver] + data.cell_offsets.float() @ data.cell[0]).norm(dim=-1)
    assert 2.0 < lengths.max() < 3.1
    assert "delta_pos" not in data
    labelled = toy_slab()
    labelled.pos_relaxed = labelled.pos + torch.tensor([0.1, -0.2, 0.3]) + labelled.cell[0, 1]
    moved = transform(labelled).delta_pos
    torch.testing.assert_close(moved, torch.tensor([[0.1, -0.2, 0.3]]).expand(7, 3), rtol=0, atol=1e-5)


def test_transform_caps_neighbours():
    free = build_transform(DataConfig(radius=5.0), training=False)(toy_slab())
    capped = build_transform(DataConfig(radius=5.0, max_neighbors=5), training=False)(toy_slab())
    assert capped.num_edges < free.num_edges


def test_transform_augments_for_training_only():
    """Rotation and interpolation move atoms, and the graph is that of where they are."""
    settings = {"interpolate_fraction": 1.0, "noise_std": 0.2, "random_rotation": "any"}
    config = DataConfig(radius=5.0, **settings)
    labelled = toy_slab()
    labelled.pos_relaxed = labelled.pos + 0.1
    plain = build_transform(config, training=False)(labelled)
    assert torch.equal(plain.pos, labelled.pos)
    assert torch.equal(plain.cell, labelled.cell)
    augmented = build_transform(config, training=True)(labelled)
    assert (augmented.cell - labelled.cell).abs().max() > 0.1
    torch.testing.assert_close(augmented.pos + augmented.delta_pos, augmented.pos_relaxed, rtol=0, atol=1e-5)
    graph = build_transform(config, training=False)(augmented)
    assert torch.equal(augmented.edge_index, graph.edge_index)
    assert build_augmentation(DataConfig()) == []


def test_dataset_is_the_named_split_ready_for_the_model(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = DataConfig(root="datasets/fcc111", radius=4.0)
    dataset = build_dataset(config, "val_ood_ads")
    assert (dataset[0].atomic_numbers == 17).any()
    assert dataset[0].delta_pos.shape == dataset[0].pos.shape
    assert dataset[0].edge_index.max() < dataset[0].num_nodes
    with pytest.raises(InputError, match="no split 'val_od'"):
        build_dataset(config, "val_od")


def test_parameter_counts_at_the_published_size():
    """45.1 M are published for Graphormer-3D and under 0.03 M more for FLT than for the Performer."""
    folder = ROOT / "configs/oc20_is2re"
    published = build_model(load_config(folder / "graphormer3d_base.yaml").model, radius=6.0)
    assert 44.6e6 < num_parameters(published) < 45.6e6
    # The layers of a model share what they add to the Performer's.
    flt, performer, best = (
        num_parameters(build_model(load_config(folder / name, ["--model.num_layers=1"]).model, radius=6.0))
        for name in ("flt_12l.yaml", "performer_12l.yaml", "flt_best.yaml")
    )
    assert 0 < flt - performer < 0.03e6
    assert 0 < best - performer < 0.03e6


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_configuration_is_complete(path):
    written = flattened(yaml.safe_load(path.read_text(encoding="utf-8")))
    assert written.keys() == {key for key, _, _ in config_keys()}
    load_config(path)


def test_fcc111_configurations_differ_in_attention_output_and_the_rotations_that_it_needs():
    folder = ROOT / "configs/fcc111"
    first, *others = [
        flattened(yaml.safe_load(path.read_text(encoding="utf-8"))) for path in folder.glob("*.yaml")
    ]
    assert len(others) >= 9
    alike = {"training.output", "data.random_rotation"}
    for other in others:
        different = {key for key in first if first[key] != other[key]}
        assert "training.output" in different
        assert all(key.startswith("model.attention.") for key in different - alike)
        assert len(different) > 1
    for one in (first, *others):
        has_random_frequencies = (
            one["model.attention.kind"] == "flt" and one["model.attention.sampler"] != "lattice"
        )
        assert one["data.random_rotation"] == ("any" if has_random_frequencies else "none")


def test_fcc111_configurations_have_as_many_parameters_as_each_other():
    """All within 0.2 % of each other; what positions add in attention is far below 0.03 M."""
    counts = {
        path.stem: num_parameters(build_model(load_config(path).model, radius=6.0))
        for path in (ROOT / "configs/fcc111").glob("*.yaml")
    }
    assert max(counts.values()) < 1.002 * min(counts.values())
    assert counts["performer"] == counts["softmax_norpe"] == min(counts.values())
    assert max(counts.values()) - counts["performer"] < 0.03e6


@pytest.mark.parametrize(
    "path",
    [path for path in CONFIGS if path.stem != "graphormer3d_base"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_positions_add_fewer_than_30000_parameters_to_the_attention_of_any_shipped_configuration(path):
    """At its real size. Near edges are biased by a weight per Gaussian and head."""
    config = load_config(path).model
    layer = attention_builder(config)()
    num_rpes = 1 if config.attention.share_rpe else config.num_layers
    rpe = getattr(layer, "rpe", None)
    assert num_rpes * (0 if rpe is None else num_parameters(rpe)) < 30_000


@pytest.mark.parametrize("path", OC20, ids=lambda path: path.stem)
def test_oc20_configuration_takes_a_training_step_on_the_oc20_sample(path, monkeypatch):
    """All but the widths are the real ones: depth, repeats, heads, graph and images."""
    monkeypatch.chdir(ROOT)
    widths = {"channels": 96, "ffn_channels": 96, "num_gaussians": 16, "displacement_channels": 48}
    narrow = [f"--model.{name}={width}" for name, width in widths.items()]
    config = load_config(path, ["--data.root=datasets/oc20_sample", *narrow])
    assert config.model.num_heads == 48
    torch.manual_seed(config.seed)
    dataset = build_dataset(config.data, None, training=True)
    model = build_model(config.model, config.data.radius, any(config.optim.delta_pos_weight))
    batch = Batch.from_data_list([min(dataset, key=lambda data: data.num_nodes)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optim.lr)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    energy, delta_pos = model(batch)
    ((energy - batch.y_relaxed).abs().mean() + (delta_pos - batch.delta_pos).abs().mean()).backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("path", LEARNABLE, ids=lambda path: str(path.relative_to(ROOT)))
def test_shipped_configuration_learns_a_small_batch(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    torch.manual_seed(config.seed)
    dataset = build_dataset(config.data, config.data.train_split, training=True)
    batch = Batch.from_data_list([dataset[index] for index in (0, 101, 202, 303)])
    model = build_model(config.model, config.data.radius, any(config.optim.delta_pos_weight))
    model.energy_mean.copy_(batch.y_relaxed.mean())
    model.energy_std.copy_(batch.y_relaxed.std())
    labelled = "delta_pos" in batch
    if labelled:
        model.delta_pos_std.copy_(batch.delta_pos[~batch.fixed].square().mean().sqrt())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss() -> torch.Tensor:
        energy, delta_pos = model(batch)
        error = (energy - batch.y_relaxed).abs().mean() / model.energy_std
        if not labelled:
            return error
        return error + (delta_pos - batch.delta_pos)[~batch.fixed].abs().mean() / model.delta_pos_std

    def loss_without_dropout() -> float:
        model.eval()
        with torch.no_grad():
            value = loss().item()
        model.train()
        return value

    before = loss_without_dropout()
    for _ in range(25):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss_without_dropout() < 0.7 * before


@pytest.mark.parametrize("path", CHARGED, ids=lambda path: path.stem)
def test_only_the_far_part_tells_arrangements_of_charged_fragments_apart(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = load_config(path)
    dataset = build_dataset(config.data, "val")
    batch = Batch.from_data_list([dataset[index] for index in range(11)])

    def spread(far: bool) -> float:
        config.model.attention.far = far
        torch.manual_seed(0)
        model = build_model(config.model, config.data.radius, predict_delta_pos=False).eval()
        with torch.no_grad():
            return model(batch).energy.std().item()

    assert spread(far=False) < 1e-5
    assert spread(far=True) > 1e-3


@pytest.mark.parametrize(
    ("settings", "layer", "position_layer"),
    [
        ({"kind": "softmax", "use_rpe": False}, SoftmaxAttention, type(None)),
        ({"kind": "range_separated"}, RangeSeparatedAttention, RangeSeparatedRPE),
        ({"sampler": "lattice", "coupling": "multiplicative"}, RangeSeparatedAttention, RangeSeparatedRPE),
        ({"sampler": "lattice"}, LatticeFLTAttention, LatticeRPE),
        ({"coupling": "multiplicative"}, FLTAttention, FourierRPE),
        ({"element_rank": 2}, ElementPairFLTAttention, ElementPairRPE),
    ],
)
def test_attention_settings_choose_layer_and_rpe(settings, layer, position_layer):
    for share in (True, False):
        model = build_model(small_config(share_rpe=share, **settings), radius=4.0)
        first, second = (block.attention for block in model.encoder.layers)
        assert type(first) is type(second) is layer
        assert isinstance(first.rpe, position_layer)
        assert (first.rpe is second.rpe) == (share or first.rpe is None)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        ("gaussian", GaussianFrequencies),
        ("orthogonal", OrthogonalGaussianFrequencies),
        ("sobol", SobolGaussianFrequencies),
        ("matched_mixture", MatchedMixtureFrequencies),
        ("spherical", SphericalQuadratureFrequencies),
    ],
)
def test_samplers_are_those_named(sampler, expected):
    config = small_config(sampler=sampler, basis_width_range=(2.0, 4.0), quadrature_extent=3.0)
    rpe = build_model(config, radius=4.0).encoder.layers[0].attention.rpe
    assert type(rpe.sampler) is expected
    if sampler == "matched_mixture":
        assert rpe.sampler.components is rpe.spectrum.components
    if sampler != "spherical":
        assert rpe.num_frequencies == 5


def test_range_separation_takes_its_parts_from_the_settings():
    def rpe(**settings):
        settings = {
            "kind": "range_separated",
            "max_frequencies": 23,
            "far_cutoff": 0.2,
            "far_basis": 3,
        } | settings
        return build_model(small_config(**settings), radius=4.0).encoder.layers[0].attention.rpe

    whole = rpe()
    assert whole.near.linear.in_features == 11
    assert (whole.far.cutoff, whole.far.max_frequencies) == (0.2, 23)
    assert whole.far.spectrum.widths.shape == (3, 3)
    assert rpe(far=False).far is None
    assert rpe(near=False).near is None
    layer = build_model(small_config(kind="range_separated", separate_normalizers=True), radius=4.0)
    assert layer.encoder.layers[1].attention.separate_normalizers


@pytest.mark.parametrize("kind", ["flt", "performer", "softmax"])
def test_rotating_a_slab_turns_its_displacements_in_float32(kind):
    torch.manual_seed(0)
    model = build_model(small_config(kind=kind), radius=4.0).eval()
    transform = build_transform(DataConfig(radius=4.0), training=False)
    turned, rotation = toy_slab(), random_rotation(generator=torch.Generator().manual_seed(3)).float()
    turned.pos, turned.cell = turned.pos @ rotation.T, turned.cell @ rotation.T
    with torch.no_grad():
        straight, rotated = model(transform(toy_slab())), model(transform(turned))
    # Random frequencies and features tie FLT to its axes; Performer and softmax are free of them.
    tolerance = 0.3 if kind == "flt" else 1e-5
    torch.testing.assert_close(rotated.delta_pos, straight.delta_pos @ rotation.T, rtol=0, atol=tolerance)
    torch.testing.assert_close(rotated.energy, straight.energy, rtol=0, atol=tolerance)
