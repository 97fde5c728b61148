"""FLTConv in PyG's conventions."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINEConv, Sequential

from molflt.nn.attention import FLTAttention
from molflt.nn.conv import FLTConv
from molflt.nn.couplings import NoCoupling
from molflt.nn.feature_maps import PositiveRandomFeatures

A, CIN, COUT, HEADS, X = 23, 5, 14, 2, 3


def make_graphs(num_graphs: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nodes of unsorted graphs; graphs 2 and 6 are empty, graph 3 has one node."""
    generator = torch.Generator().manual_seed(0)
    choices = torch.tensor([0, 1, 4, 5])
    batch = choices[torch.randint(4, (A,), generator=generator)]
    batch[11] = 3
    x = torch.randn(A, CIN, dtype=torch.float64, generator=generator)
    return x, torch.randn(A, X, dtype=torch.float64, generator=generator), batch


def make_conv(**options) -> FLTConv:
    """A float64 layer."""
    torch.manual_seed(1)
    return FLTConv(CIN, COUT, heads=HEADS, **options).double()


def test_each_graph_of_an_unsorted_batch_equals_itself_alone_in_value_and_gradient():
    conv = make_conv()
    x, pos, batch = make_graphs()
    weight = torch.randn(A, COUT, dtype=torch.float64)

    def value_and_gradients(index: torch.Tensor, batch: torch.Tensor | None) -> list[torch.Tensor]:
        leaves = [x[index].requires_grad_(), pos[index].requires_grad_()]
        out = conv(*leaves, batch)
        return [out, *torch.autograd.grad((out * weight[index]).sum(), leaves)]

    together = value_and_gradients(torch.arange(A), batch)
    for graph in batch.unique().tolist():
        index = (batch == graph).nonzero().squeeze(1)
        alone = value_and_gradients(index, None)
        for ours, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(ours[index], theirs, rtol=1e-9, atol=1e-9)


