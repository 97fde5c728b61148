"""The examples in the docstrings of molflt.nn run and show what they say."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import molflt.nn

MODULES = [info.name for info in pkgutil.iter_modules(molflt.nn.__path__, "molflt.nn.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_give_the_results_they_show(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": torch, **vars(module)})
    assert result.failed == 0
