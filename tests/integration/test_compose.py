"""Other libraries give the same bits with umem: `distributed/compositions.py`.

`bench/compose.py` measures the same programs. System calls on evicted memory are in
native/test_wrapped_calls.py, workers that read evicted rows in test_dataloader.py and
test_persistent_workers.py, and workers that pin in gpu/test_process.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
distributed = pytest.importorskip("torch.distributed.checkpoint")

from distributed import model, trial  # noqa: E402
from distributed.compositions import COMPOSITIONS, as_int8  # noqa: E402

import umem  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
PLANNED = 3  # steps follow a plan from this iteration
LEAST = 8 * MIB  # a budget
# Others, and test_dataloader.py, have what is special about them too.
SLOW = ("accumulate4", "bf16", "bf16_scaler_clip", "loader_spawn", "clip", "scaler_skips")
# Few tokens: a CPU without instructions for bfloat16 takes a hundred times as long as with float32.
BFLOAT16 = ("bf16", "bf16_scaler_clip", "together", "scaler_skips")
# The peak of live bytes in a step.
PEAK_MIB = {
    "plain": 121, "accumulate4": 131, "bf16": 121, "bf16_scaler_clip": 141, "clip": 121,
    "clip_foreach": 141, "together": 169, "scaler_skips": 169, "checkpoint": 121,
    "reentrant_checkpoint": 121, "save_on_cpu": 121, "in_backward": 109, "averaged": 149,
    "functional": 81, "per_sample": 62, "loader_fork": 112, "loader_spawn": 80, "lora": 45,
    "peft": 45, "bitsandbytes": 91, "torchao8": 124, "torchao4": 117, "int8_rows": 65,
    "torchao_rows": 57,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # other libraries'
@pytest.mark.parametrize(
    "name",
    [pytest.param(it, marks=pytest.mark.nightly) if it in SLOW else it for it in COMPOSITIONS],
)
def test_bits_are_equal_at_half_and_at_a_quarter(name: str, nightly: bool) -> None:
    composition = COMPOSITIONS[name]
    if missing := composition.trial.missing:
        pytest.skip(f"CI does not install {', '.join(missing)}")
    length = 24 if name in BFLOAT16 else model.LENGTH
    course = trial.Course(steps=5, batch=1, length=length, says_steps=composition.says_steps)
    plain = trial.run(name, "plain", course=course)
    assert not plain.error
    for share in (2, 4) if nightly else (4,):
        budget = max(PEAK_MIB[name] * MIB // share, LEAST)
        found = trial.run(name, f"1/{share}", bytes_of_budget=budget, course=course)
        assert not found.error
        assert found.bits == plain.bits
        # Otherwise the share differs. Ops on lists need less once not all of a list fits.
        assert found.peak_live_bytes >= 0.8 * PEAK_MIB[name] * MIB
        assert found.peak_resident_bytes <= budget
        if composition.steady:
            hits = found.hit_share_from(PLANNED)
            assert hits is not None
            assert hits >= 0.95


def test_the_page_has_the_figures_of_its_report() -> None:
    page = (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\.\./bench/results/(compose_\S+\.md)", page))
    assert len(named) == 1
    report = (ROOT / "bench" / "results" / named.pop()).read_text(encoding="utf-8")
    table = re.search(r"^\| program \|.*?(?=\n\n)", report, re.MULTILINE | re.DOTALL)
    assert table is not None
    assert table[0] in page
    rows = [line.split(" | ")[0][2:] for line in table[0].splitlines()[2:]]
    assert rows == [composition.title for composition in COMPOSITIONS.values()]


@pytest.mark.nightly
def test_the_bench_prints_a_row_for_its_program() -> None:
    command = [sys.executable, str(ROOT / "bench" / "compose.py"), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    row = f"| {COMPOSITIONS['int8_rows'].title} | "
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(row))
    assert line.endswith(" | equal |")


# --- files ---------------------------------------------------------------------------------------


def state() -> dict[str, torch.Tensor]:
    """24 MiB: several types, with an offset, and not contiguous."""
    generator = torch.Generator().manual_seed(5)
    floats = torch.empty(8 * MIB // 4).normal_(generator=generator)
    made = torch.empty(1024, 2048).normal_(generator=generator)
    return {
        "float": floats,
        "view": floats[5:-3],
        "transposed": made.t(),
        "half": made.bfloat16(),
        "int8": torch.randint(-128, 127, (4 * MIB,), dtype=torch.int8, generator=generator),
        "scalar": torch.tensor(3),
    }


def on_the_host(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, evicted where umem is on."""
    if umem.is_enabled():
        for tensor in tensors.values():
            umem.evict(tensor)
    return tensors


