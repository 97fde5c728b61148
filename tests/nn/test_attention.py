"""The layers: independence of padding, batch mates and order; extremes; precision; what is learned."""

import copy
import itertools
import math

import jaxtyping
import pytest
import torch
from torch import nn
from torch_geometric.nn.attention import PerformerAttention

from molflt.nn.attention import FLTAttention, flt_attention
from molflt.nn.conv import FLTConv
from molflt.nn.couplings import AdditiveCoupling, MultiplicativeCoupling, NoCoupling
from molflt.nn.feature_maps import HyperbolicRandomFeatures, OptimalPositiveFeatures, PositiveRandomFeatures
from molflt.nn.kernel_feature_maps import (
    CosineReweighting,
    EluFeatures,
    ReLUFeatures,
    RFAArcCosineFeatures,
    RFAGaussianFeatures,
)
from molflt.nn.rpe import FourierRPE, default_rpe
from molflt.nn.softmax import SoftmaxAttention

B, N, C, H, X = 3, 11, 14, 2, 3

FEATURE_MAPS = {
    "positive": lambda: PositiveRandomFeatures(13),
    "hyperbolic": lambda: HyperbolicRandomFeatures(10),
    "optimal": lambda: OptimalPositiveFeatures(13),
    "relu": lambda: ReLUFeatures(13),
    "elu": EluFeatures,
    "rfa-gaussian": lambda: RFAGaussianFeatures(200),
    "rfa-arc-cosine": lambda: RFAArcCosineFeatures(13),
    "cosine": lambda: CosineReweighting(max_length=64),
}
COUPLINGS = {"additive": AdditiveCoupling, "multiplicative": MultiplicativeCoupling, "none": NoCoupling}


def make_layer(feature_map: str = "positive", coupling: str = "additive", position_dim: int = X, **options):
    """A float64 layer of each kind."""
    layer = FLTAttention(
        C,
        H,
        position_dim=position_dim,
        rpe=None if coupling == "none" else default_rpe(H, position_dim, num_frequencies=5, num_basis=4),
        feature_map=FEATURE_MAPS[feature_map](),
        coupling=COUPLINGS[coupling](),
        **options,
    )
    return layer.double()


def all_layers() -> dict[str, nn.Module]:
    """Every feature map with every coupling, causal ones, and the softmax twin."""
    torch.manual_seed(0)
    layers: dict[str, nn.Module] = {
        f"{feature_map}-{coupling}": make_layer(feature_map, coupling)
        for feature_map, coupling in itertools.product(FEATURE_MAPS, COUPLINGS)
    }
    layers["causal-additive"] = make_layer(causal=True, chunk_size=4)
    layers["causal-multiplicative"] = make_layer(coupling="multiplicative", causal=True, chunk_size=4)
    layers["causal-elu"] = make_layer("elu", causal=True, chunk_size=4)
    layers["softmax"] = SoftmaxAttention(C, H).double()
    layers["softmax-causal"] = SoftmaxAttention(C, H, causal=True).double()
    return layers


LAYERS = all_layers()
each_layer = pytest.mark.parametrize("name", LAYERS)


