"""Layers of molflt: tensors in, tensors out. Knows nothing of molecules, files or configurations."""

from molflt.nn.alarm import VanishingNormalizerWarning
from molflt.nn.attention import FLTAttention, flt_attention
from molflt.nn.causal import causal_linear_attention
from molflt.nn.conv import FLTConv
from molflt.nn.couplings import AdditiveCoupling, Coupling, MultiplicativeCoupling, NoCoupling
from molflt.nn.diagnostics import (
    UnboundedRatioWarning,
    attention_error,
    effective_sample_size,
    rpe_bias_error,
    variance_bound,
)
from molflt.nn.element_pairs import ElementPairFLTAttention, ElementPairRPE
from molflt.nn.far import FarModulation
from molflt.nn.feature_maps import (
    FeatureMap,
    HyperbolicRandomFeatures,
    OptimalPositiveFeatures,
    PositiveRandomFeatures,
)
from molflt.nn.frequencies import (
    FrequencySample,
    FrequencySampler,
    GaussianFrequencies,
    OrthogonalGaussianFrequencies,
    SobolGaussianFrequencies,
    resample_,
)
from molflt.nn.functional import linear_attention, quadratic_linear_attention, softmax_attention
from molflt.nn.gaussian_components import GaussianComponents
from molflt.nn.kernel_feature_maps import (
    CosineReweighting,
    EluFeatures,
    ReLUFeatures,
    RFAArcCosineFeatures,
    RFAGaussianFeatures,
)
from molflt.nn.kernel_spectra import ShiftInvariantKernelSpectrum
from molflt.nn.kernels import GaussianKernel, LaplacianKernel, MaternKernel, ShiftInvariantKernel
from molflt.nn.lattice import LatticeFrequencies, lattice_frequencies
from molflt.nn.lattice_attention import LatticeFLTAttention, LatticeRPE
from molflt.nn.lattice_rpe import lattice_rpe
from molflt.nn.local_spectra import LocalBoxSpectrum, SmoothLocalSpectrum
from molflt.nn.matched_frequencies import MatchedKernelFrequencies, MatchedMixtureFrequencies
from molflt.nn.near import EdgeFeatureNearBias, NearBias, NearGraph, RadialNearBias
from molflt.nn.packing import dense_layout, to_dense, to_ragged
from molflt.nn.periodic import PeriodicGeometry
from molflt.nn.quadrature import SphericalQuadratureFrequencies
from molflt.nn.radial_spectra import RadialMLPSpectrum
from molflt.nn.range_separated import (
    RangeSeparatedAttention,
    RangeSeparatedRPE,
    dense_range_separated_attention,
    range_separated_attention,
)
from molflt.nn.rpe import FourierRPE, default_rpe
from molflt.nn.softmax import SoftmaxAttention
from molflt.nn.spectra import GaussianBasisSpectrum, GaussianMixtureSpectrum, Spectrum

__all__ = [
    "AdditiveCoupling",
    "CosineReweighting",
    "Coupling",
    "EdgeFeatureNearBias",
    "ElementPairFLTAttention",
    "ElementPairRPE",
    "EluFeatures",
    "FLTAttention",
    "FLTConv",
    "FarModulation",
    "FeatureMap",
    "FourierRPE",
    "FrequencySample",
    "FrequencySampler",
    "GaussianBasisSpectrum",
    "GaussianComponents",
    "GaussianFrequencies",
    "GaussianKernel",
    "GaussianMixtureSpectrum",
    "HyperbolicRandomFeatures",
    "LaplacianKernel",
    "LatticeFLTAttention",
    "LatticeFrequencies",
    "LatticeRPE",
    "LocalBoxSpectrum",
    "MatchedKernelFrequencies",
    "MatchedMixtureFrequencies",
    "MaternKernel",
    "MultiplicativeCoupling",
    "NearBias",
    "NearGraph",
    "NoCoupling",
    "OptimalPositiveFeatures",
    "OrthogonalGaussianFrequencies",
    "PeriodicGeometry",
    "PositiveRandomFeatures",
    "RFAArcCosineFeatures",
    "RFAGaussianFeatures",
    "RadialMLPSpectrum",
    "RadialNearBias",
    "RangeSeparatedAttention",
    "RangeSeparatedRPE",
    "ReLUFeatures",
    "ShiftInvariantKernel",
    "ShiftInvariantKernelSpectrum",
    "SmoothLocalSpectrum",
    "SobolGaussianFrequencies",
    "SoftmaxAttention",
    "Spectrum",
    "SphericalQuadratureFrequencies",
    "UnboundedRatioWarning",
    "VanishingNormalizerWarning",
    "attention_error",
    "causal_linear_attention",
    "default_rpe",
    "dense_layout",
    "dense_range_separated_attention",
    "effective_sample_size",
    "flt_attention",
    "lattice_frequencies",
    "lattice_rpe",
    "linear_attention",
    "quadratic_linear_attention",
    "range_separated_attention",
    "resample_",
    "rpe_bias_error",
    "softmax_attention",
    "to_dense",
    "to_ragged",
    "variance_bound",
]
