"""The near part against sums edge by edge: images, self-images, cutoffs, scales."""

import math

import pytest
import torch

import molflt.nn.near as near_module
from molflt.nn import near_pairs
from molflt.nn.functional import softmax_attention
from molflt.nn.near import (
    EdgeFeatureNearBias,
    NearGraph,
    RadialNearBias,
    ScaledSums,
    dense_near_log_weights,
    merge_images,
    near_sums,
)
from molflt.nn.near_pairs import most_pairs_are_near, near_pair_bias, near_pair_sums
from molflt.nn.periodic import PeriodicGeometry
from molflt.nn.range_separated import near_positions

B, H, N, D = 2, 3, 5, 7
# Sender, receiver: several images of one pair (0 -> 1 three times), self-images (2 -> 2), graph 1 from row 5.
SENDER = torch.tensor([0, 0, 0, 1, 2, 2, 3, 6, 5, 7, 7])
RECEIVER = torch.tensor([1, 1, 1, 0, 2, 2, 0, 5, 6, 7, 5])


def make_graph(seed: int = 0) -> NearGraph:
    generator = torch.Generator().manual_seed(seed)
    distances, cutoff = torch.rand(2, len(SENDER), generator=generator, dtype=torch.float64)
    return NearGraph(SENDER, RECEIVER, 4 * distances, cutoff)