def make_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, pos and a mask of graphs with 7, 11 and 4 atoms, zeros in the padding."""
    torch.manual_seed(1)
    atom_mask = torch.arange(N) < torch.tensor([[7], [N], [4]])
    x, pos = torch.randn(B, N, C, dtype=torch.float64), torch.randn(B, N, X, dtype=torch.float64)
    return x * atom_mask[..., None], pos * atom_mask[..., None], atom_mask


def outputs_and_gradients(layer, x, pos, atom_mask, weight) -> list[torch.Tensor]:
    """Output, and the gradients of (out * weight).sum() in x, pos and the parameters that take part."""
    x, pos = x.clone().requires_grad_(), pos.clone().requires_grad_()
    out = layer(x, pos, atom_mask)
    leaves = [x, pos, *layer.parameters()]
    gradients = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    return [out, *[torch.zeros_like(a) if g is None else g for a, g in zip(leaves, gradients, strict=True)]]


@each_layer
@pytest.mark.parametrize("content", [1e30, float("nan")])
def test_what_padding_holds_changes_no_value_and_no_gradient(name, content):
    x, pos, atom_mask = make_batch()
    weight = torch.randn(B, N, C, dtype=torch.float64)
    clean = outputs_and_gradients(LAYERS[name], x, pos, atom_mask, weight)
    padding = ~atom_mask[..., None]
    dirty = outputs_and_gradients(
        LAYERS[name], x.masked_fill(padding, content), pos.masked_fill(padding, content), atom_mask, weight
    )
    for with_zeros, with_content in zip(clean, dirty, strict=True):
        assert torch.equal(with_zeros, with_content)
    for of_rows in dirty[:3]:
        assert of_rows[~atom_mask].abs().max() == 0
    assert dirty[1][atom_mask].abs().min() > 0


@each_layer
def test_a_graph_alone_equals_the_graph_in_any_batch_in_value_and_gradient(name):
    """Batch of three in reverse order with 6 more rows of padding, against each graph by itself without a
    mask."""
    layer = LAYERS[name]
    x, pos, atom_mask = make_batch()
    weight = torch.randn(B, N, C, dtype=torch.float64)
    x_batch, pos_batch, mask_batch, weight_batch = (
        torch.cat([a, torch.zeros(B, 6, *a.shape[2:], dtype=a.dtype)], dim=1).flip(0)
        for a in (x, pos, atom_mask, weight)
    )
    together = outputs_and_gradients(layer, x_batch, pos_batch, mask_batch, weight_batch)
    parameter_gradients = [torch.zeros_like(parameter) for parameter in layer.parameters()]
    for graph, size in enumerate(atom_mask.sum(-1).tolist()):
        one = slice(graph, graph + 1)
        alone = outputs_and_gradients(layer, x[one, :size], pos[one, :size], None, weight[one, :size])
        for ours, theirs in zip(together[:3], alone[:3], strict=True):
            torch.testing.assert_close(ours[B - 1 - graph, :size], theirs[0], rtol=1e-9, atol=1e-9)
        for total, gradient in zip(parameter_gradients, alone[3:], strict=True):
            total += gradient
    for ours, theirs in zip(together[3:], parameter_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


def test_pyg_performer_attention_fails_the_same_check():
    """Negative control: PyG masks the values only, so padding moves the output of its real rows."""
    torch.manual_seed(2)
    layer = PerformerAttention(channels=C, heads=H, head_channels=C // H).double().eval()
    x, _, atom_mask = make_batch()
    alone = layer(x[:1, :7], torch.ones(1, 7, dtype=torch.bool))
    together = layer(x, atom_mask)
    assert (together[0, :7] - alone[0]).abs().max() > 1e-3 * alone.abs().max()


@each_layer
def test_a_batch_with_an_empty_graph_is_finite(name):
    x, pos, atom_mask = make_batch()
    atom_mask = atom_mask.clone()
    atom_mask[1] = False
    for tensor in outputs_and_gradients(LAYERS[name], x, pos, atom_mask, torch.ones(B, N, C).double()):
        assert tensor.isfinite().all()


@each_layer
def test_no_graphs_give_no_output(name):
    x, pos, atom_mask = make_batch()
    assert LAYERS[name](x[:0], pos[:0], atom_mask[:0]).shape == (0, N, C)


@pytest.mark.parametrize("name", [name for name in LAYERS if "causal" not in name and "cosine" not in name])
def test_layers_are_permutation_equivariant(name):
    x, pos, atom_mask = make_batch()
    order = torch.randperm(N)
    out = LAYERS[name](x, pos, atom_mask)
    permuted = LAYERS[name](x[:, order], pos[:, order], atom_mask[:, order])
    torch.testing.assert_close(permuted, out[:, order], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in LAYERS if "none" not in name])
def test_shuffled_positions_change_the_output(name):
    """Negative control: positions do enter."""
    x, pos, _ = make_batch()
    assert (LAYERS[name](x, 2 * pos) - LAYERS[name](x, 2 * pos.flip(1))).abs().max() > 1e-4


@pytest.mark.parametrize("name", [name for name in LAYERS if "causal" in name])
def test_causal_layers_never_see_later_tokens(name):
    x, pos, _ = make_batch()
    now = 5
    later_x, later_pos = x.clone(), pos.clone()
    later_x[:, now + 1 :] = 30 * torch.randn(B, N - now - 1, C)
    later_pos[:, now + 1 :] += 1
    out, changed = LAYERS[name](x, pos), LAYERS[name](later_x, later_pos)
    torch.testing.assert_close(changed[:, : now + 1], out[:, : now + 1], rtol=1e-10, atol=1e-10)
    assert (changed[:, now + 1 :] - out[:, now + 1 :]).abs().max() > 1e-3
    leaves = [x.clone().requires_grad_(), pos.clone().requires_grad_()]
    gradients = torch.autograd.grad(LAYERS[name](*leaves)[:, now].square().sum(), leaves)
    for gradient in gradients:
        assert (gradient[:, : now + 1] != 0).any()
        assert (gradient[:, now + 1 :] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature_map", [PositiveRandomFeatures, HyperbolicRandomFeatures])
def test_the_linear_layer_tends_to_the_softmax_layer_with_the_same_state(feature_map, causal):
    torch.manual_seed(3)
    rpe = default_rpe(H, X, num_frequencies=5, num_basis=4)
    linear = FLTAttention(C, H, rpe=rpe, feature_map=feature_map(16384), causal=causal, chunk_size=4).double()
    with torch.no_grad():
        linear.query.weight.div_(3)
        linear.key.weight.div_(3)
    softmax = SoftmaxAttention(C, H, rpe=rpe, closed_form=False, causal=causal).double()
    state = {name: t for name, t in linear.state_dict().items() if not name.startswith("feature_map")}
    softmax.load_state_dict(state)
    without_rpe = SoftmaxAttention(C, H, use_rpe=False, causal=causal).double()
    without_rpe.load_state_dict({name: t for name, t in state.items() if not name.startswith("rpe")})
    x, pos, atom_mask = make_batch()
    exact = softmax(x, pos, atom_mask)
    error = (linear(x, pos, atom_mask) - exact).square().mean().sqrt()
    effect = (without_rpe(x, None, atom_mask) - exact).square().mean().sqrt()
    assert error < 0.02 * exact.std()
    assert error < 0.3 * effect


def test_softmax_closed_form_takes_the_bias_of_the_spectrum():
    layer = SoftmaxAttention(C, H).double()
    x, pos, atom_mask = make_batch()
    torch.testing.assert_close(
        layer.encode_positions(pos, atom_mask), layer.rpe.closed_form_bias(pos), rtol=0, atol=0
    )
    assert torch.equal(
        layer(x, pos, atom_mask), layer(x, None, atom_mask, positional=layer.rpe.closed_form_bias(pos))
    )


@pytest.mark.parametrize("name", ["positive-additive", "positive-multiplicative", "softmax"])
def test_positions_encoded_once_serve_every_layer(name):
    x, pos, atom_mask = make_batch()
    layer = LAYERS[name]
    positional = layer.encode_positions(pos, atom_mask)
    assert torch.equal(layer(x, atom_mask=atom_mask, positional=positional), layer(x, pos, atom_mask))


@pytest.mark.parametrize("position_dim", [1, 2, 3, 4])
@pytest.mark.parametrize("coupling", ["additive", "multiplicative"])
def test_one_class_serves_any_position_dim(position_dim, coupling):
    """Every coordinate matters, and the layer is its projections around the core."""
    torch.manual_seed(4)
    x, _, atom_mask = make_batch()
    pos = torch.randn(B, N, position_dim, dtype=torch.float64)
    layer = make_layer("positive", coupling, position_dim)
    out = layer(x, pos, atom_mask)
    query, key, value = layer.heads(x)
    twin = flt_attention(
        query,
        key,
        value,
        pos,
        atom_mask,
        feature_map=layer.feature_map,
        coupling=layer.coupling,
        rpe=layer.rpe,
    )
    torch.testing.assert_close(out, layer.merge(twin, atom_mask))
    for dim in range(position_dim):
        moved = pos.clone()
        moved[:, ::2, dim] += 0.7
        assert (layer(x, moved, atom_mask) - out).abs().max() > 1e-4


def extremes() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """x and pos in float32 that break careless code."""
    torch.manual_seed(5)
    x, pos = torch.randn(1, 37, C), torch.randn(1, 37, X)
    return {
        "coincident atoms": (x, torch.zeros(1, 37, X)),
        "positions of 1e4": (x, 1e4 * pos),
        "equal tokens": (x[:, :1].expand_as(x), pos[:, :1].expand_as(pos)),
        "zero tokens": (torch.zeros_like(x), torch.zeros_like(pos)),
        "one token": (x[:, :1], pos[:, :1]),
    }


@each_layer
@pytest.mark.parametrize("case", extremes())
@pytest.mark.filterwarnings("ignore::molflt.nn.alarm.VanishingNormalizerWarning")
def test_outputs_and_gradients_are_finite_at_extremes(name, case):
    layer = copy.deepcopy(LAYERS[name]).float()
    x, pos = extremes()[case]
    for tensor in outputs_and_gradients(layer, x, pos, None, torch.ones(())):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("name", ["positive-additive", "positive-multiplicative", "causal-additive"])
@pytest.mark.parametrize(("parameter", "value"), [("raw_std", math.log(1e-4)), ("amplitude", 0.0)])
def test_outputs_and_gradients_are_finite_for_narrow_sampling_and_a_spectrum_of_zero(name, parameter, value):
    layer = copy.deepcopy(LAYERS[name]).float()
    owner = layer.rpe.sampler if parameter == "raw_std" else layer.rpe.spectrum
    with torch.no_grad():
        getattr(owner, parameter).fill_(value)
    x, pos, atom_mask = make_batch()
    for tensor in outputs_and_gradients(layer, x.float(), 5 * pos.float(), atom_mask, torch.ones(())):
        assert tensor.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_layer_in_half_precision_keeps_its_rpe_in_float32_and_its_gradients_finite(dtype):
    torch.manual_seed(3)
    layer = FLTAttention(C, H).to(dtype)
    assert {parameter.dtype for parameter in layer.rpe.parameters()} == {torch.float32}
    assert layer.query.weight.dtype == dtype
    x, pos, atom_mask = make_batch()
    for tensor in outputs_and_gradients(layer, x.to(dtype), pos.to(dtype), atom_mask, torch.ones(())):
        assert tensor.isfinite().all()
    torch.testing.assert_close(layer.float()(x.float(), pos.float()), layer.double()(x, pos).float())


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented")
def test_forward_mode_derivatives_and_vmap_agree_with_autograd_and_a_loop():
    layer = copy.deepcopy(LAYERS["positive-additive"]).requires_grad_(False)
    x, pos, _ = make_batch()
    direction = torch.randn_like(pos)
    _, forward = torch.func.jvp(lambda r: layer(x, r), (pos,), (direction,))
    step = 1e-5 * direction
    torch.testing.assert_close(
        forward, (layer(x, pos + step) - layer(x, pos - step)) / 2e-5, rtol=1e-6, atol=1e-8
    )
    with torch.no_grad():
        mapped = torch.func.vmap(lambda a, r: layer(a[None], r[None])[0])(x, pos)
        torch.testing.assert_close(mapped, layer(x, pos), rtol=1e-12, atol=1e-12)


@each_layer
@pytest.mark.filterwarnings("ignore::molflt.nn.alarm.VanishingNormalizerWarning")
def test_outputs_and_gradients_are_finite_for_queries_and_keys_a_hundredfold(name):
    layer = copy.deepcopy(LAYERS[name]).float()
    with torch.no_grad():
        layer.query.weight.mul_(100)
        layer.key.weight.mul_(100)
    x, pos, atom_mask = make_batch()
    for tensor in outputs_and_gradients(layer, x.float(), pos.float(), atom_mask, torch.ones(())):
        assert tensor.isfinite().all()


def test_outputs_stay_convex_combinations_of_values_for_queries_and_keys_a_hundredfold():
    """Positive features of any size are weights that sum to one."""
    torch.manual_seed(6)
    query, key, value = torch.randn(3, 1, H, 37, 7)
    feature_map = PositiveRandomFeatures(16)
    feature_map.build(H, 7)
    for causal in (False, True):
        out = flt_attention(
            100 * query, 100 * key, value, feature_map=feature_map, causal=causal, chunk_size=8
        )
        assert out.max() <= value.max() + 1e-4
        assert out.min() >= value.min() - 1e-4
        ones = flt_attention(
            100 * query,
            100 * key,
            torch.ones_like(value),
            feature_map=feature_map,
            causal=causal,
            chunk_size=8,
        )
        torch.testing.assert_close(ones, torch.ones_like(ones))


@pytest.mark.parametrize("coupling", ["additive", "multiplicative", "none"])
def test_4096_equal_tokens_in_bf16_give_the_value_of_one(coupling):
    """Sums over 4,096 tokens would lose half their terms in bf16's 8 bits; they are float32."""
    torch.manual_seed(7)
    layer = make_layer("positive", coupling).float()
    x, pos = torch.randn(1, 1, C), torch.randn(1, 1, X)
    expected = layer.out(layer.value(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x.expand(1, 4096, C), pos.expand(1, 4096, X))
    assert out.dtype == torch.bfloat16
    scale = expected.abs().max()
    assert (out.float() - expected).abs().max() < 0.03 * scale
    whole = copy.deepcopy(layer).bfloat16()
    out = whole(x.bfloat16().expand(1, 4096, C), pos.bfloat16().expand(1, 4096, X))
    out.float().sum().backward()
    assert (out.float() - expected).abs().max() < 0.05 * scale
    assert all(p.grad is None or p.grad.isfinite().all() for p in whole.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("coupling", ["additive", "multiplicative", "none"])
@pytest.mark.parametrize("causal", [False, True])
def test_under_autocast_features_are_float32(coupling, causal, dtype):
    """The core of low-precision q, k, v is that of the same numbers in float32, rounded once at the end."""
    torch.manual_seed(8)
    layer = make_layer("positive", coupling).float()
    query, key, value = torch.randn(3, B, H, N, C // H).to(dtype)
    pos = 10 * torch.randn(B, N, X)
    core = {"feature_map": layer.feature_map, "coupling": layer.coupling, "rpe": layer.rpe, "causal": causal}
    with torch.autocast("cpu", dtype=dtype):
        out = flt_attention(query, key, value, pos, **core)
        positional = layer.encode_positions(pos)
    expected = flt_attention(query.float(), key.float(), value.float(), pos, **core)
    assert torch.equal(out, expected.to(dtype))
    if positional is not None:
        assert torch.equal(positional, layer.encode_positions(pos))


def test_float64_input_stays_float64():
    x, pos, atom_mask = make_batch()
    layer = make_layer()
    exact = layer(x, pos, atom_mask)
    single = copy.deepcopy(layer).float()(x.float(), pos.float(), atom_mask)
    assert exact.dtype == torch.float64
    assert 0 < (exact - single).abs().max() < 1e-5


@pytest.mark.parametrize("coupling", ["additive", "multiplicative"])
def test_from_the_default_initialisation_every_parameter_of_the_rpe_gets_a_gradient(coupling):
    torch.manual_seed(9)
    layer = FLTAttention(C, H, coupling=COUPLINGS[coupling]())
    x, pos, atom_mask = make_batch()
    layer(x.float(), pos.float(), atom_mask).square().sum().backward()
    for name, parameter in layer.named_parameters():
        if name != "key.bias" and "bias" not in name:
            assert parameter.grad is not None, name
            of_rpe = name.startswith("rpe.")
            assert (parameter.grad != 0).all() if of_rpe else (parameter.grad != 0).any(), name


def test_flt_adds_fewer_than_30000_parameters_at_the_papers_size():
    """12 layers of 768 channels and 48 heads that share one RPE of 32 basis functions."""
    rpe = default_rpe(48, 3, num_frequencies=16, num_basis=32)
    with_rpe = nn.ModuleList(FLTAttention(768, 48, rpe=rpe) for _ in range(12))
    without = nn.ModuleList(FLTAttention(768, 48, coupling=NoCoupling()) for _ in range(12))
    added = sum(p.numel() for p in with_rpe.parameters()) - sum(p.numel() for p in without.parameters())
    assert 0 < added < 30_000


def test_resetting_draws_everything_anew():
    torch.manual_seed(10)
    layer = make_layer()
    before = copy.deepcopy(layer.state_dict())
    layer.reset_parameters()
    changed = {name for name, tensor in layer.state_dict().items() if not torch.equal(tensor, before[name])}
    assert {"query.weight", "key.weight", "value.weight", "out.weight", "feature_map.projection"} <= changed
    assert any(name.startswith("rpe.sampler") for name in changed)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="num_heads must divide channels, got num_heads=3 and channels=14"):
        FLTAttention(14, 3)
    with pytest.raises(ValueError, match="rpe must have num_heads=2 as the layer has, got 7"):
        FLTAttention(14, 2, rpe=default_rpe(7, 3))
    with pytest.raises(ValueError, match="rpe must have position_dim=2 as the layer has, got 3"):
        SoftmaxAttention(14, 2, position_dim=2, rpe=default_rpe(2, 3))
    with pytest.raises(ValueError, match="chunk_size must be at least 1, got 0"):
        FLTAttention(14, 2, chunk_size=0)
    with pytest.raises(ValueError, match="can not be causal"):
        FLTAttention(14, 2, causal=True, feature_map=OptimalPositiveFeatures(8))
    with pytest.raises(ValueError, match="use_rpe=False leaves the RPE out"):
        SoftmaxAttention(14, 2, use_rpe=False, rpe=default_rpe(2, 3))
    with pytest.raises(ValueError, match="NoCoupling uses no RPE, got an rpe"):
        FLTAttention(14, 2, coupling=NoCoupling(), rpe=default_rpe(2, 3))
    x = torch.randn(1, 5, 14)
    for layer in (FLTAttention(14, 2), SoftmaxAttention(14, 2)):
        with pytest.raises(ValueError, match="position_dim=3 coordinates, got 2"):
            layer(x, torch.randn(1, 5, 2))
        with pytest.raises(ValueError, match=r"x must have shape \[B, N, 14\], got \[5, 14\]; for ragged"):
            layer.check_inputs(x[0], None, None)
        with pytest.raises(ValueError, match=r"pos must have a row for each row of x"):
            layer.check_inputs(x, torch.randn(1, 7, 3), None)
        with pytest.raises(ValueError, match=r"atom_mask must be bool of shape \[1, 5\].*got torch.float32"):
            layer.check_inputs(x, None, torch.ones(1, 5))
    with pytest.raises(ValueError, match="AdditiveCoupling needs positions: pass pos"):
        FLTAttention(14, 2)(x)
    with pytest.raises(ValueError, match="SoftmaxAttention needs positions: pass pos"):
        SoftmaxAttention(14, 2)(x)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "rpe",
            FourierRPE,
            r"rpe must be a FourierRPE object or None, got the class FourierRPE; pass default_",
        ),
        (
            "rpe",
            default_rpe(2, 3).sampler,
            r"rpe must be .*got GaussianFrequencies object; .*FourierRPE\(sam",
        ),
        ("feature_map", PositiveRandomFeatures, "feature_map must be .*got the class PositiveRandomFeatures"),
        (
            "feature_map",
            64,
            r"feature_map must be .*got int object; pass one such as PositiveRandomFeatures\(",
        ),
        (
            "coupling",
            "none",
            r"coupling must be a Coupling.*got str object; pass one such as AdditiveCoupling",
        ),
        ("coupling", NoCoupling, "coupling must be .*got the class NoCoupling; pass one"),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_at_construction(name, value, message):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        for layer in (FLTAttention, SoftmaxAttention) if name == "rpe" else (FLTAttention,):
            with pytest.raises(TypeError, match=message):
                layer(14, 2, **{name: value})
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def test_positions_passed_as_their_encoding_are_refused():
    x, pos = torch.randn(2, 5, 14), torch.randn(2, 5, 3)
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        for layer, shape in ((FLTAttention(14, 2), "2, 2, 5, 32"), (SoftmaxAttention(14, 2), "2, 2, 5, 5")):
            for wrong in (pos, layer.encode_positions(pos)[..., :4], layer.encode_positions(pos[:, :4])):
                message = rf"positional must have shape \[{shape}\], got .*; pass encode_positions\(pos, a"
                with pytest.raises(ValueError, match=message):
                    layer(x, positional=wrong)
        # Softmax attention adds one graph's bias to all graphs.
        shared = layer(x, positional=layer.encode_positions(pos[:1]))
        torch.testing.assert_close(shared, layer(x, pos[:1].expand(2, -1, -1)), rtol=1e-5, atol=1e-6)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_features_of_another_type_than_the_weights_are_refused(dtype):
    x, pos = torch.ones(2, 5, 14).to(dtype), torch.randn(2, 5, 3)
    message = rf"x must have the type of the layer's weights, torch.float32, got {dtype}; use x.to\(torch"
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        for layer in (FLTAttention(14, 2), SoftmaxAttention(14, 2)):
            with pytest.raises(ValueError, match=message):
                layer(x, pos)
        with pytest.raises(ValueError, match=message):
            FLTConv(14, 14)(x[0], pos[0])
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_autocast_converts_features_and_weights(dtype, weights):
    x, pos = torch.randn(2, 5, 14).to(dtype), torch.randn(2, 5, 3)
    for layer in (FLTAttention(14, 2), SoftmaxAttention(14, 2)):
        exact = layer(x.float(), pos)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(layer.to(weights)(x, pos).float(), exact, rtol=0.2, atol=0.1)
