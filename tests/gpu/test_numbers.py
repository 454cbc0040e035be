"""Trainings on the software driver, with kernels that compute: equal bits, with umem and without.

Work is done late and in a random legal order under each seed, and reads the pages at that time: a
wait that umem forgot, or a discard too early, changes the numbers. The nightly profile takes more
seeds and a smaller budget.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from softcuda.load import Softcuda  # noqa: E402
from support.cuda_nets import NETS  # noqa: E402
from support.gpu import program, worker  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("softcuda")]
WORKER = Path(__file__).with_name("numbers_worker.py")
POLICIES = ("lru", "conv_lru", "auto")
BUDGETS = ("1", "1/2", "1/4")
# Orders of the device's work: plans depend on more of it than evictions by age.
SEEDS = {"auto": ("0", "1"), "lru": ("1",), "conv_lru": ("1",)}
MAPPED = ("cnn", "auto"), ("streams", "lru")  # in CI; the others nightly
NIGHTLY_BUDGETS, NIGHTLY_SEEDS = (*BUDGETS, "1/8"), tuple(map(str, range(8)))


def runs(net: str, policy: str, *options: str) -> list[dict[str, Any]]:
    out = worker(WORKER, net, policy, *options, timeout=1800)
    return [json.loads(line) for line in out.splitlines()]


@functools.cache
def plain(net: str) -> dict[str, Any]:
    """With torch's own allocator, for which the order of work is irrelevant."""
    rows = runs(net, "plain", "--seeds", "0", "1")
    assert len({row["digest"] for row in rows}) == 1, rows
    assert not any(row["races"] for row in rows), rows
    return rows[0]


@pytest.mark.parametrize(
    ("net", "policy"),
    [
        # Without convolutions, conv_lru is lru.
        pytest.param(net, policy, marks=[pytest.mark.nightly] if late else [])
        for net, policy in itertools.product(NETS, POLICIES)
        for late in [policy == "conv_lru" and net not in ("cnn", "unet")]
    ],
)
def test_equal_bits_at_every_budget(net: str, policy: str, nightly: bool) -> None:
    budgets, seeds = (NIGHTLY_BUDGETS, NIGHTLY_SEEDS) if nightly else (BUDGETS, SEEDS[policy])
    want = plain(net)
    rows = runs(net, policy, "--peak", want["peak_bytes"], "--budgets", *budgets, "--seeds", *seeds)
    assert len(rows) == len(budgets) * len(seeds)
    wrong = [row for row in rows if row["digest"] != want["digest"] or row["errors"] != "0"]
    assert not wrong, wrong
    assert not any(row["races"] for row in rows), rows
    # Otherwise the smallest budget fits it. A graph's own memory remains on the device, and takes
    # all of a quarter: nothing is fetched, so nothing leaves.
    if int(want["peak_bytes"]) >= 32 << 20:
        tight = "1/2" if net == "graph" else "1/4"
        assert all(int(row["evictions"]) > 0 for row in rows if row["budget"] == tight), rows


@pytest.mark.parametrize(
    ("net", "policy"),
    [
        pytest.param(net, policy, marks=[] if (net, policy) in MAPPED else [pytest.mark.nightly])
        for net, policy in itertools.product(NETS, ("lru", "auto"))
        if net != "graph"  # refused
    ],
)
def test_equal_bits_in_mapped_memory(net: str, policy: str, nightly: bool) -> None:
    """There are no page faults: memory that is used while it is away or moves fails."""
    budgets, seeds = (NIGHTLY_BUDGETS, NIGHTLY_SEEDS) if nightly else (("1/2", "1/4"), ("0", "1"))
    want = plain(net)
    rows = runs(
        net, policy, "--backing", "mapped", "--peak", want["peak_bytes"],
        "--budgets", *budgets, "--seeds", *seeds,
    )  # fmt: skip
    wrong = [row for row in rows if row["digest"] != want["digest"] or row["errors"] != "0"]
    assert not wrong, wrong
    assert not any(row["races"] for row in rows), rows
    if int(want["peak_bytes"]) >= 32 << 20 and net != "lstm":  # small blocks, which stay
        assert all(int(row["evictions"]) > 0 for row in rows if row["budget"] == "1/4"), rows


def test_a_training_that_fits_evicts_nothing() -> None:
    rows = runs("gpt", "lru", "--peak", str(512 << 20), "--budgets", "1", "--seeds", "0", "1")
    assert [row["evictions"] for row in rows] == ["0", "0"]
    assert {row["digest"] for row in rows} == {plain("gpt")["digest"]}


@pytest.mark.parametrize("call", ["cuStreamWaitEvent", "cuEventRecord"])
def test_a_forgotten_wait_changes_the_numbers(call: str) -> None:
    """The test of the tests: with the call left out, they fail."""
    want = plain("gpt")
    rows = runs(
        "gpt", "lru", "--peak", want["peak_bytes"], "--budgets", "1/4", "--seeds", "0", "1", "2",
        "--skip", call,
    )  # fmt: skip
    assert any(row["digest"] != want["digest"] for row in rows)
    # Immediate work changes no numbers: there the race detector finds it too.
    for row in rows:
        by_name = [race for race in row["races"] if "aten::" in race and "cuMemDiscard" in race]
        assert by_name, row


def test_an_operator_without_a_cpu_kernel_is_refused() -> None:
    code = """
assert load.compute() > 1000
cell = torch.nn.GRUCell(4, 4).cuda()
try:
    cell(torch.randn(2, 4).cuda())
except NotImplementedError as error:
    assert "_thnn_fused_gru_cell has no CPU kernel" in str(error), error
else:
    raise AssertionError("computed")
x = torch.arange(6.0).cuda()
assert x.gt(2).nonzero().flatten().tolist() == [3, 4, 5]
assert torch.topk(x, 2).values.tolist() == [5.0, 4.0]
assert str(x.unique().sum()) == "tensor(15., device='cuda:0')"
"""
    program(code)


def test_compute_names_what_must_come_before(softcuda: Softcuda) -> None:
    code = f"""
import sys
sys.path[:0] = [{str(WORKER.parents[1] / "softcuda")!r}]
import load
load.compute()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert "compute() comes after load()" in done.stderr


EXAMPLE = WORKER.parents[2] / "examples" / "train_digits.py"
TO_CUDA = {
    "images, labels = load_data()": 'images, labels = (t.to("cuda") for t in load_data())',
    "net = make_net()": 'net = make_net().to("cuda")',
    "tensor.contiguous()": "tensor.cpu().contiguous()",
    "THREADS = 2": "THREADS = 1",  # work may run on any thread here
}


def digits(tmp_path: Path, start: str) -> str:
    """The last line of the example on "cuda", after the statements of `start`."""
    source = EXAMPLE.read_text()
    for old, new in TO_CUDA.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    program = tmp_path / "train_digits.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(WORKER.parents[1] / 'softcuda')!r})\n"
        f"import load\nload.load().seed(1)\nimport torch, umem\n{start}\nload.compute()\n"
        + source.replace("from __future__ import annotations\n", "")
    )
    environ = os.environ | {"SOFTCUDA_BYTES": str(512 << 20), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True, text=True, check=False, timeout=300, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.nightly
def test_the_digits_example_ends_with_the_same_line(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    want = digits(tmp_path, "")
    assert want.startswith("final loss=0x")
    enable = 'umem.enable(budget="32MiB", device="cuda")'
    assert digits(tmp_path, enable) == want
