"""Coverage of the tests at commits: ``python bench/covered.py e4299fc HEAD``.

Each commit is built in a clone of its own, with counters in the native code, and runs the tests of
`make test` and of `make test-cuda` under coverage.py, which follows the processes that tests start.
Sanitizers are left out, because they build other binaries. Counters slow tests down, and a few that
compare times may fail; the report has their names.
Writes bench/results/covered_<hardware>_<date>.{json,md}.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import (
    Report,
    Result,
    Spread,
    add_outputs,
    cases,
    output_of,
    results_folder,
    table,
)

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = """\
[run]
branch = true
parallel = true
source_pkgs = umem
data_file = {data}/counts
patch = subprocess, _exit, fork
disable_warnings = no-data-collected, module-not-measured, couldnt-parse, module-not-imported
[report]
ignore_errors = true
[paths]
umem =
    {clone}/umem
    */site-packages/umem
"""
CUDA_TESTS = ("tests/softcuda", "tests/gpu")
# Tests by the environment that runs them.
WHOLE = {
    ".venv": tuple(f"--ignore={it}" for it in ("tests/native/test_sanitizers.py", *CUDA_TESTS)),
    ".venv-cuda": CUDA_TESTS,
}
SMOKE = {".venv": ("tests/unit/test_units.py",), ".venv-cuda": ("tests/gpu/test_snapshot.py",)}
TOOLS = ("coverage", "gcovr", "pytest-xdist")
KINDS = ("lines", "branches")


def prepare(commit: str, clone: Path) -> None:
    """Clone a commit and build it with counters, which are exact in several threads.

    Each source is a unit: a process that is killed while it writes a unit's counts spoils them.
    """
    output_of(["git", "clone", "-q", str(ROOT), str(clone)])
    output_of(["git", "checkout", "-q", commit], cwd=clone)
    build = clone / "CMakeLists.txt"
    build.write_text(build.read_text().replace("UNITY_BUILD ON", "UNITY_BUILD OFF"))
    make = ["make", f"VENV={clone}/.venv", f"BUILD_VENV={clone}/.venv-build",
            f"CUDA_VENV={clone}/.venv-cuda"]  # fmt: skip
    flags = {"CXXFLAGS": "--coverage -fprofile-update=atomic", "LDFLAGS": "--coverage"}
    output_of([*make, f"{clone}/.venv-cuda/softcuda/.built"], cwd=clone)  # the driver is not umem
    for venv in WHOLE:
        counted = {**os.environ, **flags}
        output_of([*make, f"{clone}/{venv}/.installed"], cwd=clone, env=counted)
        output_of([f"{venv}/bin/python", "-m", "pip", "install", "-q", *TOOLS], cwd=clone)


def counts_of(clone: Path) -> Path:
    """Return the folder of a clone's counts."""
    return clone.with_name(f"{clone.name}-counts")


