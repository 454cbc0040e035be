"""`umem run --report` and `umem demo --report`: pages of real runs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the programs train")

TRAIN = """
import os, signal, sys, torch, umem
net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6)))
for step in range(5):
    net(torch.ones(64, 1024)).square().mean().backward()
    for p in net.parameters():  # an optimizer would import torch._dynamo, which takes 3 s
        p.data.sub_(p.grad, alpha=0.1)
        p.grad = None
    umem.step()
    print("step", step, flush=True)
"""


def start(folder: Path, end: str, *options: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(TRAIN + end)
    return subprocess.Popen(
        [sys.executable, "-m", "umem", "run", "--device", "soft", "--policy", "lru", *options,
         "--report", "r.html", "train.py"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # without a terminal
        env={key: value for key, value in os.environ.items() if not key.startswith("UMEM")},
    )  # fmt: skip


def data_of(page: Path) -> list[dict[str, Any]]:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    steps: list[dict[str, Any]] = json.loads(found[0])
    return steps


def test_a_run_ends_with_a_page_of_its_last_step(tmp_path: Path) -> None:
    run = start(tmp_path, "", "--budget", "32MiB")
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert "step 4" in out
    assert "umem run: report: r.html" in err
    (data,) = data_of(tmp_path / "r.html")
    assert (data["policy"], data["budget"]) == ("lru", 32 << 20)
    assert data["title"] == "train.py"
    assert data["ops"] > 20
    assert data["bytes_in"] > 0
    assert any("its operators have CPU times" in note for note in data["notes"])
    assert not [*tmp_path.glob("*.jsonl*")], "the trace was a temporary file"


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        pytest.param(
            "sys.exit(7)", 7, "the program ended with exit code 7", marks=pytest.mark.nightly
        ),
        pytest.param(
            "raise ValueError('spoilt')",
            1,
            "the program ended with exit code 1",
            marks=pytest.mark.nightly,
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "the program ended with SIGKILL"),
    ],
)
def test_a_program_that_fails_keeps_its_exit_code_and_has_its_page(
    end: str, code: int, words: str, tmp_path: Path
) -> None:
    run = start(tmp_path, end)  # within the budget of a device that has a host budget too
    _, err = run.communicate(timeout=120)
    assert run.returncode == code, err
    assert words in err
    assert "umem run: report of the last whole step: r.html" in err
    (data,) = data_of(tmp_path / "r.html")
    assert data["ops"] > 20
    assert 64 << 20 < data["budget"] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("name", [pytest.param("SIGTERM", marks=pytest.mark.nightly), "SIGINT"])
def test_a_signal_reaches_the_program(name: str, tmp_path: Path) -> None:
    """Also Ctrl-C's, where no terminal sends it to both."""
    end = f"""
signal.signal(signal.{name}, lambda *_: sys.exit(5))
print("waiting", flush=True)
signal.pause()
"""
    run = start(tmp_path, end)
    assert run.stdout is not None
    for line in run.stdout:
        if line == "waiting\n":
            break
    time.sleep(0.1)
    run.send_signal(signal.Signals[name])
    _, err = run.communicate(timeout=60)
    assert run.returncode == 5, err
    assert (tmp_path / "r.html").exists()


def test_a_program_without_a_step_has_no_page_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('no torch here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "umem", "run", "--report", "r.html", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "umem run: no report: the program recorded no trace" in done.stderr
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--report", "r.txt"], "--report r.txt; allowed: FILE.html"),
        (["--report", "r.html", "--trace", "t.jsonl"], "--report and --trace are both given"),
    ],
)
def test_a_page_that_cannot_be_is_refused_before_the_program_runs(
    options: list[str], words: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print('ran')\n")
    done = subprocess.run(
        [sys.executable, "-m", "umem", "run", *options, "train.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert words in done.stderr
    assert "ran" not in done.stdout


@pytest.mark.nightly
def test_the_demo_writes_a_page_of_its_own_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the demo's picture")
    done = subprocess.run(
        [sys.executable, "-m", "umem", "demo", "--quick", "--workload", "gpt", "--steps", "3",
         "--report", "demo.html"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Report of a step of each workload: demo.html" in done.stdout
    (data,) = data_of(tmp_path / "demo.html")
    assert data["policy"] == "lru"
    assert data["peak"] > 3 * data["budget"]
    heads, *rows = data["measured"]
    assert heads[0] == "workload"
    assert [row[2] for row in rows] == ["plain torch", "lru", "lru"]
