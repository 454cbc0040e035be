"""The README: what it is first, then how to start; its example does what it says."""

from __future__ import annotations

import re
from pathlib import Path

from support import page_blocks
from support.page_blocks import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_LINES = 120


def test_it_is_short_and_says_what_it_is_before_it_shows_figures() -> None:
    lines = README.splitlines()
    assert len(lines) <= MOST_LINES
    marks = ("**Before:**", "**After:**", "**Status:**", "![", "## Start", "## Figures")
    places = [README.index(mark) for mark in marks]
    assert places == sorted(places)
    assert "**Status:**" in "".join(lines[:10])


def test_each_figure_names_its_report() -> None:
    section = README.partition("## Figures\n")[2].partition("\n## ")[0]
    figures = section.split("\n- ")[1:]
    assert 0 < len(figures) <= 2
    for figure in figures:
        assert re.search(r"\(bench/results/[^)]+\.md\)", figure), figure


def test_what_it_links_exists() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_first_example_stays_within_its_budget(tmp_path: Path) -> None:
    (block,) = [b for b in page_blocks.blocks("README.md") if b.language == "python"]
    checks = (
        "stats = umem.stats()\n"
        "assert stats.peak_resident_bytes <= stats.budget_bytes == 32 << 20\n"
        "assert stats.peak_live_bytes > 300 << 20\n"
        "assert '32 MiB' in str(umem.summary())\n"
    )
    page_blocks.run(block._replace(text=block.text + checks), tmp_path)
