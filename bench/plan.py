"""Records what `umem plan` and `umem replay` print for their pages: ``python bench/plan.py``.

Writes plan_a100-pcie4_<date>.{json,md} to bench/results. Every figure is of virtual time and the
same on every machine.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from facts import version_facts
from harness import add_outputs, cases, output_of, results_folder, write

from umem.base.progress import over

ROOT = Path(__file__).resolve().parent.parent
DEVICE = "a100-pcie4"
PLAN = f"plan examples.gpt:make_step --budget 50% --device {DEVICE} --out gpt.jsonl.gz"
REPLAY = "replay gpt.jsonl.gz --policy auto autoswap belady lru --budget 50% 33%"
_SECONDS = re.compile(r" in \d+\.\d s$", re.MULTILINE)  # tracing time


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench/plan.py", description=__doc__)
    add_outputs(parser)
    args = parser.parse_args(argv)
    folder = results_folder(parser, args)
    with tempfile.TemporaryDirectory() as place:
        commands = (PLAN, REPLAY, f"{PLAN} --json", f"{REPLAY} --json")
        with cases(len(commands)) as advance:
            texts = [_run(command, Path(place)) for command in over(commands, advance)]
    shown = [(PLAN, texts[0]), (REPLAY, texts[1])]
    plan, rows = json.loads(texts[2]), texts[3].splitlines()
    versions = version_facts()
    record = {
        "commit": versions["commit"],
        "torch": versions["torch"],
        "plan": {key: value for key, value in plan.items() if key != "trace_seconds"},
        "replays": [_virtual(json.loads(row)) for row in rows],
    }
    page = _page(versions, shown)
    print(page)
    if folder is not None:
        stem = f"plan_{DEVICE}_{datetime.now(timezone.utc):%Y-%m-%d}"
        print("\n".join(map(str, write(folder, stem, record, page))))
    return 0


def _run(command: str, place: Path) -> str:
    """Run a command of umem, with the examples of this tree, and return what it prints."""
    words = [sys.executable, "-m", "umem", *shlex.split(command)]
    words[words.index("gpt.jsonl.gz")] = str(place / "gpt.jsonl.gz")
    text = output_of(words, cwd=ROOT).replace(f"{place}/", "")
    return _SECONDS.sub("", text)


def _virtual(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "events_per_s"}


def _page(versions: dict[str, str], shown: list[tuple[str, str]]) -> str:
    lines = [
        "# A plan and replays of GPT-2 medium, batch 8",
        "",
        f"umem at commit {versions['commit']}, torch {versions['torch']}. Memory, durations and "
        f"transfers are computed for the device profile `{DEVICE}`",
        "(`umem/base/device_profiles.py`): no device was used, and no figure depends on the "
        "machine. The time that tracing took is left out.",
        "",
    ]
    for command, output in shown:
        lines += ["```", f"$ umem {command}", output.rstrip(), "```", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
