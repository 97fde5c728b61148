"""torch.compile and torch.export, in one process of their own: shape checks by import hook do not trace."""

import json
import subprocess
import sys

import pytest

SCRIPT = '''
import json
import sys

import torch
from torch._dynamo.testing import CompileCounter

from molflt.nn.attention import FLTAttention
from molflt.nn.conv import FLTConv
from molflt.nn.couplings import MultiplicativeCoupling

results = {}


def compiled(name, layer, calls):
    """Graphs compiled over all calls, and the largest difference from the layer itself in value and
    gradient."""
    torch._dynamo.reset()
    counter = CompileCounter()
    function = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    error = 0.0
    for arguments in calls:
        gradients = []
        for f in (function, layer):
            layer.zero_grad()
            out = f(*arguments)
            out.square().sum().backward()
            gradients.append([out.detach()] + [p.grad.clone() for p in layer.parameters()])
        error = max([error] + [(a - b).abs().max().item() for a, b in zip(*gradients)])
    results[name] = {"graphs": counter.frame_count, "error": error}


def dense(num_graphs, num_tokens):
    atom_mask = torch.rand(num_graphs, num_tokens) < 0.7
    atom_mask[:, 0] = True
    return torch.randn(num_graphs, num_tokens, 6), torch.randn(num_graphs, num_tokens, 3), atom_mask


def ragged(num_nodes, num_graphs):
    batch = torch.randint(num_graphs, (num_nodes,))
    return torch.randn(num_nodes, 6), torch.randn(num_nodes, 3), batch, num_graphs, num_nodes


torch.manual_seed(0)
shapes = [(2, 7), (3, 11), (5, 131), (7, 64)]
compiled("additive", FLTAttention(6, 2), [dense(*shape) for shape in shapes])
layer = FLTAttention(6, 2, coupling=MultiplicativeCoupling())
compiled("multiplicative", layer, [dense(*shape) for shape in shapes[:3]])
layer = FLTAttention(6, 2, causal=True, chunk_size=8)
compiled("causal", layer, [dense(*shape) for shape in [(2, 35), (3, 97), (5, 61), (2, 301)]])
conv = FLTConv(6, 6, heads=2)
compiled("conv", conv, [ragged(23, 3), ragged(31, 5), ragged(11, 7)])
compiled("conv without batch", conv, [ragged(n, 1)[:2] for n in (5, 11, 31)])

torch._dynamo.reset()
function = torch.compile(conv, backend="eager", fullgraph=True, dynamic=True)
x, pos, batch = ragged(23, 3)[:3]
for name, arguments in {
    "overflow": (x, pos, batch, 3, 4),
    "negative": (x, pos, batch - 1, 3, 23),
    "too large": (x, pos, batch + 1, 3, 23),
    "far out": (x, pos, 1000 * batch - 500, 3, 23),
}.items():
    try:
        function(*arguments)
        results[name] = ""
    except RuntimeError as error:
        results[name] = str(error)

Dim = torch.export.Dim
exports = (
    ("additive", FLTAttention(6, 2).eval(), Dim("tokens")),
    # A causal layer is exported for whole chunks.
    ("causal", FLTAttention(6, 2, causal=True, chunk_size=8).eval(), 8 * Dim("chunks", min=2)),
)
for name, layer, tokens in exports:
    dims = ({0: Dim("graphs"), 1: tokens},) * 3
    program = torch.export.export(layer, dense(2, 24), dynamic_shapes=dims)
    arguments = dense(5, 136)
    results["export " + name] = (program.module()(*arguments) - layer(*arguments)).abs().max().item()


class ConvOfSixGraphs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = FLTConv(6, 6, heads=2)

    def forward(self, x, pos, batch):
        return self.conv(x, pos, batch, 6, 16)


layer, nodes = ConvOfSixGraphs().eval(), Dim("nodes", max=96)
for strict in (False, True):
    inputs = ragged(23, 6)[:3]
    program = torch.export.export(layer, inputs, dynamic_shapes=({0: nodes},) * 3, strict=strict)
    arguments = ragged(15, 6)[:3]
    error = (program.module()(*arguments) - layer(*arguments)).abs().max().item()
    results["export conv" + (" strict" if strict else "")] = error
json.dump(results, sys.stdout)
'''


@pytest.fixture(scope="module")
def results() -> dict:
    """What the script prints."""
    process = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["additive", "multiplicative", "causal", "conv", "conv without batch"])
def test_layers_compile_without_graph_breaks_into_one_graph_for_all_shapes(results, name):
    """fullgraph=True refuses breaks."""
    assert results[name]["graphs"] == 1
    assert results[name]["error"] < 1e-3


def test_a_compiled_conv_stops_at_a_graph_larger_than_max_nodes(results):
    assert "more nodes than max_nodes" in results["overflow"]


def test_a_compiled_conv_stops_at_a_graph_index_outside_size(results):
    assert "batch holds a negative graph index: graph indices begin at 0" in results["negative"]
    assert "batch holds a graph index that is not below size" in results["too large"]
    assert "batch holds" in results["far out"]


@pytest.mark.parametrize("name", ["additive", "causal", "conv", "conv strict"])
def test_an_exported_layer_serves_other_shapes(results, name):
    assert results[f"export {name}"] < 1e-6
