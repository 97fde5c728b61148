"""Range-separated attention against its dense twin and explicit weights; periodicity, padding, scale."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import molflt.nn.far_attention as far_attention
from molflt.data.displacements import edge_displacement
from molflt.data.graphs import radius_graph
from molflt.nn.far import FarModulation
from molflt.nn.feature_maps import (
    FeatureMap,
    HyperbolicRandomFeatures,
    OptimalPositiveFeatures,
    PositiveRandomFeatures,
)
from molflt.nn.functional import softmax_attention
from molflt.nn.kernel_feature_maps import EluFeatures, ReLUFeatures, RFAGaussianFeatures
from molflt.nn.near import NearGraph, RadialNearBias
from molflt.nn.periodic import PeriodicGeometry
from molflt.nn.range_separated import (
    RangeSeparatedAttention,
    RangeSeparatedPositions,
    RangeSeparatedRPE,
    dense_range_separated_attention,
    range_separated_attention,
)

H, N, D, C = 3, 7, 5, 15
RADIUS = 4.5
SKEWED = torch.tensor([[5.0, 0.3, 0.0], [1.0, 6.0, 0.4], [0.5, -0.7, -7.0]], dtype=torch.float64)
TTT, TTF, FFF = (True, True, True), (True, True, False), (False, False, False)
MAPS: list[Callable[[], FeatureMap]] = [
    lambda: PositiveRandomFeatures(11),
    lambda: HyperbolicRandomFeatures(12),
    lambda: OptimalPositiveFeatures(11),
    lambda: ReLUFeatures(11),
    EluFeatures,
]


@pytest.fixture(autouse=True, params=[0, far_attention.MAX_PAIR_ATOMS], ids=["linear", "pairs"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both orders of the far sums: along columns, and pair by pair."""
    monkeypatch.setattr(far_attention, "MAX_PAIR_ATOMS", request.param)


class Structure:
    """Positions, a cell and which of its directions are periodic."""

    def __init__(self, pos: torch.Tensor, cell: torch.Tensor = SKEWED, pbc: Sequence[bool] = TTT) -> None:
        self.pos, self.cell, self.pbc = pos, cell, torch.tensor(pbc)


def make_pos(num_atoms: int = N, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_atoms, 3, generator=generator, dtype=torch.float64) @ SKEWED


def geometry(structures: Iterable[Structure], radius: float = RADIUS, fill: float = 0.0) -> PeriodicGeometry:
    """Padded batch with its radius graph; gradients flow from the distances to the positions."""
    structures = list(structures)
    size = max(len(s.pos) for s in structures)
    parts: list[list[torch.Tensor]] = [[], [], []]
    for index, s in enumerate(structures):
        edge_index, offsets, _ = radius_graph(s.pos, s.cell, s.pbc, radius)
        displacement = edge_displacement(s.pos, s.cell, edge_index, offsets)
        distances = displacement.square().sum(-1).add(1e-30).sqrt()
        for part, value in zip(parts, (*(edge_index + index * size), distances), strict=True):
            part.append(value)
    sender, receiver, distances = map(torch.cat, parts)
    padded = [torch.cat((s.pos, s.pos.new_full((size - len(s.pos), 3), fill))) for s in structures]
    return PeriodicGeometry(
        pos=torch.stack(padded),
        atom_mask=torch.arange(size) < torch.tensor([[len(s.pos)] for s in structures]),
        cell=torch.stack([s.cell for s in structures]),
        pbc=torch.stack([s.pbc for s in structures]),
        near=NearGraph(sender, receiver, distances, (1 - distances / radius).clamp(min=0) ** 3),
    )


def make_layer(
    feature_map: FeatureMap | None = None,
    far: FarModulation | None = None,
    separate_normalizers: bool = False,
) -> RangeSeparatedAttention:
    torch.manual_seed(0)
    far = FarModulation(H, 0.2, 3, peak=2.0) if far is None else far
    rpe = RangeSeparatedRPE(RadialNearBias(H, RADIUS, 5), far)
    return RangeSeparatedAttention(
        C, H, rpe=rpe, feature_map=feature_map, separate_normalizers=separate_normalizers
    ).double()


