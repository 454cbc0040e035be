"""Figures for loggers, and the callbacks that give them to Lightning's and Transformers'."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support import program  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402

MIB = 1 << 20
LEVELS = {"umem/resident_bytes", "umem/live_bytes", "umem/host_bytes"}
FLOWS = {"umem/in_bytes_per_step", "umem/out_bytes_per_step", "umem/faults_per_step"}


def enable(policy: str = "lru") -> None:
    """Enable umem after the imports: libraries keep tensors created at import."""
    umem.enable(budget="24MiB", device="soft", policy=policy)


def step(tensors: list[Any]) -> None:
    for tensor in tensors:
        tensor.add_(1)
    umem.step()


def test_flows_are_means_over_the_steps_since_the_last_call() -> None:
    enable()
    tensors = [torch.zeros(2 * MIB) for _ in range(8)]  # 64 MiB
    step(tensors)
    scalars = umem.Scalars()
    before = umem.stats()
    for _ in range(4):
        step(tensors)
    after, found = umem.stats(), scalars()
    assert found.keys() == LEVELS | FLOWS  # no plan: no share of hits
    moved = after.bytes_in - before.bytes_in
    assert moved > 4 * 24 * MIB
    assert found["umem/in_bytes_per_step"] == moved / 4
    assert found["umem/out_bytes_per_step"] == (after.bytes_out - before.bytes_out) / 4
    assert found["umem/live_bytes"] == 64 * MIB
    assert scalars().keys() == LEVELS  # no step since
    assert umem.Scalars("m.")().keys() == {name.replace("umem/", "m.") for name in LEVELS}


def test_flows_of_a_new_session_are_counted_from_its_start() -> None:
    enable()
    tensors = [torch.zeros(2 * MIB) for _ in range(8)]
    for _ in range(3):
        step(tensors)
    scalars = umem.Scalars()
    del tensors  # counters go on while umem has blocks
    umem.disable()
    enable()
    tensors = [torch.zeros(2 * MIB) for _ in range(8)]
    for _ in range(2):
        step(tensors)
    stats, found = umem.stats(), scalars()
    assert (stats.steps, found["umem/in_bytes_per_step"]) == (2, stats.bytes_in / 2)


def test_the_share_of_hits_is_that_of_operators_under_a_plan() -> None:
    enable("auto")
    tensors = [torch.zeros(2 * MIB) for _ in range(8)]
    for _ in range(6):
        step(tensors)
    scalars = umem.Scalars()
    for _ in range(4):
        step(tensors)
    assert scalars()["umem/plan_hit_share"] > 0.9
    umem.disable()
    assert umem.Scalars()().keys() == LEVELS


def test_a_gpu_has_no_faults_to_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver does not report them."""
    enable()
    scalars = umem.Scalars()
    umem.step()
    monkeypatch.setattr(core, "current_options", lambda: SimpleNamespace(device="cuda"))
    assert scalars().keys() == LEVELS | FLOWS - {"umem/faults_per_step"}


def stand_in(monkeypatch: pytest.MonkeyPatch, library: str, **names: object) -> None:
    """Put a module in the library's place, if that is not installed."""
    for module in (library, f"umem.monitor.{library}"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    if importlib.util.find_spec(library) is None:
        made = ModuleType(library)
        made.__dict__.update(names)
        monkeypatch.setitem(sys.modules, library, made)


def test_lightnings_loggers_get_figures_when_the_trainer_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, "lightning", Callback=object, Trainer=object)
    module = umem.lightning
    enable()
    callback = module.StatsCallback()
    entries: list[tuple[int, dict[str, float]]] = []
    logger = SimpleNamespace(log_metrics=lambda figures, step: entries.append((step, figures)))
    tensors = [torch.zeros(2 * MIB) for _ in range(8)]
    # The trainer logs at steps 1 and 3, and accumulates two batches in step 1.
    for number, accumulates in ((0, False), (1, True), (1, False), (2, False), (3, False)):
        step(tensors)
        loop = SimpleNamespace(
            _should_accumulate=lambda accumulates=accumulates: accumulates,
            epoch_loop=SimpleNamespace(_batches_that_stepped=number),
        )
        trainer = SimpleNamespace(
            fit_loop=loop,
            _logger_connector=SimpleNamespace(should_update_logs=number % 2 == 1),
            loggers=[logger],
        )
        callback.on_train_batch_end(trainer, None, None, None, 0)
    assert [number for number, _ in entries] == [1, 3]
    assert all(figures.keys() == LEVELS | FLOWS for _, figures in entries)


def test_entries_of_the_trainer_get_figures_before_they_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, "transformers", TrainerCallback=object)
    handler = SimpleNamespace(callbacks=["reports"])
    module = umem.transformers
    enable()
    module.StatsCallback.add_to(SimpleNamespace(callback_handler=handler))
    callback, reports = handler.callbacks
    assert reports == "reports"
    logs: dict[str, Any] = {"loss": 1.0}
    state = SimpleNamespace(log_history=[dict(logs)])
    callback.on_log(None, state, None, logs=logs)
    assert logs.keys() == {"loss"} | LEVELS
    assert state.log_history[-1] == logs
    for other in ({"eval_loss": 1.0}, {"train_runtime": 1.0}, None):
        entry = None if other is None else dict(other)
        callback.on_log(None, state, None, logs=entry)
        assert entry == other


def test_a_lightning_training_logs_them(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    code, out, err = program.run(
        """
import lightning
from lightning.pytorch.loggers import CSVLogger

class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1024, 1024)

    def training_step(self, batch, index):
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

lightning.Trainer(
    max_steps=8, log_every_n_steps=2, accelerator="cpu", enable_progress_bar=False,
    logger=CSVLogger(os.environ["TEST_FOLDER"], flush_logs_every_n_steps=1),
    enable_checkpointing=False, enable_model_summary=False,
    callbacks=[umem.lightning.StatsCallback()],
).fit(Net(), torch.utils.data.DataLoader(torch.randn(512, 1024), batch_size=64))
""",
        timeout=120,
        TEST_FOLDER=str(tmp_path),
    )
    assert code == 0, err
    (log,) = tmp_path.rglob("metrics.csv")
    head, *rows = log.read_text().splitlines()
    names = head.split(",")
    assert set(names) >= LEVELS | FLOWS | {"loss"}, (head, out)
    entries = [dict(zip(names, row.split(","), strict=True)) for row in rows]
    for name in ("loss", *LEVELS, *FLOWS):  # on one axis
        assert [entry["step"] for entry in entries if entry[name]] == ["1", "3", "5", "7"]


def test_a_transformers_training_logs_them(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    code, out, err = program.run(
        """
import json, transformers
config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=64, n_positions=16)
tokens = torch.arange(32 * 16).view(32, 16) % 64
trainer = transformers.Trainer(
    transformers.GPT2LMHeadModel(config),
    transformers.TrainingArguments(
        output_dir=os.environ["TEST_FOLDER"], per_device_train_batch_size=8, max_steps=4,
        logging_steps=2, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
)
umem.transformers.StatsCallback.add_to(trainer)
trainer.train()
print(json.dumps(trainer.state.log_history))
""",
        timeout=120,
        TEST_FOLDER=str(tmp_path),
    )
    assert code == 0, err
    entries = [entry for entry in json.loads(out.splitlines()[-1]) if "loss" in entry]
    assert len(entries) == 2
    assert all(entry.keys() >= LEVELS | FLOWS for entry in entries)
