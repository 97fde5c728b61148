"""An RPE learns a given f in 200 optimiser steps, as well as the estimator's own error allows."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from molflt.nn.frequencies import GaussianFrequencies
from molflt.nn.kernel_spectra import ShiftInvariantKernelSpectrum
from molflt.nn.kernels import GaussianKernel
from molflt.nn.local_spectra import LocalBoxSpectrum
from molflt.nn.rpe import FourierRPE, default_rpe
from molflt.nn.spectra import GaussianMixtureSpectrum, Spectrum

HEADS, FREQUENCIES = 2, 64


class Shifted(Spectrum):
    """f(x - offset) for the f of another spectrum: g turns by exp(-2 pi i xi.offset)."""

    def __init__(self, spectrum: Spectrum, offset: float) -> None:
        super().__init__(spectrum.num_heads, spectrum.position_dim)
        self.spectrum = spectrum
        self.offset = offset

    def forward(self, frequencies: Tensor) -> Tensor:
        return torch.polar(self.spectrum(frequencies), -2 * math.pi * self.offset * frequencies.sum(-1))

    def closed_form(self, displacement: Tensor) -> Tensor:
        return self.spectrum.closed_form(displacement - self.offset)


def gaussian_case() -> tuple[FourierRPE, Spectrum, Tensor]:
    """A Gaussian of width 1.5 in three dimensions, by the default RPE."""
    target = ShiftInvariantKernelSpectrum(GaussianKernel(HEADS, 3, 1.5))
    return default_rpe(HEADS, 3, FREQUENCIES, width_range=(1.0, 4.0)), target, 6 * torch.rand(1, 31, 3)


def box_case() -> tuple[FourierRPE, Spectrum, Tensor]:
    """A window of 2 tokens to either side in a sequence."""
    target = LocalBoxSpectrum(HEADS, 1, 1, (2.5, 2.5))
    with torch.no_grad():
        target.amplitude.fill_(1.0)
    rpe = FourierRPE(GaussianFrequencies(HEADS, FREQUENCIES, 1, 0.25), LocalBoxSpectrum(HEADS, 1))
    return rpe, target, torch.arange(31.0).view(1, -1, 1)


def asymmetric_case() -> tuple[FourierRPE, Spectrum, Tensor]:
    """A bump around the tokens 2 places before."""
    target = Shifted(ShiftInvariantKernelSpectrum(GaussianKernel(HEADS, 1, 2.0)), 2.0)
    spectrum = GaussianMixtureSpectrum(HEADS, 1, asymmetric=True)
    rpe = FourierRPE(GaussianFrequencies(HEADS, FREQUENCIES, 1, 0.15), spectrum)
    return rpe, target, torch.arange(31.0).view(1, -1, 1)


@torch.no_grad()
def rms_errors(rpe: FourierRPE, expected: Tensor, pos: Tensor, redraws: int) -> Tensor:
    """RMS error of the dense bias for each of several redraws."""
    errors, generator = [], torch.Generator().manual_seed(0)
    for _ in range(redraws):
        rpe.sampler.resample(generator)
        errors.append((rpe.dense_bias(pos) - expected).square().mean().sqrt())
    return torch.stack(errors)


@pytest.mark.parametrize("case", [gaussian_case, box_case, asymmetric_case])
@pytest.mark.parametrize("seed", [0, 1])
def test_two_hundred_steps_fit_a_target_to_the_error_the_theory_allows(
    case: Callable[[], tuple[FourierRPE, Spectrum, Tensor]], seed: int
) -> None:
    """Below the median RMS error of the estimate with the target's own spectrum, same R and density."""
    torch.manual_seed(seed)
    rpe, target, pos = case()
    truth = FourierRPE(copy.deepcopy(rpe.sampler), target)
    expected = truth.closed_form_bias(pos).detach()
    allowed = rms_errors(truth, expected, pos, 100).median().item()
    optimizer = torch.optim.Adam(rpe.parameters(), lr=0.05)
    errors = []
    for _ in range(200):
        optimizer.zero_grad()
        query, key = rpe(pos)
        loss = (query @ key.mT - expected).square().mean()
        loss.backward()
        optimizer.step()
        errors.append(loss.item() ** 0.5)
    assert errors[-1] < allowed
    assert errors[-1] < 0.5 * errors[0]
