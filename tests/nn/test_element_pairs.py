"""Element factors on RPE features against the explicit bias of all pairs."""

import pytest
import torch

from molflt.nn.attention import flt_attention
from molflt.nn.element_pairs import (
    ElementFactors,
    ElementPairCoupling,
    ElementPairFLTAttention,
    ElementPairOperands,
    ElementPairRPE,
)
from molflt.nn.feature_maps import OptimalPositiveFeatures, PositiveRandomFeatures
from molflt.nn.frequencies import GaussianFrequencies
from molflt.nn.functional import quadratic_linear_attention, softmax_attention
from molflt.nn.near import NearGraph
from molflt.nn.periodic import PeriodicGeometry
from molflt.nn.spectra import GaussianBasisSpectrum, GaussianMixtureSpectrum

B, H, N, D, R, P = 2, 3, 7, 5, 4, 2


def make_rpe(asymmetric: bool = False) -> ElementPairRPE:
    torch.manual_seed(0)
    if asymmetric:
        spectrum = GaussianMixtureSpectrum(H, 3, 5, asymmetric=True)
    else:
        spectrum = GaussianBasisSpectrum(H, 3, 5, (1.0, 3.0))
    return ElementPairRPE(GaussianFrequencies(H, R, 3, std=0.2), spectrum, P).double()


def make_atoms() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pos = 3 * torch.randn(B, N, 3, generator=generator, dtype=torch.float64)
    return pos, torch.tensor([1, 6, 8, 29, 78])[torch.randint(5, (B, N), generator=generator)]


def make_heads(scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [scale * torch.randn(B, H, N, D, generator=generator, dtype=torch.float64) for _ in range(3)]


@pytest.mark.parametrize("asymmetric", [False, True])
def test_features_multiply_to_the_bias_of_all_pairs(asymmetric):
    rpe, (pos, numbers) = make_rpe(asymmetric), make_atoms()
    query_basis, key_basis = rpe.element_basis(pos, numbers).chunk(2, -1)
    operands = ElementPairOperands(*make_heads()[:2], rpe, query_basis, key_basis)
    query, key = operands.concatenated()
    product = query[..., : 2 * R] @ key[..., : 2 * R].mT
    torch.testing.assert_close(product, rpe.element_bias(pos, numbers), rtol=0, atol=1e-12)


def test_the_bias_depends_on_both_elements_and_in_their_order():
    rpe, (pos, numbers) = make_rpe(), make_atoms()
    pos, numbers = pos[:1, :2], torch.tensor([[6, 78]])
    bias = rpe.element_bias(pos, numbers)
    for other in ([[8, 78]], [[6, 29]]):
        assert (rpe.element_bias(pos, torch.tensor(other)) - bias)[0, :, 0, 1].abs().min() > 1e-4
    assert (bias[0, :, 0, 1] - bias[0, :, 1, 0]).abs().min() > 1e-4


def test_factors_of_one_leave_the_rpe_as_it_is():
    rpe, (pos, numbers) = make_rpe(), make_atoms()
    for factors in (rpe.query_factors, rpe.key_factors):
        torch.nn.init.zeros_(factors.mixing)
    torch.testing.assert_close(rpe.element_bias(pos, numbers), rpe.dense_bias(pos), rtol=0, atol=1e-12)


@pytest.mark.parametrize("feature_map", [PositiveRandomFeatures(11), OptimalPositiveFeatures(11)])
def test_linear_attention_equals_its_quadratic_rewriting(feature_map):
    rpe, (pos, numbers), (q, k, v) = make_rpe(), make_atoms(), make_heads()
    feature_map.build(H, D + 2 * R)
    feature_map = feature_map.double()
    basis = rpe.element_basis(pos, numbers)
    out = flt_attention(
        q, k, v, feature_map=feature_map, coupling=ElementPairCoupling(), rpe=rpe, positional=basis
    )
    operands = ElementPairOperands(q, k, rpe, *basis.chunk(2, -1))
    query, key = operands.concatenated()
    # The same vectors without any RPE: 1 / sqrt(E) is undone by the scale.
    scale = query.shape[-1] ** 0.25
    wide = torch.nn.functional.pad(v, (0, query.shape[-1] - D))
    plain = flt_attention(scale * query, scale * key, wide, feature_map=feature_map)[..., :D]
    torch.testing.assert_close(out, plain, rtol=0, atol=1e-10)


def test_linear_attention_equals_the_explicit_positive_features():
    rpe, (pos, numbers), (q, k, v) = make_rpe(), make_atoms(), make_heads()
    feature_map = PositiveRandomFeatures(11)
    feature_map.build(H, D + 2 * R)
    feature_map = feature_map.double()
    basis = rpe.element_basis(pos, numbers)
    out = flt_attention(
        q, k, v, feature_map=feature_map, coupling=ElementPairCoupling(), rpe=rpe, positional=basis
    )
    vectors = ElementPairOperands(q, k, rpe, *basis.chunk(2, -1)).concatenated()
    rows = feature_map.projection
    features = ((x @ rows.mT - 0.5 * x.square().sum(-1, keepdim=True)).exp() for x in vectors)
    expected = quadratic_linear_attention(*features, v, eps=0.0)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)


