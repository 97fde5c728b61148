"""What a model was trained on, in numbers that travel with its checkpoint, and what lies outside.

Besides elements and sizes (which the checkpoint's metadata hold anyway) that is the range of each element's
share of the atoms, and where the training systems lie in the space of the network's own features. A system's
embedding h is the mean of its atoms' last features over the atoms that make the energy. With the mean m
and the leading principal directions u_k (variances v_k) of the training embeddings, and the mean variance v_0
of all other directions,

    d(h)^2 = sum_k (u_k.(h - m))^2 / v_k + |h - m - sum_k u_k u_k.(h - m)|^2 / v_0

is a Mahalanobis distance with the small variances, which few systems cannot fix, pooled. A system further out
than 99 % of the training systems is called unlike them. So about one training system in a hundred is, too;
what the flag says is that nothing like the system supports its energy, not that the energy is wrong, and its
absence is no promise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from ase.data import atomic_numbers, chemical_symbols
from numpy.typing import NDArray
from torch import Tensor
from torch_geometric.data import Batch, Data

from molflt.errors import InputError
from molflt.models.graphormer3d import Graphormer3D, Graphormer3DOutput
from molflt.models.heads import counted_atoms

MAX_DIRECTIONS = 16
SYSTEMS_PER_DIRECTION = 10
PERCENTILE = 99.0
MAX_SYSTEMS = 20_000
"""Of a larger training split so many systems, evenly spread, describe it."""
_SHARE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class TrainingDomain:
    """Composition and embeddings of the training systems."""

    num_systems: int
    """Systems that were measured."""
    shares: dict[str, list[float]]
    """Element symbol to the smallest and largest share of a system's atoms, 0 to 1."""
    mean: list[float]
    """m, [C]."""
    directions: list[list[float]]
    """u_k, [K, C]."""
    variances: list[float]
    """v_k, [K]."""
    rest_variance: float
    """v_0."""
    distance_limit: float
    """99th percentile of d over the measured systems."""

    def distance(self, embedding: NDArray[np.float64]) -> float:
        """d(h) of an embedding [C]."""
        directions = np.asarray(self.directions).reshape(-1, len(self.mean))
        offset = np.asarray(embedding, dtype=np.float64) - np.asarray(self.mean)
        along = directions @ offset
        rest = offset - along @ directions
        return float(
            np.sqrt((along**2 / np.asarray(self.variances)).sum() + rest @ rest / self.rest_variance)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and strings."""
        return asdict(self)


def domain_from_dict(values: Mapping[str, Any]) -> TrainingDomain | None:
    """The domain that `TrainingDomain.to_dict` made plain; None for the empty one of checkpoints without.

    Raises `InputError` where entries are missing, unknown or do not belong together.
    """
    if not values:
        return None
    domain = None
    try:
        domain = TrainingDomain(**values)
        width, number = len(domain.mean), len(domain.variances)
        lists = (domain.mean, domain.variances, *domain.directions, *domain.shares.values())
        fits = (
            all(type(number) in (int, float) for numbers in lists for number in numbers)
            and [len(direction) for direction in domain.directions] == [width] * number
            and all(variance > 0 for variance in (*domain.variances, domain.rest_variance))
            and all(len(bounds) == 2 and symbol in atomic_numbers for symbol, bounds in domain.shares.items())
            and domain.distance_limit >= 0
        )
    except (TypeError, AttributeError):
        fits = False
    if domain is None or not fits:
        raise InputError(
            "the checkpoint's description of its training data is damaged; copy it again from its source"
        )
    return domain


def measure_domain(model: Graphormer3D, samples: Sequence[Data], batch_size: int = 32) -> TrainingDomain:
    """Run the network over its training systems (at most 20,000 of them) and summarise them.

    Args:
        model: in evaluation mode, with the weights that the domain is for.
        samples: prepared training samples, as the network takes them.
        batch_size: systems per batch.
    """
    picked = np.unique(np.linspace(0, len(samples) - 1, min(len(samples), MAX_SYSTEMS)).astype(int))
    shares: list[dict[str, float]] = []
    embeddings: list[NDArray[np.float64]] = []
    device = model.energy_mean.device
    with torch.inference_mode():
        for start in range(0, len(picked), batch_size):
            chosen: list[Any] = [samples[int(index)] for index in picked[start : start + batch_size]]
            shares += [element_shares(sample.atomic_numbers) for sample in chosen]
            batch: Any = Batch.from_data_list(chosen)
            embeddings.append(forward_with_embedding(model, batch.to(device))[1].double().cpu().numpy())
    return fit_domain(np.concatenate(embeddings), shares)


def fit_domain(embeddings: NDArray[np.float64], shares: Iterable[Mapping[str, float]]) -> TrainingDomain:
    """Summarise embeddings [n, C] and element shares (one mapping per system)."""
    shares = list(shares)
    symbols = sorted({symbol for system in shares for symbol in system})
    ranges = {s: [system.get(s, 0.0) for system in shares] for s in symbols}
    count, width = embeddings.shape
    mean = embeddings.mean(axis=0)
    _, singular, basis = np.linalg.svd(embeddings - mean, full_matrices=False)
    variances = singular**2 / max(count - 1, 1)
    number = min(MAX_DIRECTIONS, max(1, count // SYSTEMS_PER_DIRECTION), len(variances))
    # A variance that rounding alone makes would turn any difference into an infinite distance.
    floor = max(1e-6 * float(variances[0]), 1e-12 * float(mean @ mean) / width, 1e-30)
    rest = float(variances[number:].sum()) / max(width - number, 1)
    domain = TrainingDomain(
        num_systems=count,
        shares={symbol: [min(values), max(values)] for symbol, values in ranges.items()},
        mean=mean.tolist(),
        directions=basis[:number].tolist(),
        variances=np.maximum(variances[:number], floor).tolist(),
        rest_variance=max(rest, floor),
        distance_limit=0.0,
    )
    limit = float(np.percentile([domain.distance(row) for row in embeddings], PERCENTILE))
    return TrainingDomain(**{**asdict(domain), "distance_limit": limit})


def element_shares(atomic_numbers: Tensor) -> dict[str, float]:
    """Symbol to share of the atoms [A], 0 to 1."""
    numbers, counts = atomic_numbers.unique(return_counts=True)
    return {
        chemical_symbols[number]: count / len(atomic_numbers)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True)
    }


def unusual_shares(domain: TrainingDomain, shares: Mapping[str, float]) -> list[str]:
    """What is outside the training systems' composition, a phrase per element that they have."""
    phrases = []
    for symbol, (low, high) in domain.shares.items():
        share = shares.get(symbol, 0.0)
        if not low - _SHARE_TOLERANCE <= share <= high + _SHARE_TOLERANCE:
            phrases.append(
                f"{symbol} is {100 * share:.1f} % of the atoms, {100 * low:.1f} to {100 * high:.1f} % in "
                "the training data"
            )
    return phrases


def forward_with_embedding(model: Graphormer3D, batch: Data | Batch) -> tuple[Graphormer3DOutput, Tensor]:
    """The network's output for a batch, and the embeddings [B, C] on which its energies are based."""
    seen: list[tuple[Any, ...]] = []
    handle = model.energy_head.register_forward_pre_hook(lambda module, arguments: seen.append(arguments))
    try:
        output = model(batch)
    finally:
        handle.remove()
    x, tags, graph, num_graphs = seen[0]
    counted = counted_atoms(tags, graph, num_graphs).to(x.dtype)
    total = x.new_zeros(num_graphs, x.shape[-1]).index_add(0, graph, x * counted[:, None])
    atoms = x.new_zeros(num_graphs).index_add(0, graph, counted)
    return output, total / atoms[:, None]
