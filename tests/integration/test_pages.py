"""Every block of code in the pages runs, and prints the page's output."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from support import page_blocks
from support.page_blocks import PAGES, ROOT, Block

TUTORIAL = "docs/tutorial.md"
RUN = [
    page for page in PAGES if any(b.language in page_blocks.RUN for b in page_blocks.blocks(page))
]

TRAIN = """
import torch

torch.manual_seed(0)
net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
optimizer = torch.optim.Adam(net.parameters())
for _ in range(6):
    optimizer.zero_grad()
    net(torch.randn(64, 1024)).square().mean().backward()
    optimizer.step()
"""
STEP = """
import torch


def make_step():
    net = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4)))
    optimizer = torch.optim.Adam(net.parameters())
    return net, optimizer, torch.randn(64, 1024), lambda model, x: model(x).square().mean()
"""


class Rule(NamedTuple):
    """Why a block does not run in each test run, and when it does."""

    why: str
    nightly: bool = False  # it runs every night
    needs: str | None = None  # it runs where this library is


GPU = Rule("needs a GPU and its library; tests/gpu/test_frameworks_page.py runs it")
INSTALLS = Rule("installs umem, as the Makefile did before this test")
KEPT = Rule("the output is that of a run that is kept: test_shown_outputs_are_those_of_a_kept_run")
SLOW = Rule("takes longer than CI may", nightly=True)
RANKS = Rule("tests/integration/test_distributed_examples.py runs these examples")
TRANSFORMERS = Rule("CI does not install transformers", needs="transformers")
STREAM = Rule("bench/streaming.py runs it; minutes", nightly=True)

# By page and the beginning of the block's first line.
RULES = {
    ("README.md", "$ python3 -m venv .venv && . .venv/bin/activate"): INSTALLS,
    ("README.md", "$ umem run --backing mapped train.py"): Rule("needs a GPU"),
    ("README.md", "import torch, umem"): Rule("tests/integration/test_readme.py runs it"),
    ("docs/compile.md", "$ python examples/compiled_gpt.py"): Rule(
        "compiles for minutes; tests/integration/test_compiled.py runs it"
    ),
    ("docs/cuda.md", "with torch.cuda.use_mem_pool"): Rule("needs a GPU"),
    ("docs/choose_budget.md", "$ umem plan examples.gpt:make_step --budget 50%"): SLOW,
    ("docs/choose_budget.md", "$ umem plan examples.gpt:make_step --out gpt.jsonl.gz"): SLOW,
    ("docs/choose_method.md", "$ umem plan examples.resnet50"): SLOW,
    ("docs/diffusers.md", "import torch"): Rule("CI does not install diffusers", needs="diffusers"),
    ("docs/distributed.md", "$ umem run --budget 32MiB torchrun"): RANKS,
    ("docs/errors.md", "$ gdb"): Rule("waits for a user in gdb"),
    ("docs/estimating.md", "$ umem estimate examples.gpt:make_step --budget"): SLOW,
    ("docs/estimating.md", "$ umem estimate examples.gpt:make_step"): SLOW,
    ("docs/frameworks.md", "import cupy, torch, umem"): GPU,
    ("docs/frameworks.md", "import torch, umem"): GPU,
    ("docs/frameworks.md", "import umem"): GPU,
    ("docs/huggingface.md", "$ umem run --budget 8GiB train.py"): Rule(
        "CI does not install accelerate", needs="accelerate"
    ),
    ("docs/huggingface.md", "import torch"): TRANSFORMERS,
    ("docs/loggers.md", "import torch"): Rule(
        "CI does not install tensorboard", needs="tensorboard"
    ),
    ("docs/install.md", "$ pip install ."): INSTALLS,
    ("docs/install.md", "$ pip wheel"): INSTALLS,
    ("docs/planning_models.md", "$ umem plan LlamaConfig"): Rule(
        "names a folder of the reader; tests/integration/test_plan_model.py"
    ),
    ("docs/report.md", "$ umem plan examples.gpt:make_step --out gpt.jsonl.gz"): SLOW,
    ("docs/install.md", "$ pip install 'setuptools"): INSTALLS,
    ("docs/install.md", "$ make demo"): INSTALLS,
    ("docs/lightning.md", "import torch"): Rule("CI does not install lightning", needs="lightning"),
    ("docs/lint.md", "from umem.lint import apply, findings"): Rule(
        "continues a program of the reader; tests/integration/test_findings.py"
    ),
    ("docs/optimizer_state.md", "$ umem plan examples.gpt"): SLOW,
    ("docs/planning.md", "$ umem plan examples.gpt:make_step --budget 50%"): KEPT,
    ("docs/planning.md", "$ (cd examples && umem plan fsdp2_gpt:make_sharded"): SLOW,
    ("docs/recompute.md", "$ umem plan examples.resnet50"): SLOW,
    ("docs/replay.md", "$ umem replay gpt.jsonl.gz"): KEPT,
    ("docs/sleep.md", "import umem"): Rule(
        "a sketch around a call of the reader; reinforcement.md has one that runs"
    ),
    ("docs/streaming.md", "$ pip install transformers"): TRANSFORMERS,
    ("docs/streaming.md", "$ python examples/stream_llm.py --budget 25%"): STREAM,
    ("docs/top.md", "$ umem top --all --metrics"): Rule(
        "needs a running process and Prometheus's node_exporter; tests/unit/test_metrics.py"
    ),
    ("docs/top.md", "$ UMEM_TOP=1"): Rule("needs two terminals; tests/unit/test_monitor_server.py"),
    ("docs/tutorial.md", "$ python3 -m venv .venv"): INSTALLS,
    ("examples/README.md", "$ pip install '.[demo]'"): INSTALLS,
    ("examples/README.md", "$ python examples/train_digits.py"): SLOW,
    ("examples/README.md", "$ python examples/gpt.py"): SLOW,
    ("examples/README.md", "$ python examples/compiled_gpt.py"): SLOW,
    ("examples/README.md", "$ python examples/llama.py"): SLOW,
    ("examples/README.md", "$ python examples/resnet50.py"): SLOW,
    ("examples/README.md", "$ pip install transformers"): TRANSFORMERS,
    ("examples/README.md", "$ python examples/stream_llm.py --budget 25%"): STREAM,
    ("examples/README.md", "$ torchrun"): RANKS,
}


def _blocks(page: str) -> list[Block]:
    return [block for block in page_blocks.blocks(page) if block.language in page_blocks.RUN]


def _key(block: Block) -> tuple[str, str] | None:
    """Return the key of a block's rule, the most specific one that matches."""
    page, line = block.name
    matching = [key for key in RULES if key[0] == page and line.startswith(key[1])]
    return max(matching, key=lambda key: len(key[1])) if matching else None


