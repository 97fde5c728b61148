"""The warning about vanishing normalisers."""

import warnings

import pytest
import torch

from molflt.nn.alarm import CALLS_BETWEEN_CHECKS, NormalizerAlarm, VanishingNormalizerWarning
from molflt.nn.attention import FLTAttention
from molflt.nn.couplings import NoCoupling
from molflt.nn.kernel_feature_maps import ReLUFeatures


def test_a_layer_whose_normaliser_vanishes_warns_once():
    layer = FLTAttention(6, 2, coupling=NoCoupling(), feature_map=ReLUFeatures(3, offset=0.0))
    with torch.no_grad():
        layer.key.weight.zero_()
    x = torch.randn(1, 5, 6)
    with pytest.warns(VanishingNormalizerWarning, match=r"below eps=1e-06 at 10 of 10 queries and heads"):
        out = layer(x)
    assert out.isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * CALLS_BETWEEN_CHECKS):
            layer(x)


def test_padded_queries_and_healthy_normalisers_raise_no_alarm():
    normalizer = torch.tensor([[[[1.0], [0.0]]]])
    atom_mask = torch.tensor([[True, False]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NormalizerAlarm()(normalizer, atom_mask, 1e-6)
        NormalizerAlarm()(torch.ones(1, 1, 2, 1), None, 1e-6)


def test_a_negative_normaliser_raises_the_alarm():
    with pytest.warns(VanishingNormalizerWarning, match="negative or below eps=1e-06 at 1 of 2 queries"):
        NormalizerAlarm()(torch.tensor([[[[1.0], [-1.0]]]]), None, 1e-6)


def test_a_normaliser_that_vanishes_later_is_found_at_the_next_check():
    alarm = NormalizerAlarm()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alarm(torch.ones(1, 1, 2, 1), None, 1e-6)
        for _ in range(CALLS_BETWEEN_CHECKS - 1):
            alarm(torch.zeros(1, 1, 2, 1), None, 1e-6)
    with pytest.warns(VanishingNormalizerWarning, match="at 2 of 2 queries"):
        alarm(torch.zeros(1, 1, 2, 1), None, 1e-6)
