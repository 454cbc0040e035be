"""The --json output of commands, checked against docs/schemas.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "schemas.json"
CONTENT: dict[str, Any] = json.loads(SCHEMAS.read_text(encoding="utf-8"))


def read(command: str, text: str) -> Any:
    """Return the text's object, which must match the schema `command`."""
    found = json.loads(text)
    check(command, found)
    return found


def check(command: str, found: Any) -> None:
    """The object must match the schema `command`."""
    schema = {**CONTENT, "$ref": f"#/$defs/{command}"}
    problems = [
        f"{'/'.join(map(str, error.absolute_path))}: {error.message[:200]}"
        for error in Draft202012Validator(schema).iter_errors(found)
    ]
    assert not problems, problems
