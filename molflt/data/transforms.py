"""Transforms of one `Data`: neighbour graph, Δpos target, random rotation, interpolation with noise.

Each is a PyG `BaseTransform`: it returns a changed shallow copy and can be chained with `Compose`. Randomness
comes from the generator given, else from torch's global one, which PyG's and torch's data loaders seed per
worker. Order matters: `InterpolateNoise` and `RandomRotation` move atoms, so `RadiusGraph` goes after
`InterpolateNoise` (rotation changes no distance and may come before or after).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import BaseTransform

from molflt.data.displacements import minimum_image
from molflt.data.graphs import radius_graph
from molflt.errors import InputError

VECTOR_FIELDS = ("pos", "pos_relaxed", "delta_pos", "cell", "force", "forces")
"""Fields whose last dimension is a vector in space."""
EDGE_FIELDS = ("edge_index", "cell_offsets", "distances")


def random_rotation(about_z: bool = False, generator: torch.Generator | None = None) -> Tensor:
    """Draw a rotation matrix [3, 3] (float64, determinant +1), uniform over all rotations or about z.

    A uniform rotation is a normalised Gaussian quaternion (Shoemake, Graphics Gems III, 1992).
    """
    if about_z:
        angle = 2.0 * math.pi * torch.rand((), generator=generator, dtype=torch.float64)
        cos, sin = angle.cos().item(), angle.sin().item()
        return torch.tensor([[cos, -sin, 0.0], [sin, cos, 0.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    quaternion = torch.randn(4, generator=generator, dtype=torch.float64)
    w, x, y, z = (quaternion / quaternion.norm()).tolist()
    return torch.tensor(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ],
        dtype=torch.float64,
    )


def cell_and_pbc(data: Data) -> tuple[Tensor, Tensor]:
    """Return `cell` [3, 3] and `pbc` [3] of one structure, with OC20's meaning where a field is absent.

    A cell without `pbc` repeats in all three directions (OC20 records hold no `pbc`); without a cell nothing
    repeats.

    Raises:
        InputError: if `pbc` is on but there is no cell.
    """
    cell, pbc = data.get("cell"), data.get("pbc")
    if cell is None:
        if pbc is not None and bool(pbc.any()):
            raise InputError(
                f"structure {_name(data)} has pbc on but no cell; add `cell` [1, 3, 3] or switch pbc off"
            )
        return torch.zeros(3, 3, dtype=data["pos"].dtype), torch.zeros(3, dtype=torch.bool)
    if pbc is None:
        pbc = torch.ones(3, dtype=torch.bool)
    return cell.reshape(3, 3), pbc.reshape(3)


class RadiusGraph(BaseTransform):
    """Set `edge_index`, `cell_offsets` and `distances` to the periodic radius graph of `pos`.

    Args:
        radius, max_neighbors, strict_cap: as in `molflt.data.graphs.radius_graph`.
    """

    def __init__(self, radius: float, max_neighbors: int | None = None, *, strict_cap: bool = False) -> None:
        self.radius = radius
        self.max_neighbors = max_neighbors
        self.strict_cap = strict_cap

    def forward(self, data: Data) -> Data:
        cell, pbc = cell_and_pbc(data)
        data.edge_index, data.cell_offsets, data.distances = radius_graph(
            data["pos"], cell, pbc, self.radius, self.max_neighbors, strict_cap=self.strict_cap
        )
        return data

    def __repr__(self) -> str:
        cap = f"max_neighbors={self.max_neighbors}, strict_cap={self.strict_cap}"
        return f"RadiusGraph(radius={self.radius}, {cap})"


class DeltaPos(BaseTransform):
    """Set `delta_pos` [A, 3] to the minimum image of pos_relaxed - pos, Å.

    Positions in OC20 are wrapped into the cell, so the plain difference jumps by lattice vectors. A structure
    without `pos_relaxed` (test sets, user files) passes unchanged.
    """

    def forward(self, data: Data) -> Data:
        if data.get("pos_relaxed") is not None:
            data.delta_pos = minimum_image(data["pos_relaxed"] - data["pos"], *cell_and_pbc(data))
        return data


class RandomRotation(BaseTransform):
    """Rotate every vector of a structure, cell included, by one random rotation.

    Distances, edges and `cell_offsets` stay valid, as lattice and positions turn together.

    Args:
        about_z: rotate about z only, which keeps a slab's open direction along z.
        generator: source of randomness; None uses torch's global one.
    """

    def __init__(self, about_z: bool = False, generator: torch.Generator | None = None) -> None:
        self.about_z = about_z
        self.generator = generator

    def forward(self, data: Data) -> Data:
        rotation = random_rotation(self.about_z, self.generator)
        for name in VECTOR_FIELDS:
            vectors = data.get(name)
            if vectors is not None:
                data[name] = (vectors.double() @ rotation.T.to(vectors.device)).to(vectors.dtype)
        return data

    def __repr__(self) -> str:
        return f"RandomRotation(about_z={self.about_z})"


class InterpolateNoise(BaseTransform):
    """Start some structures from points between initial and relaxed positions, plus noise.

    With the given probability a structure's free atoms start from

        pos_i + u_i Δpos_i + noise_std n_i,    u_i uniform in [0, 1), n_i normal, Δpos the minimum image,

    and `delta_pos` is set to what is then left to `pos_relaxed`; `pos_relaxed` and the target energy stay. A
    `delta_pos` that is there already (from `DeltaPos`) is believed, as finding it takes half of the time.
    Free atoms are those not `fixed`; where no `fixed` is given, those with tag > 0; else all. Edges are
    removed, moved or not, as they would be stale: `RadiusGraph` comes after this.

    Source: Godwin et al., Noisy Nodes (arXiv:2106.07971), with one factor per atom and the settings of
    Liao and Smidt, Equiformer (arXiv:2206.11990): probability 0.5, noise_std 0.3 Å.

    Args:
        probability: share of structures that are changed.
        noise_std: standard deviation of the noise per coordinate, Å.
        generator: source of randomness; None uses torch's global one.

    Raises:
        InputError: when applied to a structure without `pos_relaxed`.
    """

    def __init__(
        self, probability: float = 0.5, noise_std: float = 0.3, generator: torch.Generator | None = None
    ) -> None:
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"probability must lie in [0, 1], got {probability}")
        if not (math.isfinite(noise_std) and noise_std >= 0.0):
            raise ValueError(f"noise_std must be finite and not negative, got {noise_std}; give it in Å")
        self.probability = probability
        self.noise_std = noise_std
        self.generator = generator

    def forward(self, data: Data) -> Data:
        if data.get("pos_relaxed") is None:
            raise InputError(
                f"structure {_name(data)} has no pos_relaxed to interpolate to; leave InterpolateNoise out"
            )
        pos: Tensor = data["pos"]
        delta_pos = data.get("delta_pos")
        if delta_pos is None:
            delta_pos = minimum_image(data.pos_relaxed - pos, *cell_and_pbc(data))
        if torch.rand((), generator=self.generator).item() < self.probability:
            factor = torch.rand(len(pos), 1, generator=self.generator, dtype=pos.dtype)
            noise = self.noise_std * torch.randn(pos.shape, generator=self.generator, dtype=pos.dtype)
            step = torch.where(_free_atoms(data).unsqueeze(-1), factor * delta_pos + noise, 0.0)
            data.pos, delta_pos = pos + step, delta_pos - step
        data.delta_pos = delta_pos
        for name in EDGE_FIELDS:
            if name in data:
                del data[name]
        return data

    def __repr__(self) -> str:
        return f"InterpolateNoise(probability={self.probability}, noise_std={self.noise_std})"


def _free_atoms(data: Data) -> Tensor:
    if data.get("fixed") is not None:
        return ~data.fixed.bool()
    if data.get("tags") is not None:
        return data.tags > 0
    return torch.ones(len(data["pos"]), dtype=torch.bool)


def _name(data: Data) -> str:
    sid = data.get("sid")
    return "" if sid is None else f"sid {int(sid)}"
