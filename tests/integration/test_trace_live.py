"""Recordings of torch programs: ops, what they read and write, and lifetimes of blocks."""

from __future__ import annotations

import gc
import os
import subprocess
import textwrap
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from support import forkserver, recorded  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.errors import TraceError  # noqa: E402
from umem.trace.convert import convert  # noqa: E402
from umem.trace.event_columns import EventColumns  # noqa: E402
from umem.trace.file_recorder import TraceFile  # noqa: E402
from umem.trace.reader import read  # noqa: E402
from umem.trace.schema import Alloc, Event, Free, Header, Op, Step, Validator  # noqa: E402
from umem.trace.step_builder import StepBuilder, read_step  # noqa: E402
from umem.trace.step_trace import Kind  # noqa: E402

WIDTH = 1024  # a weight, and a batch as large, is 4 MiB
BOTH = pytest.mark.parametrize("observer", ["native", "python"])


class Recorded:
    """The events of some work, and the ids of blocks by address."""

    def __init__(self, work: Callable[[], object]) -> None:
        core.record_start("plan")
        self.result = work()
        columns = core.record_take("plan")
        core.record_stop("plan")
        self.events = recorded.taken(columns)
        self.ids = {place: block for block, place in recorded.addresses(columns).items()}
        check = Validator()
        for event in self.events:
            check.check(event)  # among them: every op's inputs are alive

    def id(self, tensor: torch.Tensor) -> int:
        return self.ids[tensor.untyped_storage().data_ptr()]

    def ops(self, name: str) -> list[Op]:
        # The Python observer reports aten.mm.default.
        other = name.replace("::", ".") + "."
        return [
            event
            for event in self.events
            if type(event) is Op and (event.name == name or event.name.startswith(other))
        ]


