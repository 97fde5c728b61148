"""FourierRPE: features, folded projections and dense twin agree; gradients are live; precision is kept."""

import math
from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from torch import Tensor, nn

from molflt.nn import phases as phases_module
from molflt.nn.frequencies import FrequencySample, FrequencySampler, GaussianFrequencies
from molflt.nn.matched_frequencies import MatchedMixtureFrequencies
from molflt.nn.phases import cosine_and_sine, phases, split_high_low, split_matmul
from molflt.nn.rpe import WEIGHT_FLOOR, FourierRPE, default_rpe
from molflt.nn.spectra import GaussianBasisSpectrum, GaussianMixtureSpectrum, Spectrum

HEADS, FREQUENCIES, GRAPHS, TOKENS, FEATURES = 3, 11, 2, 7, 5


class PerGraphFrequencies(FrequencySampler):
    """Frequencies that differ between graphs, as those of a reciprocal lattice do."""

    def __init__(self, dim: int) -> None:
        super().__init__(HEADS, FREQUENCIES, dim)
        self.values = nn.Parameter(0.3 * torch.randn(GRAPHS, HEADS, FREQUENCIES, dim))

    @property
    def frequencies(self) -> Tensor:
        return self.values

    def forward(self) -> FrequencySample:
        return FrequencySample(self.values, self.values.square().sum(-1))


def build(per_graph: bool, asymmetric: bool, dim: int = 3) -> FourierRPE:
    torch.manual_seed(0)
    spectrum = GaussianMixtureSpectrum(HEADS, dim, 5, 0.2, 0.2, asymmetric=asymmetric)
    sampler = PerGraphFrequencies(dim) if per_graph else GaussianFrequencies(HEADS, FREQUENCIES, dim, 0.3)
    return FourierRPE(sampler, spectrum).double()


