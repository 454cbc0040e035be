"""The soak of tests/soak.py for a few seconds, and proof that it finds its targets."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[1] / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", PATH)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def lines(count: int, **each: float) -> list[dict[str, Any]]:
    """Samples of a process that grows by this much at each checkpoint."""
    return [
        {
            "step": 8 * i, "digest": str(i), "hook_errors": 0,
            "rss_mib": 500 + i * each.get("rss_mib", 0),
            "mappings": 600 + i * each.get("mappings", 0),
            "files": 4 + i * each.get("files", 0),
        }
        for i in range(count)
    ]  # fmt: skip


@pytest.mark.nightly
def test_a_few_steps_are_identical(soak: ModuleType) -> None:
    result = soak.soak(0.01)
    assert result["wrong"] == []
    assert result["compared"] >= 1
    assert result["gib_in"] > 0


@pytest.mark.parametrize(("name", "each"), [("rss_mib", 2), ("mappings", 4), ("files", 1)])
def test_growth_is_found(soak: ModuleType, name: str, each: float) -> None:
    plain = lines(60)
    assert soak.judge(plain, plain) == []
    (found,) = soak.judge(lines(60, **{name: each}), plain)
    assert found.startswith(f"{name} grew by {20 * each}")


def test_other_bits_and_errors_are_found(soak: ModuleType) -> None:
    plain = lines(3)
    ours = [*lines(2), {**plain[2], "digest": "other", "hook_errors": 1}]
    assert soak.judge(ours, plain) == ["step 16: the digests differ", "1 errors in hooks"]
