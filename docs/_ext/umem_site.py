"""Parts of the site that are made at build time: the CLI reference and the index of messages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cli_reference
import messages
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_REDIRECT = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">\n'


class CliReference(SphinxDirective):
    """A section for each command: what it does, its usage and its arguments."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return [self._section(page) for page in cli_reference.commands()]

    def _section(self, page: cli_reference.CommandPage) -> nodes.Node:
        section = _section(self.state.document, page.name)
        section += nodes.paragraph("", "", *_inline(page.description))
        section += _literal(page.usage)
        if page.arguments:
            rows = [
                [[nodes.literal("", argument.form)], _inline(argument.help)]
                for argument in page.arguments
            ]
            section += _table(("argument", "meaning"), (30, 70), rows)
        return section


class Messages(SphinxDirective):
    """A section for each kind of message, with all of its messages and where each comes from."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        found = messages.messages()
        return [
            self._section(kind, [message for message in found if message.kind == kind])
            for kind in dict.fromkeys(message.kind for message in found)
        ]

    def _section(self, kind: str, of_kind: list[messages.Message]) -> nodes.Node:
        section = _section(self.state.document, kind)
        rows = [
            [[nodes.Text(message.text)], [nodes.literal("", message.path)]] for message in of_kind
        ]
        section += _table(("message", "source"), (70, 30), rows)
        return section


def _section(document: nodes.document, title: str) -> nodes.section:
    section = nodes.section("", nodes.title("", title), names=[nodes.fully_normalize_name(title)])
    document.note_implicit_target(section, section)
    return section


def _literal(text: str) -> nodes.literal_block:
    return nodes.literal_block(text, text, language="text")


def _inline(text: str) -> list[nodes.Node]:
    """Return the text with parts between backticks as code."""
    parts = re.split(r"``?([^`]+)``?", text)
    return [nodes.literal("", part) if i % 2 else nodes.Text(part) for i, part in enumerate(parts)]


def _table(
    head: tuple[str, ...], widths: tuple[int, ...], rows: list[list[list[nodes.Node]]]
) -> nodes.table:
    group = nodes.tgroup(cols=len(head))
    group += [nodes.colspec(colwidth=width) for width in widths]
    group += nodes.thead("", _row([[nodes.Text(word)] for word in head]))
    group += nodes.tbody("", *(_row(row) for row in rows))
    return nodes.table("", group, classes=["colwidths-given"])


def _row(cells: list[list[nodes.Node]]) -> nodes.row:
    return nodes.row("", *(nodes.entry("", nodes.paragraph("", "", *cell)) for cell in cells))


def _write_redirect(app: Sphinx, error: Exception | None) -> None:
    """Make `index.html` at the top lead to the first page, which is in `docs/`."""
    if error is None:
        (Path(app.outdir) / "index.html").write_text(_REDIRECT, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directives with Sphinx."""
    app.add_directive("cli-reference", CliReference)
    app.add_directive("messages", Messages)
    app.connect("build-finished", _write_redirect)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
