"""The reports under bench/results: each can be measured again at the commit that it names."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.benches import imports

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
REPORTS = sorted(path.stem for path in RESULTS.glob("*.json"))
LARGEST = 400_000  # bytes of a file; larger ones are raw and remain in build/


def git(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False
    )


def commits(record: dict[str, Any]) -> list[str]:
    """All that a report was measured at: one, or two that took turns."""
    known = {**record.get("versions", {}), **record}
    return [known[key] for key in ("commit", "before", "after") if key in known]


@functools.cache
def no_history() -> str | None:
    """Return why commits cannot be looked up; None if they can."""
    if git("rev-parse", "--show-toplevel").stdout.strip() != str(ROOT):
        return "not a git checkout: no commit can be looked up"
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        return "a shallow clone: old commits cannot be looked up"
    return None


def fault(stem: str) -> str | None:
    """Why a report cannot be measured again; None where it can."""
    named = commits(json.loads((RESULTS / f"{stem}.json").read_text()))
    if not named:
        return "names no commit"
    for commit in named:
        if re.fullmatch("[0-9a-f]{40}", commit) is None:
            return f"names {commit}, which is no full hash of a clean tree"
        if git("merge-base", "--is-ancestor", commit, "HEAD").returncode != 0:
            return f"names {commit}, which is not in the history of HEAD"
    return None


@pytest.mark.parametrize("stem", REPORTS)
def test_every_report_names_commits_of_this_history(stem: str) -> None:
    if (why := no_history()) is not None:
        pytest.skip(why)
    found = fault(stem)
    assert found is None, f"{stem} {found}"


@pytest.mark.parametrize("stem", REPORTS)
def test_the_page_of_a_report_names_its_commits(stem: str) -> None:
    record = json.loads((RESULTS / f"{stem}.json").read_text())
    page = (RESULTS / f"{stem}.md").read_text()
    assert [commit for commit in commits(record) if commit[:7] not in page] == []


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """bench/facts.py over a repository of one commit, in `tmp_path`."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set where a hook runs the tests
        monkeypatch.delenv(name, raising=False)
    for module in imports(monkeypatch, "facts"):
        found = module("facts")
        monkeypatch.setattr(found, "ROOT", tmp_path)
        monkeypatch.setattr(found, "RESULTS", tmp_path / "bench" / "results")
        (tmp_path / "code.py").write_text("1\n")
        (tmp_path / ".gitignore").write_text("/build/\n")
        git("init", "-q", folder=tmp_path)
        commit(tmp_path)
        yield found


def commit(folder: Path) -> str:
    git("add", "-A", folder=folder)
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    git(*who, "commit", "-qm", "x", "--allow-empty", folder=folder)
    return git("rev-parse", "HEAD", folder=folder).stdout.strip()


def test_a_clean_tree_may_write_results_one_after_another(facts: Any, tmp_path: Path) -> None:
    assert facts.refusal(facts.RESULTS) is None
    for folder in ("bench/results", "build"):  # the reports so far, and what git ignores
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.json").write_text("{}")
    assert facts.refusal(facts.RESULTS) is None
    head = git("rev-parse", "HEAD", folder=tmp_path).stdout.strip()
    assert facts.version_facts()["commit"] == head


@pytest.mark.parametrize("name", ["code.py", "new.py"])
def test_a_dirty_tree_may_not(facts: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("2\n")
    why = facts.refusal(facts.RESULTS / "deeper")
    assert f"differs from its commit: {name}. Commit first" in why
    assert why.endswith("name another folder: --out FOLDER")
    assert facts.refusal(tmp_path / "elsewhere") is None
    assert facts.version_facts()["commit"].endswith("+")


def test_a_commit_while_it_is_measured_refuses_the_report(facts: Any, tmp_path: Path) -> None:
    start = facts.version_facts()["commit"]
    (tmp_path / "code.py").write_text("2\n")
    end = commit(tmp_path)
    assert f"at {start} at the start and is at {end} now" in facts.refusal(facts.RESULTS)


def test_figures_of_another_umem_are_refused(facts: Any, tmp_path: Path) -> None:
    (tmp_path / "umem").mkdir()
    (tmp_path / "umem" / "units.py").write_text("GIB = 1\n")
    commit(tmp_path)
    why = facts.refusal(facts.RESULTS)
    assert "the umem that Python imports is not this tree's" in why
    assert "units.py" in why


def test_outside_of_git_no_results_are_written(
    facts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".git").rename(tmp_path / "kept")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "is no git checkout with a commit" in facts.refusal(facts.RESULTS)


@pytest.fixture
def harness(facts: Any) -> Any:
    """bench/harness.py over the repository of `facts`."""
    return importlib.import_module("harness")


def chosen(harness: Any, *words: str) -> Any:
    parser = argparse.ArgumentParser()
    harness.add_outputs(parser)
    return harness.results_folder(parser, parser.parse_args(words))


def test_smoke_runs_never_write_results(harness: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(harness, "--smoke") is None
    assert chosen(harness, "--smoke", "--out", "elsewhere") == Path("elsewhere")
    with pytest.raises(SystemExit):
        chosen(harness, "--smoke", "--out", str(harness.RESULTS))
    assert "its figures mean nothing; name another folder" in capsys.readouterr().err


def test_a_bench_ends_before_it_measures_what_it_may_not_keep(
    harness: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen(harness) == harness.RESULTS
    (tmp_path / "code.py").write_text("2\n")
    with pytest.raises(SystemExit):
        chosen(harness)
    assert "differs from its commit: code.py" in capsys.readouterr().err


def test_a_report_of_a_tree_that_changed_meanwhile_is_kept_aside(
    harness: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(harness, "ASIDE", tmp_path / "build")
    folder = chosen(harness)
    (tmp_path / "code.py").write_text("2\n")
    with pytest.raises(SystemExit, match=r"differs from its commit.*This one is at .*build.x\.md"):
        harness.write(folder, "x", {}, "page")
    assert (tmp_path / "build" / "x.md").read_text() == "page"
    assert not (folder / "x.md").exists()


def test_what_is_stored_is_a_summary() -> None:
    sizes = {path.name: path.stat().st_size for path in RESULTS.iterdir() if path.is_file()}
    assert {name: size for name, size in sizes.items() if size > LARGEST} == {}


@pytest.mark.parametrize(
    "path", sorted(RESULTS.glob("policies_*.json")), ids=lambda path: path.stem
)
def test_the_page_of_the_policies_can_be_made_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in imports(monkeypatch, "policies"):
        assert module("policies.report").main([str(path)]) == 0
    assert capsys.readouterr().out == path.with_suffix(".md").read_text()
