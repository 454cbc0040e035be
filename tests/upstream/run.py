"""Run PyTorch's own tests with umem and without, and say which of them end differently.

python tests/upstream/run.py --source DIR [--device cuda] [--only FILE ...] [--out FILE]

DIR (or the environment's UPSTREAM) is a source tree of PyTorch, of the installed version.
selection.toml lists the tests to run, expected.toml the expected differences with reasons. On the
CPU umem runs on the software device with 16 MiB, while a thread evicts all the time; with --device
cuda on the GPU, or on the software driver where SOFTCUDA_LIB is set.

A test that crashes or hangs is named, and the rest of its file goes on in a new process. A test
that ends no better without umem is no difference. The exit code is 1 if a difference is not
explained, or if a file did not run.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import fnmatch
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
MIB = 1 << 20
BUDGET = 16 * MIB
ROTATED = 24 * MIB  # more than the budget: all that a test holds leaves the device
SOFTCUDA_BYTES = 1024 * MIB  # the largest test needs more than half of them
# How bad an end is. Without umem a test may as well not be there; with umem it may not.
RANKS = {"passed": 0, "skipped": 1, "failed": 2, "error": 2, "race": 2, "hang": 3, "crash": 3}
MISSING = 3
STARTING = 120  # seconds that pytest may take until its first test
COLUMNS = ("tests", "passed", "explained", "unexplained", "seconds")
NOT_GIVEN = (
    "no PyTorch sources: name them with --source or UPSTREAM; to get them: git clone --depth 1 "
    "--branch v{version} https://github.com/pytorch/pytorch"
)


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A file of tests, those of its tests that an expression of pytest's -k names, and why."""

    path: str
    device: str
    reason: str
    tests: str = ""