def test_many_features_approach_softmax_attention_with_the_explicit_bias():
    rpe, (pos, numbers), (q, k, v) = make_rpe(), make_atoms(), make_heads(0.5)
    exact = softmax_attention(q, k, v, rpe.element_bias(pos, numbers))
    errors = []
    for num_features in (64, 4096):
        feature_map = PositiveRandomFeatures(num_features)
        feature_map.build(H, D + 2 * R)
        out = flt_attention(
            q,
            k,
            v,
            feature_map=feature_map.double(),
            coupling=ElementPairCoupling(),
            rpe=rpe,
            positional=rpe.element_basis(pos, numbers),
        )
        errors.append((out - exact).abs().mean().item())
    # An eighth of the error is expected of 64 times the features.
    assert errors[1] < errors[0] / 4


def make_geometry() -> PeriodicGeometry:
    pos, numbers = make_atoms()
    mask = torch.arange(N) < torch.tensor([[N], [5]])
    none = torch.empty(0, dtype=torch.int64)
    cell, pbc = torch.zeros(B, 3, 3).double(), torch.zeros(B, 3, dtype=torch.bool)
    return PeriodicGeometry(
        pos, mask, cell, pbc, NearGraph(none, none, none.double(), none.double()), numbers * mask
    )


def test_padding_changes_nothing_and_every_weight_learns():
    torch.manual_seed(3)
    layer = ElementPairFLTAttention(15, H, rpe=make_rpe(), feature_map=PositiveRandomFeatures(11)).double()
    geometry, x = make_geometry(), torch.randn(B, N, 15, dtype=torch.float64)
    out = layer(x, geometry)
    pos = torch.where(geometry.atom_mask[..., None], geometry.pos, 1e30)
    other = PeriodicGeometry(
        pos, geometry.atom_mask, geometry.cell, geometry.pbc, geometry.near, geometry.atomic_numbers
    )
    torch.testing.assert_close(layer(x, other), out, rtol=0, atol=0)
    torch.testing.assert_close(
        layer(x, atom_mask=geometry.atom_mask, positional=layer.encode_positions(geometry)), out
    )
    out.square().sum().backward()
    for name, parameter in layer.named_parameters():
        if name != "key.bias":
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name


def test_missing_elements_and_ranks_are_refused():
    layer = ElementPairFLTAttention(15, H, rpe=make_rpe(), feature_map=PositiveRandomFeatures(11))
    with pytest.raises(ValueError, match="needs a PeriodicGeometry with atomic_numbers, got Tensor"):
        layer(torch.zeros(1, 2, 15), torch.zeros(1, 2, 3))
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        ElementFactors(H, R, 0)
    with pytest.raises(NotImplementedError, match=r"use rpe\.element_bias"):
        ElementPairCoupling().exact_bias(None, None)
