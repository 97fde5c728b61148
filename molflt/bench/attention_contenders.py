"""The attentions that `molflt bench attention` compares, each as a core and as a whole layer.

A core takes query, key, value and positions; a layer takes its input and positions, and projects. What
depends on positions alone (FLT's trigonometric basis, the materialised RPE bias) is computed in every call,
although a model shares it between its layers.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.nn.attention import PerformerAttention
from torch_geometric.nn.attention.performer import orthogonal_matrix

from molflt.bench.attention_settings import AttentionBenchSettings, Level
from molflt.nn.attention import FLTAttention, flt_attention
from molflt.nn.couplings import NoCoupling
from molflt.nn.feature_maps import PositiveRandomFeatures
from molflt.nn.functional import softmax_attention
from molflt.nn.rpe import default_rpe
from molflt.nn.softmax import SoftmaxAttention

POSITION_DIM = 3
BOX = 20.0

FLT = "molflt FLT"
PERFORMER = "molflt Performer"
SOFTMAX = "molflt softmax+RPE"
PYG = "PyG PerformerAttention"
PERFORMER_PYTORCH = "performer-pytorch"


class AttentionInputs(NamedTuple):
    """What all contenders of one comparison receive.

    Attributes:
        query, key, value: `[B, H, N, D]`, standard normal.
        x: `[B, N, C]`, standard normal.
        pos: `[B, N, 3]`, uniform in a box of 20 Å.
        cotangent: gradient of some loss in the output, `[B, H, N, D]` or `[B, N, C]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    x: Tensor
    pos: Tensor
    cotangent: Tensor


def make_inputs(
    settings: AttentionBenchSettings,
    level: Level,
    length: int,
    dtype: torch.dtype = torch.float32,
) -> AttentionInputs:
    """Random inputs of `length` tokens, fixed by the settings' seed."""
    generator = torch.Generator().manual_seed(settings.seed)
    heads_first = (settings.batch_size, settings.heads, length, settings.head_dim)
    tokens_first = (settings.batch_size, length, settings.channels)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).to(settings.device)

    query, key, value = (normal(heads_first) for _ in range(3))
    x = normal(tokens_first)
    pos = torch.rand(settings.batch_size, length, POSITION_DIM, generator=generator, dtype=dtype)
    cotangent = normal(heads_first if level == "core" else tokens_first)
    return AttentionInputs(query, key, value, x, (BOX * (pos - 0.5)).to(settings.device), cotangent)


@dataclass(frozen=True)
class Contender:
    """One attention at one level.

    Attributes:
        name: what the tables call it.
        description: what it computes.
        level: which inputs it takes.
        attend: inputs to output.
        parameters: what receives gradients in training, besides the inputs other than positions.
        quadratic: it holds N x N tensors.
    """

    name: str
    description: str
    level: Level
    attend: Callable[[AttentionInputs], Tensor]
    parameters: tuple[Tensor, ...]
    quadratic: bool = False

    def forward(self, inputs: AttentionInputs) -> Tensor:
        """Output without a graph for gradients."""
        with torch.no_grad():
            return self.attend(inputs)

    def train(self, inputs: AttentionInputs) -> tuple[Tensor, ...]:
        """Forward and backward: gradients of the inputs, then of the parameters."""
        names = ("query", "key", "value") if self.level == "core" else ("x",)
        leaves = {name: getattr(inputs, name).detach().requires_grad_() for name in names}
        # Views, since torch's flop counter can not follow modules whose inputs are leaves.
        views = {name: leaf.view_as(leaf) for name, leaf in leaves.items()}
        output = self.attend(inputs._replace(**views))
        wanted = (*leaves.values(), *self.parameters)
        return torch.autograd.grad(output, wanted, inputs.cotangent)


class Contenders(NamedTuple):
    """Contenders of one level, and why others are missing.

    Attributes:
        present: in the order of the tables.
        absent: name to reason.
    """

    present: list[Contender]
    absent: dict[str, str]


def make_contenders(
    settings: AttentionBenchSettings, level: Level, dtype: torch.dtype = torch.float32
) -> Contenders:
    """All contenders of one level, with weights fixed by the settings' seed."""
    absent = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        present = [
            _flt(settings, level, dtype),
            _performer(settings, level, dtype),
            _softmax(settings, level, dtype),
            _pyg(settings, level, dtype),
        ]
        package = import_performer_pytorch()
        if isinstance(package, ModuleType):
            present.append(_performer_pytorch(package, settings, level, dtype))
        else:
            absent[PERFORMER_PYTORCH] = package
    return Contenders(present, absent)


def import_performer_pytorch() -> ModuleType | str:
    """The package of the extra `molflt[bench]`, or the reason why it can not be used."""
    try:
        # It still imports what newer versions of its dependencies deprecate.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("performer_pytorch")
    except ImportError as error:
        reason = "not installed" if error.name == "performer_pytorch" else f"does not import ({error})"
        return f'{reason}; pip install "molflt[bench]"'


def _parameters(module: nn.Module) -> tuple[Tensor, ...]:
    return tuple(module.parameters())


def _flt(settings: AttentionBenchSettings, level: Level, dtype: torch.dtype) -> Contender:
    rpe = default_rpe(settings.heads, POSITION_DIM, settings.frequencies)
    layer = FLTAttention(
        settings.channels,
        settings.heads,
        position_dim=POSITION_DIM,
        rpe=rpe,
        feature_map=PositiveRandomFeatures(settings.features),
    ).to(settings.device, dtype)
    description = "additive coupling, Gaussian-basis spectrum, positive random features, exact normaliser"
    if level == "layer":
        return Contender(FLT, description, level, lambda i: layer(i.x, i.pos), _parameters(layer))

    def core(inputs: AttentionInputs) -> Tensor:
        query, key, value, pos = inputs.query, inputs.key, inputs.value, inputs.pos
        return flt_attention(query, key, value, pos, feature_map=layer.feature_map, rpe=rpe)

    return Contender(FLT, description, level, core, _parameters(rpe))


def _performer(settings: AttentionBenchSettings, level: Level, dtype: torch.dtype) -> Contender:
    layer = FLTAttention(
        settings.channels,
        settings.heads,
        feature_map=PositiveRandomFeatures(settings.features),
        coupling=NoCoupling(),
    ).to(settings.device, dtype)
    description = "the same without RPE"
    if level == "layer":
        return Contender(PERFORMER, description, level, lambda i: layer(i.x), _parameters(layer))

    def core(inputs: AttentionInputs) -> Tensor:
        query, key, value = inputs.query, inputs.key, inputs.value
        return flt_attention(query, key, value, feature_map=layer.feature_map)

    return Contender(PERFORMER, description, level, core, ())


def _softmax(settings: AttentionBenchSettings, level: Level, dtype: torch.dtype) -> Contender:
    rpe = default_rpe(settings.heads, POSITION_DIM, settings.frequencies)
    layer = SoftmaxAttention(settings.channels, settings.heads, position_dim=POSITION_DIM, rpe=rpe)
    layer = layer.to(settings.device, dtype)
    description = "exact softmax; FLT's estimate of the RPE bias materialised by one matrix product"

    def materialise_bias(pos: Tensor) -> Tensor:
        # The cheapest way to the bias: displacements would cost R cosines a pair of tokens, its closed form T
        # exponentials.
        query_rpe_features, key_rpe_features = rpe(pos)
        return query_rpe_features @ key_rpe_features.transpose(-1, -2)

    if level == "layer":

        def whole(inputs: AttentionInputs) -> Tensor:
            return layer(inputs.x, positional=materialise_bias(inputs.pos))

        return Contender(SOFTMAX, description, level, whole, _parameters(layer), quadratic=True)

    def core(inputs: AttentionInputs) -> Tensor:
        return softmax_attention(inputs.query, inputs.key, inputs.value, materialise_bias(inputs.pos))

    return Contender(SOFTMAX, description, level, core, _parameters(rpe), quadratic=True)


def _pyg(settings: AttentionBenchSettings, level: Level, dtype: torch.dtype) -> Contender:
    layer = PerformerAttention(settings.channels, settings.heads, settings.head_dim)
    # Its number of features is fixed by the head's width: D ln D.
    layer.fast_attn.projection_matrix = orthogonal_matrix(settings.features, settings.head_dim)
    layer = layer.to(settings.device, dtype)
    description = "ReLU features, one projection for all heads, no RPE; its M set to ours"
    if level == "layer":
        return Contender(PYG, description, level, lambda i: layer(i.x), _parameters(layer))
    core = layer.fast_attn
    return Contender(PYG, description, level, lambda i: core(i.query, i.key, i.value), ())


def _performer_pytorch(
    package: ModuleType, settings: AttentionBenchSettings, level: Level, dtype: torch.dtype
) -> Contender:
    layer = package.SelfAttention(
        settings.channels, heads=settings.heads, dim_head=settings.head_dim, nb_features=settings.features
    ).to(settings.device, dtype)
    description = "positive random features plus an epsilon, one projection for all heads, no RPE"
    if level == "layer":
        return Contender(PERFORMER_PYTORCH, description, level, lambda i: layer(i.x), _parameters(layer))
    core = layer.fast_attention
    return Contender(PERFORMER_PYTORCH, description, level, lambda i: core(i.query, i.key, i.value), ())
