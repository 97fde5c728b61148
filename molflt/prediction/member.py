"""One checkpoint at work: energies, displacements, their spread, and how far from the training data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from ase.data import chemical_symbols
from numpy.typing import NDArray
from torch_geometric.data import Batch, Data

from molflt.build import build_transform
from molflt.checkpoint import Checkpoint, CheckpointMetadata
from molflt.data.structures import Structure
from molflt.data.transforms import RadiusGraph
from molflt.domain import domain_from_dict, element_shares, forward_with_embedding, unusual_shares
from molflt.prediction.inputs import model_input
from molflt.prediction.redraws import Redraws

LEAST_SPREAD = 1e-5
"""eV; a spread below is rounding: draws play no part, as in softmax attention or for a single atom."""
LEAST_RELATIVE_SPREAD = 2e-6
"""The same, as a share of the energy: a few times what single precision resolves."""


class MemberOutput(NamedTuple):
    """What one network says of one structure."""

    energy: float
    """eV."""
    delta_pos: NDArray[np.float64] | None
    """[A, 3] Å."""
    redraw_std: float | None
    """Standard deviation over the network's own and other draws, eV; None where draws play no part."""
    unlike: dict[str, str]
    """In what the structure is unlike the training data: kind to phrase."""


class Member:
    """A checkpoint's network, a copy in the given precision on the given device.

    Other draws are computed in single precision and without displacements, at half the cost: their spread is
    a rough number, and energies do not depend on them. Without `displacements` they are not computed at all.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        num_redraws: int,
        displacements: bool = True,
    ) -> None:
        self.metadata = checkpoint.metadata
        self.model = copy.deepcopy(checkpoint.model).to(device=device, dtype=dtype).eval()
        if not displacements:
            self.model.displacement_head = None
        self.device = device
        self.domain = domain_from_dict(checkpoint.metadata.domain)
        self._redrawn = copy.deepcopy(checkpoint.model).to(device=device, dtype=torch.float32).eval()
        self._redrawn.displacement_head = None
        self._redraws = Redraws(self._redrawn, num_redraws)
        self._transform = build_transform(checkpoint.config.data, False)

    def prepare(self, structure: Structure) -> Data:
        """The network's input for a structure; `InputError` where its graph cannot be made.

        Neighbours that the structure's reader has found are not searched for again.
        """
        data: Any = model_input(structure.data)
        for step in getattr(self._transform, "transforms", [self._transform]):
            known = structure.neighbors
            if type(step) is RadiusGraph and known is not None and known.radius >= step.radius:
                edge_index, offsets, distances = known.graph(
                    step.radius, step.max_neighbors, strict_cap=step.strict_cap
                )
                data.edge_index, data.cell_offsets, data.distances = edge_index, offsets, distances.float()
            else:
                data = step(data)
        return data

    @torch.inference_mode()
    def predict(self, samples: Sequence[Data]) -> list[MemberOutput]:
        """Results for prepared samples, computed as one batch."""
        items: list[Any] = list(samples)
        batch: Any = Batch.from_data_list(items)
        batch = batch.to(self.device)
        output, embedding = forward_with_embedding(self.model, batch)
        energies = output.energy.double().cpu().numpy()
        draws = [energies, *self._drawn_energies(batch)]
        spread = np.std(draws, axis=0, ddof=1) if len(draws) > 1 else np.zeros_like(energies)
        rounding = np.maximum(LEAST_SPREAD, LEAST_RELATIVE_SPREAD * np.abs(energies))
        embeddings = embedding.double().cpu().numpy()
        moves: list[Any] = [None] * len(samples)
        if output.delta_pos is not None:
            sizes = [len(sample.atomic_numbers) for sample in samples]
            moves = np.split(output.delta_pos.double().cpu().numpy(), np.cumsum(sizes)[:-1])
        return [
            MemberOutput(
                energy=float(energies[index]),
                delta_pos=moves[index],
                redraw_std=float(spread[index]) if spread[index] > rounding[index] else None,
                unlike=self._unlike(sample, embeddings[index]),
            )
            for index, sample in enumerate(samples)
        ]

    def _drawn_energies(self, batch: Any) -> Iterator[NDArray[np.float64]]:
        prepared = None
        for _ in self._redraws:
            if prepared is None or not self._redraws.only_features:
                prepared = self._redrawn.prepare(batch)
            yield self._redrawn.predict(prepared).energy.double().cpu().numpy()

    def _unlike(self, sample: Data, embedding: NDArray[np.float64]) -> dict[str, str]:
        found = unlike_metadata(sample, self.metadata)
        if self.domain is not None:
            unusual = unusual_shares(self.domain, element_shares(sample.atomic_numbers))
            if unusual:
                found["composition"] = "; ".join(unusual)
            distance, limit = self.domain.distance(embedding), self.domain.distance_limit
            if distance > limit:
                found["embedding"] = (
                    f"embedding distance {distance:.3g}, 99 % of the training data are within {limit:.3g}"
                )
        return found


def unlike_metadata(sample: Data, metadata: CheckpointMetadata) -> dict[str, str]:
    """Elements that training did not have, and a size outside its range, as kind to phrase."""
    found = {}
    unseen = sorted({*sample.atomic_numbers.tolist()} - {*metadata.elements})
    if unseen and metadata.elements:
        symbols = ", ".join(chemical_symbols[number] for number in unseen)
        found["elements"] = f"not in the training data: {symbols}"
    if metadata.num_atoms_range:
        fewest, most = metadata.num_atoms_range
        if not fewest <= len(sample.atomic_numbers) <= most:
            found["size"] = f"training systems have {fewest} to {most} atoms"
    return found
