"""Ragged to dense and back."""

import pytest
import torch

from molflt.nn.packing import check_batch, dense_layout, to_dense, to_ragged


def random_batch(num_nodes: int = 23, num_graphs: int = 7) -> torch.Tensor:
    """Unsorted graph indices in which graph 2 and the last graph are empty."""
    choices = torch.tensor([graph for graph in range(num_graphs - 1) if graph != 2])
    return choices[torch.randint(len(choices), (num_nodes,), generator=torch.Generator().manual_seed(3))]


def test_rows_of_an_unsorted_batch_keep_their_order_within_each_graph():
    batch = torch.tensor([1, 0, 1, 3, 0, 1])
    x = torch.arange(6.0)
    dense, atom_mask = to_dense(x, batch, batch_size=5)
    expected = torch.tensor([[1.0, 4, 0], [0, 2, 5], [0, 0, 0], [3, 0, 0], [0, 0, 0]])
    assert torch.equal(dense, expected)
    assert atom_mask.sum(-1).tolist() == [2, 3, 0, 1, 0]
    assert torch.equal(
        atom_mask, torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0]]).bool()
    )


def test_unpacking_inverts_packing_for_an_unsorted_batch_with_empty_graphs():
    batch = random_batch()
    x = torch.randn(23, 5, 2)
    layout = dense_layout(batch, batch_size=7)
    assert torch.equal(layout.unpack(layout.pack(x)), x)
    dense, atom_mask = to_dense(x, batch, batch_size=7)
    assert torch.equal(to_ragged(dense, atom_mask, batch), x)
    assert not torch.equal(to_ragged(dense, atom_mask), x)


def test_to_ragged_without_batch_gives_a_sorted_batch_back():
    batch = random_batch().sort().values
    x = torch.randn(23, 5)
    assert torch.equal(to_ragged(*to_dense(x, batch, batch_size=7)), x)


def test_padding_is_zero_and_gradients_reach_exactly_the_real_rows():
    batch = torch.tensor([0, 2, 2])
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    dense, atom_mask = to_dense(x, batch, batch_size=3, max_nodes=4)
    assert dense[~atom_mask].abs().max() == 0
    weight = torch.randn_like(dense)
    (gradient,) = torch.autograd.grad((dense * weight).sum(), x)
    assert torch.equal(gradient, to_ragged(weight, atom_mask, batch))


def test_without_batch_everything_is_one_graph():
    x = torch.randn(5, 3)
    dense, atom_mask = to_dense(x)
    assert torch.equal(dense[0], x)
    assert torch.equal(atom_mask, torch.ones(1, 5, dtype=torch.bool))


def test_no_atoms_make_only_padding():
    dense, atom_mask = to_dense(
        torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), batch_size=2, max_nodes=5
    )
    assert dense.shape == (2, 5, 3)
    assert not atom_mask.any()
    assert to_dense(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))[0].shape == (0, 0, 3)


def test_a_graph_index_outside_the_batch_is_refused():
    with pytest.raises(ValueError, match=r"\[0, batch_size\) = \[0, 3\).*as batch_size, 4 or more"):
        dense_layout(torch.tensor([0, 1, 3]), batch_size=3)
    for batch_size in (None, 3):
        with pytest.raises(ValueError, match="graph indices begin at 0"):
            to_dense(torch.zeros(3), torch.tensor([0, -1, 1]), batch_size)


def test_only_a_wrong_type_of_the_index_is_mended_by_a_conversion():
    for batch, remedy in (
        (torch.zeros(3).int(), r"batch.long\(\)"),
        (torch.zeros(3, 1), r"batch.flatten\(\)"),
        (torch.zeros(3, 2), "pass one graph index for each node"),
    ):
        with pytest.raises(ValueError, match=rf"batch must be an int64 tensor \[num_nodes\].*; .*{remedy}$"):
            check_batch(batch)
    with pytest.raises(TypeError, match=r"got list; use torch.as_tensor\(batch\)"):
        check_batch([0, 1])


def test_a_graph_larger_than_max_nodes_is_refused():
    with pytest.raises(ValueError, match="largest graph, 3, got 2"):
        to_dense(torch.zeros(4), torch.tensor([0, 1, 1, 1]), max_nodes=2)