def torch_save(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    torch.save(tensors, folder / "state.pt")


def distributed_checkpoint(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    distributed.save(tensors, checkpoint_id=folder, no_dist=True)


def safetensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    owned = {name: t.contiguous() for name, t in tensors.items() if name != "view"}
    library.save_file(owned, folder / "state.safetensors")
    (folder / "bytes").write_bytes(library.save(owned))


def hdf5(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    library = pytest.importorskip("h5py")
    with library.File(folder / "state.h5", "w") as file:
        for name, tensor in tensors.items():
            if tensor.dtype != torch.bfloat16:  # numpy has none
                file[name] = tensor.numpy()


alone = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Files = Callable[[dict[str, torch.Tensor], Path], None]


@alone
@pytest.mark.parametrize("write", [torch_save, distributed_checkpoint, safetensors, hdf5])
def test_files_of_evicted_tensors_have_the_same_bytes(tmp_path: Path, write: Files) -> None:
    folders = [tmp_path / name for name in ("plain", "evicted")]
    for folder in folders:
        folder.mkdir()
    write(state(), folders[0])
    with umem.enable(budget="16MiB", device="soft"):
        write(on_the_host(state()), folders[1])
        assert umem.stats().peak_resident_bytes <= 16 * MIB
    plain, found = (
        {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".metadata"}
        for folder in folders
    )  # that one names the folder and the time
    assert sum(map(len, plain.values())) > 14 * MIB
    assert found == plain


def from_distributed_checkpoint(into: dict[str, torch.Tensor], folder: Path) -> None:
    distributed.load(into, checkpoint_id=folder, no_dist=True)


def from_hdf5(into: dict[str, torch.Tensor], folder: Path) -> None:
    library = pytest.importorskip("h5py")
    with library.File(folder / "state.h5") as file:
        for name, tensor in into.items():
            file[name].read_direct(tensor.numpy())


@alone
@pytest.mark.parametrize(
    ("write", "read"),
    [(distributed_checkpoint, from_distributed_checkpoint), (hdf5, from_hdf5)],
)
def test_files_are_read_into_evicted_tensors(tmp_path: Path, write: Files, read: Files) -> None:
    plain = {name: state()[name] for name in ("float", "int8")}
    write(plain, tmp_path)
    with umem.enable(budget="8MiB", device="soft"):
        into = on_the_host({name: torch.zeros_like(tensor) for name, tensor in plain.items()})
        read(into, tmp_path)
        on_the_host(into)
        for name, tensor in plain.items():
            assert torch.equal(into[name], tensor), name
        assert umem.stats().peak_resident_bytes <= 8 * MIB


# --- 8 bits --------------------------------------------------------------------------------------


def weights() -> list[torch.Tensor]:
    """24 MiB; as in a Transformer, some rows are far larger than most."""
    generator = torch.Generator().manual_seed(7)
    sizes = torch.logspace(0, 2, 1024).unsqueeze(1)
    return [torch.empty(1024, 1024).normal_(generator=generator) * sizes for _ in range(6)]


def own_errors(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    row, all_ = (as_int8(weight, rows=rows) for rows in (True, False))
    on_the_host({"row": row[0], "all": all_[0]})
    return tuple((q * scale - weight).abs().mean(1) for q, scale in (row, all_))


def torchao_errors(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    quantization = pytest.importorskip("torchao.quantization")
    found = []
    for kind in (quantization.PerRow, quantization.PerTensor):
        layer = torch.nn.Linear(1024, 1024, bias=False)
        layer.weight = torch.nn.Parameter(weight)
        quantization.quantize_(layer, quantization.Int8WeightOnlyConfig(granularity=kind()))
        on_the_host({"layer": layer.weight.qdata})
        found.append((layer.weight.dequantize() - weight).abs().mean(1))
    return tuple(found)


@pytest.mark.parametrize("errors_of", [own_errors, torchao_errors])
def test_a_scale_for_each_row_errs_less_than_one_for_all(
    errors_of: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """With evicted weights as with plain ones, and by the same bits."""
    plain = [errors_of(weight) for weight in weights()]
    with umem.enable(budget="20MiB", device="soft"):
        found = [errors_of(weight) for weight in weights()]
        for (row, all_), (plain_row, plain_all) in zip(found, plain, strict=True):
            assert torch.equal(row, plain_row)
            assert torch.equal(all_, plain_all)
            assert row.mean() < 0.5 * all_.mean()
            assert (row[:512] < all_[:512]).all()  # one scale for all loses the small rows


def products(steps: int) -> list[umem.Stats]:
    """Figures before the first step and after each, of 24 products of int8 weights and floats."""
    generator = torch.Generator().manual_seed(9)
    stored = [
        torch.randint(-127, 127, (2048, 1024), dtype=torch.int8, generator=generator)
        for _ in range(24)
    ]  # 48 MiB
    scale, x = torch.rand(2048, 1, generator=generator), torch.ones(32, 1024)
    found = [umem.stats()]
    for _ in range(steps):
        for weight in stored:
            torch.nn.functional.linear(x, weight * scale)
        umem.step()
        found.append(umem.stats())
    return found


def test_what_an_operator_converts_its_input_to_stays_until_its_end() -> None:
    """`int8 * float` makes a copy of floats with another operator, and reads it afterwards."""
    with umem.enable(budget="32MiB", device="soft"):
        *_, before, after = products(6)  # the first three are recorded, and planned
    # With the copy evicted it was 242 MiB and 108 faults, and the plan was given up.
    assert after.plan_hits > before.plan_hits
    assert after.plan_misses == before.plan_misses
    assert after.faults - before.faults <= 8
    assert after.bytes_in - before.bytes_in <= 1.5 * 48 * MIB
