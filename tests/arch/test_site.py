"""The documentation's site holds every page once, every public name and every command."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import cli_reference
import messages
import pytest

from umem import cli

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> set[Path]:
    """Return the pages that the site has: those of `include_patterns` in docs/conf.py."""
    block = re.search(r"include_patterns = \[(.*?)\]", (DOCS / "conf.py").read_text(), re.DOTALL)
    assert block is not None
    patterns = re.findall(r'"(.+?)"', block[1])
    found = {path for pattern in patterns for path in ROOT.glob(pattern.replace("**", "**/*.md"))}
    return {path for path in found if "_build" not in path.parts} - {DOCS / "index.md"}


def entries(page: Path) -> list[Path]:
    """Return the pages that the toctrees of a page name."""
    found: list[Path] = []
    for toctree in _TOCTREE.findall(page.read_text(encoding="utf-8")):
        for line in toctree.splitlines():
            if line and not line.startswith(":"):
                target = re.sub(r".*<(.+)>", r"\1", line)
                if re.search(r"[*\[?]", target):
                    folder = (page.parent / target).resolve().parent
                    found += sorted(folder.glob(Path(target).name + ".md"))
                else:
                    found.append((page.parent / f"{target}.md").resolve())
    return found


def test_the_toctrees_hold_every_page_once() -> None:
    named = Counter(path for page in DOCS.glob("*.md") for path in entries(page))
    assert set(named) == pages()
    assert [path.name for path, times in named.items() if times > 1] == []


def test_every_page_is_reached_from_the_first() -> None:
    reached, waiting = set(), [DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            waiting += entries(page)
    assert pages() - reached == set()


def test_the_reference_has_every_public_name() -> None:
    import umem
    from umem import policies

    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"auto(?:function|class):: (\S+)", page))
    public = {f"umem.{name}" for name in umem.__all__ if not name.endswith(("Error", "__"))}
    assert public | {f"umem.policies.{name}" for name in policies.__all__} <= named
    for module in umem._MODULES.values():
        assert f"umem.{module}" in page
    errors = re.search(r"automodule:: umem.errors\n   :members: (.+)", page)
    assert errors is not None
    assert set(errors[1].split(", ")) == {n for n in umem.__all__ if n.endswith("Error")}


def test_the_reference_has_every_command_with_its_options() -> None:
    found = {page.name: page for page in cli_reference.commands()}
    assert {name.split()[1] for name in found} == set(cli.COMMANDS)
    assert {"umem trace info", "umem trace convert", "umem trace record"} <= set(found)
    budget = found["umem run"].arguments[0]
    assert budget.form == "--budget SIZE"
    assert "80%" in budget.help  # as argparse shows it, without its escapes
    for page in found.values():
        assert page.usage.startswith(page.name)
        assert page.description


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("ConfigError", "the policy … does not load: …"),  # an f-string
        ("StateError", "the stream is being captured; discard before the capture"),  # native
        ("warning", "no usable GPU (…); using the software device."),
        ("CheckpointError", "not a safetensors file, or cut off"),
    ],
)
def test_the_index_finds_a_message_by_its_text(kind: str, part: str) -> None:
    assert any(m.kind == kind and part in m.text for m in messages.messages())


def test_the_index_has_every_class_of_error_that_is_raised() -> None:
    found = messages.messages()
    assert {m.kind for m in found} >= {*messages.CLASSES, messages.WARNING} - {"DriverError"}
    assert all((ROOT / m.path).is_file() for m in found)
    assert len(found) > 250
