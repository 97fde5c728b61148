"""Energy and displacement heads against formulas written out."""

import math

import pytest
import torch

from molflt.models.embeddings import edge_geometry
from molflt.models.heads import DisplacementHead, EnergyHead, attention_over_edges, counted_atoms


def random_edges(num_atoms: int, num_edges: int, seed: int = 5, radius: float = 3.0):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, num_atoms, (2, num_edges), generator=generator)
    displacement = torch.randn(num_edges, 3, generator=generator, dtype=torch.float64)
    return index, displacement, edge_geometry(index, displacement, radius)


def random_rotation() -> torch.Tensor:
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))
    return rotation * torch.linalg.det(rotation)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(11)


def test_counted_are_tagged_atoms_and_all_atoms_of_a_graph_without_any():
    tags = torch.tensor([0, 1, 2, 0, 0, 0, 2])
    batch = torch.tensor([0, 0, 0, 1, 1, 3, 3])
    counted = counted_atoms(tags, batch, num_graphs=4)
    assert counted.tolist() == [False, True, True, True, True, False, True]


def test_energy_is_the_tag_scaled_sum_over_counted_atoms():
    head = EnergyHead(channels=5).double()
    head.tag_scale.weight.data = torch.tensor([[0.5], [-2.0], [3.0]], dtype=torch.float64)
    x = torch.randn(7, 5, dtype=torch.float64)
    tags, batch = torch.tensor([0, 1, 2, 0, 0, 2, 1]), torch.tensor([1, 1, 1, 0, 0, 2, 2])
    e = [head.mlp(row).item() for row in x]
    expected = [0.5 * (e[3] + e[4]), -2.0 * e[1] + 3.0 * e[2], 3.0 * e[5] - 2.0 * e[6]]
    assert head(x, tags, batch, num_graphs=3).tolist() == pytest.approx(expected, rel=1e-12)


def test_energy_under_autocast_is_summed_in_float32():
    head = EnergyHead(channels=5)
    x, tags, batch = torch.randn(2003, 5), torch.ones(2003, dtype=torch.int64), torch.zeros(2003).long()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        energy = head(x, tags, batch, num_graphs=1)
        expected = head.mlp(x).double().sum()
    assert energy.dtype == torch.float32
    assert energy.item() == pytest.approx(expected.item(), rel=1e-5)


def test_attention_weights_are_a_softmax_over_edges_and_the_atom_itself():
    index, _, edges = random_edges(5, 23)
    logits, self_logits = (torch.randn(n, 3, dtype=torch.float64) for n in (23, 5))
    weights = attention_over_edges(logits, self_logits, edges)
    for e in range(23):
        i = index[1, e]
        mine = index[1] == i
        total = (edges.cutoff[mine, None] * logits[mine].exp()).sum(0) + self_logits[i].exp()
        torch.testing.assert_close(weights[e], edges.cutoff[e] * logits[e].exp() / total)


def test_attention_weights_survive_huge_logits():
    _, _, edges = random_edges(5, 23)
    logits = 1e5 * torch.randn(23, 3, dtype=torch.float64)
    logits.requires_grad_()
    weights = attention_over_edges(logits, torch.zeros(5, 3, dtype=torch.float64), edges)
    weights.square().sum().backward()
    assert weights.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_displacements_are_the_stated_sum():
    index, displacement, edges = random_edges(5, 23)
    head = DisplacementHead(channels=11, num_heads=2, num_gaussians=7, attention_channels=6).double()
    x, gaussians = torch.randn(5, 11, dtype=torch.float64), torch.rand(23, 7, dtype=torch.float64)
    q, k = head.query(x).view(5, 2, 3), head.key(x).view(5, 2, 3)
    bias, value = head.edge_bias(gaussians), head.value(x)
    expected = torch.zeros(5, 3, dtype=torch.float64)
    for i in range(5):
        for h in range(2):
            mine = (index[1] == i).nonzero().flatten().tolist()
            own = torch.exp(q[i, h] @ k[i, h] / math.sqrt(3))
            share = {
                e: edges.cutoff[e] * torch.exp(q[i, h] @ k[index[0, e], h] / math.sqrt(3) + bias[e, h])
                for e in mine
            }
            total = own + sum(share.values())
            for e in mine:
                unit = displacement[e] / displacement[e].norm()
                expected[i] += share[e] / total * value[index[0, e], h] * unit
    torch.testing.assert_close(head(x, edges, gaussians), expected)


def test_displacements_turn_with_the_edges():
    index, displacement, edges = random_edges(7, 31)
    head = DisplacementHead(channels=6, num_heads=3, num_gaussians=5).double()
    x, gaussians = torch.randn(7, 6, dtype=torch.float64), torch.rand(31, 5, dtype=torch.float64)
    rotation = random_rotation()
    rotated = edge_geometry(index, displacement @ rotation.T, 3.0)
    straight = head(x, edges, gaussians)
    assert straight.abs().max() > 1e-2
    torch.testing.assert_close(head(x, rotated, gaussians), straight @ rotation.T)


def test_the_last_edge_of_an_atom_fades_out():
    head = DisplacementHead(channels=4, num_heads=2, num_gaussians=5).double()
    x, gaussians = torch.randn(2, 4, dtype=torch.float64), torch.rand(1, 5, dtype=torch.float64)
    sizes = []
    for distance in (1.0, 2.9, 2.999, 3.0):
        displacement = torch.tensor([[distance, 0.0, 0.0]], dtype=torch.float64)
        edges = edge_geometry(torch.tensor([[0], [1]]), displacement, 3.0)
        sizes.append(head(x, edges, gaussians)[1, 0].abs().item())
    assert sizes[0] > 1e-2
    assert sizes[1] < 1e-2 * sizes[0]
    assert sizes[2] < 1e-6 * sizes[0]
    assert sizes[3] == 0.0


def test_edges_of_zero_length_have_no_direction_and_finite_gradients():
    displacement = torch.tensor([[0.0, 0.0, 0.0], [0.4, 0.2, -0.3]], dtype=torch.float64, requires_grad=True)
    edges = edge_geometry(torch.tensor([[0, 0], [1, 1]]), displacement, 3.0)
    head = DisplacementHead(channels=4, num_heads=2, num_gaussians=5).double()
    out = head(torch.randn(2, 4, dtype=torch.float64), edges, torch.rand(2, 5, dtype=torch.float64))
    direction = torch.linalg.cross(out[1], displacement[1])
    torch.testing.assert_close(direction, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-15)
    (gradient,) = torch.autograd.grad(out.square().sum(), displacement)
    assert gradient.isfinite().all()
    assert gradient[1].abs().max() > 0


def test_width_that_does_not_divide_into_heads_is_refused():
    with pytest.raises(
        ValueError, match=r"must be divisible by num_heads, got attention_channels=7 and num_heads=2"
    ):
        DisplacementHead(channels=8, num_heads=2, num_gaussians=3, attention_channels=7)