def positions(tokens: int = TOKENS, dim: int = 3) -> Tensor:
    return 3 * torch.randn(
        GRAPHS, tokens, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


variants = pytest.mark.parametrize("per_graph", [False, True], ids=["shared", "per_graph"])
kinds = pytest.mark.parametrize("asymmetric", [False, True], ids=["real", "complex"])


@variants
@kinds
@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_dense_bias_is_the_product_of_the_features(per_graph: bool, asymmetric: bool, dim: int) -> None:
    rpe, pos, key_pos = build(per_graph, asymmetric, dim), positions(dim=dim), positions(5, dim)
    query, key = rpe(pos)
    torch.testing.assert_close(query @ key.mT, rpe.dense_bias(pos), rtol=0, atol=1e-12)
    other_key = rpe(key_pos)[1]
    torch.testing.assert_close(query @ other_key.mT, rpe.dense_bias(pos, key_pos), rtol=0, atol=1e-12)


@variants
@kinds
def test_dense_bias_is_the_weighted_sum_of_waves(per_graph: bool, asymmetric: bool) -> None:
    rpe, pos = build(per_graph, asymmetric), positions()
    frequencies, weights = rpe.sampler()
    frequencies = frequencies.expand(GRAPHS, *frequencies.shape[-3:])
    g = (weights * rpe.spectrum(rpe.sampler().frequencies)).expand(GRAPHS, HEADS, FREQUENCIES)
    expected = torch.zeros(GRAPHS, HEADS, TOKENS, TOKENS, dtype=torch.float64)
    for graph in range(GRAPHS):
        for i in range(TOKENS):
            for j in range(TOKENS):
                angle = 2 * math.pi * frequencies[graph] @ (pos[graph, i] - pos[graph, j])
                expected[graph, :, i, j] = (g[graph] * torch.exp(1j * angle)).sum(-1).real
    torch.testing.assert_close(rpe.dense_bias(pos), expected, rtol=0, atol=1e-12)


@variants
@kinds
@pytest.mark.parametrize("per_head", [False, True])
def test_folded_projection_of_the_basis_equals_projection_of_the_features(
    per_graph: bool, asymmetric: bool, per_head: bool
) -> None:
    """In value and in the gradients of positions, projection, spectrum and sampler."""
    rpe = build(per_graph, asymmetric)
    pos = positions().requires_grad_()
    shape = (HEADS, FEATURES, 2 * FREQUENCIES) if per_head else (FEATURES, 2 * FREQUENCIES)
    projection = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    leaves = [pos, projection, *rpe.parameters()]
    cotangents = torch.randn(2, GRAPHS, HEADS, TOKENS, FEATURES, dtype=torch.float64)

    direct = torch.stack([features @ projection.mT for features in rpe(pos)])
    basis = rpe.basis(pos)
    folded = torch.stack([basis @ weight.mT for weight in rpe.fold(projection)])
    torch.testing.assert_close(folded, direct, rtol=0, atol=1e-12)
    expected = torch.autograd.grad(direct, leaves, cotangents)
    actual = torch.autograd.grad(folded, leaves, cotangents)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@kinds
def test_gradients_of_the_dense_bias_equal_those_of_the_product(asymmetric: bool) -> None:
    rpe, pos = build(False, asymmetric), positions().requires_grad_()
    leaves = [pos, *rpe.parameters()]
    cotangent = torch.randn(GRAPHS, HEADS, TOKENS, TOKENS, dtype=torch.float64)
    query, key = rpe(pos)
    actual = torch.autograd.grad(query @ key.mT, leaves, cotangent)
    expected = torch.autograd.grad(rpe.dense_bias(pos), leaves, cotangent)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("cached", [0, 2**20])
def test_basis_is_bit_equal_with_and_without_gradients(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases_module, "CACHED_ELEMENTS", cached)
    rpe = default_rpe(3, 2, generator=torch.Generator().manual_seed(0))
    pos = 7 * torch.randn(5, 11, 2, generator=torch.Generator().manual_seed(1))
    with_gradients = rpe.basis(pos)
    assert with_gradients.requires_grad
    with torch.no_grad():
        assert torch.equal(rpe.basis(pos), with_gradients)


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented")
@pytest.mark.parametrize("cached", [0, 2**20])
def test_cosine_and_sine_have_all_derivatives(cached: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward, forward, any two of them, and of a batch at once; in either order in memory."""
    monkeypatch.setattr(phases_module, "CACHED_ELEMENTS", cached)
    heads_first = 4 * torch.randn(3, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for theta in (heads_first, heads_first.transpose(0, 1)):
        leaf = theta.detach().requires_grad_()
        assert torch.autograd.gradcheck(cosine_and_sine, leaf, check_forward_ad=True, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(cosine_and_sine, leaf, check_fwd_over_rev=True)
        expected = torch.cat((theta.cos(), theta.sin()), dim=-1)
        assert torch.equal(cosine_and_sine(leaf), expected)
        mapped = torch.func.vmap(cosine_and_sine, in_dims=1, out_dims=1)(leaf.unsqueeze(2))
        assert torch.equal(mapped.squeeze(2), expected)
    point = torch.tensor(0.7, dtype=torch.float64)

    def waves(x: Tensor) -> Tensor:
        return cosine_and_sine(x.expand(2, 1, 1, 1)).sum((0, 1, 2))

    for outer in (torch.func.jacfwd, torch.func.jacrev):
        for inner in (torch.func.jacfwd, torch.func.jacrev):
            torch.testing.assert_close(outer(inner(waves))(point), -waves(point))
            third = outer(inner(torch.func.jacrev(waves)))(point)
            torch.testing.assert_close(third, 2 * torch.stack([point.sin(), -point.cos()]))


@kinds
def test_features_pass_gradcheck(asymmetric: bool) -> None:
    torch.manual_seed(0)
    spectrum = GaussianMixtureSpectrum(2, 2, 2, 0.2, 0.2, asymmetric=asymmetric)
    rpe = FourierRPE(GaussianFrequencies(2, 3, 2, 0.3), spectrum).double()
    names, values = zip(*rpe.named_parameters(), strict=True)

    def features(pos: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return torch.func.functional_call(rpe, dict(zip(names, parameters, strict=True)), (pos,))

    pos = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    leaves = [value.detach().clone().requires_grad_() for value in values]
    assert torch.autograd.gradcheck(features, (pos, *leaves))


class WeightSpectrum(Spectrum):
    """g given frequency by frequency."""

    def __init__(self, g: Tensor) -> None:
        super().__init__(g.shape[0], 3)
        self.g = nn.Parameter(g)

    def forward(self, frequencies: Tensor) -> Tensor:
        return self.g


@pytest.mark.parametrize("value", [0.0, 1e-30, -1e-30, 1e-4, -0.7, 0.0 + 0.0j, 0.3 - 0.2j])
def test_product_has_the_derivative_of_the_sum_of_waves_also_where_g_is_zero(value: complex) -> None:
    g = torch.full((1, 5), value, dtype=torch.complex128 if isinstance(value, complex) else torch.float64)
    sampler = GaussianFrequencies(1, 5, 3, 0.3, learnable=False, generator=torch.Generator().manual_seed(0))
    rpe, pos = FourierRPE(sampler, WeightSpectrum(g)).double(), positions()
    cotangent = torch.randn(GRAPHS, 1, TOKENS, TOKENS, dtype=torch.float64)
    query, key = rpe(pos)
    (gradient,) = torch.autograd.grad(query @ key.mT, rpe.spectrum.g, cotangent)
    frequencies, weights = sampler.double()()
    angle = 2 * math.pi * (pos.unsqueeze(2) - pos.unsqueeze(1)) @ frequencies[0].T
    expected = weights[0] * (cotangent[:, 0, :, :, None] * angle.cos()).sum((0, 1, 2))
    if g.is_complex():
        # torch's convention for real functions of u + i v: the gradient is d/du + i d/dv.
        sine = weights[0] * (cotangent[:, 0, :, :, None] * angle.sin()).sum((0, 1, 2))
        expected = torch.complex(expected, -sine)
    torch.testing.assert_close(gradient[0], expected, rtol=1e-9, atol=1e-12)
    assert (gradient.abs() > 0).all()


def test_all_zero_weights_are_no_dead_point_in_float32() -> None:
    rpe = default_rpe(3, 3)
    with torch.no_grad():
        rpe.spectrum.amplitude.zero_()
    pos = positions().float()
    query, key = rpe(pos)
    ((query @ key.mT) * torch.randn(TOKENS, TOKENS)).sum().backward()
    gradient = rpe.spectrum.amplitude.grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert (gradient != 0).all()


@variants
@kinds
def test_squared_norms_are_those_of_every_token_and_close_to_the_amplitudes(
    per_graph: bool, asymmetric: bool
) -> None:
    rpe, pos = build(per_graph, asymmetric), positions()
    for features, norm in zip(rpe(pos), rpe.squared_norms(), strict=True):
        expected = norm.unsqueeze(-1).expand(GRAPHS, HEADS, TOKENS)
        torch.testing.assert_close(features.square().sum(-1), expected, rtol=1e-12, atol=0)
        assert (norm - rpe.amplitudes().sum(-1)).abs().max() <= FREQUENCIES * WEIGHT_FLOOR


def test_amplitudes_bound_the_bias() -> None:
    rpe, pos = build(False, True), positions()
    bound = rpe.amplitudes().sum(-1)[None, :, None, None]
    bias = rpe.dense_bias(pos)
    assert (bias.abs() <= bound + 1e-12).all()
    assert bias.abs().max() > 0.3 * bound.max()


def test_bias_is_invariant_under_translation() -> None:
    rpe, pos = build(False, True), positions()
    query, key = rpe(pos)
    moved_query, moved_key = rpe(pos + torch.tensor([17.0, -29.0, 101.0], dtype=torch.float64))
    torch.testing.assert_close(moved_query @ moved_key.mT, query @ key.mT, rtol=0, atol=1e-10)


def test_bias_depends_on_positions() -> None:
    """Negative control: other positions give another bias."""
    rpe, pos = build(False, False), positions()
    assert (rpe.dense_bias(pos) - rpe.dense_bias(pos.flip(1))).abs().max() > 0.1


def test_an_asymmetric_bias_tells_i_from_j_and_a_real_one_does_not() -> None:
    pos = positions()
    symmetric, asymmetric = (build(False, kind).dense_bias(pos) for kind in (False, True))
    torch.testing.assert_close(symmetric, symmetric.mT, rtol=0, atol=1e-12)
    assert (asymmetric - asymmetric.mT).abs().max() > 0.1


def test_closed_form_bias_is_f_of_the_displacements() -> None:
    rpe, pos, key_pos = build(False, True), positions(), positions(5)
    bias = rpe.closed_form_bias(pos, key_pos)
    expected = rpe.spectrum.closed_form(pos[1, 4] - key_pos[1, 3])
    torch.testing.assert_close(bias[1, :, 4, 3], expected)
    assert bias.shape == (GRAPHS, HEADS, TOKENS, 5)


def test_split_parts_add_up_and_fit_tf32() -> None:
    x = torch.randn(1009, generator=torch.Generator().manual_seed(0)) * 100
    high, low = split_high_low(x)
    assert torch.equal(high + low, x)
    assert torch.equal(to_tf32(high), high)
    assert not torch.equal(to_tf32(x), x)


def to_tf32(x: Tensor) -> Tensor:
    """x rounded to TF32's 11 significant bits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


def test_split_products_survive_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the product's factors rounded as a GPU rounds them: 1e-6 of 2,000 rad, unsplit 1e-1."""
    points = 200 * torch.randn(5, 31, 3, generator=torch.Generator().manual_seed(0))
    waves = 2 * math.pi * torch.randn(3, 17, generator=torch.Generator().manual_seed(1))
    exact = points.double() @ waves.double()
    rounded = to_tf32(points).double() @ to_tf32(waves).double()
    matmul = Tensor.__matmul__
    monkeypatch.setattr(Tensor, "__matmul__", lambda a, b: matmul(to_tf32(a), to_tf32(b)))
    assert (split_matmul(points, waves) - exact).abs().max() < 2e-3
    assert (rounded - exact).abs().max() > 0.1


def test_cpu_phases_stay_in_float32_where_tf32_is_allowed() -> None:
    torch.manual_seed(0)
    points, frequencies = 200 * torch.randn(5, 31, 3), torch.randn(3, 17, 3)
    expected = phases(points, frequencies)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        actual = phases(points, frequencies)
    finally:
        torch.set_float32_matmul_precision(precision)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-3)


def test_phases_are_the_same_by_split_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the CPU phases take them; here they stand in for the CPU's product."""
    rpe, pos = build(False, False), positions()
    expected = rpe.basis(pos)
    monkeypatch.setattr(torch, "matmul", split_matmul)
    torch.testing.assert_close(rpe.basis(pos), expected, rtol=0, atol=1e-12)


def test_autocast_leaves_features_in_float32_and_unchanged() -> None:
    torch.manual_seed(0)
    rpe, pos = default_rpe(3, 3), positions().float()
    projection = torch.randn(FEATURES, 32)
    expected = (*rpe(pos), rpe.basis(pos), *rpe.fold(projection), rpe.dense_bias(pos))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = (*rpe(pos), rpe.basis(pos), *rpe.fold(projection), rpe.dense_bias(pos))
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    half = rpe.basis(pos.half())
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, rpe.basis(pos.half().float()), rtol=0, atol=0)


