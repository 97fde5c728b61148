"""The encoder around any attention layer."""

import pytest
import torch
from torch import nn

from molflt.build import build_model
from molflt.config import AttentionConfig, ModelConfig
from molflt.models.encoder import Encoder, EncoderLayer, stochastic_depth
from molflt.nn.near import NearGraph
from molflt.nn.periodic import PeriodicGeometry


class RecordingAttention(nn.Module):
    """Mixes tokens by what `encode_positions` gave, and counts how often that was asked for."""

    def __init__(self, channels: int, rpe: nn.Module | None):
        super().__init__()
        self.rpe = rpe
        self.mix = nn.Linear(channels, channels).double()
        self.calls = 0

    def encode_positions(self, pos, atom_mask):
        self.calls += 1
        return pos.norm(dim=-1, keepdim=True)

    def forward(self, x, pos, atom_mask, *, positional):
        return self.mix(x) * positional * atom_mask[..., None]


def make_encoder(rpes, num_blocks=1, input_dropout=0.0, checkpointing=False, **layer_options):
    attentions = [RecordingAttention(5, rpe) for rpe in rpes]
    layers = [EncoderLayer(attention, 5, 7, **layer_options) for attention in attentions]
    return Encoder(layers, 5, num_blocks, input_dropout, checkpointing).double(), attentions


@pytest.fixture(name="tokens")
def _tokens():
    torch.manual_seed(2)
    x, pos = torch.randn(2, 11, 5, dtype=torch.float64), torch.randn(2, 11, 3, dtype=torch.float64)
    return x, pos, torch.arange(11) < torch.tensor([[11], [7]])


def test_encoder_is_pre_norm_with_residuals_and_a_last_norm(tokens):
    x, pos, atom_mask = tokens
    encoder, attentions = make_encoder([None, None])
    expected = x
    for layer, attention in zip(encoder.layers, attentions, strict=True):
        scale = pos.norm(dim=-1, keepdim=True) * atom_mask[..., None]
        expected = expected + attention.mix(layer.attention_norm(expected)) * scale
        hidden = nn.functional.gelu(layer.ffn[0](layer.ffn_norm(expected)))
        expected = expected + layer.ffn[3](hidden)
    expected = nn.functional.layer_norm(expected, (5,), encoder.norm.weight, encoder.norm.bias)
    torch.testing.assert_close(encoder(x, pos, atom_mask), expected)


def test_repeats_share_their_weights(tokens):
    x, pos, atom_mask = tokens
    encoder, _ = make_encoder([None, None], num_blocks=3)
    by_hand = x
    for _ in range(3):
        for layer in encoder.layers:
            by_hand = layer(by_hand, pos, atom_mask, pos.norm(dim=-1, keepdim=True))
    torch.testing.assert_close(encoder(x, pos, atom_mask), encoder.norm(by_hand))
    assert not torch.allclose(
        encoder(x, pos, atom_mask), encoder.norm(encoder.layers[0](*tokens, pos[..., :1]))
    )


def test_positions_are_encoded_once_for_a_shared_rpe_and_once_a_layer_otherwise(tokens):
    shared = nn.Identity()
    encoder, attentions = make_encoder([shared, shared, shared], num_blocks=2)
    encoder(*tokens)
    assert [attention.calls for attention in attentions] == [1, 0, 0]
    encoder, attentions = make_encoder([nn.Identity(), nn.Identity(), nn.Identity()], num_blocks=2)
    encoder(*tokens)
    assert [attention.calls for attention in attentions] == [1, 1, 1]


class GeometryAttention(RecordingAttention):
    needs_geometry = True

    def encode_positions(self, geometry):
        return super().encode_positions(2.0 * geometry.pos, geometry.atom_mask)


