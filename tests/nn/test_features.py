"""Computing some heads at a time, and second derivatives."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from molflt.nn import features as features_module
from molflt.nn.attention import flt_attention
from molflt.nn.couplings import AdditiveCoupling, MultiplicativeCoupling, NoCoupling
from molflt.nn.feature_maps import OptimalPositiveFeatures, PositiveRandomFeatures
from molflt.nn.rpe import default_rpe

B, H, N, D, X, M = 2, 5, 11, 3, 2, 7


def make_core(coupling, feature_map, causal: bool):
    """The core as a function of q, k, v and positions, float64, with padding."""
    rpe = default_rpe(H, X, num_frequencies=3, num_basis=2).double()
    feature_map.build(H, coupling.input_width(D, rpe))
    feature_map.double()
    atom_mask = torch.arange(N) < torch.tensor([[7], [N]])

    def core(query, key, value, pos):
        size = query.shape[2]
        return flt_attention(
            query,
            key,
            value,
            pos,
            atom_mask[:, :size],
            feature_map=feature_map,
            coupling=coupling,
            rpe=rpe,
            causal=causal,
            chunk_size=4,
        )

    return core


def make_inputs(num_tokens: int = N) -> list[torch.Tensor]:
    """q, k, v and positions that require gradients."""
    tensors = [*torch.randn(3, B, H, num_tokens, D).double(), torch.randn(B, num_tokens, X).double()]
    return [tensor.requires_grad_() for tensor in tensors]


CASES = [
    (NoCoupling(), PositiveRandomFeatures, False),
    (AdditiveCoupling(), PositiveRandomFeatures, False),
    (AdditiveCoupling(), OptimalPositiveFeatures, False),
    (AdditiveCoupling(), PositiveRandomFeatures, True),
    (MultiplicativeCoupling(), PositiveRandomFeatures, False),
    (MultiplicativeCoupling(), PositiveRandomFeatures, True),
]


@pytest.mark.parametrize(("coupling", "kind", "causal"), CASES)
def test_heads_computed_two_at_a_time_equal_all_heads_at_once(coupling, kind, causal, monkeypatch):
    torch.manual_seed(0)
    core, inputs = make_core(coupling, kind(M), causal), make_inputs()
    weight = torch.randn(B, H, N, D, dtype=torch.float64)
    results = []
    for elements in (2**18, 2 * B * N * M):
        monkeypatch.setattr(features_module, "BLOCK_ELEMENTS", elements)
        out = core(*inputs)
        used = inputs if coupling.needs_positions else inputs[:3]
        with torch.no_grad():
            torch.testing.assert_close(core(*inputs), out, rtol=1e-12, atol=1e-12)
        results.append([out, *torch.autograd.grad((out * weight).sum(), used)])
    for together, in_blocks in zip(*results, strict=True):
        torch.testing.assert_close(in_blocks, together, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("coupling", "kind", "causal"), [case for case in CASES if case[1] is not OptimalPositiveFeatures]
)
def test_the_core_passes_gradcheck_and_gradgradcheck_in_positions_and_values(coupling, kind, causal):
    """Forces are derivatives in positions, and training on them takes a second one.

    The map with a detached shape parameter is left out: its gradient is meant to ignore it.
    """
    torch.manual_seed(1)
    core, inputs = make_core(coupling, kind(3), causal), make_inputs(5)
    assert torch.autograd.gradcheck(core, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(core, inputs, fast_mode=True)


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest result of any operation."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("coupling", [NoCoupling(), AdditiveCoupling(), MultiplicativeCoupling()])
def test_no_tensor_grows_faster_than_the_number_of_tokens(coupling, causal):
    """Forward and backward at N = 2,003: at most 64 numbers a token and head, where N x N has 2,003."""
    num_tokens, heads = 2003, 2
    rpe = default_rpe(heads, X, num_frequencies=3, num_basis=2)
    feature_map = PositiveRandomFeatures(8)
    feature_map.build(heads, coupling.input_width(D, rpe))
    query, key, value = (torch.randn(1, heads, num_tokens, D, requires_grad=True) for _ in range(3))
    pos = torch.randn(1, num_tokens, X, requires_grad=True)
    with LargestTensor() as recorded:
        out = flt_attention(
            query, key, value, pos, feature_map=feature_map, coupling=coupling, rpe=rpe, causal=causal
        )
        out.square().sum().backward()
    assert query.grad is not None
    assert 0 < recorded.largest <= 64 * heads * (num_tokens + 64)


def test_second_derivatives_are_finite_at_zero_queries_keys_and_positions():
    """Padded rows are all zero, and so are the atoms' own keys at the start of training without biases."""
    core = make_core(AdditiveCoupling(), PositiveRandomFeatures(M), causal=False)
    zeros = [torch.zeros_like(x).requires_grad_() for x in make_inputs()]
    first = torch.autograd.grad(core(*zeros).square().sum() + core(*zeros).sum(), zeros, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), zeros)
    assert all(tensor.isfinite().all() for tensor in (*first, *second))
