"""Projections of queries, keys and RPE features without the concatenation, against the concatenation."""

import pytest
import torch

from molflt.nn.frequencies import GaussianFrequencies
from molflt.nn.operands import FourierOperands, Operands, Projection, Term, affine_sum, token_mean
from molflt.nn.rpe import FourierRPE
from molflt.nn.spectra import GaussianMixtureSpectrum

B, H, N, D, X, R, M = 2, 3, 11, 5, 3, 7, 13


@pytest.fixture
def vectors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, FourierRPE]:
    """q, k, positions and an RPE with weights of both signs, float64."""
    torch.manual_seed(0)
    query, key = torch.randn(2, B, H, N, D, dtype=torch.float64)
    rpe = FourierRPE(GaussianFrequencies(H, R, X, 0.2), GaussianMixtureSpectrum(H, X)).double()
    assert len(rpe.importance_weights().sign().unique()) == 2
    return query, key, torch.randn(B, N, X, dtype=torch.float64), rpe


def test_concatenated_operands_have_the_logits_as_their_product(vectors):
    query, key, pos, rpe = vectors
    full_query, full_key = FourierOperands(query, key, rpe, rpe.basis(pos)).concatenated()
    torch.testing.assert_close(full_query @ full_key.mT, query @ key.mT / D**0.5 + rpe.dense_bias(pos))
    full_query, full_key = Operands(query, key).concatenated()
    torch.testing.assert_close(full_query @ full_key.mT, query @ key.mT / D**0.5)


def test_projections_equal_those_of_the_concatenation(vectors):
    query, key, pos, rpe = vectors
    rows = torch.randn(H, M, 2 * R + D, dtype=torch.float64)
    bias = torch.randn(B, H, 1, M, dtype=torch.float64)
    gain = torch.rand(B, H, 1, 1, dtype=torch.float64)
    for operands, width in (
        (FourierOperands(query, key, rpe, rpe.basis(pos)), 2 * R + D),
        (Operands(query, key), D),
    ):
        projection = operands.project(rows[..., -width:]).scaled(gain)
        full_query, full_key = operands.concatenated()
        expected = gain * (full_query @ rows[..., -width:].mT) + bias
        torch.testing.assert_close(projection.query(bias), expected)
        blocks = projection.split(2)
        parts = [part.query(b) for part, b in zip(blocks, bias.split(2, dim=1), strict=True)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)
        torch.testing.assert_close(projection.key(bias), gain * (full_key @ rows[..., -width:].mT) + bias)


@pytest.mark.parametrize("num_graphs", [1, 3])
@pytest.mark.parametrize("per_graph", [False, True])
@pytest.mark.parametrize("bias_shape", [(1, 1, 1, 1), (1, H, N, 1), (1, H, 1, M), (1, H, N, M)])
def test_an_affine_sum_is_its_definition_and_leaves_its_arguments(num_graphs, per_graph, bias_shape):
    """Weights of each graph and of all, every form of bias, also one of each graph, and heads first."""
    torch.manual_seed(0)
    options = {"dtype": torch.float64}
    weights = [
        torch.randn(*((num_graphs,) if per_graph else ()), H, width, M, **options) for width in (D, 2 * R)
    ]
    terms = [Term(torch.randn(num_graphs, N, H, w.shape[-2], **options).transpose(1, 2), w) for w in weights]
    projection = Projection(terms, terms[:1])
    assert projection.shares_weights() == (not per_graph)
    for graphs in {1, num_graphs}:
        bias = torch.randn(graphs, *bias_shape[1:], **options)
        before = [bias.clone(), *(x.clone() for term in terms for x in term)]
        expected = bias + sum(x @ weight for x, weight in terms)
        torch.testing.assert_close(projection.query(bias), expected)
        if not per_graph:
            turned = projection.with_heads_first().query(bias.transpose(0, 1))
            torch.testing.assert_close(turned.transpose(0, 1), expected)
        assert all(map(torch.equal, before, [bias, *(x for term in terms for x in term)]))


def test_norms_and_moments_equal_those_of_the_concatenation(vectors):
    query, key, pos, rpe = vectors
    atom_mask = torch.rand(B, N) < 0.6
    for operands in (Operands(query, key), FourierOperands(query, key, rpe, rpe.basis(pos))):
        full_query, full_key = operands.concatenated()
        half_squares = full_key.square().sum(-1, keepdim=True) / 2
        for requires_grad in (False, True):
            key.requires_grad_(requires_grad)
            offset = half_squares - operands.half_squared_key_norm()
            torch.testing.assert_close(offset, offset[:, :, :1].expand_as(offset))
        key.requires_grad_(False)
        squares = (full_query.unsqueeze(3) + full_key.unsqueeze(2)).square().sum(-1)
        pairs = atom_mask[:, None, :, None] & atom_mask[:, None, None, :]
        expected = (squares * pairs).sum((-1, -2)) / pairs.sum((-1, -2))
        torch.testing.assert_close(operands.mean_squared_sum(atom_mask)[..., 0, 0], expected)
        torch.testing.assert_close(operands.mean_squared_sum(None)[..., 0, 0], squares.mean((-1, -2)))


def test_normalized_operands_have_constant_length_and_the_same_rpe(vectors):
    query, key, pos, rpe = vectors
    temperature = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
    full_query, full_key = (
        FourierOperands(query, key, rpe, rpe.basis(pos)).normalized(temperature).concatenated()
    )
    cosine = torch.nn.functional.cosine_similarity(query.unsqueeze(3), key.unsqueeze(2), dim=-1)
    torch.testing.assert_close(
        full_query @ full_key.mT, temperature[:, None, None] * cosine + rpe.dense_bias(pos)
    )


def test_frequencies_per_graph_give_each_graph_its_own_weights(vectors):
    """fold may return projections per graph: affine_sum takes weights `[B, H, E, M]`."""
    query, *_ = vectors
    weight = torch.randn(B, H, D, M, dtype=torch.float64)
    terms = [Term(query, weight), Term(query, weight[:1])]
    total = affine_sum(torch.zeros(1, 1, 1, 1, dtype=torch.float64), terms)
    torch.testing.assert_close(total, query @ weight + query @ weight[:1])


def test_token_mean_is_over_real_tokens_and_zero_without_any():
    x = torch.tensor([[[[1.0], [2.0], [9.0]]], [[[1.0], [2.0], [float("nan")]]]])
    atom_mask = torch.tensor([[True, True, False], [False, False, False]])
    assert token_mean(x, atom_mask).flatten().tolist() == [1.5, 0.0]
