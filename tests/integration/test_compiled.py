"""Kernels of torch.compile: umem sees each call as an operator, and plans their steps."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support import program, recorded  # noqa: E402

import umem  # noqa: E402
from umem.config.settings import child_environment  # noqa: E402
from umem.integrations.torch import compiled, cpu  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300  # a compiler on a busy machine takes long
LAUNCHER = "torch._inductor.runtime.triton_heuristics"
LOADER = "torch._inductor.async_compile"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("inductor"))


def run(code: str, cache: str, **environ: str) -> str:
    """The output of a program that compiles."""
    # Without trying each set of vector instructions, which takes longer than the kernels.
    environ = {"TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_VEC_ISA_OK": "1", **environ}
    status, out, err = program.run(code, SECONDS, fresh=False, **environ)
    if "InvalidCxxCompiler" in err:
        pytest.skip("torch.compile finds no C++ compiler here")
    assert status == 0, out + err
    return out


KERNEL = """
def work(x, bias):
    return torch.relu(x * 2 + bias).sum(0)
work = torch.compile(work)
x, bias = torch.ones(1024, 1024, requires_grad=True), torch.ones(1024)
"""


def kernels(trace: Path) -> list[dict[str, Any]]:
    """The generated kernels of a trace."""
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    return [event for event in events if event.get("name", "").startswith("cpp_fused")]


def test_each_kernel_is_an_operator_with_its_inputs_and_outputs(cache: str, tmp_path: Path) -> None:
    code = KERNEL + "work(x, bias).sum().backward()\nprint(float(x.grad.sum()))\numem.disable()\n"
    for threads in ("2", "1"):  # the second process finds the first one's code
        path = tmp_path / f"{threads}.jsonl"
        out = run(code, cache, UMEM_TRACE=str(path), TORCHINDUCTOR_COMPILE_THREADS=threads)
        assert float(out) == 2 * 1024 * 1024
        forward, backward = kernels(path)
        assert len(forward["r"]) >= 2
        assert len(forward["w"]) >= 1
        assert len(backward["w"]) == 1
        assert set(backward["w"]) <= set(backward["r"])  # perhaps it is written in parts only


def test_kernels_run_without_umem_as_with_it(cache: str) -> None:
    out = run(
        KERNEL
        + """
        with torch.no_grad():
            first = work(x, bias)
            umem.disable()
            second = work(x, bias)
            print(torch.equal(first, second))
            umem.enable(budget="8MiB", device="soft", policy="lru")
            sys.path.insert(0, os.environ["TESTS"])
            from support import recorded
            results = []
            print(len(recorded.ops_of(lambda: results.append(work(x, bias)))))
            print(torch.equal(second, results[0]))
        """.replace("\n        ", "\n"),
        cache,
        TESTS=str(ROOT / "tests"),
    )
    assert out.split() == ["True", "1", "True"]


def test_a_program_that_compiles_nothing_does_not_import_inductor() -> None:
    status, out, err = program.run("print('torch._inductor.async_compile' in sys.modules)")
    assert status == 0, err
    assert out.split() == ["False"]


@pytest.mark.nightly
@pytest.mark.parametrize("net", ["resnet", "gpt"])
def test_a_compiled_step_is_planned_and_moves_no_more_than_an_eager_one(
    net: str, cache: str
) -> None:
    command = [sys.executable, str(ROOT / "bench" / "compiled.py"), "--measure", net]
    environment = child_environment() | {"TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    if "InvalidCxxCompiler" in done.stderr:
        pytest.skip("torch.compile finds no C++ compiler here")
    assert done.returncode == 0, done.stderr
    eager, fused = map(json.loads, done.stdout.splitlines())
    assert fused["loss"] == pytest.approx(eager["loss"], rel=1e-3)
    assert fused["hits"] >= 0.95
    assert 0 < fused["moved"] <= 1.1 * eager["moved"]


# --- imitated parts of torch: a launcher of Triton kernels, and another torch's Inductor


class FakeAutotuner:
    """Launches as Inductor's CachingAutotuner does."""

    def __init__(
        self, signature: dict[str, str], mutated: tuple[str, ...] = (), kind: str = "POINTWISE"
    ) -> None:
        self.triton_meta = {"signature": signature}
        # Without the list of what is changed in place, which Inductor takes out of it.
        self.inductor_meta = {"kernel_name": "k"} if kind == "POINTWISE" else {}
        self.mutated_arg_names = list(mutated)
        self.heuristic_type = SimpleNamespace(name=kind)
        self.fn = SimpleNamespace(__name__="of_the_program")

    def run(self, *args: Any, stream: int) -> Any:
        return args, stream


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


