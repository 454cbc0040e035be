"""The checks of `make dist` on a wheel's list of files."""

from __future__ import annotations

import check_dist
import pytest

GOOD = [
    "umem/__init__.py",
    "umem/_core.cpython-311-x86_64-linux-gnu.so",
    "umem/libumem.so",
    "umem/py.typed",
    "umem/_src/torch_ext/observer.cpp",
    "_umem_autoload.py",
    "umem-0.1.0.dist-info/METADATA",
    "umem-0.1.0.dist-info/licenses/LICENSE",
]


def test_a_whole_wheel_has_no_problems() -> None:
    assert check_dist.wheel_problems(GOOD) == []


@pytest.mark.parametrize("name", [*GOOD[1:5], GOOD[-1]])
def test_what_is_missing_is_named(name: str) -> None:
    (problem,) = check_dist.wheel_problems(set(GOOD) - {name})
    assert problem.endswith("is missing")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("umem/_torch_ext-91eeb273d503ee3a.so", "built for one torch"),
        ("umem/_core_testing.cpython-311-x86_64-linux-gnu.so", "for tests only"),
        ("tests/conftest.py", "tests/ is not umem's"),
    ],
)
def test_what_must_not_be_there_is_named(name: str, problem: str) -> None:
    (found,) = check_dist.wheel_problems([*GOOD, name])
    assert problem in found