@dataclasses.dataclass(frozen=True)
class Expected:
    """Tests, by a pattern, that may end differently with umem; all versions where none is named."""

    test: str
    device: str
    reason: str
    torch: tuple[str, ...] = ()

    def holds(self, device: str, version: str) -> bool:
        return device == self.device and (not self.torch or version.startswith(self.torch))


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the tests are run: what the environment has in addition, and options of the plugin."""

    environ: dict[str, str]
    options: Sequence[str]


@dataclasses.dataclass(frozen=True)
class End:
    """How a test ended."""

    outcome: str
    error: str = ""
    seconds: float = 0.0


@dataclasses.dataclass
class Ran:
    """The result of a file: its tests by id, what umem did, and what kept it from running."""

    ends: dict[str, End] = dataclasses.field(default_factory=dict)
    umem: dict[str, int] = dataclasses.field(default_factory=dict)
    broken: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Difference:
    """A test that ends worse with umem, and the entry that explains it."""

    test: str
    plain: str
    umem: str
    error: str
    explained: Expected | None = None


@dataclasses.dataclass
class Verdict:
    """The outcome of both runs of a file: a row of the table."""

    path: str
    plain: Ran
    umem: Ran
    differences: list[Difference]

    @property
    def unexplained(self) -> list[Difference]:
        return [one for one in self.differences if one.explained is None]

    @property
    def broken(self) -> list[str]:
        """Return what kept the file from running."""
        without = [f"without umem: {why}" for why in self.plain.broken]
        if not without and not any(end.outcome == "passed" for end in self.plain.ends.values()):
            without = ["without umem: no test passes"]
        return without + self.umem.broken

    @property
    def counts(self) -> collections.Counter[str]:
        plain, umem = self.plain.ends, self.umem.ends
        both = [test for test in plain.keys() & umem.keys() if plain[test].outcome == "passed"]
        return collections.Counter(
            tests=len(plain.keys() | umem.keys()),
            passed=sum(umem[test].outcome == "passed" for test in both),
            explained=len(self.differences) - len(self.unexplained),
            unexplained=len(self.unexplained),
            seconds=round(self.plain.seconds + self.umem.seconds),
        )


def read_table(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(path.read_text(encoding="utf-8"))


def selection(path: Path) -> list[Chosen]:
    return [Chosen(**row) for row in read_table(path)["file"]]


def expected(path: Path) -> list[Expected]:
    rows = read_table(path).get("difference", [])
    return [Expected(**row | {"torch": tuple(row.get("torch", ()))}) for row in rows]


def variants(device: str) -> tuple[Variant, Variant]:
    """Without umem and with it, alike in all else."""
    common = {"PYTORCH_TESTING_DEVICE_ONLY_FOR": device, "OMP_NUM_THREADS": "1"}
    on = {"UMEM": "1", "UMEM_STRICT": "1"}
    if device == "cpu":
        on |= {"UMEM_DEVICE": "soft", "UMEM_POLICY": "lru", "UMEM_BUDGET": str(BUDGET)}
        options = ["--rotate", str(ROTATED)]
    else:
        on |= {"UMEM_DEVICE": "cuda"}
        options = ["--cuda"]
        if folder := os.environ.get("SOFTCUDA_LIB"):  # also for the programs that tests start
            libraries = [f"{folder}/libcuda.so.1", f"{folder}/libcudart.so.13"]
            common |= {"LD_LIBRARY_PATH": folder, "LD_PRELOAD": " ".join(libraries)}
            common["SOFTCUDA_BYTES"] = str(SOFTCUDA_BYTES)
    return Variant(common, options), Variant(common | on, [*options, "--umem"])


class Runner:
    """Runs files of tests in a copy of PyTorch's folder, each in processes of its own.

    In the tree itself its folder torch/ would come before the installed torch.
    """

    def __init__(self, source: Path, folder: Path, timeout: float) -> None:
        self.tests, self.timeout = folder / "test", timeout
        self.results, self.log = folder / "results.jsonl", folder / "log"
        shutil.copytree(source / "test", self.tests, symlinks=True)
        (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    serial: alone\n")

    def run(self, chosen: Chosen, variant: Variant) -> Ran:
        """Run the file to its end, in as many processes as it takes."""
        ran, started = Ran(), time.monotonic()
        self.results.unlink(missing_ok=True)
        left: int | None = None
        while left != 0 and not ran.broken:
            known = len(ran.ends)
            how = self._process(chosen, variant)
            running, left = self._read(ran)
            if how and (running or left is not None):
                test = running or f"{chosen.path}::[the process's end]"
                ran.ends[test] = End(how.split()[0], f"{how}: {self._said()}")
                line = {"test": test, **dataclasses.asdict(ran.ends[test])}
                with self.results.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            elif left != 0 and len(ran.ends) == known:
                ran.broken.append(f"{how or 'it stops'}, at no test: {self._said()}")
        ran.seconds = time.monotonic() - started
        return ran

    def _process(self, chosen: Chosen, variant: Variant) -> str:
        """Start pytest and wait for it; how it ended, empty if as it should."""
        command = [
            sys.executable, "-m", "pytest", "-q", "-c", "../pytest.ini", "--rootdir", ".",
            "--noconftest", "--assert=plain", "--tb=native", "--capture=sys",
            "-p", "no:warnings", "-p", "no:cacheprovider", "-p", "upstream.plugin",
            "--results", str(self.results), *variant.options,
            *(["-k", chosen.tests] if chosen.tests else []), chosen.path,
        ]  # fmt: skip
        environ = {k: v for k, v in os.environ.items() if k.split("_")[0] != "UMEM"}
        environ["TORCH_EXTENSIONS_DIR"] = str(self.results.parent / "extensions")
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        with self.log.open("w") as log:
            process = subprocess.Popen(
                command, cwd=self.tests, env=environ | variant.environ | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
            try:
                hung = not self._wait(process)
            finally:
                with contextlib.suppress(ProcessLookupError):  # and what its tests left running
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if hung:
            return f"hang of {self.timeout:g} s"
        code = process.returncode
        return (
            ""
            if code in (0, 1, 2, 5) and self._read(Ran())[1] is not None
            else f"crash with exit code {code}"
        )

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Return True if the process ends, and until then adds to its results in time."""
        size = self.results.stat().st_size if self.results.exists() else 0
        since, limit = time.monotonic(), max(self.timeout, STARTING)
        while process.poll() is None:
            now = self.results.stat().st_size if self.results.exists() else 0
            if now != size:
                size, since, limit = now, time.monotonic(), self.timeout
            elif time.monotonic() - since > limit:
                process.send_signal(signal.SIGABRT)  # its stacks go to the log
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=5)
                return False
            time.sleep(0.05)
        return True

    def _read(self, ran: Ran) -> tuple[str, int | None]:
        """Take over all results.

        Returns: the test that was running at the end, if any, and how many tests were left when
            pytest ended, None if it did not.
        """
        running, left = "", None
        ran.umem.clear()
        text = self.results.read_text() if self.results.exists() else ""
        for line in map(json.loads, text.splitlines()):
            running, left = line.get("start", ""), line.get("left")
            if test := line.pop("test", ""):
                ran.ends[test] = End(**line)
            for name, number in line.get("end", {}).items():
                ran.umem[name] = ran.umem.get(name, 0) + number
            ran.broken += [line["broken"]] if "broken" in line else []
        return running, left

    def _said(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])


