"""Two tiny families and one mergekit process for all parity tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # the helpers of all tests

import llamas
from llamas import Family
from sides import Sides, sides


@pytest.fixture(scope="session")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    with sides(tmp_path_factory.mktemp("parity")) as started:
        yield started


@pytest.fixture(scope="session")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Small changes of some of the elements, as reinforcement learning makes them."""
    return llamas.family(tmp_path_factory.mktemp("sparse"), 0.4, 1e-3, 1)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Changes of nearly every element, as large as the weights."""
    return llamas.family(tmp_path_factory.mktemp("dense"), 0.95, 2e-2, 2)


@pytest.fixture(params=["sparse", "dense"])
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.getfixturevalue(request.param)
    return found
