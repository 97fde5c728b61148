"""Additive, multiplicative and no coupling against the weights they stand for."""

import math

import pytest
import torch

from molflt.nn.attention import flt_attention
from molflt.nn.couplings import AdditiveCoupling, Coupling, MultiplicativeCoupling, NoCoupling
from molflt.nn.feature_maps import FeatureMap, PositiveRandomFeatures
from molflt.nn.frequencies import GaussianFrequencies
from molflt.nn.functional import quadratic_linear_attention, softmax_attention
from molflt.nn.kernel_feature_maps import EluFeatures, RFAGaussianFeatures
from molflt.nn.operands import Operands
from molflt.nn.rpe import FourierRPE
from molflt.nn.spectra import GaussianMixtureSpectrum

B, H, N, D, X, R, M = 2, 3, 17, 5, 3, 7, 11


def make_rpe(num_heads: int = H, position_dim: int = X) -> FourierRPE:
    """Weights of both signs, float64."""
    sampler = GaussianFrequencies(num_heads, R, position_dim, 0.2)
    return FourierRPE(sampler, GaussianMixtureSpectrum(num_heads, position_dim)).double()


def built(
    feature_map: FeatureMap, coupling: Coupling, rpe: FourierRPE | None, num_heads: int = H
) -> FeatureMap:
    """The map in float64, sized for the coupling."""
    feature_map.build(num_heads, coupling.input_width(D, rpe))
    return feature_map.double()


def make_inputs(num_heads: int = H) -> tuple[torch.Tensor, ...]:
    """q, k, v, positions and a mask, float64."""
    query, key, value = 0.6 * torch.randn(3, B, num_heads, N, D, dtype=torch.float64)
    atom_mask = torch.arange(N) < torch.tensor([[13], [N]])
    return query, key, value, torch.randn(B, N, X, dtype=torch.float64), atom_mask


def explicit_attention(
    weights: torch.Tensor, value: torch.Tensor, atom_mask: torch.Tensor | None
) -> torch.Tensor:
    """sum_j a_ij v_j / sum_j a_ij over real tokens."""
    if atom_mask is not None:
        weights = weights * atom_mask[:, None, None, :]
    return weights @ value / weights.sum(-1, keepdim=True)


def modulation(coupling: MultiplicativeCoupling, rpe: FourierRPE, pos: torch.Tensor) -> torch.Tensor:
    """M(r_i - r_j) from displacements."""
    displacement = pos.unsqueeze(2) - pos.unsqueeze(1)
    phase = 2 * math.pi * torch.einsum("bijx,hrx->bhijr", displacement, rpe.sampler().frequencies)
    terms = rpe.importance_weights().abs()[:, None, None] * (coupling.floor_ratio + phase.cos())
    return coupling.background + terms.sum(-1)


def real_rows(x: torch.Tensor, atom_mask: torch.Tensor) -> torch.Tensor:
    """Rows of real tokens, `[A, H, D]`."""
    return x.transpose(1, 2)[atom_mask]


@pytest.mark.parametrize("causal", [False, True])
def test_additive_attention_equals_its_quadratic_rewriting_under_the_same_draws(causal):
    """The rewriting concatenates the RPE features and takes the textbook's positive features of the whole."""
    torch.manual_seed(0)
    query, key, value, pos, atom_mask = make_inputs()
    rpe, coupling = make_rpe(), AdditiveCoupling()
    feature_map = built(PositiveRandomFeatures(M), coupling, rpe)
    query_rpe, key_rpe = rpe(pos)
    full_query = torch.cat([query_rpe, query * D**-0.25], dim=-1)
    full_key = torch.cat([key_rpe, key * D**-0.25], dim=-1)
    phi_query, phi_key = (
        (x @ feature_map.projection.mT - x.square().sum(-1, keepdim=True) / 2).exp() / M**0.5
        for x in (full_query, full_key)
    )
    weights = phi_query @ phi_key.mT
    expected = explicit_attention(weights.tril() if causal else weights, value, atom_mask)
    out = flt_attention(
        query,
        key,
        value,
        pos,
        atom_mask,
        feature_map=feature_map,
        coupling=coupling,
        rpe=rpe,
        causal=causal,
        chunk_size=4,
    )
    torch.testing.assert_close(real_rows(out, atom_mask), real_rows(expected, atom_mask), rtol=0, atol=1e-10)