def test_layers_that_need_a_geometry_get_it_and_others_the_positions(tokens):
    x, pos, atom_mask = tokens
    encoder, _ = make_encoder([None])
    assert not encoder.needs_geometry
    geometric = GeometryAttention(5, None)
    geometric.load_state_dict(encoder.layers[0].attention.state_dict())
    other = Encoder([EncoderLayer(geometric, 5, 7)], channels=5).double()
    other.load_state_dict(encoder.state_dict())
    assert other.needs_geometry
    with pytest.raises(ValueError, match="GeometryAttention needs a geometry, got None"):
        other(x, pos, atom_mask)
    none = torch.empty(0, dtype=torch.int64)
    cell, pbc = torch.zeros(2, 3, 3).double(), torch.zeros(2, 3, dtype=torch.bool)
    near = NearGraph(none, none, torch.empty(0), torch.empty(0))
    geometry = PeriodicGeometry(pos, atom_mask, cell, pbc, near)
    torch.testing.assert_close(other(x, None, atom_mask, geometry), encoder(x, 2.0 * pos, atom_mask))


@pytest.mark.parametrize("option", ["dropout", "activation_dropout", "input_dropout", "drop_path"])
def test_dropout_acts_in_training_only(tokens, option):
    encoder, _ = make_encoder([None], **{option: 0.5})
    reference, _ = make_encoder([None])
    reference.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(encoder.eval()(*tokens), reference(*tokens))
    assert (encoder.train()(*tokens) - reference(*tokens)).abs().max() > 0.1


def test_stochastic_depth_keeps_or_drops_whole_graphs_and_the_mean():
    torch.manual_seed(0)
    branch = torch.rand(20_011, 2, 3, dtype=torch.float64) + 1.0
    dropped = stochastic_depth(branch, 0.3, training=True)
    kept = dropped[:, 0, 0] > 0
    torch.testing.assert_close(dropped, torch.where(kept[:, None, None], branch / 0.7, 0.0))
    # Four standard errors of a share of 0.7 among 20,011.
    assert abs(kept.double().mean().item() - 0.7) < 4 * (0.7 * 0.3 / 20_011) ** 0.5
    assert torch.equal(stochastic_depth(branch, 0.3, training=False), branch)


def test_deeper_layers_are_dropped_more_often():
    config = ModelConfig(num_layers=4, drop_path=0.2)
    layers = build_model(config, radius=4.0).encoder.layers
    assert [layer.drop_path for layer in layers] == pytest.approx([0.05, 0.1, 0.15, 0.2])


def test_checkpointing_gives_the_same_values_and_gradients_dropout_included(tokens):
    x, pos, atom_mask = tokens
    results = []
    for checkpointing in (False, True):
        options = {"dropout": 0.3, "activation_dropout": 0.2, "drop_path": 0.4, "input_dropout": 0.1}
        encoder, _ = make_encoder([None, None], num_blocks=3, checkpointing=checkpointing, **options)
        if results:
            encoder.load_state_dict(results[0][0])
        torch.manual_seed(7)
        out = encoder.train()(x, pos, atom_mask)
        gradients = torch.autograd.grad(out.square().sum(), list(encoder.parameters()))
        results.append((encoder.state_dict(), out, gradients))
    (_, out, gradients), (_, again, others) = results
    torch.testing.assert_close(again, out, rtol=0, atol=0)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-13)


@pytest.mark.parametrize("kind", ["flt", "range_separated"])
def test_checkpointing_a_whole_model_keeps_fewer_tensors_and_the_same_gradients(kind, toy_structure):
    kept, gradients = [], []
    for checkpointing in (False, True):
        config = ModelConfig(channels=8, num_heads=2, num_layers=5, ffn_channels=16, num_gaussians=7)
        config.displacement_channels, config.gradient_checkpointing = 4, checkpointing
        config.attention = AttentionConfig(kind=kind, num_random_features=5, num_basis=3)
        torch.manual_seed(0)
        model = build_model(config, radius=3.7).double()
        saved: list[int] = []

        def keep(tensor, saved=saved):
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            energy, delta_pos = model(toy_structure(19))
            loss = energy.sum() + delta_pos.square().sum()
        kept.append(sum(saved))
        used = [p for p in model.parameters() if p.requires_grad]
        gradients.append(torch.autograd.grad(loss, used))
    assert kept[1] < 0.6 * kept[0]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_no_blocks_are_refused():
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        Encoder([], channels=5, num_blocks=0)