def _runs(block: Block, nightly: bool) -> bool:
    key = _key(block)
    if key is None:
        return True
    rule = RULES[key]
    if rule.needs is not None:
        return importlib.util.find_spec(rule.needs) is not None
    return rule.nightly and nightly


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the pages' commands name: examples, a script, a module with a step."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "training.py").write_text(STEP)
    page = (ROOT / "docs" / "planning.md").read_text()
    profiles = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)  # a node's, and a device's
    (tmp_path / "my-card.toml").write_text(profiles[-1])
    return tmp_path


# The other pages' programs take two minutes, most of it in starts of Python.
@pytest.mark.parametrize(
    "page",
    [
        page if page == "README.md" else pytest.param(page, marks=pytest.mark.nightly)
        for page in RUN
        if page != TUTORIAL
    ],
)
def test_the_blocks_of_a_page_do_what_it_says(page: str, folder: Path, nightly: bool) -> None:
    for block in _blocks(page):
        if _runs(block, nightly):
            page_blocks.run(block, folder)


def test_each_rule_is_that_of_a_block_and_most_blocks_run_somewhere() -> None:
    keys = [_key(block) for page in RUN for block in _blocks(page)]
    assert set(RULES) - set(keys) == set()
    never = [key for key in keys if key and not (RULES[key].nightly or RULES[key].needs)]
    assert len(never) < len(keys) / 3


def test_every_block_has_a_language() -> None:
    found = {block.name for page in PAGES for block in page_blocks.blocks(page)
             if block.language not in page_blocks.LANGUAGES}  # fmt: skip
    assert found == set()


def test_what_a_program_prints_is_compared() -> None:
    for page in PAGES:
        claims = (ROOT / page).read_text().count("\nIt prints\n")
        assert sum(block.prints is not None for block in page_blocks.blocks(page)) == claims, page


def test_a_block_that_does_not_do_what_its_page_says_fails(tmp_path: Path) -> None:
    for block in (
        Block("page", "python", "print(1)\n", None, "2\n"),
        Block("page", "python", "1 / 0\n", None, None),
        Block("page", "console", "$ echo one\ntwo\n", None, None),
        Block("page", "console", "$ false\n", None, None),
    ):
        with pytest.raises(AssertionError):
            page_blocks.run(block, tmp_path)
    page_blocks.run(
        Block("page", "console", "$ echo one; echo two\none\n...\n", None, None), tmp_path
    )


@pytest.mark.nightly
def test_the_tutorial_trains_the_same_weights_with_half_of_the_memory(folder: Path) -> None:
    """The runs of the page: plain, with all of its memory, with half of it, and with a disk."""
    printed = [page_blocks.run(block, folder) for block in _blocks(TUTORIAL) if _runs(block, False)]
    weights = re.findall(r"^weights \w{16}$", "".join(printed), re.MULTILINE)
    assert len(weights) == 4
    assert len(set(weights)) == 1


def test_shown_outputs_are_those_of_a_kept_run() -> None:
    kept = sorted((ROOT / "bench" / "results").glob("plan_*.md"))[-1]
    lines = kept.read_text().splitlines()
    shown = [
        (command, page)
        for page in ("docs/planning.md", "docs/replay.md")
        for block in _blocks(page)
        for command in page_blocks.commands(block.text)
        if command.output
    ]
    assert len(shown) == 2
    for command, page in shown:
        assert f"({'../'}{kept.relative_to(ROOT)})" in (ROOT / page).read_text()
        assert any(line.startswith(f"$ {command.text}") for line in lines), command.text
        assert [line for line in command.output.splitlines() if line not in lines] == []


def test_the_json_of_a_page_is_json() -> None:
    """The example of the trace format; its other block is a table's row of options."""
    (block,) = [b for b in page_blocks.blocks("docs/trace_format.md") if b.language == "text"]
    assert all(json.loads(line) for line in block.text.splitlines())
