"""How good the estimates of FLT are: measured errors, variance bound, effective sample size.

With c = sup |g|/p the estimate's variance is at most (c^2 - f^2)/R (flt_math, section 1; arXiv 2302.01925,
Theorem A.3). c is infinite where p has thinner tails than |g|: the estimate is then right on average only,
and single draws are far off. All functions work without gradients.
"""

from __future__ import annotations

import copy
import warnings

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from molflt.nn.attention import FLTAttention, flt_attention
from molflt.nn.functional import softmax_attention
from molflt.nn.matched_frequencies import MatchedMixtureFrequencies
from molflt.nn.multihead import check_atom_mask, zero_padding
from molflt.nn.rpe import FourierRPE
from molflt.nn.spectra import GaussianBasisSpectrum, GaussianMixtureSpectrum

NUM_RADII = 800
NUM_RANDOM_DIRECTIONS = 32
SMALLEST_SPECTRUM = 1e-300
LEAST_GROWTH = 0.05
LARGEST_USEFUL_BOUND = 1e6
"""R = c^2 frequencies bring the estimate's standard error to 1."""


class UnboundedRatioWarning(UserWarning):
    """g/p is unbounded: the sampling density's tails are thinner than the spectrum's."""


@torch.no_grad()
def rpe_bias_error(
    rpe: FourierRPE, pos: Float[Tensor, "B N X"], atom_mask: Bool[Tensor, "B N"] | None = None
) -> Float[Tensor, "B H"]:
    """Largest |estimate - f| over all pairs of real positions, in units of f (attention logits).

    0 for a graph without real positions. Raises NotImplementedError where the spectrum has no closed form,
    and ValueError for shapes that do not belong together.

    Args:
        rpe: the encoding.
        pos: positions.
        atom_mask: true at real positions; all are without it.
    """
    if pos.ndim != 3 or pos.shape[-1] != rpe.position_dim:
        remedy = "pass pos[None] for one graph" if pos.ndim == 2 else "its last dimension is the RPE's"
        raise ValueError(f"pos must have shape [B, N, {rpe.position_dim}], got {list(pos.shape)}; {remedy}")
    if atom_mask is not None:
        check_atom_mask(atom_mask, pos.shape[:-1])
    if pos.shape[1] == 0:
        return pos.new_zeros((pos.shape[0], rpe.num_heads))
    error = (rpe.dense_bias(pos) - rpe.closed_form_bias(pos)).abs()
    if atom_mask is not None:
        pairs = atom_mask.unsqueeze(-1) & atom_mask.unsqueeze(-2)
        error = torch.where(pairs.unsqueeze(1), error, 0.0)
    return error.amax((-1, -2))


@torch.no_grad()
def attention_error(
    layer: FLTAttention,
    x: Float[Tensor, "B N C"],
    pos: Float[Tensor, "B N X"] | None = None,
    atom_mask: Bool[Tensor, "B N"] | None = None,
) -> Float[Tensor, "B H"]:
    """Error of a layer's attention against its exact twin: |out - exact| / |exact|, norms over real tokens.

    The twin is softmax attention over the layer's own queries, keys and values with the coupling's
    `exact_bias` under the layer's own frequencies, so what is measured is the feature map's error alone;
    `rpe_bias_error` has the frequencies'. For feature maps of another kernel than exp (ReLU, elu + 1) it is
    the distance from softmax attention and has no reason to be small. 1 is as bad as no output at all.
    Quadratic in N. 0 for a graph without real tokens. Raises ValueError as the layer's `forward` does.

    Args:
        layer: the attention layer. For an `FLTConv` pass `conv.attention`, and one graph as `x[None]` and
            `pos[None]` (or `to_dense(x, batch)` and so on).
        x, pos, atom_mask: as in its `forward`.
    """
    layer.check_inputs(x, pos, atom_mask)
    query, key, value = layer.heads(zero_padding(x, atom_mask))
    if pos is not None:
        pos = zero_padding(pos, atom_mask)
    out = flt_attention(
        query,
        key,
        value,
        pos,
        atom_mask,
        feature_map=layer.feature_map,
        coupling=layer.coupling,
        rpe=layer.rpe,
        causal=layer.causal,
        chunk_size=layer.chunk_size,
        eps=layer.eps,
    )
    bias = layer.coupling.exact_bias(layer.rpe, pos)
    exact = softmax_attention(query, key, value, bias, atom_mask, layer.causal)
    if atom_mask is not None:
        out = out.masked_fill(~atom_mask[:, None, :, None], 0.0)
    difference = (out - exact).flatten(-2).norm(dim=-1)
    return torch.where(difference == 0, 0.0, difference / exact.flatten(-2).norm(dim=-1))


@torch.no_grad()
def effective_sample_size(rpe: FourierRPE) -> Float[Tensor, "*G H"]:
    """(sum_k |W_k|)^2 / sum_k |W_k|^2 per head: how many of the R frequencies carry the estimate, 1 to R.

    NaN for a head whose weights are all zero.
    """
    amplitudes = rpe.amplitudes().double()
    return amplitudes.sum(-1).square() / amplitudes.square().sum(-1)


