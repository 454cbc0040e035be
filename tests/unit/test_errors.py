"""Error classes keep the built-in bases that callers rely on."""

from __future__ import annotations

import pytest

from umem import errors


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        (errors.ConfigError, ValueError),
        (errors.OutOfMemoryError, MemoryError),
        (errors.NotSupportedError, RuntimeError),
        (errors.StateError, RuntimeError),
        (errors.DriverError, RuntimeError),
        (errors.CheckpointError, RuntimeError),
    ],
)
def test_bases(kind: type[Exception], base: type[Exception]) -> None:
    assert issubclass(kind, base)
    assert issubclass(kind, errors.UmemError)
    assert str(kind("words")) == "words"


def test_the_native_core_raises_them() -> None:
    from umem.base.native import core

    with pytest.raises(errors.StateError):
        core.set_budget(64 << 20, 0)
    options = core.Options()
    options.device = "abacus"
    options.budget_bytes = 64 << 20
    with pytest.raises((errors.ConfigError, errors.NotSupportedError)):
        core.start(options)


def test_a_core_of_other_sources_is_said_to_be_one() -> None:
    from umem.base.native import core

    with pytest.raises(AttributeError, match="no 'of_tomorrow': it was built from other sources"):
        core.of_tomorrow  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(core, "of_tomorrow")