def differences(
    plain: Mapping[str, End], umem: Mapping[str, End], entries: Sequence[Expected]
) -> list[Difference]:
    """Return the tests that end worse with umem."""
    found = []
    for test in sorted(plain.keys() | umem.keys()):
        before, after = plain.get(test), umem.get(test)
        rank = RANKS[after.outcome] if after else MISSING
        if rank > (RANKS[before.outcome] if before else 0):
            explained = (entry for entry in entries if fnmatch.fnmatchcase(test, entry.test))
            missing = End("missing")
            before, after = before or missing, after or missing
            why = next(explained, None)
            found.append(Difference(test, before.outcome, after.outcome, after.error, why))
    return found


def no_longer_needed(entries: Sequence[Expected], verdicts: Sequence[Verdict]) -> list[Expected]:
    """Return the entries for tests that ran, none of which differs."""
    used = {one.explained for verdict in verdicts for one in verdict.differences}
    ran = [test for verdict in verdicts for test in verdict.plain.ends]
    return [entry for entry in entries if entry not in used and fnmatch.filter(ran, entry.test)]


def row(path: str, counts: collections.Counter[str], width: int) -> str:
    return f"{path:{width}} " + " ".join(f"{counts[name]:>{len(name)}}" for name in COLUMNS)


def run(
    source: Path,
    files: Sequence[Chosen],
    entries: Sequence[Expected],
    kinds: tuple[Variant, Variant],
    timeout: float,
) -> list[Verdict]:
    """Run the files one after the other, and print the table."""
    width = max(len(chosen.path) for chosen in files)
    print(f"{'file':{width}}", *COLUMNS)
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(source, Path(folder), timeout)
        for chosen in files:
            plain, umem = (runner.run(chosen, kind) for kind in kinds)
            if "--umem" in kinds[1].options and not umem.broken and not _worked(umem, kinds[1]):
                umem.broken.append(f"umem was not at work: {umem.umem}")
            found = differences(plain.ends, umem.ends, entries)
            verdicts.append(Verdict(chosen.path, plain, umem, found))
            print(row(chosen.path, verdicts[-1].counts, width), flush=True)
    print(row("all", sum((one.counts for one in verdicts), collections.Counter()), width))
    return verdicts


def _worked(ran: Ran, variant: Variant) -> bool:
    names = ["allocs", "bytes_out"] if "--rotate" in variant.options else ["allocs"]
    return all(ran.umem.get(name) for name in names)


def report(verdicts: Sequence[Verdict], unneeded: Sequence[Expected]) -> None:
    """Print what the table only counts."""
    for entry in unneeded:
        print(f"no longer needed: {entry.test}: {entry.reason}")
    for verdict in verdicts:
        for why in verdict.broken:
            print(f"did not run: {verdict.path}: {why}")
        for one in verdict.unexplained:
            print(f"unexplained: {one.test}: {one.plain} -> {one.umem}: {one.error}")


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=raw)
    parser.add_argument("--source", type=Path, default=os.environ.get("UPSTREAM") or None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", metavar="FILE", help="only these files")
    parser.add_argument("--timeout", type=float, default=240.0, help="of a test, s (%(default)s)")
    parser.add_argument("--out", type=Path, help="write all results to this file, as JSON")
    options = parser.parse_args(arguments)
    version = importlib.metadata.version("torch")
    if options.source is None:
        print(NOT_GIVEN.format(version=version.split("+")[0]))
        return 0
    if not (options.source / "version.txt").is_file():
        parser.error(f"{options.source} has no version.txt: name PyTorch's source tree")
    files = [one for one in selection(HERE / "selection.toml") if one.device == options.device]
    if unknown := {*(options.only or ())} - {one.path for one in files}:
        parser.error(f"--only: {', '.join(sorted(unknown))}: not in selection.toml")
    files = [one for one in files if not options.only or one.path in options.only]
    entries = [
        one for one in expected(HERE / "expected.toml") if one.holds(options.device, version)
    ]
    print(f"torch {version}, tests of {(options.source / 'version.txt').read_text().strip()}")
    verdicts = run(options.source, files, entries, variants(options.device), options.timeout)
    unneeded = no_longer_needed(entries, verdicts)
    report(verdicts, unneeded)
    if options.out:
        told = [dataclasses.asdict(verdict) for verdict in verdicts]
        options.out.write_text(json.dumps({"torch": version, "files": told}, indent=1) + "\n")
    return 1 if any(one.unexplained or one.broken for one in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