def test_empty_graphs_and_larger_padding_change_nothing():
    conv = make_conv()
    x, pos, batch = make_graphs()
    out = conv(x, pos, batch)
    torch.testing.assert_close(conv(x, pos, batch, size=11), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(conv(x, pos, batch, 7, max_nodes=13), out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(conv(x, pos, 2 * batch), out, rtol=1e-12, atol=1e-12)


def test_a_node_alone_in_its_graph_gets_its_own_value():
    conv = make_conv()
    x, pos, batch = make_graphs()
    attention = conv.attention
    expected = attention.out(attention.value(x[11]))
    torch.testing.assert_close(conv(x, pos, batch)[11], expected)


def test_no_nodes_give_no_output():
    conv = make_conv()
    x, pos = torch.zeros(0, CIN).double(), torch.zeros(0, X).double()
    assert conv(x, pos, torch.zeros(0, dtype=torch.long), size=3).shape == (0, COUT)
    assert conv(x, pos, torch.zeros(0, dtype=torch.long)).shape == (0, COUT)
    assert conv(x, pos).shape == (0, COUT)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """As outside of pytest: no hook looks at shapes and types before the layer does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_a_graph_index_outside_size_is_refused():
    x, pos, batch = make_graphs()
    conv = make_conv()
    with pytest.raises(ValueError, match=r"\[0, size\) = \[0, 4\).*pass the number of graphs as size, 6 or"):
        conv(x, pos, batch, size=4)
    for size in (None, 4, 7):
        with pytest.raises(ValueError, match="values from -1 to 4; graph indices begin at 0"):
            conv(x, pos, batch - 1, size=size)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [[1.0]]}, TypeError, r"^x must be a tensor \[num_nodes, 5\], got list; use torch.as_tensor"),
        (
            {"x": torch.zeros(23, 4)},
            ValueError,
            r"^x must have .*\[num_nodes, 5\].*23, 4\]; .*in_channels=4$",
        ),
        ({"x": torch.zeros(1, 23, 5)}, ValueError, "^x must have .*; for padded graphs use FLTAttention$"),
        ({"x": torch.zeros(5)}, ValueError, r"^x must have .*got \[5\]; pass one row of features for each"),
        ({"pos": None}, ValueError, "^pos must be given, since AdditiveCoupling needs positions"),
        (
            {"pos": [[0.0] * 3] * 23},
            TypeError,
            r"^pos must be a tensor \[num_nodes, 3\], got list; use torch",
        ),
        ({"pos": torch.zeros(23, 2)}, ValueError, r"^pos must have .*= \[23, 3\].*position_dim=2$"),
        ({"pos": torch.zeros(22, 3)}, ValueError, r"^pos must have .*22, 3\]; pass one row of coordinates"),
        (
            {"pos": torch.zeros(23).long()},
            ValueError,
            r"^pos must have .*the arguments are \(x, pos, batch\)",
        ),
        ({"batch": [0] * 23}, TypeError, r"^batch must be an int64 tensor \[23\].*; use torch.as_tensor\(b"),
        ({"batch": 7}, TypeError, "^batch must be .*got int; pass the graph index of each node$"),
        (
            {"batch": torch.zeros(23, 1).long()},
            ValueError,
            r"^batch must be .*23, 1\]; use batch.flatten\(\)$",
        ),
        ({"batch": torch.zeros(23, 3)}, ValueError, "^batch must be .*; pass one graph index for each node$"),
        (
            {"batch": torch.zeros(22).int()},
            ValueError,
            "^batch must be .*; pass one graph index for each node$",
        ),
        (
            {"batch": torch.zeros(23).int()},
            ValueError,
            r"^batch must be .*torch.int32.*; use batch.long\(\)$",
        ),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_in_the_words_of_the_layer(unchecked, change, error, message):
    x, pos, batch = make_graphs()
    with pytest.raises(error, match=message):
        make_conv()(**{"x": x, "pos": pos, "batch": batch, **change})


def test_positions_on_a_line_need_a_dimension_of_their_own(unchecked):
    x, pos, batch = make_graphs()
    with pytest.raises(
        ValueError, match=r"pos must have .*= \[23, 1\], got \[23\]; use pos.unsqueeze\(-1\)$"
    ):
        make_conv(position_dim=1)(x, pos[:, 0], batch)


def test_nodes_without_batch_are_one_graph():
    x, pos, _ = make_graphs()
    with pytest.raises(ValueError, match="size must be 1 where batch is None"):
        make_conv()(x, pos, size=2)


def test_a_layer_without_rpe_takes_positions_of_any_width():
    x, pos, batch = make_graphs()
    conv = make_conv(coupling=NoCoupling())
    assert torch.equal(conv(x, pos[:, :2], batch), conv(x, None, batch))


def test_options_of_a_wrong_kind_are_refused(unchecked):
    with pytest.raises(ValueError, match="heads must divide out_channels, got heads=3 and out_channels=14"):
        FLTConv(5, 14, heads=3)
    with pytest.raises(
        TypeError, match="coupling must be a Coupling object or None, got the class NoCoupling"
    ):
        FLTConv(5, 14, coupling=NoCoupling)


def test_the_causal_layer_follows_the_order_of_nodes_within_each_graph():
    conv = make_conv(causal=True, chunk_size=4)
    x, pos, batch = make_graphs()
    out = conv(x, pos, batch)
    nodes = (batch == batch.mode().values).nonzero().squeeze(1)
    x[nodes[3]] += 1
    changed = (conv(x, pos, batch) - out).abs().amax(-1) > 1e-9
    assert torch.equal(changed.nonzero().squeeze(1), nodes[3:])


def test_it_prints_as_pyg_layers_do_and_resets():
    conv = make_conv()
    assert repr(conv) == "FLTConv(5, 14, position_dim=3, heads=2)"
    x, pos, batch = make_graphs()
    out = conv(x, pos, batch)
    torch.manual_seed(1)
    fresh = FLTConv(CIN, COUT, heads=HEADS).double()
    torch.testing.assert_close(fresh(x, pos, batch), out)
    conv.reset_parameters()
    assert (conv(x, pos, batch) - out).abs().max() > 1e-3


def test_it_trains_inside_torch_geometric_sequential():
    """Three steps of descent on random targets lower the loss."""
    torch.manual_seed(2)
    model = Sequential(
        "x, pos, batch",
        [
            (FLTConv(CIN, COUT, position_dim=X, heads=HEADS), "x, pos, batch -> x"),
            nn.ReLU(inplace=True),
            (FLTConv(COUT, COUT, position_dim=X, heads=HEADS), "x, pos, batch -> x"),
            nn.Linear(COUT, 1),
        ],
    ).double()
    x, pos, batch = make_graphs()
    target = torch.randn(A, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        loss = (model(x, pos, batch) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.99 * losses[0]


class GPSLayer(nn.Module):
    """A block as in PyG's GPSConv: message passing and global attention side by side, then a network."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.local = GINEConv(nn.Linear(channels, channels), edge_dim=1)
        self.attention = FLTConv(channels, channels, position_dim=X, heads=heads)
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(channels, channels), nn.ReLU(), nn.Linear(channels, channels))

    def forward(self, x, pos, edge_index, edge_attr, batch):
        local = self.norms[0](x + self.local(x, edge_index, edge_attr))
        attended = self.norms[1](x + self.attention(x, pos, batch))
        x = local + attended
        return self.norms[2](x + self.mlp(x))


def test_it_works_in_a_gps_like_stack_where_it_carries_what_edges_do_not():
    """Two parts of a graph without an edge between them see each other through attention only."""
    torch.manual_seed(3)
    layers = nn.ModuleList(GPSLayer(COUT, HEADS) for _ in range(2)).double()
    graphs = [
        Data(
            x=torch.randn(size, COUT, dtype=torch.float64),
            pos=torch.randn(size, X, dtype=torch.float64),
            edge_index=torch.tensor([[0, 1], [1, 0]]),
            edge_attr=torch.randn(2, 1, dtype=torch.float64),
        )
        for size in (5, 2, 7)
    ]

    def run(graphs: list[Data]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = Batch.from_data_list(graphs)
        x = batch.x
        for layer in layers:
            x = layer(x, batch.pos, batch.edge_index, batch.edge_attr, batch.batch)
        return x, batch.batch

    before, batch = run(graphs)
    graphs[0].x[4] += 1.0
    after, _ = run(graphs)
    change = (after - before).abs().amax(-1)
    assert (change[batch == 0] > 1e-6).all()
    assert (change[batch != 0] < 1e-12).all()


def test_options_reach_the_attention_layer():
    feature_map = PositiveRandomFeatures(7)
    conv = FLTConv(CIN, COUT, heads=HEADS, feature_map=feature_map, coupling=NoCoupling(), bias=False)
    assert conv.attention.feature_map is feature_map
    assert conv.attention.query.bias is None
    x, _, batch = make_graphs()
    dense = FLTAttention(
        COUT, HEADS, in_channels=CIN, feature_map=feature_map, coupling=NoCoupling(), bias=False
    )
    dense.load_state_dict(conv.attention.state_dict())
    nodes = batch == 0
    torch.testing.assert_close(conv(x.float(), batch=batch)[nodes], dense(x.float()[nodes][None])[0])
