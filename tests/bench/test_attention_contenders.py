"""Each contender against the formula it stands for, written out with N x N weights in float64."""

import sys

import pytest
import torch
from torch import Tensor

from molflt.bench.attention_contenders import (
    BOX,
    FLT,
    PERFORMER,
    PERFORMER_PYTORCH,
    PYG,
    SOFTMAX,
    AttentionInputs,
    Contender,
    import_performer_pytorch,
    make_contenders,
    make_inputs,
)
from molflt.bench.attention_settings import AttentionBenchSettings, Level
from molflt.bench.measure import matmul_flops, peak_memory

SETTINGS = AttentionBenchSettings(heads=2, head_dim=5, features=7, frequencies=3, batch_size=2, seed=4)
LENGTH = 11
NAMES = (FLT, PERFORMER, SOFTMAX, PYG, PERFORMER_PYTORCH)


def contender(name: str, level: Level = "core") -> Contender:
    found = {c.name: c for c in make_contenders(SETTINGS, level, torch.float64).present}
    if name == PERFORMER_PYTORCH and name not in found:
        pytest.skip("performer-pytorch is not installed")
    return found[name]


def module_of(found: Contender) -> torch.nn.Module:
    """The layer that the contender's function closes over."""
    cells = found.attend.__closure__ or ()
    return next(c.cell_contents for c in cells if isinstance(c.cell_contents, torch.nn.Module))


def inputs(level: Level = "core") -> AttentionInputs:
    return make_inputs(SETTINGS, level, LENGTH, torch.float64)


def normalised(weights: Tensor, value: Tensor) -> Tensor:
    return (weights / weights.sum(-1, keepdim=True)) @ value


def exponential_weights(query: Tensor, key: Tensor, projection: Tensor) -> Tensor:
    """a_ij = sum_m exp(w_m.q_i - |q_i|^2/2) exp(w_m.k_j - |k_j|^2/2)."""

    def features(x: Tensor) -> Tensor:
        return (x @ projection.transpose(-1, -2) - x.square().sum(-1, keepdim=True) / 2).exp()

    return features(query) @ features(key).transpose(-1, -2)


def flt_reference(i: AttentionInputs, layer: torch.nn.Module) -> Tensor:
    query_rpe_features, key_rpe_features = layer.rpe(i.pos)
    scale = SETTINGS.head_dim**-0.25
    query = torch.cat([query_rpe_features, scale * i.query], dim=-1)
    key = torch.cat([key_rpe_features, scale * i.key], dim=-1)
    return normalised(exponential_weights(query, key, layer.feature_map.projection), i.value)


def performer_reference(i: AttentionInputs, layer: torch.nn.Module) -> Tensor:
    scale = SETTINGS.head_dim**-0.25
    weights = exponential_weights(scale * i.query, scale * i.key, layer.feature_map.projection)
    return normalised(weights, i.value)


def softmax_reference(i: AttentionInputs, layer: torch.nn.Module) -> Tensor:
    logits = i.query @ i.key.transpose(-1, -2) / SETTINGS.head_dim**0.5 + layer.rpe.dense_bias(i.pos)
    return normalised(logits.exp(), i.value)


def relu_reference(i: AttentionInputs, projection: Tensor) -> Tensor:
    query, key = ((x @ projection.T).relu() + 1e-3 for x in (i.query, i.key))
    return normalised(query @ key.transpose(-1, -2), i.value)


def favor_reference(i: AttentionInputs, projection: Tensor) -> Tensor:
    """Positive features with performer-pytorch's stabilisers, detached, and its epsilon."""
    scale = SETTINGS.head_dim**-0.25

    def features(x: Tensor, over: tuple[int, ...]) -> Tensor:
        logits = scale * x @ projection.T
        half_norm = (scale * x).square().sum(-1, keepdim=True) / 2
        return (logits - half_norm - logits.detach().amax(over, keepdim=True)).exp() + 1e-4

    query, key = features(i.query, (-1,)), features(i.key, (-1, -2))
    return normalised(query @ key.transpose(-1, -2), i.value)


def reference(name: str, i: AttentionInputs) -> Tensor:
    # The core and the layer of one seed have the same weights, and layers hold them by name.
    layer = module_of(contender(name, "layer"))
    if name == PYG:
        return relu_reference(i, layer.fast_attn.projection_matrix)
    if name == PERFORMER_PYTORCH:
        return favor_reference(i, layer.fast_attention.projection_matrix)
    references = {FLT: flt_reference, PERFORMER: performer_reference, SOFTMAX: softmax_reference}
    return references[name](i, layer)