def network() -> tuple[torch.nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    rows = torch.randn(WIDTH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        net(rows).square().mean().backward()
        optimizer.step()

    return net, step


@BOTH
def test_ops_read_weights_and_write_what_they_make(observer: str) -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru", observer=observer):
        weight, rows = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
        seen = Recorded(lambda: rows @ weight)
        (product,) = seen.ops("aten::mm")
        assert set(product.reads) == {seen.id(weight), seen.id(rows)}
        assert isinstance(seen.result, torch.Tensor)
        assert product.writes == (seen.id(seen.result),)
        assert product.us is not None
        assert product.us > 0
        del seen.result


@BOTH
def test_what_an_op_changes_in_place_is_read_and_written(observer: str) -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru", observer=observer):
        a, b = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
        (add,) = Recorded(lambda: a.add_(b)).ops("aten::add_")
        assert len(add.reads) == 2
        assert len(add.writes) == 1
        assert add.writes[0] in add.reads


def test_what_an_op_overwrites_whole_is_not_read() -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        a, b = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
        seen = Recorded(lambda: a.copy_(b))
        (whole,) = seen.ops("aten::copy_")
        assert (whole.reads, whole.writes) == ((seen.id(b),), (seen.id(a),))
        part = Recorded(lambda: a[:10].copy_(b[:10]))
        (partly,) = part.ops("aten::copy_")
        assert set(partly.reads) == {part.id(a), part.id(b)}  # the rest of it must remain
        twice = Recorded(lambda: a[: WIDTH // 2].expand(2, -1, -1).zero_())  # as many elements
        (half,) = twice.ops("aten::zero_")
        assert half.reads == half.writes == (twice.id(a),)
        out = Recorded(lambda: torch.mul(b, 2.0, out=a))
        assert all(out.id(a) not in op.reads for op in out.ops("aten::mul"))
        assert any(op.writes == (out.id(a),) for op in out.ops("aten::mul"))


def test_an_op_on_views_says_which_parts_of_the_block_it_uses(tmp_path: Path) -> None:
    """In the recording and in the file, from which a replay moves no more than these."""
    path = tmp_path / "trace.jsonl"
    mib = 1 << 20
    with umem.enable(budget="64MiB", device="soft", observer="native", trace=path):
        block, other = torch.zeros(4 << 20), torch.ones(4 << 20)

        def work(block: torch.Tensor = block, other: torch.Tensor = other) -> None:
            block.view(4, 1 << 20)[1].add_(other[: 1 << 20])
            block[1:].mul_(2)
            block.view(4, 1 << 20)[:, : 1 << 10].sub_(1)
            block.sum()

        recorded = Recorded(work)
        (added,), (multiplied,), (less,), *_ = (
            recorded.ops(f"aten::{name}") for name in ("add_", "mul_", "sub_")
        )
        assert set(added.reads) == {recorded.id(block), recorded.id(other)}
        rows = [added.parts[i : i + 3] for i in range(0, len(added.parts), 3)]
        assert {(added.reads + added.writes)[which] for which, _, _ in rows} == set(added.reads)
        assert {row[1:] for row in rows} == {(0, 4 * mib), (4 * mib, 8 * mib)}
        assert {multiplied.parts[i : i + 2] for i in (1, 4)} == {(4, 16 * mib)}
        assert {less.parts[i : i + 2] for i in (1, 4)} == {(0, 12 * mib + 4096)}
        assert all(op.parts == () for op in recorded.ops("aten::sum"))
        for _ in range(2):
            work()
            umem.step()
        del block, other, work
    in_file = [event for event in read(path)[1] if type(event) is Op and event.parts]
    assert {op.name for op in in_file} == {"aten::add_", "aten::mul_", "aten::sub_"}
    step = read_step(path)
    assert step.parts is not None
    assert step.cut is not None


def test_lists_of_tensors_are_written_too() -> None:
    with umem.enable(budget="64MiB", device="soft", policy="lru"):
        many = [torch.ones(16) for _ in range(200)]
        seen = Recorded(lambda: torch._foreach_add_(many, 1.0))
        written = {block for op in seen.ops("aten::_foreach_add_") for block in op.writes}
        inside = {block for op in seen.ops("aten::add_") for block in op.writes}
        assert written | inside == {seen.id(tensor) for tensor in many}


@BOTH
def test_a_step_in_columns(observer: str) -> None:
    with umem.enable(budget="128MiB", device="soft", policy="lru", observer=observer):
        net, step = network()
        for _ in range(2):
            step()
        core.record_start("plan")
        builder = StepBuilder()
        for _ in range(2):
            step()
            builder.take(EventColumns.of_native(core.record_take("plan")))
        core.record_stop("plan")
        trace = builder.step()
        large = [
            (trace.tags[t], Kind(trace.kind[t]).name)
            for t in range(trace.n_tensors)
            if trace.large[t]
        ]
        assert large.count(("param", "PERSISTENT")) == 2
        assert large.count(("optimizer", "PERSISTENT")) == 2
        # zero_grad frees them before the next step's first op. The Python observer tags them as
        # gradients in the first steps only.
        assert sum(kind == "MADE" for _, kind in large) == 2
        activations = large.count(("activation", "TRANSIENT"))
        assert activations >= 3
        assert trace.compute_us > 0
        del net, step


def run(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    preamble = (
        "import sys, torch, umem\n"
        "torch.set_num_threads(1)\n"
        "umem.enable(budget='64MiB', device='soft', policy='lru', trace=sys.argv[1])\n"
        "weight = torch.nn.Parameter(torch.randn(1024, 1024))\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "def step():\n"
        "    optimizer.zero_grad(); (weight @ weight).sum().backward(); optimizer.step()\n"
    )
    return forkserver.run(["-c", preamble + textwrap.dedent(code), *map(str, args)])


ENDS = {
    "falls off its end": ("for _ in range(3): step()\n", 0),
    "sys.exit": ("for _ in range(3): step()\nsys.exit(3)\n", 3),
    "an exception": ("for _ in range(3): step()\nraise KeyError('it')\n", 1),
    "umem.disable": ("for _ in range(3): step()\numem.disable()\nstep()\n", 0),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_file_is_complete_however_the_program_ends(how: str, tmp_path: Path) -> None:
    code, expected = ENDS[how]
    path = tmp_path / "trace.jsonl.gz"
    done = run(code, path)
    assert done.returncode == expected, done.stderr
    header, events = read(path)
    assert header.device == "h200-pcie5"
    assert header.source == f"torch {torch.__version__}"
    seen: list[Event] = list(events)  # and each fits its place
    assert sum(type(event) is Step for event in seen) == 3
    first = next(event for event in seen if type(event) is Alloc)
    assert (first.bytes, first.tag) == (4 << 20, "param")
    assert any(type(event) is Free for event in seen)
    assert read_step(path).n_ops > 5


def test_a_trace_with_a_limit_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of `umem run --report`; the program goes on."""
    most = 20_000
    for name in ("trace.jsonl", "trace.jsonl.gz"):
        path = tmp_path / name
        monkeypatch.setenv("_UMEM_TRACE_MOST", str(most))
        monkeypatch.setenv("UMEM_TRACE", str(path))
        with umem.enable(budget="64MiB", device="soft"):
            weight = torch.ones(1 << 19)
            steps, left = 0, 50
            while left:
                for _ in range(20):
                    weight.mul_(1)
                umem.step()
                steps += 1
                left -= path.stat().st_size >= most
            size = path.stat().st_size
            umem.step()
            del weight
        assert path.stat().st_size == size < 20 * most
        seen = list(read(path)[1])
        assert 0 < sum(type(event) is Step for event in seen) < steps
    # The file that a program asks for itself has no limit.
    with umem.enable(budget="64MiB", device="soft", trace=tmp_path / "own.jsonl"):
        weight = torch.ones(1 << 19)
        for _ in range(10 * most // 100):
            weight.mul_(1)
        del weight
    assert (tmp_path / "own.jsonl").stat().st_size > 2 * most


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    done = run(
        """
        import os, warnings
        warnings.simplefilter("ignore")
        step()
        child = os.fork()
        if child == 0:
            for _ in range(5): step()
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        step()
        """,
        path,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sum(type(event) is Step for event in read(path)[1]) == 2


def test_a_finished_recorder_is_not_kept(tmp_path: Path) -> None:
    umem.enable(budget="64MiB", device="soft")
    recorder = TraceFile(tmp_path / "trace.jsonl", lambda: Header("soft", "test"))
    recorder.close()
    kept = weakref.ref(recorder)
    del recorder
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{tmp}/no/where.jsonl", "No such file or directory; allowed: a file in a directory"),
        ("{tmp}/trace.txt", "ends neither in .jsonl nor in .jsonl.gz"),
    ],
)
def test_a_path_that_cannot_be_written_is_an_error(value: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(umem.ConfigError) as error:
        umem.enable(budget="64MiB", device="soft", trace=value.format(tmp=tmp_path))
    assert str(error.value).startswith("trace=: ")
    assert said in str(error.value)
    assert not umem.is_enabled()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_full_disk_ends_the_trace_and_not_the_program(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name
    path.symlink_to("/dev/full")

    def said() -> list[str]:
        return [r.getMessage() for r in caplog.records if str(path) in r.getMessage()]

    with umem.enable(budget="64MiB", device="soft", policy="lru", trace=path):
        deadline = time.monotonic() + 60
        while not said() and time.monotonic() < deadline:  # a thread writes it
            assert torch.ones(WIDTH).sum() == WIDTH
            umem.step()
            time.sleep(0.01)
        umem.step()
    assert len(said()) == 1
    assert "No space left on device" in said()[0]


def test_a_pipe_is_written_if_it_is_read(tmp_path: Path) -> None:
    """Opening one without a reader would wait for it forever, inside `import torch`."""
    path = tmp_path / "trace.jsonl"
    os.mkfifo(path)
    with pytest.raises(umem.ConfigError, match="no program reads this pipe"):
        umem.enable(budget="64MiB", device="soft", trace=path)
    assert not umem.is_enabled()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with umem.enable(budget="64MiB", device="soft", policy="lru", trace=path):
        torch.ones(WIDTH)
    with os.fdopen(reader, encoding="utf-8") as stream:
        lines = stream.readlines()
    assert '"kind":"umem-trace"' in lines[0]
    assert any('"e":"alloc"' in line for line in lines)


def test_the_steps_of_a_killed_program_can_be_saved(tmp_path: Path) -> None:
    path, saved = tmp_path / "killed.jsonl.gz", tmp_path / "saved.jsonl"
    ended = run(
        """
        import os, signal, time
        for _ in range(3): step()
        size = 0
        while size == 0 or size != os.path.getsize(sys.argv[1]):  # a thread writes it
            size = os.path.getsize(sys.argv[1])
            time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
        path,
    )
    assert ended.returncode == -9, ended.stderr
    with pytest.raises(TraceError, match="cut off"):
        list(read(path)[1])
    convert(path, saved, partial=True)
    assert sum(type(event) is Step for event in read(saved)[1]) == 3