def test_float32_error_at_large_positions_is_what_the_docstring_says() -> None:
    torch.manual_seed(0)
    sampler = GaussianFrequencies(1, 101, 3, std=0.5)
    pos = torch.randn(1, 31, 3)
    pos = 1e4 * pos / pos.norm(dim=-1, keepdim=True)
    single, double = phases(pos, sampler.frequencies), phases(pos.double(), sampler.frequencies.double())
    assert (single - double).abs().max() < 2e-2
    centred = pos - pos[:, :1]
    assert phases(centred[:, :1], sampler.frequencies).abs().max() == 0


@pytest.fixture
def _without_shape_checks() -> Iterator[None]:
    """The checks of shape annotations, on under pytest alone, can not be traced."""
    jaxtyping.config.update("jaxtyping_disable", True)
    torch._dynamo.reset()
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.usefixtures("_without_shape_checks")
def test_basis_and_fold_trace_into_one_graph() -> None:
    torch.manual_seed(0)
    rpe, pos, projection = default_rpe(3, 3), positions().float(), torch.randn(FEATURES, 32)

    def random_features(pos: Tensor) -> Tensor:
        query_projection, key_projection = rpe.fold(projection)
        basis = rpe.basis(pos)
        return basis @ query_projection.mT + basis @ key_projection.mT

    compiled = torch.compile(random_features, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(pos), random_features(pos))