@pytest.mark.parametrize("name", NAMES)
def test_a_core_computes_the_attention_it_stands_for(name: str) -> None:
    i = inputs()
    torch.testing.assert_close(contender(name).forward(i), reference(name, i), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_its_core_between_its_projections(name: str) -> None:
    found = contender(name, "layer")
    layer = module_of(found)
    kinds = {
        PYG: ("q", "k", "v", "attn_out"),
        PERFORMER_PYTORCH: ("to_q", "to_k", "to_v", "to_out"),
    }
    query, key, value, out = (
        getattr(layer, kind) for kind in kinds.get(name, ("query", "key", "value", "out"))
    )
    i = inputs("layer")

    def heads(linear: torch.nn.Module) -> Tensor:
        return linear(i.x).unflatten(-1, (SETTINGS.heads, SETTINGS.head_dim)).transpose(1, 2)

    attended = reference(name, i._replace(query=heads(query), key=heads(key), value=heads(value)))
    expected = out(attended.transpose(1, 2).flatten(-2))
    torch.testing.assert_close(found.forward(i), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_training_gives_the_gradients_of_inputs_and_parameters(name: str) -> None:
    found, i = contender(name), inputs()
    leaves = {field: getattr(i, field).clone().requires_grad_() for field in ("query", "key", "value")}
    loss = (reference(name, i._replace(**leaves)) * i.cotangent).sum()
    expected = torch.autograd.grad(loss, list(leaves.values()))
    torch.testing.assert_close(found.train(i)[:3], expected, rtol=1e-8, atol=1e-8)
    assert not found.forward(i).requires_grad


def test_training_reaches_the_parameters_of_spectrum_and_sampler() -> None:
    found, i = contender(FLT), inputs()
    gradients = found.train(i)[3:]
    assert len(gradients) == len(found.parameters) > 0
    step, direction = 1e-6, [g.sign() for g in gradients]
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, towards in zip(found.parameters, direction, strict=True):
                parameter.add_(sign * step * towards)
            losses.append((found.attend(i) * i.cotangent).sum())
            for parameter, towards in zip(found.parameters, direction, strict=True):
                parameter.sub_(sign * step * towards)
    slope = (losses[0] - losses[1]) / (2 * step)
    expected = sum(g.abs().sum() for g in gradients)
    assert slope.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("name", [FLT, SOFTMAX])
@pytest.mark.parametrize("level", ["core", "layer"])
def test_positions_matter_where_there_is_an_rpe(name: str, level: Level) -> None:
    found, i = contender(name, level), inputs(level)
    assert (found.forward(i) - found.forward(i._replace(pos=i.pos.flip(1)))).abs().max() > 1e-3


def test_all_contenders_have_the_asked_number_of_features() -> None:
    for name, get in (
        (FLT, lambda m: m.feature_map.projection),
        (PERFORMER, lambda m: m.feature_map.projection),
        (PYG, lambda m: m.fast_attn.projection_matrix),
    ):
        assert get(module_of(contender(name, "layer"))).shape[-2] == SETTINGS.features, name
    package = module_of(contender(PERFORMER_PYTORCH, "layer"))
    assert package.fast_attention.projection_matrix.shape[0] == SETTINGS.features


def test_only_softmax_is_marked_quadratic_and_it_alone_holds_pairs() -> None:
    settings = AttentionBenchSettings(heads=1, head_dim=2, features=2, frequencies=1)
    length = 1009
    pairs = 4 * length**2
    for found in make_contenders(settings, "core").present:
        i = make_inputs(settings, "core", length)
        found.forward(i)
        assert (peak_memory(lambda: found.forward(i), torch.device("cpu")) > pairs / 2) == found.quadratic  # noqa: B023


def test_the_performer_does_four_products_a_token_and_flt_two_more() -> None:
    heads, width, features, basis = 2 * SETTINGS.heads, SETTINGS.head_dim, SETTINGS.features, 6
    i, performer_core, flt_core = inputs(), contender(PERFORMER), contender(FLT)
    performer = matmul_flops(lambda: performer_core.forward(i))
    assert performer == 2 * heads * LENGTH * 4 * width * features
    # Phases are a product with positions, of which the RPE may use more columns than three to keep digits.
    more = matmul_flops(lambda: flt_core.forward(i)) - performer
    folded = 2 * heads * LENGTH * 2 * basis * features
    assert 0 <= (more - folded) / (2 * heads * LENGTH * SETTINGS.frequencies) <= 9


def test_inputs_are_fixed_by_the_seed_and_shared_by_the_levels() -> None:
    first, again = inputs(), inputs()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(first.x, inputs("layer").x)
    other = make_inputs(AttentionBenchSettings(heads=2, head_dim=5, batch_size=2), "core", LENGTH)
    assert not torch.equal(first.query, other.query.double())
    assert first.pos.abs().max() <= BOX / 2
    assert first.pos.std() == pytest.approx(BOX / 12**0.5, rel=0.2)


def test_making_contenders_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_contenders(SETTINGS, "core")
    assert torch.equal(torch.rand(3), expected)


def test_a_missing_performer_pytorch_is_said_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "performer_pytorch", None)
    assert import_performer_pytorch() == 'not installed; pip install "molflt[bench]"'
    contenders = make_contenders(SETTINGS, "core")
    assert [c.name for c in contenders.present] == [FLT, PERFORMER, SOFTMAX, PYG]
    assert list(contenders.absent) == [PERFORMER_PYTORCH]


def test_a_broken_performer_pytorch_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ModuleNotFoundError("No module named 'distutils'", name="distutils")

    monkeypatch.setattr("molflt.bench.attention_contenders.importlib.import_module", broken)
    assert "does not import (No module named 'distutils')" in import_performer_pytorch()