def make_inputs(scale: float = 1.0) -> list[torch.Tensor]:
    """q, k, v, the edges' bias and an atom's own."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(B, H, N, D)] * 3 + [(len(SENDER), H), (H,)]
    scales = [scale, scale, 1, 1, 1]
    return [
        (factor * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
        for factor, shape in zip(scales, shapes, strict=True)
    ]


def by_hand(graph: NearGraph, inputs: list[torch.Tensor]) -> torch.Tensor:
    """sum_j a_ij v_j / sum_j a_ij, one weight after the other."""
    query, key, value, edge_bias, self_bias = inputs
    rows = []
    for atom in range(B * N):
        b, n = divmod(atom, N)
        weights = [(query[b, :, n] * key[b, :, n]).sum(-1).div(math.sqrt(D)).add(self_bias).exp()]
        values = [value[b, :, n]]
        for e in (graph.receiver == atom).nonzero().flatten().tolist():
            c, m = divmod(int(graph.sender[e]), N)
            logit = (query[b, :, n] * key[c, :, m]).sum(-1) / math.sqrt(D) + edge_bias[e]
            weights.append(graph.cutoff[e] * logit.exp())
            values.append(value[c, :, m])
        stacked = torch.stack(weights).unsqueeze(-1)
        rows.append((stacked * torch.stack(values)).sum(0) / stacked.sum(0))
    return torch.stack(rows).view(B, N, H, D).transpose(1, 2)


def assert_same_with_gradients(first: torch.Tensor, second: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)
    upstream = torch.randn(first.shape, generator=torch.Generator().manual_seed(2), dtype=first.dtype)
    gradients = [
        torch.autograd.grad((upstream * out).sum(), inputs, retain_graph=True) for out in (first, second)
    ]
    for one, other in zip(*gradients, strict=True):
        assert other.abs().max() > 1e-3
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_sums_equal_the_weights_added_one_by_one_in_value_and_gradient() -> None:
    graph, inputs = make_graph(), make_inputs()
    assert_same_with_gradients(
        near_sums(*inputs[:3], graph, *inputs[3:]).quotient(), by_hand(graph, inputs), inputs
    )


def test_what_is_recomputed_in_the_backward_pass_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, inputs = make_graph(), make_inputs()
    kept = near_sums(*inputs[:3], graph, *inputs[3:]).quotient()
    monkeypatch.setattr(near_module, "RECOMPUTED_ELEMENTS", 0)
    recomputed = near_sums(*inputs[:3], graph, *inputs[3:]).quotient()
    assert_same_with_gradients(recomputed, kept, inputs)


def test_a_complete_graph_without_cutoff_is_softmax_attention_with_a_bias() -> None:
    query, key, value, _, self_bias = make_inputs()
    receiver, sender = (x.flatten() for x in torch.meshgrid(torch.arange(N), torch.arange(N), indexing="ij"))
    apart = receiver != sender
    sender, receiver = (torch.cat((x[apart], x[apart] + N)) for x in (sender, receiver))
    edge_bias = torch.randn(len(sender), H, dtype=torch.float64)
    graph = NearGraph(sender, receiver, torch.ones(len(sender)).double(), torch.ones(len(sender)).double())
    bias = torch.zeros(B, N, N, H, dtype=torch.float64)
    bias[receiver // N, receiver % N, sender % N] = edge_bias
    bias[:, torch.arange(N), torch.arange(N)] = self_bias.detach()
    exact = softmax_attention(query, key, value, bias.permute(0, 3, 1, 2))
    out = near_sums(query, key, value, graph, edge_bias, self_bias).quotient()
    torch.testing.assert_close(out, exact, rtol=0, atol=1e-12)


def test_dense_factors_are_the_same_weights() -> None:
    graph, inputs = make_graph(), make_inputs()
    logits, factors = dense_near_log_weights(*inputs[:2], graph, *inputs[3:])
    weights = logits.exp() * factors
    out = weights @ inputs[2] / weights.sum(-1, keepdim=True)
    assert_same_with_gradients(out, by_hand(graph, inputs), inputs)


def test_an_edge_at_the_cutoff_counts_for_nothing_however_large_its_logit() -> None:
    graph, inputs = make_graph(), make_inputs()
    cutoff = graph.cutoff.clone()
    cutoff[[0, 4, 9]] = torch.tensor([0.0, 0.0, 1e-40], dtype=torch.float64)
    cutoff.requires_grad_()
    with torch.no_grad():
        inputs[3][[0, 4, 9]] = 1e4
    kept = torch.tensor([e not in (0, 4, 9) for e in range(len(SENDER))])
    fewer = NearGraph(SENDER[kept], RECEIVER[kept], graph.distances[kept], cutoff.detach()[kept])
    without = near_sums(*inputs[:3], fewer, inputs[3][kept], inputs[4]).quotient()
    out = near_sums(*inputs[:3], NearGraph(SENDER, RECEIVER, graph.distances, cutoff), *inputs[3:]).quotient()
    torch.testing.assert_close(out, without, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(out.square().sum(), [*inputs, cutoff])
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


def test_gradients_reach_the_cutoff() -> None:
    graph, inputs = make_graph(), make_inputs()
    cutoff = graph.cutoff.clone().requires_grad_()
    graph = NearGraph(SENDER, RECEIVER, graph.distances, cutoff)
    ours = near_sums(*inputs[:3], graph, *inputs[3:]).quotient().square().sum()
    theirs = by_hand(graph, inputs).square().sum()
    expected = torch.autograd.grad(theirs, cutoff)[0]
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(torch.autograd.grad(ours, cutoff)[0], expected, rtol=0, atol=1e-12)


def test_large_logits_neither_overflow_nor_lose_the_largest() -> None:
    graph, inputs = make_graph(), [x.detach().float().requires_grad_() for x in make_inputs(scale=100.0)]
    graph = NearGraph(SENDER, RECEIVER, graph.distances.float(), graph.cutoff.float())
    sums = near_sums(*inputs[:3], graph, *inputs[3:])
    assert sums.normalizer.min() >= 1 - 1e-6
    out = sums.quotient()
    assert bool(out.isfinite().all())
    assert all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum(), inputs))


def scaled(weights: torch.Tensor, value: torch.Tensor, log_scale: float) -> ScaledSums:
    """Sums over dense weights exp(log_scale) times `weights`, `[B, H, N, L]`."""
    return ScaledSums(
        weights @ value,
        weights.sum(-1, keepdim=True),
        torch.full((B, H, N, 1), log_scale, dtype=torch.float64),
    )


@pytest.mark.parametrize(
    ("ours", "theirs"), [(0.0, 0.0), (2.0, -1.0), (900.0, 899.0), (-5000.0, -4999.0), (0.0, 800.0)]
)
def test_added_sums_are_those_over_all_weights(ours: float, theirs: float) -> None:
    first, second = torch.rand(2, B, H, N, 11, dtype=torch.float64)
    value = torch.randn(2, B, H, 11, D, dtype=torch.float64)
    both = scaled(first, value[0], ours).add(scaled(second, value[1], theirs))
    largest = max(ours, theirs)
    weights = torch.cat((math.exp(ours - largest) * first, math.exp(theirs - largest) * second), dim=-1)
    expected = weights @ torch.cat((value[0], value[1]), dim=-2) / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(both.quotient(), expected, rtol=0, atol=1e-12)
    assert both.normalizer.min() >= 1 - 1e-12


@pytest.mark.parametrize("rounding", [0.0, -1e-18, 1e-40])
def test_a_part_without_weights_adds_nothing(rounding: float) -> None:
    """Not even where its scale is huge and rounding has left a trace."""
    value = torch.randn(B, H, 11, D, dtype=torch.float64)
    weights = torch.rand(B, H, N, 11, dtype=torch.float64)
    nothing = scaled(torch.full((B, H, N, 11), rounding, dtype=torch.float64), value, 5000.0)
    part = scaled(weights, value, 1.0)
    for both in (part.add(nothing), nothing.add(part)):
        torch.testing.assert_close(both.quotient(), part.quotient(), rtol=0, atol=1e-12)
    assert bool((nothing.quotient() == 0).all())
    assert bool((nothing.add(nothing).quotient() == 0).all())


def test_radial_bias_is_the_sum_of_its_gaussians() -> None:
    torch.manual_seed(0)
    bias = RadialNearBias(H, radius=6.0, num_basis=4).double()
    graph = make_graph()
    expected = sum(
        bias.amplitude[t] * torch.exp(-0.5 * ((graph.distances.unsqueeze(-1) - 2.0 * t) / 2.0) ** 2)
        for t in range(4)
    )
    torch.testing.assert_close(bias(graph), expected)
    nearby = NearGraph(SENDER[:1], RECEIVER[:1], torch.zeros(1).double(), torch.ones(1).double())
    torch.testing.assert_close(bias.self_bias(), bias(nearby)[0])


def test_radial_bias_starts_with_about_unit_variance() -> None:
    torch.manual_seed(0)
    bias = RadialNearBias(2000, radius=6.0)
    for distance in (2.0, 3.3):
        assert 0.7 < float(bias.at(torch.tensor([distance])).detach().var()) < 1.4


def test_edge_features_make_the_bias() -> None:
    torch.manual_seed(0)
    bias = EdgeFeatureNearBias(H, 13).double()
    features = torch.randn(len(SENDER), 13, dtype=torch.float64)
    graph = NearGraph(SENDER, RECEIVER, make_graph().distances, make_graph().cutoff, features)
    torch.testing.assert_close(bias(graph), features @ bias.linear.weight.T + bias.linear.bias)
    assert bool((bias.self_bias() == 0).all())
    with pytest.raises(ValueError, match="pass them, or use RadialNearBias"):
        bias(make_graph())


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="radius must be positive"):
        RadialNearBias(H, radius=0.0)
    with pytest.raises(ValueError, match="num_basis at least 2"):
        RadialNearBias(H, radius=5.0, num_basis=1)


def test_merged_images_give_the_same_sums_and_gradients() -> None:
    inputs = make_inputs()
    graph = make_graph()
    cutoff = graph.cutoff.detach().clone()
    cutoff[:3] = 0.0
    graph = NearGraph(SENDER, RECEIVER, graph.distances, cutoff.requires_grad_())
    merged, bias = merge_images(graph, inputs[3])
    assert len(merged.sender) < int((cutoff > 0).sum())
    assert len({*zip(merged.sender.tolist(), merged.receiver.tolist(), strict=True)}) == len(merged.sender)
    ours = near_sums(*inputs[:3], merged, bias, inputs[4]).quotient()
    theirs = near_sums(*inputs[:3], graph, *inputs[3:]).quotient()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    leaves = [*inputs, cutoff]
    for one, other in zip(
        torch.autograd.grad(ours.square().sum(), leaves),
        torch.autograd.grad(theirs.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def test_a_graph_without_edges_merges_to_one_without_edges() -> None:
    none = torch.empty(0, dtype=torch.int64)
    merged, bias = merge_images(NearGraph(none, none, none.float(), none.float()), torch.empty(0, 3))
    assert len(merged.sender) == len(bias) == 0


def pair_sums(inputs: list[torch.Tensor], graph: NearGraph, num_graphs: int = B) -> ScaledSums:
    """Over all pairs, from edges with several images."""
    merged, edge_bias = merge_images(graph, inputs[3])
    return near_pair_sums(*inputs[:3], near_pair_bias(merged, edge_bias, inputs[4], num_graphs, N))


def test_all_pairs_give_the_sums_over_edges_in_value_and_gradient() -> None:
    """With self-images and atoms without neighbours."""
    graph, inputs = make_graph(), make_inputs()
    ours, theirs = pair_sums(inputs, graph), near_sums(*inputs[:3], graph, *inputs[3:])
    assert_same_with_gradients(ours.quotient(), theirs.quotient(), inputs)
    torch.testing.assert_close(ours.log_normalizer(), theirs.log_normalizer(), rtol=0, atol=1e-12)


def test_all_pairs_do_not_overflow_where_edges_do_not() -> None:
    """Logits of thousands, whose exponentials no float holds."""
    graph, inputs = make_graph(), make_inputs(scale=100.0)
    ours, theirs = pair_sums(inputs, graph), near_sums(*inputs[:3], graph, *inputs[3:])
    assert theirs.log_normalizer().max() > 1000
    torch.testing.assert_close(ours.quotient(), theirs.quotient(), rtol=0, atol=1e-9)
    torch.testing.assert_close(ours.log_normalizer(), theirs.log_normalizer(), rtol=1e-12, atol=0)


def test_over_all_pairs_a_graph_alone_has_the_sums_it_has_in_a_batch() -> None:
    graph, inputs = make_graph(), make_inputs()
    inside = RECEIVER < N
    alone = NearGraph(SENDER[inside], RECEIVER[inside], graph.distances[inside], graph.cutoff[inside])
    ours = pair_sums([*(x[:1] for x in inputs[:3]), inputs[3][inside], inputs[4]], alone, 1)
    for one, other in zip(ours, pair_sums(inputs, graph), strict=True):
        torch.testing.assert_close(one, other[:1], rtol=0, atol=1e-14)


def test_all_pairs_are_taken_where_they_are_at_most_four_times_the_near_ones() -> None:
    """The edges reach 8 pairs: enough for the 32 of 2 graphs of 4 atoms, not for the 50 of 2 graphs of 5."""
    merged, _ = merge_images(make_graph(), make_inputs()[3])
    assert len(merged.sender) == 8
    assert most_pairs_are_near(merged, 2, 4)
    assert not most_pairs_are_near(merged, B, N)


@pytest.mark.parametrize("worthwhile", [0, 100])
def test_layers_are_given_all_pairs_where_these_are_worthwhile(
    worthwhile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_pairs, "WORTHWHILE", worthwhile)
    bias, graph = RadialNearBias(H, 4.0).double(), make_graph()
    geometry = PeriodicGeometry(
        pos=torch.zeros(B, N, 3, dtype=torch.float64),
        atom_mask=torch.ones(B, N, dtype=torch.bool),
        cell=torch.eye(3, dtype=torch.float64).repeat(B, 1, 1),
        pbc=torch.ones(B, 3, dtype=torch.bool),
        near=graph,
    )
    positions = near_positions(geometry, bias)
    assert (positions.pair_bias is not None) == bool(worthwhile)
    merged, edge_bias = merge_images(graph, bias(graph))
    torch.testing.assert_close(positions.edge_bias, edge_bias)
    if positions.pair_bias is not None:
        torch.testing.assert_close(
            positions.pair_bias, near_pair_bias(merged, edge_bias, bias.self_bias(), B, N)
        )