def count(clone: Path, workers: int, tests: Mapping[str, Sequence[str]]) -> None:
    """Run the tests in a clone; the log, counts and summaries stay beside it."""
    data = counts_of(clone)
    data.mkdir()
    (data / "settings").write_text(SETTINGS.format(data=data, clone=clone))
    words = ["-q", "-p", "no:cacheprovider", "-n", str(workers), "--dist", "loadfile"]
    words += ["--no-loadscope-reorder", "--max-worker-restart=0"]
    softcuda = clone / ".venv-cuda"
    env = {
        **os.environ,
        "COVERAGE_RCFILE": str(data / "settings"),
        "GCOV_ERROR_FILE": str(data / "gcov"),
    }
    of_cuda = {
        "SOFTCUDA_LIB": str(softcuda / "softcuda" / "lib"),
        "SOFTCUDA_PYTHON": str(softcuda / "bin" / "python"),
    }
    with (data / "log").open("w") as log:  # tests may fail
        for venv, its in tests.items():
            subprocess.run(
                [f"{venv}/bin/python", "-m", "coverage", "run", "-m", "pytest", *words, *its],
                cwd=clone, env=env | (of_cuda if venv == softcuda.name else {}), check=False,
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
    coverage = [".venv/bin/python", "-m", "coverage"]
    output_of([*coverage, "combine", "-q"], cwd=clone, env=env)
    output_of([*coverage, "json", "-q", "-o", str(data / "python.json")], cwd=clone, env=env)
    gcovr = [
        ".venv/bin/gcovr", "--root", ".", "--object-directory", "build", "--filter", "src/",
        "--exclude-throw-branches",
        "--gcov-ignore-parse-errors", "all", "--gcov-ignore-errors", "all",
        "--json-summary", str(data / "native.json"),
    ]  # fmt: skip
    output_of(gcovr, cwd=clone)


def files_of(clone: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield each file of umem/ and src/ with its numbers of lines and branches, all and covered."""
    for name, file in json.loads((counts_of(clone) / "python.json").read_text())["files"].items():
        if Path(name).is_absolute():  # a package of a test's own that has umem's name
            continue
        numbers = file["summary"]
        yield name, {
            "lines": numbers["num_statements"], "lines covered": numbers["covered_lines"],
            "branches": numbers["num_branches"], "branches covered": numbers["covered_branches"],
        }  # fmt: skip
    for file in json.loads((counts_of(clone) / "native.json").read_text())["files"]:
        yield file["filename"], {
            "lines": file["line_total"], "lines covered": file["line_covered"],
            "branches": file["branch_total"], "branches covered": file["branch_covered"],
        }  # fmt: skip


def sums(clone: Path) -> dict[str, dict[str, int]]:
    """Return the numbers of both trees, and of each of their rooms."""
    found: dict[str, Counter[str]] = {}
    for place, numbers in files_of(clone):
        top, room, *_ = place.split("/")
        for group in (top, f"{top}/{room}"):
            found.setdefault(group, Counter()).update(numbers)
    return {group: dict(numbers) for group, numbers in sorted(found.items())}


def share(numbers: dict[str, int], kind: str) -> float:
    """Return the covered percentage of lines or branches."""
    return 100 * numbers[f"{kind} covered"] / (numbers[kind] or 1)


def measured(
    commit: str, clone: Path, workers: int, tests: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """Measure a commit in this clone, or read the measurement that is there.

    One that was interrupted begins again: its counts would be added to those of the next.
    """
    if not (counts_of(clone) / "native.json").exists():
        for folder in (clone, counts_of(clone)):
            shutil.rmtree(folder, ignore_errors=True)
        prepare(commit, clone)
        count(clone, workers, tests)
    log = (counts_of(clone) / "log").read_text().splitlines()
    failed = [line.split(" - ")[0] for line in log if line.startswith(("FAILED", "ERROR"))]
    ends = [line.strip("= ") for line in log if re.search(r"\d passed.* in ", line)]
    return {"commit": commit, "tests": ends, "failed": failed, "sums": sums(clone)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_outputs(parser)
    parser.add_argument("commits", nargs="*", default=["HEAD"], help="two at most (default: HEAD)")
    parser.add_argument("--workers", type=int, default=3, help="files of tests at a time")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "covered",
        help="of the clones; a commit that was measured there is not measured again",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if len(options.commits) > 2:
        parser.error(f"{len(options.commits)} commits; allowed: one, or two to compare")
    folder = results_folder(parser, options)
    tests = SMOKE if options.smoke else WHOLE
    clones = options.folder / ("smoke" if options.smoke else "whole")
    whole = [
        output_of(["git", "rev-parse", "--verify", f"{commit}^{{commit}}"], cwd=ROOT).strip()
        for commit in options.commits
    ]
    rows = []
    with cases(len(whole)) as advance:
        for commit in whole:
            clone = (clones / commit[:12]).resolve()
            rows.append(measured(commit, clone, options.workers, tests))
            advance(1)
    which = "few" if options.smoke else "all"
    report = Report("covered", {"workers": options.workers, "tests": which})
    report.versions |= dict(zip(("after", "before"), reversed(whole), strict=False))
    for row in rows:
        name = row["commit"][:12]
        report.sections += [f"{name}: {'; '.join(row['tests'])}", ""]
        report.sections += [*(f"- {it}" for it in row["failed"]), ""]
        report.results += [
            Result(f"{tree}/, {kind}, {name}", Spread.of([share(row["sums"][tree], kind)]), "%",
                   note=f"of {row['sums'][tree][kind]}")
            for tree in ("umem", "src")
            for kind in KINDS
        ]  # fmt: skip
    groups = sorted({group for row in rows for group in row["sums"] if "/" in group})
    header = ["", *(f"{row['commit'][:12]}: {kind}" for row in rows for kind in KINDS)]
    report.sections += table(
        header,
        [
            [group] + [f"{share(row['sums'][group], kind):.1f}" if group in row["sums"] else "-"
                       for row in rows for kind in KINDS]
            for group in groups
        ],
    )  # fmt: skip
    report.details["rows"] = rows
    print(report.markdown())
    if folder is not None:
        report.write(folder)


if __name__ == "__main__":
    main()
