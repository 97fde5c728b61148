"""Graphormer-3D as published, against the published arithmetic written out once more in plain loops."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Batch

from molflt.build import build_model
from molflt.config import AttentionConfig, ModelConfig
from molflt.models.all_pairs import AllPairsGraphormer3D
from molflt.models.atoms import read_atoms
from molflt.models.images import with_images

H, C, K, BLOCKS = 3, 12, 7, 2


def small_model(image_radius=4.0, seed=0, **options):
    torch.manual_seed(seed)
    config = ModelConfig(channels=C, num_heads=H, num_layers=2, ffn_channels=17, num_gaussians=K)
    config.num_blocks, config.displacement_channels, config.geometry = BLOCKS, C, "all_pairs"
    config.image_radius = image_radius
    config.attention = AttentionConfig(kind="softmax", use_rpe=False)
    for name, value in options.items():
        setattr(config, name, value)
    model = build_model(config, radius=3.7).double().eval()
    assert isinstance(model, AllPairsGraphormer3D)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.rand_like(parameter))
    return model


def published(model, numbers, tags, pos, num_real):
    """The published forward of one structure, images behind the real atoms, as energy and node output."""
    w = model.state_dict()
    n = len(pos)

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    gbf = torch.zeros(n, n, K, dtype=torch.float64)
    unit = torch.zeros(n, n, 3, dtype=torch.float64)
    for i in range(n):
        for j in range(n):
            delta = pos[j] - pos[i]
            dist = delta.norm()
            unit[i, j] = delta / dist if i != j else 0.0
            edge_type = numbers[i] * 119 + numbers[j]
            x = w["embedding.pair_mul.weight"][edge_type] * dist + w["embedding.pair_bias.weight"][edge_type]
            std = w["embedding.stds"].abs() + 1e-2
            z = (x - w["embedding.means"]) / std
            gbf[i, j] = torch.exp(-0.5 * z**2) / ((2 * math.pi) ** 0.5 * std)
    h = w["embedding.tag.weight"][tags] + w["embedding.element.weight"][numbers]
    h = h + linear("embedding.geometry", gbf.sum(dim=-2))
    bias = linear("embedding.attention_bias.2", F.gelu(linear("embedding.attention_bias.0", gbf)))
    bias = bias.permute(2, 0, 1)

    def heads(name, x):
        return linear(name, x).view(n, H, C // H).transpose(0, 1)

    for _ in range(BLOCKS):
        for layer in range(2):
            at = f"encoder.layers.{layer}"
            y = F.layer_norm(h, (C,), w[f"{at}.attention_norm.weight"], w[f"{at}.attention_norm.bias"])
            q, k, v = (heads(f"{at}.attention.{name}", y) for name in ("query", "key", "value"))
            probs = F.softmax(q * (C // H) ** -0.5 @ k.transpose(1, 2) + bias, -1)
            h = h + linear(f"{at}.attention.out", (probs @ v).transpose(0, 1).reshape(n, C))
            y = F.layer_norm(h, (C,), w[f"{at}.ffn_norm.weight"], w[f"{at}.ffn_norm.bias"])
            h = h + linear(f"{at}.ffn.3", F.gelu(linear(f"{at}.ffn.0", y)))
    h = F.layer_norm(h, (C,), w["encoder.norm.weight"], w["encoder.norm.bias"])
    scale = w["energy_head.tag_scale.weight"][tags]
    contributions = (linear("energy_head.mlp.2", F.gelu(linear("energy_head.mlp.0", h))) * scale).flatten()
    energy = contributions[:num_real][tags[:num_real] > 0].sum()

    q, k, v = (heads(f"displacement_head.{name}", h) for name in ("query", "key", "value"))
    probs = F.softmax(q * (C // H) ** -0.5 @ k.transpose(1, 2) + bias, -1)
    rotated = probs.unsqueeze(-1) * unit.unsqueeze(0)
    x = (rotated.permute(0, 3, 1, 2) @ v.unsqueeze(1)).permute(2, 1, 0, 3).reshape(n, 3, C)
    weight, offset = w["displacement_head.axes.weight"], w["displacement_head.axes.bias"]
    forces = torch.stack([x[:, axis] @ weight[axis] + offset[axis] for axis in range(3)], dim=-1)
    return energy, forces[:num_real]


@pytest.mark.parametrize("image_radius", [None, 4.0])
def test_a_batch_gives_the_published_arithmetic_of_each_structure(image_radius, toy_structure):
    model = small_model(image_radius)
    structures = [toy_structure(7, 1), toy_structure(5, 2)]
    with torch.no_grad():
        energy, delta_pos = model(Batch.from_data_list(structures))
        first = 0
        for index, data in enumerate(structures):
            atoms, source = with_images(read_atoms(data, torch.float64), image_radius)
            assert (source is not None and len(source) > 0) == (image_radius is not None)
            expected, forces = published(model, atoms.atomic_numbers, atoms.tags, atoms.pos, data.num_nodes)
            torch.testing.assert_close(energy[index], expected, rtol=0, atol=1e-11)
            torch.testing.assert_close(delta_pos[first : first + data.num_nodes], forces, rtol=0, atol=1e-11)
            first += data.num_nodes


def test_edges_of_the_batch_play_no_part(toy_structure):
    model, data = small_model(), toy_structure(7)
    bare = data.clone()
    bare.edge_index, bare.cell_offsets = data.edge_index[:, :0], data.cell_offsets[:0]
    with torch.no_grad():
        assert torch.equal(model(bare).energy, model(data).energy)


def test_energy_is_invariant_and_displacements_are_not_under_rotation(toy_structure):
    model, data = small_model(), toy_structure(7)
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    turned = data.clone()
    turned.pos, turned.cell = data.pos @ rotation.T, data.cell @ rotation.T
    with torch.no_grad():
        straight, rotated = model(data), model(turned)
    torch.testing.assert_close(rotated.energy, straight.energy, rtol=0, atol=1e-10)
    assert (rotated.delta_pos - straight.delta_pos @ rotation.T).abs().max() > 1e-3


def test_every_weight_receives_a_finite_gradient_with_coincident_atoms(toy_structure):
    model, data = small_model(), toy_structure(7)
    data.pos[4] = data.pos[2]
    data.pos.requires_grad_()
    energy, delta_pos = model(data)
    (energy.square().sum() + delta_pos.square().sum()).backward()
    assert data.pos.grad.isfinite().all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_initial_gaussians_are_those_published():
    torch.manual_seed(0)
    config = ModelConfig(num_gaussians=997, geometry="all_pairs")
    config.attention = AttentionConfig(kind="softmax", use_rpe=False)
    embedding = build_model(config, radius=6.0).embedding
    for values in (embedding.means, embedding.stds):
        assert 0.0 <= values.min() < 0.05
        assert 2.95 < values.max() < 3.0
    assert (embedding.pair_mul.weight == 1).all()
    assert (embedding.pair_bias.weight == 0).all()


def test_attention_dropout_acts_in_training_only(toy_structure):
    model = small_model(attention_dropout=0.4)
    data = toy_structure(7)
    with torch.no_grad():
        still = model(data).energy
        assert torch.equal(model(data).energy, still)
        model.train()
        assert not torch.equal(model(data).energy, still)
    assert isinstance(model.displacement_head, nn.Module)
    assert model.displacement_head.dropout.p == 0.4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_close(dtype, toy_structure):
    model, data = small_model().float(), Batch.from_data_list([toy_structure(7, 1), toy_structure(5, 2)])
    with torch.no_grad():
        exact = model(data).energy
        with torch.autocast("cpu", dtype=dtype):
            rough = model(data).energy
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, rtol=0.03, atol=0.03)