def test_additive_attention_tends_to_softmax_with_the_rpe_bias_as_m_to_the_minus_one_half():
    """RMS error over 31 heads with one RPE and projections of their own; exponent -1/2 to its spread of 0.03.

    Short queries and keys: with |q^ + k^|^2 of 10 the law would set in at M far beyond these.
    """
    torch.manual_seed(3)
    heads = 31
    query, key, value, pos, atom_mask = (x[:, :1] if x.ndim == 4 else x for x in make_inputs())
    query, key = query / 2, key / 2
    rpe = make_rpe(1)
    assert 0.5 < rpe.amplitudes().sum() < 1.5
    exact = softmax_attention(query, key, value, rpe.dense_bias(pos), atom_mask)
    without_rpe = softmax_attention(query, key, value, None, atom_mask)
    shared = make_rpe(heads)
    for ours, one in zip(shared.parameters(), rpe.parameters(), strict=True):
        ours.data = one.data.expand_as(ours).clone()
    for ours, one in zip(shared.buffers(), rpe.buffers(), strict=True):
        ours.data = one.data.expand_as(ours).clone()
    sizes = [64, 256, 1024, 4096]
    log_errors = []
    for size in sizes:
        coupling = AdditiveCoupling()
        feature_map = built(PositiveRandomFeatures(size), coupling, shared, heads)
        many = (B, heads, N, D)
        out = flt_attention(
            *(x.expand(many) for x in (query, key, value)),
            pos,
            atom_mask,
            feature_map=feature_map,
            rpe=shared,
        )
        error = real_rows(out - exact, atom_mask)
        log_errors.append(error.square().mean().sqrt().log())
    slope = (log_errors[-1] - log_errors[0]) / math.log(sizes[-1] / sizes[0])
    assert -0.58 < slope < -0.42
    assert log_errors[-1].exp() < 0.3 * real_rows(without_rpe - exact, atom_mask).square().mean().sqrt()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("floor_ratio", [1.0, 0.3])
def test_multiplicative_attention_equals_its_explicit_weights(floor_ratio, causal):
    torch.manual_seed(2)
    query, key, value, pos, atom_mask = make_inputs()
    rpe, coupling = make_rpe(), MultiplicativeCoupling(background=0.3, floor_ratio=floor_ratio)
    feature_map = built(PositiveRandomFeatures(M), coupling, rpe)
    features = feature_map(Operands(query, key)).evaluate()
    expected = quadratic_linear_attention(
        features.query,
        features.key / features.key_sum,
        value,
        atom_mask,
        causal=causal,
        modulation=modulation(coupling, rpe, pos),
    )
    out = flt_attention(
        query,
        key,
        value,
        pos,
        atom_mask,
        feature_map=feature_map,
        coupling=coupling,
        rpe=rpe,
        causal=causal,
        chunk_size=4,
    )
    torch.testing.assert_close(real_rows(out, atom_mask), real_rows(expected, atom_mask), rtol=0, atol=1e-10)


def test_multiplicative_attention_serves_maps_without_stabilisers():
    torch.manual_seed(3)
    query, key, value, pos, atom_mask = make_inputs()
    rpe, coupling = make_rpe(), MultiplicativeCoupling()
    feature_map = built(EluFeatures(), coupling, rpe)
    features = feature_map(Operands(query, key))
    weights = features.query @ features.key.mT * modulation(coupling, rpe, pos)
    out = flt_attention(
        query, key, value, pos, atom_mask, feature_map=feature_map, coupling=coupling, rpe=rpe
    )
    expected = explicit_attention(weights, value, atom_mask)
    torch.testing.assert_close(real_rows(out, atom_mask), real_rows(expected, atom_mask), rtol=0, atol=1e-10)


