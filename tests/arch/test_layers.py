"""The architecture's layers: the tree keeps them, and the checker sees what breaks them."""

from __future__ import annotations

from pathlib import Path

import check_layers
import pytest

ROOT = Path(__file__).resolve().parents[2]


FILES = [
    path.relative_to(ROOT)
    for part in ("src", "umem")
    for path in (ROOT / part).rglob("*")
    if path.suffix in (".h", ".cpp", ".def", ".py", ".pyi")
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """All files of the tree, each without its text."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_every_include_and_import_points_down() -> None:
    assert check_layers.violations(ROOT) == []


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("src/base/units.h", '#include "runtime/runtime.h"', "not below base"),
        ("src/arena/arena.h", '#include "residency/ledger.h"', "not below arena"),
        ("src/engine/engine.h", '#include "arena/arena.h"', "not below engine"),
        ("src/engine/engine.h", '#include "soft/device.h"', "not below engine"),
        ("src/policy/registry.h", '#include "engine/engine.h"', "not below policy"),
        ("src/driver/table.h", '#include "soft/device.h"', "not below driver"),
        ("src/runtime/runtime.h", "#include <torch/library.h>", "only torch_ext may"),
        ("src/runtime/runtime.h", "#include <pybind11/pybind11.h>", "bindings and torch_ext may"),
        ("src/base/units.h", '#include "base/nothing.h"', "does not exist"),
        ("src/soft/device.h", 'inline auto* x = getenv("UMEM");', "reads the environment"),
        ("umem/errors.py", "from .config import settings", "not below errors"),
        ("umem/config/settings.py", "import umem.session.session", "not below config"),
        ("umem/config/settings.py", "from umem import session", "not below config"),
        ("umem/config/settings.py", "from .. import enable", "not below config"),
        ("umem/session/session.py", "from ..cli import main", "not below session"),
        ("umem/session/session.py", "def f():\n    from ..offload import x", "not below session"),
        (
            "umem/session/session.py",
            "if TYPE_CHECKING:\n    from ..residency.hints import Hold",
            "not below session",
        ),
        ("umem/monitor/summary.py", "from ..session.session import stats", "not below monitor"),
        ("umem/monitor/summary.py", "from ..lint import late", "monitor stands for itself"),
        (
            "umem/offload/optimizer/parts.py",
            "from ..checkpoint import load",
            "offload.optimizer stands for itself",
        ),
        ("umem/cli/run.py", "from ..attic import old", "does not exist"),
        ("umem/session/session.py", "import os; os.environ['UMEM']", "reads the environment"),
        ("umem/session/session.py", "from os import getenv", "reads the environment"),
        (
            "umem/session/session.py",
            "import importlib\nimportlib.import_module(f'{_ROOT}.offload.optimizer.automatic')",
            "whose name it computes",
        ),
        ("umem/session/session.py", "__import__(__package__ + '.x')", "whose name it computes"),
        (
            "umem/session/session.py",
            "from importlib import import_module\nimport_module('.x', 'umem.offload')",
            "whose name it computes",
        ),
        (
            "umem/session/session.py",
            "import importlib\nimportlib.import_module('umem.offload.optimizer.automatic')",
            "not below session",
        ),
        ("umem/__init__.py", "_MODULES = {'main': 'cli.base'}", "not below umem"),
    ],
)
def test_a_seeded_breach_is_reported(copy: Path, name: str, line: str, expected: str) -> None:
    (copy / name).write_text(f"{(ROOT / name).read_text()}\n{line}\n")
    found = check_layers.violations(copy)
    assert len(found) == 1
    assert found[0].startswith(f"{name}: ")
    assert expected in found[0]


@pytest.mark.parametrize("name", ["src/attic/old.cpp", "src/old.cpp", "umem/attic.py"])
def test_a_file_on_no_layer_is_reported(copy: Path, name: str) -> None:
    (copy / name).parent.mkdir(exist_ok=True)
    (copy / name).write_text("")
    place = "in a room" if name.startswith("umem/") else "on a layer"
    assert check_layers.violations(copy) == [f"{name}: not {place} of the architecture"]


def test_comments_do_not_count_as_reading_the_environment(copy: Path) -> None:
    (copy / "src/base/units.h").write_text("// no getenv() here\n/* nor environ\n here */\n")
    assert check_layers.violations(copy) == []
