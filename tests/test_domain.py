"""The summary of the training systems: distances by hand, ranges, and the embeddings they come from."""

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch

from molflt.build import build_dataset
from molflt.checkpoint import load_checkpoint
from molflt.domain import (
    TrainingDomain,
    domain_from_dict,
    element_shares,
    fit_domain,
    forward_with_embedding,
    measure_domain,
    unusual_shares,
)
from molflt.errors import InputError


def test_the_distance_is_mahalanobis_with_the_small_variances_pooled():
    """Against the explicit inverse covariance in which the variances past the second are their mean."""
    generator = np.random.default_rng(0)
    rotation = np.linalg.qr(generator.normal(size=(5, 5)))[0]
    embeddings = generator.normal(size=(23, 5)) * [5.0, 3.0, 0.5, 0.2, 0.1] @ rotation + 7.0
    domain = fit_domain(embeddings, [{"H": 1.0}] * 23)
    assert len(domain.variances) == 2
    values, vectors = np.linalg.eigh(np.cov(embeddings.T))
    values[:3] = values[:3].mean()
    inverse = vectors / values @ vectors.T
    for point in (*embeddings[:3], np.zeros(5), generator.normal(size=5)):
        offset = point - embeddings.mean(axis=0)
        assert domain.distance(point) == pytest.approx(np.sqrt(offset @ inverse @ offset), rel=1e-8)
    distances = [domain.distance(point) for point in embeddings]
    assert domain.distance_limit == pytest.approx(np.percentile(distances, 99), rel=1e-12)


def test_embeddings_that_do_not_differ_leave_distances_finite():
    """One system, and seven equal ones: anything else is far, and nothing is NaN."""
    for count in (1, 7):
        domain = fit_domain(np.full((count, 3), 2.0), [{"H": 1.0}] * count)
        assert domain.distance(np.full(3, 2.0)) == 0.0
        assert np.isfinite(domain.distance(np.array([2.0, 2.0, 2.1])))
        assert domain.distance(np.array([2.0, 2.0, 2.1])) > domain.distance_limit


def test_shares_outside_the_training_range_are_named():
    """Too much, too little and missing; a system within the range by rounding is within."""
    domain = fit_domain(np.zeros((2, 3)), [{"Cu": 0.75, "O": 0.25}, {"Cu": 0.5, "O": 0.25, "H": 0.25}])
    assert domain.shares == {"Cu": [0.5, 0.75], "H": [0.0, 0.25], "O": [0.25, 0.25]}
    assert unusual_shares(domain, {"Cu": 0.6, "O": 0.25 + 1e-9, "H": 0.15}) == []
    assert unusual_shares(domain, {"Cu": 0.8, "H": 0.2}) == [
        "Cu is 80.0 % of the atoms, 50.0 to 75.0 % in the training data",
        "O is 0.0 % of the atoms, 25.0 to 25.0 % in the training data",
    ]
    assert element_shares(torch.tensor([8, 1, 1, 29, 29])) == {"H": 0.4, "O": 0.2, "Cu": 0.4}


def test_embeddings_are_the_mean_features_of_the_counted_atoms(finished_run):
    """Of each graph in a batch, from what the energy head is given; the output is the model's own."""
    checkpoint = load_checkpoint(finished_run.best_checkpoint)
    dataset = build_dataset(checkpoint.config.data, "train")
    batch = Batch.from_data_list([dataset[index] for index in range(3)])
    model = checkpoint.model
    with torch.inference_mode():
        output, embeddings = forward_with_embedding(model, batch)
        assert torch.equal(output.energy, model(batch).energy)
        scales = model.energy_head.tag_scale.weight[:, 0]
        # Without its nonlinearity the head's energy is linear in the mean of features, if tags weigh alike.
        scales.fill_(1.0)
        model.energy_head.mlp = torch.nn.Linear(embeddings.shape[1], 1, bias=False)
        linear = model(batch).energy
    counted = torch.tensor([int((dataset[index].tags > 0).sum()) for index in range(3)])
    expected = (linear - model.energy_mean) / model.energy_std / counted
    torch.testing.assert_close((embeddings @ model.energy_head.mlp.weight.T)[:, 0], expected)
    assert not model.energy_head._forward_pre_hooks


def test_training_stores_the_domain_of_each_checkpoint(finished_run):
    """Measured with the file's own weights, whatever the batch size."""
    for path in (finished_run.best_checkpoint, finished_run.last_checkpoint):
        checkpoint = load_checkpoint(path)
        stored = domain_from_dict(checkpoint.metadata.domain)
        samples = list(build_dataset(checkpoint.config.data, "train"))
        again = measure_domain(checkpoint.model, samples, batch_size=3)
        assert stored.num_systems == again.num_systems == 11
        np.testing.assert_allclose(stored.mean, again.mean, atol=1e-5)
        assert stored.distance_limit == pytest.approx(again.distance_limit, rel=1e-2)
        assert stored.shares == again.shares


def test_a_domain_survives_as_plain_values_and_a_damaged_one_is_refused():
    """An empty one is none."""
    domain = fit_domain(np.eye(3), [{"H": 1.0}] * 3)
    assert domain_from_dict(domain.to_dict()) == domain
    assert isinstance(domain, TrainingDomain)
    assert domain_from_dict({}) is None
    with pytest.raises(InputError, match="is damaged"):
        domain_from_dict({"mean": [1.0]})
