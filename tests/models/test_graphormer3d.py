"""Graphormer-3D as a function of structures, exact in float64."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Batch, Data

from molflt.build import build_model
from molflt.config import AttentionConfig, ModelConfig

RADIUS = 3.7
VARIANTS: dict[str, dict[str, Any]] = {
    "flt": {},
    "performer": {"kind": "performer"},
    "softmax": {"kind": "softmax"},
    "softmax_norpe": {"kind": "softmax", "use_rpe": False},
    "flt_matched": {"sampler": "matched_mixture"},
    "flt_multiplicative": {"coupling": "multiplicative"},
    "lattice_additive": {"sampler": "lattice"},
    "lattice": {"sampler": "lattice", "coupling": "multiplicative"},
    "range_separated": {"kind": "range_separated"},
    "two_normalizers": {"kind": "range_separated", "separate_normalizers": True},
    "near_only": {"kind": "range_separated", "far": False},
}
INVARIANT = (
    "performer",
    "softmax",
    "softmax_norpe",
    "lattice",
    "range_separated",
    "two_normalizers",
    "near_only",
)
BLIND = ("performer", "softmax_norpe")
"""Know positions through the embeddings alone."""


def small_model(variant: str, seed: int = 0, **changes):
    """A small float64 model whose weights are all away from special values, in eval mode."""
    torch.manual_seed(seed)
    settings = {"num_random_features": 13, "num_frequencies": 5, "num_basis": 7} | VARIANTS[variant]
    attention = AttentionConfig(**settings)
    config = ModelConfig(
        channels=12,
        num_heads=3,
        num_layers=2,
        ffn_channels=17,
        num_gaussians=11,
        displacement_channels=6,
        attention=attention,
    )
    for name, value in changes.items():
        setattr(config, name, value)
    model = build_model(config, RADIUS).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.rand_like(parameter))
    model.energy_mean.fill_(-1.75)
    model.energy_std.fill_(2.25)
    model.delta_pos_std.fill_(0.5)
    return model


def rotation_matrix(seed: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    return rotation * torch.linalg.det(rotation)


def assert_same(output, energy, delta_pos, tolerance=1e-10):
    torch.testing.assert_close(output.energy, energy, rtol=0, atol=tolerance)
    torch.testing.assert_close(output.delta_pos, delta_pos, rtol=0, atol=tolerance)


@pytest.fixture(params=VARIANTS)
def model(request):
    return small_model(request.param)


def test_atoms_may_come_in_any_order(model, toy_structure, with_graph):
    data = toy_structure(11)
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    permuted = data.clone()
    for name in ("pos", "atomic_numbers", "tags"):
        permuted[name] = data[name][order]
    with torch.no_grad():
        energy, delta_pos = model(data)
        assert_same(model(with_graph(permuted, RADIUS)), energy, delta_pos[order])


def test_edges_may_come_in_any_order(model, toy_structure):
    data = toy_structure(11)
    order = torch.randperm(data.num_edges, generator=torch.Generator().manual_seed(1))
    shuffled = data.clone()
    shuffled.edge_index = data.edge_index[:, order]
    shuffled.cell_offsets = data.cell_offsets[order]
    with torch.no_grad():
        assert_same(model(shuffled), *model(data))


def test_a_structure_alone_equals_itself_in_any_batch(model, toy_structure):
    structures = [toy_structure(num_atoms, seed) for seed, num_atoms in enumerate((7, 2, 19, 1, 5))]
    with torch.no_grad():
        alone = [model(data) for data in structures]
        for picks in ([0, 1, 2, 3, 4], [4, 2, 0], [3, 0], [1, 1]):
            together = model(Batch.from_data_list([structures[pick] for pick in picks]))
            energy = torch.cat([alone[pick].energy for pick in picks])
            delta_pos = torch.cat([alone[pick].delta_pos for pick in picks])
            assert_same(together, energy, delta_pos)


def test_weight_gradients_of_a_batch_are_the_sum_of_the_structures_own(model, toy_structure):
    structures = [toy_structure(num_atoms, seed) for seed, num_atoms in enumerate((7, 13, 5))]
    used = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients(batch):
        energy, delta_pos = model(batch)
        return torch.autograd.grad(energy.sum() + delta_pos.square().sum(), used)

    together = gradients(Batch.from_data_list(structures))
    apart = [gradients(data) for data in structures]
    for whole, *parts in zip(together, *apart, strict=True):
        torch.testing.assert_close(whole, sum(parts), rtol=1e-8, atol=1e-9)


def test_every_weight_receives_a_gradient(model, toy_structure):
    batch = Batch.from_data_list([toy_structure(num_atoms, num_atoms) for num_atoms in (7, 13, 5)])
    energy, delta_pos = model(batch)
    (energy.square().sum() + delta_pos.square().sum()).backward()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_shuffled_positions_change_energy_and_displacements(model, toy_structure, with_graph):
    data = toy_structure(11)
    shuffled = data.clone()
    shuffled.pos = data.pos[torch.randperm(11, generator=torch.Generator().manual_seed(1))]
    with torch.no_grad():
        before, after = model(data), model(with_graph(shuffled, RADIUS))
    assert (before.energy - after.energy).abs().item() > 1e-3
    assert (before.delta_pos - after.delta_pos).abs().max() > 1e-2


def test_translation_changes_nothing(model, toy_structure):
    data = toy_structure(11)
    moved = data.clone()
    moved.pos = data.pos + torch.tensor([13.1, -7.3, 101.9], dtype=torch.float64)
    with torch.no_grad():
        assert_same(model(moved), *model(data))


@pytest.mark.parametrize("kind", INVARIANT)
def test_energy_is_invariant_and_displacements_turn_under_rotation(kind, toy_structure, with_graph):
    model, rotation = small_model(kind), rotation_matrix()
    data = toy_structure(11)
    turned = data.clone()
    turned.pos, turned.cell = data.pos @ rotation.T, data.cell @ rotation.T
    with torch.no_grad():
        energy, delta_pos = model(data)
        assert delta_pos.abs().max() > 1e-2
        assert_same(model(with_graph(turned, RADIUS)), energy, delta_pos @ rotation.T)


@pytest.mark.parametrize("kind", INVARIANT)
def test_mirrored_structures_have_one_energy(kind, toy_structure, with_graph):
    model, data = small_model(kind), toy_structure(11)
    mirrored = data.clone()
    mirror = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    mirrored.pos, mirrored.cell = data.pos * mirror, data.cell * mirror
    with torch.no_grad():
        energy, delta_pos = model(data)
        assert_same(model(with_graph(mirrored, RADIUS)), energy, delta_pos * mirror)


def test_performer_sees_positions_through_the_periodic_graph_alone(toy_structure, with_graph):
    model, data = small_model("performer"), toy_structure(11)
    shifted = data.clone()
    shifted.pos = data.pos.clone()
    shifted.pos[3] += 2 * data.cell[0, 0] - data.cell[0, 1]
    with torch.no_grad():
        assert_same(model(with_graph(shifted, RADIUS)), *model(data))


def test_relative_positions_reach_the_attention_of_flt_and_softmax(toy_structure):
    """Without any edge the embeddings know no positions, and what is left of them goes through attention."""
    data = toy_structure(11)
    data.edge_index, data.cell_offsets = data.edge_index[:, :0], data.cell_offsets[:0]
    moved = data.clone()
    moved.pos = data.pos * 1.3
    for variant in VARIANTS:
        model = small_model(variant)
        with torch.no_grad():
            change = (model(data).energy - model(moved).energy).abs().item()
        assert change < 1e-12 if variant in (*BLIND, "near_only") else change > 1e-5, variant


def test_energy_does_not_jump_when_an_edge_crosses_the_cutoff(model):
    def energy_at(distance: float, connected: bool):
        pos = torch.tensor([[0.0, 0.0, 0.0], [distance, 0.0, 0.0]], dtype=torch.float64)
        edges = [[0, 1], [1, 0]] if connected else [[], []]
        data = Data(
            pos=pos,
            cell=torch.zeros(1, 3, 3, dtype=torch.float64),
            atomic_numbers=torch.tensor([8, 29]),
            tags=torch.tensor([1, 2]),
            edge_index=torch.tensor(edges, dtype=torch.int64),
            cell_offsets=torch.zeros(2 if connected else 0, 3, dtype=torch.int64),
        )
        with torch.no_grad():
            return model(data)

    for distance in (RADIUS - 1e-5, RADIUS):
        linked, apart = energy_at(distance, True), energy_at(distance, False)
        torch.testing.assert_close(linked.energy, apart.energy, rtol=0, atol=1e-11)
        torch.testing.assert_close(linked.delta_pos, apart.delta_pos, rtol=0, atol=1e-11)
    inside = energy_at(0.6 * RADIUS, True).energy - energy_at(0.6 * RADIUS, False).energy
    assert inside.abs().item() > 1e-3


def test_coincident_atoms_give_finite_outputs_and_gradients(model, toy_structure, with_graph):
    data = toy_structure(7)
    data.pos[4] = data.pos[2]
    data = with_graph(data, RADIUS)
    assert ((data.edge_index[0] == 2) & (data.edge_index[1] == 4)).any()
    data.pos.requires_grad_()
    energy, delta_pos = model(data)
    (energy.sum() + delta_pos.square().sum()).backward()
    assert energy.isfinite().all()
    assert delta_pos.isfinite().all()
    assert data.pos.grad.isfinite().all()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_position_gradient_is_the_slope_of_the_energy(model, toy_structure):
    data = toy_structure(5)
    # Along an open direction the reciprocal lattice follows the atoms' extent, which carries no gradient.
    data.pbc[:] = True
    data.pos.requires_grad_()
    (gradient,) = torch.autograd.grad(model(data).energy.sum(), data.pos)
    step = torch.zeros_like(gradient)
    step[3, 1] = 1e-5
    with torch.no_grad():
        ahead, behind = data.clone(), data.clone()
        ahead.pos, behind.pos = data.pos + step, data.pos - step
        slope = (model(ahead).energy - model(behind).energy) / 2e-5
    torch.testing.assert_close(gradient[3, 1], slope.squeeze(), rtol=1e-5, atol=1e-8)


def test_tags_absent_and_all_zero_are_the_same_and_count_all_atoms(model, toy_structure):
    data = toy_structure(7)
    data.tags = torch.zeros(7, dtype=torch.int64)
    bare = data.clone()
    del bare.tags
    with torch.no_grad():
        assert_same(model(bare), *model(data), tolerance=0.0)
        far = data.clone()
        far.tags = torch.tensor([0, 0, 0, 0, 0, 0, 2])
        assert (model(far).energy - model(data).energy).abs().item() > 1e-3


def test_outputs_are_scaled_to_physical_units_by_saved_buffers(model, toy_structure):
    data = toy_structure(7)
    with torch.no_grad():
        energy, delta_pos = model(data)
        saved = model.state_dict()
        assert {"energy_mean", "energy_std", "delta_pos_std"} <= saved.keys()
        saved["energy_mean"] = torch.tensor(5.0)
        saved["energy_std"] = torch.tensor(4.5)
        saved["delta_pos_std"] = torch.tensor(0.25)
        model.load_state_dict(saved)
        assert_same(model(data), 2.0 * (energy + 1.75) + 5.0, 0.5 * delta_pos)


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_weights_predict_the_same_bits_in_a_model_of_another_seed(variant, toy_structure, tmp_path):
    data, model, other = toy_structure(7), small_model(variant), small_model(variant, seed=1)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with torch.no_grad():
        assert (other(data).energy - model(data).energy).abs().item() > 1e-3
        other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
        assert_same(other(data), *model(data), tolerance=0.0)


def test_float32_follows_float64(model, toy_structure):
    data = toy_structure(19)
    with torch.no_grad():
        energy, delta_pos = model(data)
        single = model.float()(data)
    assert single.energy.dtype == torch.float32
    torch.testing.assert_close(single.energy.double(), energy, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single.delta_pos.double(), delta_pos, rtol=1e-3, atol=1e-4)


class Sizes(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes, and of all of them together."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
                self.total += tensor.numel()
        return result


def chain(num_atoms: int) -> Data:
    """Atoms 2 Å apart in a row, each joined to the next."""
    index = torch.arange(num_atoms - 1)
    pos = torch.zeros(num_atoms, 3, dtype=torch.float64)
    pos[:, 0] = 2.0 * torch.arange(num_atoms)
    return Data(
        pos=pos,
        cell=torch.zeros(1, 3, 3, dtype=torch.float64),
        atomic_numbers=torch.full((num_atoms,), 29),
        edge_index=torch.stack([torch.cat([index, index + 1]), torch.cat([index + 1, index])]),
        cell_offsets=torch.zeros(2 * num_atoms - 2, 3, dtype=torch.int64),
    )


def sizes_of_a_step(kind: str, num_atoms: int) -> Sizes:
    model = small_model(kind)
    with Sizes() as sizes:
        energy, delta_pos = model(chain(num_atoms))
        (energy.sum() + delta_pos.sum()).backward()
    return sizes


@pytest.mark.parametrize("kind", ["flt", "performer", "flt_multiplicative", "near_only"])
def test_no_tensor_grows_with_the_square_of_the_atoms(kind):
    small, large = sizes_of_a_step(kind, 1009), sizes_of_a_step(kind, 2017)
    assert large.largest < 2017**2 / 10
    # Weights and their gradients do not grow, so doubling the atoms less than doubles the elements made.
    assert large.total < 2.02 * small.total


def test_softmax_does_make_tensors_of_the_square():
    assert sizes_of_a_step("softmax", 211).largest >= 211**2
