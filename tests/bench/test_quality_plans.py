"""Plans of `molflt bench quality`: alike in everything but what is compared."""

import subprocess
import sys
from pathlib import Path

import pytest

from molflt.bench.quality_plans import PLANS, VARIANTS
from molflt.build import build_model
from molflt.config import config_to_dict
from molflt.errors import InputError

ROOT = Path(__file__).parents[2]
RUNS = [(plan, dataset) for plan in PLANS for dataset in PLANS[plan].configs]


def flattened(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


@pytest.mark.parametrize(("plan", "dataset"), RUNS)
def test_variants_differ_in_attention_alone_and_seeds_in_the_seed(plan, dataset, monkeypatch):
    monkeypatch.chdir(ROOT)
    variants = PLANS[plan].variants
    found = [dict(flattened(config_to_dict(PLANS[plan].config(dataset, v, 0)))) for v in variants]
    for values in found[1:]:
        different = {key for key in values if values[key] != found[0][key]}
        assert different
        assert all(key.startswith("model.attention.") for key in different)
    other = dict(flattened(config_to_dict(PLANS[plan].config(dataset, variants[0], 5))))
    assert {key for key in other if other[key] != found[0][key]} == {"seed"}


@pytest.mark.parametrize(("plan", "dataset"), RUNS)
def test_variants_of_a_plan_have_equal_sizes(plan, dataset, monkeypatch):
    """Within 1 % of each other; the tables of element pairs, equal in all, left out."""
    monkeypatch.chdir(ROOT)
    counts = {}
    for variant in PLANS[plan].variants:
        config = PLANS[plan].config(dataset, variant, 0)
        model = build_model(config.model, config.data.radius, any(config.optim.delta_pos_weight))
        counts[variant] = sum(p.numel() for name, p in model.named_parameters() if "pair_" not in name)
    assert max(counts.values()) < 1.01 * min(counts.values()), counts


def test_every_shipped_fcc111_variant_has_the_attention_of_its_configuration(monkeypatch):
    """`configs/fcc111/NAME.yaml` and the variant NAME are one thing."""
    from molflt.config import load_config

    monkeypatch.chdir(ROOT)
    base = load_config("configs/fcc111/flt.yaml")
    names = {path.stem for path in Path("configs/fcc111").glob("*.yaml")}
    assert set(VARIANTS) <= names
    for name, variant in VARIANTS.items():
        assert (
            variant.apply(base.model.attention) == load_config(f"configs/fcc111/{name}.yaml").model.attention
        )


def test_outside_a_clone_the_missing_configuration_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"configs/qm7/flt\.yaml.*clone"):
        PLANS["qm7"].config("qm7", "flt", 0)


def test_plans_load_without_torch():
    code = "import sys, molflt.bench.quality_plans; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
