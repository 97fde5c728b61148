"""The spectrum of a shift-invariant kernel: g = amplitude p_K, f = amplitude K (Bochner's theorem)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from molflt.nn.kernels import ShiftInvariantKernel
from molflt.nn.spectra import Spectrum


class ShiftInvariantKernelSpectrum(Spectrum):
    """g(xi) = amplitude p_K(xi), f(x) = amplitude K(x), one amplitude per head, of either sign.

    Amplitudes are f(0) and start at 1. Source: arXiv 2302.01925, section 3.3; Rahimi & Recht 2007.

    Args:
        kernel: `GaussianKernel`, `LaplacianKernel` or `MaternKernel`; its length is learned with the
        amplitude.

    Example:
        >>> from molflt.nn.kernels import MaternKernel
        >>> spectrum = ShiftInvariantKernelSpectrum(MaternKernel(2, 3, length=2.0, smoothness=2.5))
        >>> spectrum.closed_form(torch.zeros(3)).tolist()
        [1.0, 1.0]
    """

    even = True

    def __init__(self, kernel: ShiftInvariantKernel) -> None:
        super().__init__(kernel.num_heads, kernel.position_dim)
        self.kernel = kernel
        self.amplitude = nn.Parameter(torch.empty(kernel.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial length and amplitude 1."""
        self.kernel.reset_parameters()
        nn.init.ones_(self.amplitude)

    def forward(self, frequencies: Float[Tensor, "*G #H R X"]) -> Float[Tensor, "*G H R"]:
        return self.amplitude.unsqueeze(-1) * self.kernel.log_spectral_density(frequencies).exp()

    def closed_form(self, displacement: Float[Tensor, "*S X"]) -> Float[Tensor, "*S H"]:
        return self.amplitude * self.kernel(displacement)