@torch.no_grad()
def variance_bound(rpe: FourierRPE) -> Float[Tensor, "H"]:
    """c = sup |g|/p per head, so that Var[estimate] <= (c^2 - f^2)/R; infinite where g/p is unbounded.

    The supremum is searched in float64 along rays from the spectrum's peaks, as far out as |g| can be
    represented (1e-300). A head counts as unbounded where the largest ratio lies at the outer ends of the
    rays; where the density is the mixture of the spectrum's own T Gaussian components, the ratio tends to a
    limit out there, and T max|amplitude|, which bounds it everywhere, is given instead. (A density that is
    too thin by less than about 0.5 % passes: its ratio overtakes the peak further out than that.) The first
    time a head is unbounded for an `rpe`, or above 1e6, which is as bad, an `UnboundedRatioWarning` says so.

    Raises NotImplementedError for samplers without a density (quadrature has no variance: see
    `rpe_bias_error`).
    """
    exact = copy.deepcopy(rpe).double()
    frequencies = exact.sampler().frequencies
    exact.sampler.log_sampling_density(frequencies)  # Raises where there is no density.
    rays = _rays(exact.spectrum.peaks().to(frequencies), frequencies)
    points = rays.flatten(1, -2)
    spectrum = exact.spectrum(points).abs()
    log_ratio = spectrum.log() - exact.sampler.log_sampling_density(points)
    log_ratio = log_ratio.masked_fill(spectrum < SMALLEST_SPECTRUM, -torch.inf).view(rays.shape[:-1])
    bound = log_ratio.amax((-1, -2)).exp()
    bound = torch.where(_grows_outward(log_ratio), _bound_by_components(exact), bound)
    useless = bound > LARGEST_USEFUL_BOUND
    if useless.any() and not rpe.unbounded_ratio_reported:
        rpe.unbounded_ratio_reported = True
        heads = useless.nonzero().flatten().tolist()
        warnings.warn(
            f"g/p is unbounded in heads {heads}, or as good as (up to {bound[useless].min():.0e} or more): "
            "a single draw's estimate of f can be arbitrarily far off. Take a wider sampling density (larger "
            "std), or a matched one (MatchedMixtureFrequencies, MatchedKernelFrequencies).",
            UnboundedRatioWarning,
            stacklevel=2,
        )
    return bound


def _bound_by_components(rpe: FourierRPE) -> Float[Tensor, "H"]:
    """T max_t |a_t| of sum_t a_t N_t over the mean of the same N_t; infinite for other pairs of g and p.

    Towards a limit the ratio moves like exp(r (mu_s - mu_t).u / sigma^2), slowly where means lie close.
    """
    spectrum, sampler = rpe.spectrum, rpe.sampler
    unbounded = sampler.frequencies.new_full((rpe.num_heads,), torch.inf)
    if type(sampler) is not MatchedMixtureFrequencies:
        return unbounded
    if type(spectrum) is not GaussianBasisSpectrum and type(spectrum) is not GaussianMixtureSpectrum:
        return unbounded
    ours, theirs = spectrum.components, sampler.components
    if ours is not theirs and not (_same(ours.raw_std, theirs.raw_std) and _same(ours.mean, theirs.mean)):
        return unbounded
    amplitude = spectrum.amplitude.abs()
    if isinstance(spectrum, GaussianMixtureSpectrum) and spectrum.sine_amplitude is not None:
        amplitude = torch.hypot(amplitude, spectrum.sine_amplitude)
    return ours.num_components * amplitude.amax(-1)


def _same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Whether two parameters that may be absent hold the same."""
    if ours is None or theirs is None:
        return ours is theirs
    return torch.equal(ours, theirs)


def _rays(peaks: Float[Tensor, "H K X"], frequencies: Float[Tensor, "H R X"]) -> Float[Tensor, "H D N X"]:
    """Points on rays from every peak: along the axes, the diagonal, towards other peaks, and at random."""
    num_heads, _, position_dim = peaks.shape
    axes = torch.eye(position_dim)
    diagonal = torch.ones(1, position_dim)
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(NUM_RANDOM_DIRECTIONS, position_dim, generator=generator)
    directions = torch.cat([axes, diagonal, random]).to(peaks).expand(num_heads, -1, -1)
    directions = torch.cat([directions, peaks[:, peaks.norm(dim=-1).amin(0) > 0]], dim=1)
    directions = torch.cat([directions, -directions], dim=1)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    scale = frequencies.square().sum(-1).mean(-1).sqrt()
    radii = scale.unsqueeze(-1) * torch.logspace(-3, 3, NUM_RADII).to(peaks)
    steps = directions[:, None, :, None, :] * radii[:, None, None, :, None]
    return (peaks[:, :, None, None, :] + steps).flatten(1, 2)


def _grows_outward(log_ratio: Float[Tensor, "H D N"]) -> Bool[Tensor, "H"]:
    """Whether a head's largest ratio lies in the outer half of the radii where the spectrum is non-zero."""
    index = torch.arange(log_ratio.shape[-1], device=log_ratio.device)
    last = torch.where(log_ratio > -torch.inf, index, -1).amax(-1, keepdim=True)
    # The radii are log-spaced over six decades: half the outermost radius is this many steps further in.
    outer = index > last - NUM_RADII // 20
    outer_peak = log_ratio.masked_fill(~outer, -torch.inf).amax((-1, -2))
    inner_peak = log_ratio.masked_fill(outer, -torch.inf).amax((-1, -2))
    return outer_peak > inner_peak + LEAST_GROWTH