def test_multiplicative_attention_is_translation_invariant_with_positive_normaliser_for_1000_draws():
    """Ten times a hundred heads, each with parameters, frequencies and projection of its own, up to large
    ones."""
    heads = 100
    for draw in range(10):
        torch.manual_seed(draw)
        query, key, value, pos, atom_mask = make_inputs(heads)
        rpe, coupling = make_rpe(heads), MultiplicativeCoupling()
        for parameter in rpe.parameters():
            parameter.data += 0.3 * draw * torch.randn_like(parameter)
        feature_map = built(PositiveRandomFeatures(4), coupling, rpe, heads)
        modulations = coupling.modulations(rpe, rpe.basis(pos))
        assert (modulations.query @ modulations.key.mT).min() >= coupling.background * (1 - 1e-9)
        _, normalizer = feature_map(Operands(query, key), atom_mask).attend(value, modulations)
        assert real_rows(normalizer, atom_mask).min() >= coupling.background * (1 - 1e-9)
        out, shifted = (
            flt_attention(
                query, key, value, p, atom_mask, feature_map=feature_map, coupling=coupling, rpe=rpe
            )
            for p in (pos, pos + torch.tensor([3.0, -5.0, 7.0]))
        )
        torch.testing.assert_close(shifted, out, rtol=0, atol=1e-9)
        assert out.isfinite().all()


def test_additive_attention_depends_on_the_origin_and_signed_features_on_luck():
    """What the multiplicative coupling's two guarantees are worth: the additive one has neither."""
    torch.manual_seed(4)
    query, key, value, pos, atom_mask = make_inputs()
    rpe, coupling = make_rpe(), AdditiveCoupling()
    feature_map = built(PositiveRandomFeatures(64), coupling, rpe)
    out, shifted = (
        flt_attention(query, key, value, p, atom_mask, feature_map=feature_map, rpe=rpe)
        for p in (pos, pos + torch.tensor([3.0, -5.0, 7.0]))
    )
    assert real_rows(shifted - out, atom_mask).abs().max() > 0.01
    signed = built(RFAGaussianFeatures(16), coupling, rpe)
    features = signed(coupling.operands(3 * query, 3 * key, rpe, rpe.basis(pos)), atom_mask)
    _, normalizer = features.attend(value, None)
    assert normalizer.min() < 0


def test_without_coupling_positions_play_no_part():
    torch.manual_seed(5)
    query, key, value, pos, atom_mask = make_inputs()
    feature_map = built(PositiveRandomFeatures(M), NoCoupling(), None)
    out = flt_attention(query, key, value, None, atom_mask, feature_map=feature_map)
    features = feature_map(Operands(query, key)).evaluate()
    weights = features.query @ (features.key / features.key_sum).mT
    expected = explicit_attention(weights, value, atom_mask)
    torch.testing.assert_close(real_rows(out, atom_mask), real_rows(expected, atom_mask), rtol=0, atol=1e-10)
    with_rpe = flt_attention(
        query, key, value, pos, atom_mask, feature_map=feature_map, rpe=make_rpe(), coupling=NoCoupling()
    )
    assert torch.equal(out, with_rpe)


@pytest.mark.parametrize("coupling", [AdditiveCoupling(), MultiplicativeCoupling()])
def test_positions_that_are_needed_and_missing_are_named(coupling):
    query, key, value, *_ = make_inputs()
    with pytest.raises(ValueError, match="needs positions: pass pos"):
        flt_attention(
            query, key, value, feature_map=PositiveRandomFeatures(M), coupling=coupling, rpe=make_rpe()
        )


def test_wrong_arguments_of_the_multiplicative_coupling_are_refused():
    with pytest.raises(ValueError, match=r"background must be positive, got 0\.0"):
        MultiplicativeCoupling(background=0.0)
    with pytest.raises(ValueError, match=r"floor_ratio must be in \[0, 1\], got 1\.5"):
        MultiplicativeCoupling(floor_ratio=1.5)
