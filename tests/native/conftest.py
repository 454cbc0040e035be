"""The drivers that the contract suite runs over, and the program that plans are for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.driver import Driver, opened
from support.planned import Program, options, running


@pytest.fixture
def driver() -> Iterator[Driver]:
    """The software device with 16 frames, closed with nothing left allocated."""
    with opened() as made:
        yield made


@pytest.fixture
def program() -> Iterator[Program]:
    """With 16 MiB, under the policy `planned`."""
    with running(options()) as made:
        yield made
