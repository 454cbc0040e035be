"""The record, its order, its text and its page."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import generate_options_doc

import umem
from umem.base.stats import Stats
from umem.monitor import summary as text

ROOT = Path(__file__).resolve().parents[2]
NAMES = [field.name for field in dataclasses.fields(Stats)]


def test_the_record_is_that_of_the_native_side() -> None:
    from umem.base.native import core

    definition = (ROOT / "src" / "runtime" / "stats.def").read_text()
    assert re.findall(r"^UMEM_STAT\((\w+),", definition, re.MULTILINE) == NAMES
    assert set(core.stats()) == set(NAMES) == set(core.stats_docs())
    assert isinstance(umem.stats(), Stats)


def test_the_options_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == generate_options_doc.render(), "run `make options-doc`"


def test_the_summary_shows_every_figure_that_moves() -> None:
    zero = Stats(**dict.fromkeys(NAMES, 0))
    plain = text.summary(zero, device="soft", policy="lru")
    assert "device soft, policy lru" in plain
    for name in NAMES:
        changed = dataclasses.replace(zero, **{name: 7 << 20})
        assert text.summary(changed, device="soft", policy="lru") != plain, name


def test_the_summary_counts_in_units() -> None:
    values = {**dict.fromkeys(NAMES, 0), "budget_bytes": 32 << 20, "evictions": 5}
    summary = text.summary(Stats(**values), device="soft", policy="lru")
    assert re.search(r"^budget +32 MiB  device soft", summary, re.MULTILINE)
    assert "5 evictions" in summary
    assert "of unlimited" in summary
