"""Kernel spectra: amplitude times kernel on both sides of the transform."""

import pytest
import torch

from molflt.nn.kernel_spectra import ShiftInvariantKernelSpectrum
from molflt.nn.kernels import GaussianKernel, LaplacianKernel, MaternKernel


@pytest.mark.parametrize(
    "kernel", [GaussianKernel(2, 3, 1.3), LaplacianKernel(2, 3, 1.3), MaternKernel(2, 3, 1.3)]
)
def test_a_signed_amplitude_scales_density_and_kernel_alike(kernel) -> None:
    spectrum = ShiftInvariantKernelSpectrum(kernel)
    with torch.no_grad():
        spectrum.amplitude.copy_(torch.tensor([2.0, -3.0]))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(spectrum.closed_form(x), kernel(x) * torch.tensor([2.0, -3.0]))
    expected = kernel.log_spectral_density(x[None]).exp() * torch.tensor([[2.0], [-3.0]])
    torch.testing.assert_close(spectrum(x[None]), expected)


def test_reset_restores_length_and_amplitude() -> None:
    spectrum = ShiftInvariantKernelSpectrum(MaternKernel(2, 3, 1.3))
    with torch.no_grad():
        for parameter in spectrum.parameters():
            parameter.add_(1.0)
    spectrum.reset_parameters()
    torch.testing.assert_close(spectrum.kernel.length, torch.full((2,), 1.3))
    torch.testing.assert_close(spectrum.amplitude, torch.ones(2))