def make_x(num_atoms: int = N, seed: int = 2) -> torch.Tensor:
    return torch.randn(num_atoms, C, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def two_graphs() -> list[Structure]:
    return [Structure(make_pos()), Structure(make_pos(5, seed=3), 1.2 * SKEWED, TTF)]


def make_heads(num_graphs: int = 2, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    shape = (num_graphs, H, N, D)
    return [
        (factor * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
        for factor in (scale, scale, 1.0)
    ]


def assert_same_with_gradients(
    first: torch.Tensor, second: torch.Tensor, leaves: list[torch.Tensor], atol: float = 1e-8
) -> None:
    torch.testing.assert_close(first, second, rtol=0, atol=atol)
    upstream = torch.randn(first.shape, generator=torch.Generator().manual_seed(5), dtype=first.dtype)
    one, other = (
        torch.autograd.grad((upstream * out).sum(), leaves, retain_graph=True, allow_unused=True)
        for out in (first, second)
    )
    for ours, theirs in zip(one, other, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert theirs.abs().max() > 0
            torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("separate_normalizers", [False, True])
@pytest.mark.parametrize("make_map", MAPS)
def test_output_and_all_gradients_equal_the_dense_twins(
    make_map: Callable[[], FeatureMap], separate_normalizers: bool
) -> None:
    layer = make_layer(make_map())
    structures = two_graphs()
    for s in structures:
        s.pos.requires_grad_()
    structures[0].cell = structures[0].cell.clone().requires_grad_()
    batch = geometry(structures)
    heads = make_heads()
    positional = layer.encode_positions(batch)
    options = {"feature_map": layer.feature_map, "separate_normalizers": separate_normalizers}
    real = batch.atom_mask[:, None, :, None]
    ours = real * range_separated_attention(*heads, positional, batch.atom_mask, **options)
    theirs = real * dense_range_separated_attention(*heads, positional, batch.atom_mask, **options)
    leaves = [*heads, structures[0].cell, *(s.pos for s in structures), *layer.rpe.parameters()]
    assert_same_with_gradients(ours, theirs, leaves)


def test_output_and_gradients_equal_explicit_weights_summed_over_images() -> None:
    """M by adding up images of the closed form, at a cutoff where the spectrum has fallen below 1e-8."""
    far = FarModulation(H, 1.15, 3, (0.9, 1.2), taper=False, peak=2.0)
    layer = make_layer(far=far)
    structures = [Structure(make_pos()), Structure(make_pos(N, seed=3), 1.2 * SKEWED)]
    for s in structures:
        s.pos.requires_grad_()
    batch = geometry(structures)
    heads = make_heads()
    positional = layer.encode_positions(batch)
    images = far.image_sum(batch.cell, batch.pbc, batch.pos, batch.atom_mask)
    ours = range_separated_attention(*heads, positional, batch.atom_mask, feature_map=layer.feature_map)
    theirs = dense_range_separated_attention(
        *heads, positional, batch.atom_mask, feature_map=layer.feature_map, modulation=images
    )
    assert_same_with_gradients(ours, theirs, [*heads, *(s.pos for s in structures), *far.parameters()])


@pytest.mark.parametrize("shape_parameter", [False, True])
def test_near_and_far_weights_are_on_one_scale(shape_parameter: bool) -> None:
    """a_far = phi(q).phi(k) M with phi written out as published, nothing stabilised or left out."""
    feature_map = OptimalPositiveFeatures(11) if shape_parameter else PositiveRandomFeatures(11)
    layer = make_layer(feature_map)
    batch = geometry([Structure(make_pos())])
    query, key, value = make_heads(num_graphs=1)
    positional = layer.encode_positions(batch)

    rows = feature_map.projection
    a = 0.0
    if shape_parameter:
        s = (query[:, :, :, None] + key[:, :, None]).square().sum(-1).mean((-2, -1))[0].detach() / math.sqrt(
            D
        )
        rho = ((D + 2 * s).square() + 8 * D * s).sqrt().sub(D + 2 * s).div(4 * s)
        a = ((1 - 1 / rho) / 8)[:, None, None]

    def phi(x: torch.Tensor) -> torch.Tensor:
        x = x * D**-0.25
        log = a * rows.square().sum(-1).unsqueeze(-2) + math.sqrt(1) * (1 - 4 * a) ** 0.5 * x @ rows.mT
        return (1 - 4 * a) ** (D / 4) * (log - 0.5 * x.square().sum(-1, keepdim=True)).exp() / math.sqrt(11)

    far = positional.far
    assert far is not None
    weights = (phi(query) @ phi(key).mT) * far.dense()
    graph, edge_bias = batch.near, layer.rpe.near(batch.near)
    assert positional.near is not None
    assert len(positional.near.graph.sender) < len(graph.sender)
    for e in range(len(graph.sender)):
        i, j = int(graph.receiver[e]), int(graph.sender[e])
        logit = (query[0, :, i] * key[0, :, j]).sum(-1) / math.sqrt(D) + edge_bias[e]
        weights[0, :, i, j] = weights[0, :, i, j] + graph.cutoff[e] * logit.exp()
    own = ((query * key).sum(-1) / math.sqrt(D) + layer.rpe.near.self_bias()[:, None]).exp()
    weights = weights + torch.diag_embed(own)
    expected = weights @ value / weights.sum(-1, keepdim=True)
    out = range_separated_attention(query, key, value, positional, feature_map=feature_map)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-11)


def test_without_the_far_part_it_is_softmax_over_the_near_graph_and_the_atom_itself() -> None:
    layer = make_layer()
    layer.rpe.far = None
    batch = geometry([Structure(make_pos(), pbc=FFF), Structure(make_pos(5, seed=3), pbc=FFF)])
    query, key, value = make_heads()
    positional = layer.encode_positions(batch)
    bias = torch.full((2, H, N, N), float("-inf"), dtype=torch.float64)
    bias[:, :, torch.arange(N), torch.arange(N)] = layer.rpe.near.self_bias()[:, None].detach()
    graph = batch.near
    log_weights = layer.rpe.near(graph) + graph.cutoff.log().unsqueeze(-1)
    bias[graph.receiver // N, :, graph.receiver % N, graph.sender % N] = log_weights.detach()
    assert 0 < len(graph.sender) < N * (N - 1) + 5 * 4
    out = range_separated_attention(
        query, key, value, positional, batch.atom_mask, feature_map=layer.feature_map
    )
    exact = softmax_attention(query, key, value, bias, batch.atom_mask)
    real = batch.atom_mask[:, None, :, None]
    torch.testing.assert_close(out * real, exact * real, rtol=0, atol=1e-12)


def test_the_far_part_sees_what_the_near_graph_does_not_reach() -> None:
    """Two fragments 12 Å apart: near-only can not see one from the other."""
    pos = torch.cat((make_pos(4), make_pos(3) + torch.tensor([0.0, 0.0, 18.0])))
    layer, x = make_layer(), make_x()
    moved = pos.clone()
    moved[4:, 0] += 1.5
    for far, changed in ((layer.rpe.far, True), (None, False)):
        layer.rpe.far = far
        outs = [layer(x[None], geometry([Structure(p, pbc=FFF)]))[0, :4] for p in (pos, moved)]
        assert ((outs[0] - outs[1]).abs().max() > 1e-6) == changed


class Stack(torch.nn.Module):
    """Three layers around an energy, the sum over atoms: a toy of what models do."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([make_layer(**options) for _ in range(3)])  # type: ignore[arg-type]
        for layer in self.layers:
            layer.rpe = self.layers[0].rpe
        self.norm = torch.nn.LayerNorm(C)
        self.out = torch.nn.Linear(C, 1)
        self.double()

    def forward(self, x: torch.Tensor, batch: PeriodicGeometry) -> torch.Tensor:
        """Energies of atoms `[B, N]`."""
        positional = self.layers[0].encode_positions(batch)  # type: ignore[operator]
        for layer in self.layers:
            x = x + 2 * layer(self.norm(x), atom_mask=batch.atom_mask, positional=positional)
        return (self.out(x.tanh()).squeeze(-1)) * batch.atom_mask


def energies(stack: Stack, x: torch.Tensor, structure: Structure) -> torch.Tensor:
    return stack(x[None], geometry([structure]))[0].detach()


@pytest.mark.parametrize("separate_normalizers", [False, True])
@pytest.mark.parametrize("pbc", [TTT, TTF])
def test_every_copy_in_a_supercell_has_the_energy_of_the_cell(
    pbc: Sequence[bool], separate_normalizers: bool
) -> None:
    stack, x, pos = Stack(separate_normalizers=separate_normalizers), make_x(), make_pos()
    single = energies(stack, x, Structure(pos, pbc=pbc))
    copies = [a * SKEWED[0] + b * SKEWED[1] for a in range(2) for b in range(3)]
    supercell = torch.diag(torch.tensor([2.0, 3.0, 1.0], dtype=torch.float64)) @ SKEWED
    many = energies(stack, x.repeat(6, 1), Structure(torch.cat([pos + c for c in copies]), supercell, pbc))
    assert single.std() > 1e-2
    torch.testing.assert_close(many, single.repeat(6), rtol=0, atol=1e-11)


def test_energies_depend_on_the_lattice_and_not_on_its_description() -> None:
    stack, x, pos = Stack(), make_x(), make_pos()
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    order = torch.randperm(N)
    for pbc in (TTT, TTF):
        reference = energies(stack, x, Structure(pos, pbc=pbc))
        shifted = pos.clone()
        shifted[2] += 2 * SKEWED[1] - SKEWED[0]
        sheared = SKEWED.clone()
        sheared[0] += SKEWED[1]
        mirrored = torch.stack((SKEWED[1], SKEWED[0], SKEWED[2]))
        for other in (
            Structure(shifted, pbc=pbc),
            Structure(pos, sheared, pbc),
            Structure(pos, mirrored, pbc),
            Structure(pos @ rotation, SKEWED @ rotation, pbc),
            Structure(pos + 100.0, pbc=pbc),
        ):
            torch.testing.assert_close(energies(stack, x, other), reference, rtol=0, atol=1e-10)
        permuted = energies(stack, x[order], Structure(pos[order], pbc=pbc))
        torch.testing.assert_close(permuted, reference[order], rtol=0, atol=1e-11)
        shifted[2] += 0.5 * SKEWED[0]
        assert (energies(stack, x, Structure(shifted, pbc=pbc)) - reference).abs().max() > 1e-3


def test_more_vacuum_changes_no_slab() -> None:
    stack, x, pos = Stack(), make_x(), make_pos()
    thicker = torch.cat((SKEWED[:2], 4 * SKEWED[2:] + SKEWED[:1]))
    reference = energies(stack, x, Structure(pos, pbc=TTF))
    torch.testing.assert_close(
        energies(stack, x, Structure(pos, thicker, TTF)), reference, rtol=0, atol=1e-11
    )


@pytest.mark.parametrize("make_map", MAPS)
@pytest.mark.parametrize("fill", [1e30, float("nan"), float("inf")])
def test_padding_and_batch_mates_touch_nothing(make_map: Callable[[], FeatureMap], fill: float) -> None:
    layer = make_layer(make_map())
    small, large = Structure(make_pos(5, seed=3), pbc=TTF), Structure(make_pos(), 1.2 * SKEWED)
    x = torch.stack((torch.cat((make_x(5), make_x(2) * fill)), make_x()))
    x.requires_grad_()
    batch = replace(geometry([small, large], fill=fill))
    out = layer(x, batch)
    gradient = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)
    assert bool((out[0, 5:] == 0).all())
    assert bool((gradient[0][0, 5:] == 0).all())
    assert all(g is None or bool(g.isfinite().all()) for g in gradient)
    alone = layer(x[:1, :5].detach(), geometry([small]))
    torch.testing.assert_close(out[0, :5], alone[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(out[1], layer(x[1:].detach(), geometry([large]))[0], rtol=0, atol=1e-12)


def test_a_graph_without_atoms_and_one_with_one_are_fine() -> None:
    layer = make_layer()
    single = Structure(make_pos(1), 3 * SKEWED)
    batch = geometry([Structure(make_pos(0)), single, Structure(make_pos())])
    x = make_x(3 * N).view(3, N, C).requires_grad_()
    out = layer(x, batch)
    assert bool((out[0] == 0).all())
    # Attention of one atom to itself and its images is its own value.
    torch.testing.assert_close(out[1, 0], layer.out(layer.value(x[1, 0])), rtol=0, atol=1e-12)
    assert bool(torch.autograd.grad(out.sum(), x)[0].isfinite().all())


@pytest.mark.parametrize("make_map", MAPS)
@pytest.mark.parametrize("separate_normalizers", [False, True])
def test_large_queries_and_coincident_atoms_stay_finite(
    make_map: Callable[[], FeatureMap], separate_normalizers: bool
) -> None:
    layer = make_layer(make_map(), separate_normalizers=separate_normalizers).float()
    pos = make_pos()
    pos[3] = pos[2]
    pos.requires_grad_()
    batch = geometry([Structure(pos)])
    heads = [
        (x[:1] * s).detach().float().requires_grad_()
        for x, s in zip(make_heads(), (100.0, 100.0, 1.0), strict=True)
    ]
    near = batch.near
    batch = replace(
        batch,
        pos=batch.pos.float(),
        cell=batch.cell.float(),
        near=replace(near, distances=near.distances.float(), cutoff=near.cutoff.float()),
    )
    positional = layer.encode_positions(batch)
    out = range_separated_attention(
        *heads,
        positional,
        batch.atom_mask,
        feature_map=layer.feature_map,
        separate_normalizers=separate_normalizers,
    )
    assert bool(out.isfinite().all())
    gradients = torch.autograd.grad(out.square().sum(), [*heads, pos, *layer.rpe.parameters()])
    assert all(bool(g.isfinite().all()) for g in gradients)
    # Outputs are means of values (two of them, side by side).
    assert out.abs().max() <= (1 + separate_normalizers) * heads[2].abs().max() * (1 + 1e-5)


def test_half_precision_queries_are_summed_in_float32() -> None:
    layer = make_layer().float()
    batch = geometry([Structure(make_pos().float(), SKEWED.float())])
    positional = layer.encode_positions(batch)
    heads = [x[:1].detach().bfloat16() for x in make_heads()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = range_separated_attention(*heads, positional, feature_map=layer.feature_map)
    exact = range_separated_attention(*(x.float() for x in heads), positional, feature_map=layer.feature_map)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.bfloat16(), rtol=0, atol=0)


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.largest = max(self.largest, one.numel())
        return out


def test_no_tensor_of_atoms_times_atoms_is_made() -> None:
    """1,009 atoms, backward pass included: the largest tensor is smaller than N^2 / 2."""
    count = 1009
    cell = 22.0 * torch.eye(3, dtype=torch.float64)
    pos = torch.rand(count, 3, generator=torch.Generator().manual_seed(7), dtype=torch.float64) @ cell
    layer = make_layer(PositiveRandomFeatures(3), FarModulation(H, 0.1))
    batch = geometry([Structure(pos, cell)], radius=2.5)
    x = make_x(count)[None].requires_grad_()
    with LargestTensor() as mode:
        layer(x, batch).sum().backward()
    assert count < mode.largest < count**2 / 2


def test_layers_share_positions_and_the_default_feature_map_is_positive() -> None:
    layer = make_layer()
    other = RangeSeparatedAttention(C, H, rpe=layer.rpe).double()
    assert isinstance(other.feature_map, PositiveRandomFeatures)
    batch, x = geometry(two_graphs()), torch.stack((make_x(), make_x(seed=8)))
    positional = layer.encode_positions(batch)
    assert isinstance(positional, RangeSeparatedPositions)
    shared = other(x, atom_mask=batch.atom_mask, positional=positional)
    torch.testing.assert_close(shared, other(x, batch), rtol=0, atol=0)


def test_gradients_reach_every_parameter_at_the_start() -> None:
    layer = make_layer()
    layer(make_x()[None], geometry([Structure(make_pos())])).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        # The key's bias shifts all logits of a row alike: only the random features' noise lets it matter.
        assert parameter.grad.abs().max() > 1e-9, name


def test_reset_parameters_starts_again() -> None:
    layer = make_layer()
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(3.0)
    layer.reset_parameters()
    after = dict(layer.named_parameters())
    assert not any(bool((parameter == 3.0).any()) for parameter in after.values())
    for name in ("rpe.far.spectrum.raw_amplitude", "rpe.far.spectrum.raw_widths"):
        torch.testing.assert_close(after[name].detach(), before[name])


def test_bad_arguments_are_named() -> None:
    rpe = make_layer().rpe
    with pytest.raises(ValueError, match="one number of heads"):
        RangeSeparatedRPE(RadialNearBias(2, RADIUS), FarModulation(3, 0.2))
    with pytest.raises(ValueError, match="rpe must have num_heads=5"):
        RangeSeparatedAttention(C, 5, rpe=rpe)
    with pytest.raises(ValueError, match="positive features only, got RFAGaussianFeatures"):
        RangeSeparatedAttention(C, H, rpe=rpe, feature_map=RFAGaussianFeatures(8))
    for pos in (None, make_pos()[None]):
        with pytest.raises(ValueError, match="needs a PeriodicGeometry"):
            RangeSeparatedAttention(C, H, rpe=rpe)(make_x()[None].float(), pos)
