"""The schemas of --json describe every name; commands' own tests hold the commands to them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from support import schemas
from support.synthetic import training, write

from umem.cli import COMMANDS, _load, _parser, main

# The schema of each command's output in docs/schemas.json; None: the program's own, or no output.
OF = {
    "demo": "demo", "doctor": "doctor", "estimate": "estimate", "lint": "lint", "plan": "plan",
    "replay": "replay", "report": "report", "top": "top", "trace info": "trace_info", "run": None,
    "trace record": None, "trace convert": None,
}  # fmt: skip


def described(schema: Any, path: str = "") -> Iterator[str]:
    """Paths of the properties that have no description."""
    if isinstance(schema, dict):
        for name, value in schema.get("properties", {}).items():
            if not value.get("description"):
                yield f"{path}/{name}"
        for name, value in schema.items():
            yield from described(value, f"{path}/{name}")
    elif isinstance(schema, list):
        for value in schema:
            yield from described(value, path)


def commands() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command and subcommand, with its parser."""

    def below(parser: argparse.ArgumentParser, name: str) -> Iterator[Any]:
        groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        if not groups:
            yield name.strip(), parser
        for group in groups:
            for word, inner in group.choices.items():
                yield from below(inner, f"{name} {word}")

    yield from below(_parser({name: _load(name) for name in COMMANDS}), "")


def test_the_schemas_are_schemas_and_say_what_each_name_is() -> None:
    Draft202012Validator.check_schema(schemas.CONTENT)
    assert not list(described(schemas.CONTENT))


def test_every_command_that_prints_json_has_a_schema() -> None:
    found = {name: "--json" in parser.format_help() for name, parser in commands()}
    assert found == {name: schema is not None for name, schema in OF.items()}
    assert {schema for schema in OF.values() if schema} <= schemas.CONTENT["$defs"].keys()
    page = schemas.SCHEMAS.with_name("json.md").read_text()
    assert all(f"`umem {name}" in page for name in OF)


def test_an_output_that_differs_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "t.jsonl", training(2, 4 << 20, 2 << 20))
    assert main(["trace", "info", str(path), "--json"]) == 0
    found = schemas.read("trace_info", capsys.readouterr().out)
    for broken in ({**found, "new": 1}, {**found, "ops": "3"}, {"ops": 3}):
        with pytest.raises(AssertionError):
            schemas.check("trace_info", broken)
