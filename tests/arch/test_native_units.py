"""The units of src/ have an order from the ground up, and what breaks it is seen."""

from __future__ import annotations

from pathlib import Path

import native_units
import pytest
import structure

ROOT = Path(__file__).resolve().parents[2]

UPWARD = {"base/low.h": '#include "runtime/high.h"\n', "runtime/high.h": ""}
CIRCLE = {
    "runtime/lock.h": '#include "runtime/state.h"\nstruct Lock {};\n',
    "runtime/state.h": "struct State {};\n",
    "runtime/state.cpp": '#include "runtime/state.h"\n\n#include "runtime/lock.h"\n',
}
ELSEWHERE = {
    "runtime/state.h": "void open();\nextern int g_count;\nstruct State { void end(); };\n"
}
HIDDEN = "namespace {\nint help(int n) {\n  return n;\n}\n}  // namespace\nstatic void own() {}\n"


def plant(src: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_text(text)
    return src


def test_the_native_code_keeps_its_bounds() -> None:
    over = [
        (name, found)
        for name, found, most in structure.native_figures(ROOT / "src")
        if len(found) > most
    ]
    assert over == []


def test_every_part_of_a_unit_is_a_source_without_a_header() -> None:
    for part, unit in native_units.PARTS.items():
        assert (ROOT / "src" / f"{part}.cpp").is_file()
        assert not (ROOT / "src" / f"{part}.h").exists()
        assert (ROOT / "src" / f"{unit}.h").is_file()


def test_an_include_of_a_higher_room_is_found(tmp_path: Path) -> None:
    includes = native_units.units(plant(tmp_path, UPWARD))
    assert native_units.upward(includes) == [("base/low", "runtime/high")]
    assert native_units.arrows(includes) == {("base", "runtime")}


def test_a_circle_that_a_source_closes_is_found(tmp_path: Path) -> None:
    includes = native_units.units(plant(tmp_path, CIRCLE))
    assert structure.circles(includes) == [["runtime/lock", "runtime/state"]]
    (tmp_path / "runtime/state.cpp").write_text('#include "runtime/state.h"\n')
    assert structure.circles(native_units.units(tmp_path)) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("void open() {}\n", "open"),
        ("std::vector<int>& open(\n    int n) {}\n", "open"),
        ("void State::end() {}\n", "State"),
        ("State::State() {}\n", "State"),
        ("constinit thread_local int t_count = 0;\n", "t_count"),
        ("std::atomic<int> g_count{0};\n", "g_count"),
    ],
)
def test_a_definition_without_a_header_of_its_own_is_found(
    tmp_path: Path, text: str, name: str
) -> None:
    src = plant(tmp_path, {**ELSEWHERE, "runtime/memory.cpp": HIDDEN + text})
    assert native_units.foreign_definitions(src) == [f"runtime/memory.cpp: {name}"]
    plant(src, {"runtime/memory.h": f"extern {name};\n"})
    assert native_units.foreign_definitions(src) == []
