"""Ragged nodes to padded graphs and back: the one place where `[A, ...]` becomes `[B, N, ...]`.

Node a of graph b goes to row n of the padded tensor, where n counts the nodes of graph b that come before a.
`batch` need not be sorted; within a graph the order of the nodes is kept. Graphs without nodes, in the middle
or at the end, become rows of padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor


@dataclass(frozen=True)
class DenseLayout:
    """Where each ragged node sits in the padded tensor.

    Attributes:
        slot: flat index b * N + n of each node, `[A]`.
        atom_mask: true at real nodes, `[B, N]`.
    """

    slot: Int[Tensor, "A"]
    atom_mask: Bool[Tensor, "B N"]

    def pack(self, x: Shaped[Tensor, "A *feature"]) -> Shaped[Tensor, "B N *feature"]:
        """Padded form of `x`; the padding is zero."""
        num_graphs, num_rows = self.atom_mask.shape
        flat = x.new_zeros((num_graphs * num_rows, *x.shape[1:]))
        return flat.index_copy(0, self.slot, x).view(num_graphs, num_rows, *x.shape[1:])

    def unpack(self, dense: Shaped[Tensor, "B N *feature"]) -> Shaped[Tensor, "A *feature"]:
        """Ragged form of `dense`, in the order of the nodes that the layout was made for."""
        return dense.flatten(0, 1).index_select(0, self.slot)


def check_batch(batch: object, num_nodes: int | None = None) -> Tensor:
    """`batch`, or an error where it is not one int64 graph index per node.

    Args:
        batch: what was given as such.
        num_nodes: A; any without it.
    """
    if not isinstance(batch, Tensor):
        kind, got = TypeError, type(batch).__name__
        remedy = (
            "use torch.as_tensor(batch)" if hasattr(batch, "__len__") else "pass the graph index of each node"
        )
    elif batch.ndim != 1 or (num_nodes is not None and batch.shape[0] != num_nodes):
        kind, got = ValueError, f"{batch.dtype} of shape {list(batch.shape)}"
        a_column = batch.ndim == 2 and 1 in batch.shape and num_nodes in (None, batch.numel())
        remedy = "use batch.flatten()" if a_column else "pass one graph index for each node"
    elif batch.dtype != torch.int64:
        kind, got = ValueError, f"{batch.dtype}"
        remedy = "use batch.long()"
    else:
        return batch
    shape = "num_nodes" if num_nodes is None else num_nodes
    raise kind(f"batch must be an int64 tensor [{shape}], the graph index of each node, got {got}; {remedy}")


def number_of_graphs(batch: Tensor, num_graphs: int | None, name: str) -> int:
    """`num_graphs`, by default the largest index of `batch` plus one.

    Raises ValueError, which calls `num_graphs` by `name`, for an index that is negative or not below it;
    under `torch.compile` a RuntimeError when the compiled code runs.
    """
    if batch.numel() == 0:
        return 0 if num_graphs is None else num_graphs
    if torch.compiler.is_compiling():
        num_graphs = int(batch.max()) + 1 if num_graphs is None else num_graphs
        torch.ops.aten._assert_async.msg(
            batch.ge(0).all(), "batch holds a negative graph index: graph indices begin at 0"
        )
        torch.ops.aten._assert_async.msg(
            batch.lt(num_graphs).all(),
            f"batch holds a graph index that is not below {name}: pass the number of graphs as {name}",
        )
        return num_graphs
    low, high = torch.stack(torch.aminmax(batch)).tolist()
    if low < 0:
        raise ValueError(
            f"batch must hold graph indices of at least 0, got values from {low} to {high}; graph indices "
            "begin at 0"
        )
    num_graphs = high + 1 if num_graphs is None else num_graphs
    if high >= num_graphs:
        raise ValueError(
            f"batch must hold graph indices in [0, {name}) = [0, {num_graphs}), got values up to {high}; "
            f"pass the number of graphs as {name}, {high + 1} or more"
        )
    return num_graphs


def dense_layout(
    batch: Int[Tensor, "A"], batch_size: int | None = None, max_nodes: int | None = None
) -> DenseLayout:
    """Padded positions of ragged nodes.

    Args:
        batch: graph index of each node, in any order.
        batch_size: B; by default the largest index plus one. Needed when the last graphs may be empty, and
            under `torch.compile`, where no shape may depend on values.
        max_nodes: N; by default the size of the largest graph.

    Raises:
        TypeError: `batch` is no tensor.
        ValueError: `batch` is no vector of int64; an index of it is negative or not below `batch_size`, or a
            graph has more than `max_nodes` nodes (under `torch.compile` a RuntimeError when the compiled code
            runs).
    """
    batch = check_batch(batch)
    return checked_layout(batch, number_of_graphs(batch, batch_size, "batch_size"), max_nodes)


def checked_layout(batch: Int[Tensor, "A"], batch_size: int, max_nodes: int | None) -> DenseLayout:
    """`dense_layout` of a `batch` that `check_batch` and `number_of_graphs` have passed."""
    if torch.compiler.is_compiling() and batch.numel() > 0:
        # Whatever runs before the assertions stays inside memory.
        batch = batch.clamp(0, batch_size - 1)
    counts = batch.new_zeros(batch_size).index_add(0, batch, torch.ones_like(batch))
    if max_nodes is None:
        max_nodes = int(counts.max()) if batch_size > 0 else 0
    elif torch.compiler.is_compiling():
        fits = counts.le(max_nodes).all()
        torch.ops.aten._assert_async.msg(
            fits, "a graph has more nodes than max_nodes: pass a larger max_nodes"
        )
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

    `batch=None` means one graph. To pack several tensors of the same nodes, make a `dense_layout` once and
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

    Without `batch` the nodes come graph by graph, which is their original order when `batch` was sorted. With
    the `batch` that `to_dense` was given they come in its order, sorted or not.
    """
    if batch is None:
        return dense[atom_mask]
    return dense_layout(batch, *atom_mask.shape).unpack(dense)
