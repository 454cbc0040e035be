"""Kernels of torch.compile: umem sees each call as an operator, and plans steps made of them."""

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

from support import program  # noqa: E402

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
    environ = {"TORCHINDUCTOR_CACHE_DIR": cache, **environ}
    status, out, err = program.run(code, timeout=SECONDS, **environ)
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
    for threads in ("2", "1"):  # the second process finds the code that the first one made
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
        ext = sys.modules["_torch_ext"]
        with torch.no_grad():
            first = work(x, bias)
            umem.disable()
            before = ext.observer_counters()["ops"]
            second = work(x, bias)
            print(ext.observer_counters()["ops"] - before, torch.equal(first, second))
            umem.enable(budget="8MiB", device="soft", policy="lru")
            before = ext.observer_counters()["ops"]
            work(x, bias)
            print(ext.observer_counters()["ops"] - before)
        """.replace("\n        ", "\n"),
        cache,
    )
    assert out.split() == ["0", "True", "1"]


def test_a_program_that_compiles_nothing_does_not_import_inductor() -> None:
    status, out, err = program.run("print('torch._inductor.async_compile' in sys.modules)")
    assert status == 0, err
    assert out.split() == ["False"]


# Moved bytes and followed ops of the last steps, at half of the peak.
TRAINING = """
from torch import nn
from torch.nn import functional as F

class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
    def forward(self, x):
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(y)))

class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(32) for _ in range(4)))
        self.head = nn.Linear(32, 10)
    def forward(self, images, labels):
        return F.cross_entropy(self.head(self.blocks(self.stem(images)).mean((2, 3))), labels)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        rows, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(rows, length, 3, 4, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(1024, 192)
        self.blocks = nn.ModuleList(Block(192) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, 1024, bias=False)
    def forward(self, x, y):
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), y.flatten())

def make():
    torch.manual_seed(0)
    if os.environ["NET"] == "resnet":
        return ResNet(), (torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,)))
    return GPT(), (torch.randint(0, 1024, (32, 64)), torch.randint(0, 1024, (32, 64)))

def train(compiles, budget, steps):
    torch.compiler.reset()
    umem.enable(budget=budget, device="soft", policy="auto")
    umem.reset_peak_stats()
    net, batch = make()
    run = torch.compile(net) if compiles else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    before = umem.stats()
    for i in range(steps):
        if i == 2:
            before = umem.stats()
        loss = run(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = loss.item()
    now = umem.stats()
    hits, misses = (getattr(now, n) - getattr(before, n) for n in ("plan_hits", "plan_misses"))
    moved = now.bytes_in + now.bytes_out - before.bytes_in - before.bytes_out
    del net, run, optimizer, batch
    torch.compiler.reset()
    gc.collect()
    umem.disable()
    return {"peak": now.peak_live_bytes, "loss": loss, "moved": moved / max(steps - 2, 1),
            "hits": hits / max(hits + misses, 1), "faults": now.faults - before.faults}

umem.disable()
for compiles in (False, True):
    half = train(compiles, "1GiB", 2)["peak"] // 2
    print(json.dumps(train(compiles, half, 8)))
"""


@pytest.mark.parametrize("net", ["resnet", "gpt"])
def test_a_compiled_step_is_planned_and_moves_no_more_than_an_eager_one(
    net: str, cache: str
) -> None:
    out = run("import json\n" + TRAINING, cache, NET=net)
    eager, fused = map(json.loads, out.splitlines())
    assert fused["loss"] == pytest.approx(eager["loss"], rel=1e-3)
    assert fused["hits"] >= 0.95
    assert 0 < fused["moved"] <= 1.1 * eager["moved"]


# --- parts of torch that are stood for: a launcher of Triton kernels, and another torch's Inductor


class FakeAutotuner:
    """Launches as Inductor's CachingAutotuner does."""

    triton_meta: dict[str, Any]
    inductor_meta: dict[str, Any]

    def run(self, *args: Any, stream: int) -> Any:
        return args, stream


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, module)
    return module


def launcher(signature: dict[str, str], mutated: tuple[str, ...] = ()) -> FakeAutotuner:
    tuner = FakeAutotuner()
    tuner.triton_meta = {"signature": signature}
    tuner.inductor_meta = {"kernel_name": "triton_poi_fused_add_0", "mutated_arg_names": mutated}
    return tuner


POINTWISE = {"in_ptr0": "*fp32", "out_ptr0": "*fp32", "xnumel": "i32", "XBLOCK": "constexpr"}


def test_launches_of_triton_kernels_are_operators(
    on: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    del on
    fake(monkeypatch, LAUNCHER, CachingAutotuner=FakeAutotuner)
    original = FakeAutotuner.run
    ext = cpu.extension()
    hook = compiled.CompiledKernels(ext)
    tuner, a, b = launcher(POINTWISE), torch.ones(4), torch.ones(4)
    before = ext.observer_counters()
    assert tuner.run(a, b, 4, stream=7) == ((a, b, 4), 7)
    after = ext.observer_counters()
    hook.remove()
    assert (after["ops"] - before["ops"], after["inputs"] - before["inputs"]) == (1, 2)
    assert FakeAutotuner.run is original


def test_a_launch_that_raises_ends_its_operator(
    on: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    del on
    fake(monkeypatch, LAUNCHER, CachingAutotuner=FakeAutotuner)
    hook = compiled.CompiledKernels(cpu.extension())
    tuner, a = launcher(POINTWISE), torch.zeros(1 << 20)
    with pytest.raises(TypeError):
        tuner.run(a, a, 4)  # type: ignore[call-arg]
    hook.remove()
    assert not umem.where(a).in_use


def test_what_a_triton_kernel_writes_is_known_by_its_signature() -> None:
    a = torch.ones(1)
    inductor = {"kernel_name": "k", "mutated_arg_names": ["in_ptr1"]}
    signature = {"in_ptr0": "*fp32", "n": "i32", "in_ptr1": "*fp32", "out_ptr0": "*fp32"}
    uses = compiled.triton_uses({"signature": signature}, inductor, (a, 1, a, a))
    assert uses == ("k", "r-ww")


def test_arguments_that_do_not_match_the_signature_count_as_written() -> None:
    a = torch.ones(1)
    uses = compiled.triton_uses({"signature": POINTWISE}, {}, (1, a, a))
    assert uses == ("triton_kernel", "-ww")


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