POINTWISE = {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"}


def test_launches_of_triton_kernels_are_operators(
    on: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    del on
    fake(monkeypatch, LAUNCHER, CachingAutotuner=FakeAutotuner)
    original = FakeAutotuner.run
    ext = cpu.extension()
    hook = compiled.CompiledKernels(ext)
    tuner, a, b = FakeAutotuner(POINTWISE), torch.ones(4), torch.ones(4)
    results: list[Any] = []
    (op,) = recorded.ops_of(lambda: results.append(tuner.run(a, b, 4, stream=7)))
    assert results == [((a, b, 4), 7)]
    hook.remove()
    assert (len(op.reads), len(op.writes)) == (2, 1)
    assert FakeAutotuner.run is original


def test_a_launch_that_raises_ends_its_operator(
    on: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    del on
    fake(monkeypatch, LAUNCHER, CachingAutotuner=FakeAutotuner)
    hook = compiled.CompiledKernels(cpu.extension())
    tuner, a = FakeAutotuner(POINTWISE), torch.zeros(1 << 20)
    with pytest.raises(TypeError):
        tuner.run(a, a, 4)  # type: ignore[call-arg]
    hook.remove()
    assert not umem.where(a).in_use


def test_what_a_triton_kernel_writes_is_known_by_its_signature() -> None:
    a = torch.ones(1)
    signature = {"in_ptr0": "*fp32", "n": "i32", "in_ptr1": "*fp32", "out_ptr0": "*fp32"}
    tuner = FakeAutotuner(signature, ("in_ptr1",))
    assert compiled.triton_uses(tuner, (a, 1, a, a)) == ("k", "r-ww")


def test_arguments_that_do_not_match_the_signature_count_as_written() -> None:
    a = torch.ones(1)
    assert compiled.triton_uses(FakeAutotuner(POINTWISE), (1, a, a)) == ("k", "-ww")


@pytest.mark.parametrize("kind", ["TEMPLATE", "USER_AUTOTUNE", "FIXED"])
def test_templates_and_kernels_of_the_program_may_write_all_arguments(kind: str) -> None:
    """Their writes are not declared: y_ptr here, LSE in flex attention's template."""
    a = torch.ones(1)
    tuner = FakeAutotuner({"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"}, kind=kind)
    assert compiled.triton_uses(tuner, (a, a, 4)) == ("of_the_program", "ww-")


def test_this_inductor_has_what_the_hook_of_triton_kernels_reads() -> None:
    """Its launcher needs no Triton to be imported."""
    hints = pytest.importorskip("torch._inductor.runtime.hints")
    source = Path(torch.__file__).parent / "_inductor" / "runtime" / "triton_heuristics.py"
    text = source.read_text()
    assert set(compiled._GENERATED) <= set(hints.HeuristicType.__members__)
    for name in ("triton_meta", "inductor_meta", "mutated_arg_names", "heuristic_type", "fn"):
        assert f"self.{name} = " in text or f"self.{name}: " in text, name


def test_arguments_of_a_cpp_kernel_are_known_by_their_types() -> None:
    assert compiled.cpp_uses(["const float*", "float*", "const int64_t", "bool*"]) == "rw-w"


def test_another_inductor_is_left_as_it_is_and_that_is_said_once(
    on: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    del on
    fake(monkeypatch, LOADER)
    tuner = SimpleNamespace(run=lambda tuner, *args: args)
    fake(monkeypatch, LAUNCHER, CachingAutotuner=tuner)
    with caplog.at_level(logging.WARNING, logger="umem"):
        hook = compiled.CompiledKernels(cpu.extension())
        assert [tuner.run(tuner, 1) for _ in range(2)] == [(1,), (1,)]  # no signature to read
        hook.remove()
    assert ["AsyncCompile.cpp_pybinding" in r.message for r in caplog.records].count(True) == 1
    assert ["Triton kernels" in r.message for r in caplog.records].count(True) == 1


@pytest.mark.nightly
def test_the_example_ends_the_same_and_follows_its_plan(cache: str) -> None:
    words = [sys.executable, "examples/compiled_gpt.py"]
    options = {"UMEM": "1", "UMEM_SUMMARY": "1", "UMEM_DEVICE": "soft", "UMEM_BUDGET": "24MiB"}
    ends = []
    for more in ({}, options):
        environment = child_environment() | {"TORCHINDUCTOR_CACHE_DIR": cache} | more
        done = subprocess.run(
            words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
            timeout=SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        ends.append(done.stdout.splitlines()[-1])
    assert ends[0] == ends[1]
    found = re.search(r"plan hits ([\d.]+) %", done.stderr)
    assert found is not None, done.stderr
    assert float(found[1]) >= 95


COMPILED_STEPS = """
umem.disable()
from torch._dynamo.utils import counters

def trained(prepare):
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(1)
    net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    paged = prepare(optimizer)

    def backward():
        optimizer.zero_grad()
        net(torch.ones(64, 1024)).square().mean().backward()

    def train():
        backward()
        optimizer.step()

    step = torch.compile(train if WHOLE else optimizer.step, backend="eager")
    for _ in range(6):
        if not WHOLE:
            backward()
        step()
    weights = [p.detach().numpy().tobytes() for p in net.parameters()]
    return weights, counters["frames"]["total"]

expected, most = trained(lambda _: None)
torch._logging.set_logs(dynamo=10)  # says what is inlined
with umem.enable(budget="16MiB", device="soft"):
    weights, frames = trained(umem.page_optimizer if PAGED else lambda _: None)
    stats = umem.stats()
assert weights == expected
assert 0 < frames <= most, (frames, most)
assert stats.plan_hits > 0.95 * (stats.plan_hits + stats.plan_misses) > 0, stats
"""


@pytest.mark.parametrize(
    ("paged", "whole"),
    [
        pytest.param(False, False, marks=pytest.mark.nightly),
        (True, False),
        pytest.param(False, True, marks=pytest.mark.nightly),
    ],
)
def test_a_compiled_optimizer_step_compiles_nothing_of_umem(paged: bool, whole: bool) -> None:
    head = f"PAGED, WHOLE = {paged}, {whole}"
    status, _, err = program.run(head + COMPILED_STEPS, SECONDS)
    assert status == 0, err[-5000:]
    assert "; falling back to lru: " not in err  # as after a policy that raised
    inlined = [line for line in err.splitlines() if "INLINING" in line]
    assert inlined
    # The hook of module calls returns at once, and that of steps calls what is not compiled.
    package = str(Path(umem.__file__).parent)
    own = [line for line in inlined if package in line]
    calls = ("<code object _outermost ", "<code object _step ")
    assert not [line for line in own if not any(call in line for call in calls)]
