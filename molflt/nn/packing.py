"""Ragged atoms to padded graphs and back: the one place where `[A, ...]` becomes `[B, N, ...]`.

Atom a of graph b goes to row n of the padded tensor, where n counts the atoms of graph b that come before a.
`batch` need not be sorted; within a graph the order of the atoms is kept. Graphs without atoms, in the middle
or at the end, become rows of padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class DenseLayout:
    """Where each ragged atom sits in the padded tensor.

    Attributes:
        slot: flat index b * N + n of each atom, `[A]`.
        atom_mask: true at real atoms, `[B, N]`.
    """

    slot: Int[Tensor, "A"]
    atom_mask: Bool[Tensor, "B N"]

    def pack(self, x: Shaped[Tensor, "A *feature"]) -> Shaped[Tensor, "B N *feature"]:
        """Padded form of `x`; the padding is zero."""
        num_graphs, num_rows = self.atom_mask.shape
        flat = x.new_zeros((num_graphs * num_rows, *x.shape[1:]))
        return flat.index_copy(0, self.slot, x).view(num_graphs, num_rows, *x.shape[1:])

    def unpack(self, dense: Shaped[Tensor, "B N *feature"]) -> Shaped[Tensor, "A *feature"]:
        """Ragged form of `dense`, in the order of the atoms that the layout was made for."""
        return dense.flatten(0, 1).index_select(0, self.slot)


def dense_layout(
    batch: Int[Tensor, "A"], batch_size: int | None = None, max_nodes: int | None = None
) -> DenseLayout:
    """Padded positions of ragged atoms.

    Args:
        batch: graph index of each atom, in any order.
        batch_size: B; by default the largest index plus one. Needed when the last graphs may be empty, and
            under `torch.compile`, where no shape may depend on values.
        max_nodes: N; by default the size of the largest graph.

    Raises:
        ValueError: `batch` is no vector of int64; an index of it is negative or not below `batch_size`, or a
            graph has more than `max_nodes` atoms (under `torch.compile` a RuntimeError when the compiled code
            runs).
    """
    if batch.dtype != torch.int64 or batch.ndim != 1:
        raise ValueError(
            f"batch must be one int64 graph index per atom, got {batch.dtype} of shape {list(batch.shape)}; "
            "use batch.long()"
        )
    if torch.compiler.is_compiling() or batch.numel() == 0:
        batch_size = (int(batch.max()) + 1 if batch.numel() > 0 else 0) if batch_size is None else batch_size
    else:
        low, high = torch.stack(torch.aminmax(batch)).tolist()
        batch_size = high + 1 if batch_size is None else batch_size
        if low < 0 or high >= batch_size:
            raise ValueError(
                f"batch must hold graph indices in [0, batch_size) = [0, {batch_size}), got values from "
                f"{low} to {high}; pass the number of graphs as batch_size"
            )
    counts = batch.new_zeros(batch_size).index_add(0, batch, torch.ones_like(batch))
    if max_nodes is None:
        max_nodes = int(counts.max()) if batch_size > 0 else 0
    elif torch.compiler.is_compiling():
        fits = counts.le(max_nodes).all()
        torch.ops.aten._assert_async.msg(fits, "a graph has more atoms than max_nodes")
    elif batch_size > 0 and int(counts.max()) > max_nodes:
        raise ValueError(
            f"max_nodes must be at least the size of the largest graph, {int(counts.max())}, got {max_nodes}"
        )
    order = torch.argsort(batch, stable=True)
    starts = counts.cumsum(0) - counts
    rank_in_order = torch.arange(batch.shape[0], device=batch.device) - starts[batch[order]]
    rank = torch.empty_like(batch).index_copy(0, order, rank_in_order.to(batch.dtype))
    atom_mask = torch.arange(max_nodes, device=batch.device) < counts[:, None]
    return DenseLayout(slot=batch * max_nodes + rank, atom_mask=atom_mask)


def to_dense(
    x: Shaped[Tensor, "A *feature"],
    batch: Int[Tensor, "A"] | None = None,
    batch_size: int | None = None,
    max_nodes: int | None = None,
) -> tuple[Shaped[Tensor, "B N *feature"], Bool[Tensor, "B N"]]:
    """Padded form of ragged `x` and the mask of its real rows.

    `batch=None` means one graph. To pack several tensors of the same atoms, make a `dense_layout` once and
    call its `pack`. Arguments and errors as in `dense_layout`.

    Example:
        >>> dense, atom_mask = to_dense(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, 0, 1]))
        >>> dense
        tensor([[2., 0.],
                [1., 3.]])
        >>> atom_mask
        tensor([[ True, False],
                [ True,  True]])
    """
    if batch is None:
        batch = torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        batch_size = 1 if batch_size is None else batch_size
    layout = dense_layout(batch, batch_size, max_nodes)
    return layout.pack(x), layout.atom_mask


def to_ragged(
    dense: Shaped[Tensor, "B N *feature"],
    atom_mask: Bool[Tensor, "B N"],
    batch: Int[Tensor, "A"] | None = None,
) -> Shaped[Tensor, "A *feature"]:
    """Real rows of `dense`: the inverse of `to_dense`.

    Without `batch` the atoms come graph by graph, which is their original order when `batch` was sorted. With
    the `batch` that `to_dense` was given they come in its order, sorted or not.
    """
    if batch is None:
        return dense[atom_mask]
    return dense_layout(batch, *atom_mask.shape).unpack(dense)