@pytest.mark.usefixtures("_without_shape_checks")
def test_exported_features_serve_any_batch_and_length() -> None:
    torch.manual_seed(0)
    rpe = default_rpe(3, 3).eval()
    sizes = {0: torch.export.Dim("graphs"), 1: torch.export.Dim("tokens")}
    exported = torch.export.export(rpe, (positions().float(),), dynamic_shapes=(sizes,)).module()
    pos = torch.randn(5, 13, 3)
    for ours, theirs in zip(exported(pos), rpe(pos), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_default_has_finite_ratio_and_a_few_thousand_parameters() -> None:
    rpe = default_rpe(48, 3)
    assert sum(parameter.numel() for parameter in rpe.parameters()) == 48 * (32 + 32 + 1)
    narrowest = rpe.spectrum.components.std.max()
    torch.testing.assert_close(rpe.sampler.std, narrowest.expand(48, 3))


def test_default_draws_from_the_generator() -> None:
    first, second = (default_rpe(3, 2, generator=torch.Generator().manual_seed(5)) for _ in "ab")
    assert torch.equal(first.sampler.base_noise, second.sampler.base_noise)


def test_reset_redraws_frequencies_and_parameters() -> None:
    rpe = default_rpe(3, 2)
    noise, amplitude = rpe.sampler.base_noise.clone(), rpe.spectrum.amplitude.detach().clone()
    rpe.reset_parameters(torch.Generator().manual_seed(0))
    assert not torch.equal(rpe.sampler.base_noise, noise)
    assert not torch.equal(rpe.spectrum.amplitude, amplitude)


def test_state_dict_round_trip_gives_bit_equal_bias() -> None:
    saved, loaded = (
        FourierRPE(MatchedMixtureFrequencies(spectrum.components, 7), spectrum)
        for spectrum in (GaussianBasisSpectrum(3, 3, 5), GaussianBasisSpectrum(3, 3, 5))
    )
    pos = positions().float()
    assert not torch.equal(saved.dense_bias(pos), loaded.dense_bias(pos))
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(saved.dense_bias(pos), loaded.dense_bias(pos))


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (GaussianFrequencies(2, 5, 3), "must agree in num_heads, got 2 and 3"),
        (GaussianFrequencies(3, 5, 2), "must agree in position_dim, got 2 and 3"),
    ],
)
def test_sampler_and_spectrum_that_do_not_fit_are_named(sampler: FrequencySampler, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FourierRPE(sampler, GaussianBasisSpectrum(3, 3))


def test_inputs_of_the_wrong_width_are_named() -> None:
    rpe = default_rpe(3, 3)
    for method in (rpe, rpe.basis, rpe.dense_bias):
        with pytest.raises(ValueError, match="pos must have position_dim = 3 coordinates, got 2"):
            method(torch.zeros(1, 5, 2))
    with pytest.raises(ValueError, match="projection must have 2R = 32 columns, got 22"):
        rpe.fold(torch.zeros(5, 22))
