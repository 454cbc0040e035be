"""The formulas of `umem estimate` against the figures that articles and papers give."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import schemas

from umem import cli
from umem.analysis import formulas
from umem.analysis.formulas import Config, MemoryEstimate, estimate
from umem.base.units import MIB
from umem.errors import ConfigError

GPT2: dict[str, Any] = {"params": 1_500_000_000, "layers": 48, "hidden": 1600, "sequence": 1024}


def test_resnet50() -> None:
    """26 M parameters are 104 MB, which is 99.2 MiB; 16 M activations a sample, 2 GB at 32."""
    config: dict[str, Any] = {
        "params": 26_000_000,
        "activation_elements": 16_000_000,
        "precision": "fp32",
    }
    one, many = (estimate(Config(batch=batch, **config)) for batch in (1, 32))
    assert one.params == 104_000_000
    assert one.params / MIB == pytest.approx(99.2, abs=0.05)
    assert one.activations == 64_000_000
    assert many.activations == 2_048_000_000


def test_gpt2_cannot_train_where_its_weights_fit() -> None:
    found = estimate(Config(**GPT2, batch=32))
    assert found.params == 3_000_000_000
    assert found.total > 32e9


@pytest.mark.parametrize(
    ("precision", "optimizer", "bytes_each"),
    [
        ("mixed", "adam", (2, 2, 12)),  # ZeRO's K = 12
        ("mixed", "sgd", (2, 2, 4)),
        ("fp32", "adam", (4, 4, 8)),
        ("amp", "adamw", (4, 4, 8)),
        ("fp32", "momentum", (4, 4, 4)),
        ("fp32", "sgd", (4, 4, 0)),
        ("bf16", "adamw", (2, 2, 4)),
        ("fp16", "lion", (2, 2, 2)),
        ("mixed", "adam8bit", (2, 2, 6)),
        ("fp32", "adam8bit", (4, 4, 2)),
    ],
)
def test_states(precision: str, optimizer: str, bytes_each: tuple[int, int, int]) -> None:
    found = estimate(Config(params=1000, precision=precision, optimizer=optimizer))
    assert (found.params, found.grads, found.optimizer) == tuple(1000 * n for n in bytes_each)


def test_sixteen_bytes_a_parameter() -> None:
    assert estimate(Config(params=1_500_000_000)).states == 24_000_000_000


def test_transformer_activations() -> None:
    """12 h b s l elements: 30,198,988,800, of 2 bytes; over sqrt(48) with checkpoints: 8.72 GB."""
    whole = estimate(Config(**GPT2, batch=32))
    assert whole.activations == 2 * 30_198_988_800
    kept = estimate(Config(**GPT2, batch=32, checkpointing="sqrt"))
    assert kept.activations / 1e9 == pytest.approx(8.72, abs=0.005)


def test_a_flat_buffer_is_temp() -> None:
    found = estimate(Config(params=1_500_000_000, flat_buffer=True))
    assert found.temp == 6_000_000_000
    assert found.total == 30_000_000_000


@given(
    st.integers(1, 10**12), st.integers(1, 200), st.sampled_from(sorted(formulas.OPTIMIZERS)),
    st.sampled_from(sorted(formulas.PRECISIONS)),
)  # fmt: skip
def test_kinds_add_up_and_grow_with_the_batch(
    params: int, batch: int, optimizer: str, precision: str
) -> None:
    def at(size: int) -> MemoryEstimate:
        return estimate(
            Config(
                params=params,
                batch=size,
                optimizer=optimizer,
                precision=precision,
                layers=3,
                hidden=64,
                sequence=7,
            )
        )

    found = at(batch)
    kinds = (found.params, found.grads, found.optimizer, found.inputs, found.activations,
             found.temp, found.workspace, found.fragmentation)  # fmt: skip
    assert found.total == sum(kinds)
    assert min(kinds) >= 0
    assert at(batch + 1).total > found.total
    assert at(batch + 1).states == found.states


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"params": 1, "optimizer": "adma"}, "no optimizer 'adma' (did you mean adam?); allowed"),
        ({"params": 1, "precision": "fp8"}, "no precision 'fp8'"),
        ({"params": 1, "checkpointing": "some"}, "no checkpointing 'some'"),
        ({**GPT2, "activation_elements": 5}, "allowed: one of them"),
        ({"params": 1, "sequence": 5}, "missing: layers, hidden"),
        ({"params": 1, "checkpointing": "sqrt"}, "missing: layers, hidden, sequence"),
    ],
)
def test_bad_values(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**values)
    assert words in str(error.value)


def _answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert cli.main(["estimate", *arguments, "--json"]) == 0
    return schemas.read("estimate", capsys.readouterr().out)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--params", "1.5e9", "--optimizer", "adam", "--precision", "mixed"]
    assert cli.main(["estimate", *asked]) == 0
    assert "states          24.0 GB" in capsys.readouterr().out
    for number in ("1.5e9", "1.5B", "1500M", "1500000000"):
        answer = _answer(capsys, "--params", number)
        assert answer["states_bytes"] == 24_000_000_000
        assert answer["bytes"]["optimizer"] == 18_000_000_000
        assert answer["total_bytes"] == sum(answer["bytes"].values())
    assert answer["fits"] is answer["max_batch"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to estimate; give --params"),
        (["--params", "0"], "--params 0; allowed: a whole number from 1 to 1e18"),
        (["--params", "-3"], "--params -3"),
        (["--params", "many"], "--params many"),
        (["--params", "1e99"], "allowed: a whole number from 1"),
        (["--params", "0.5"], "--params 0.5"),
        (["--params", "1", "--batch", "nan"], "--batch nan"),
        (["--params", "1", "--optimizer", "sdg"], "did you mean sgd?"),
        (["--params", "1", "--workspace", "1"], "--workspace needs a program"),
        (["x:y", "--workspace", "x"], "--workspace: 'x' is not a number of bytes"),
        (["--params", "1", "--budget", "50%"], "--budget: '50%' is not a number of bytes"),
        (["--params", "1", "--budget", "0"], "--budget 0; allowed: more than 0 bytes"),
        (["--params", "1", "--budget", "65TiB"], "--budget 65TiB; allowed: more than 0 bytes"),
        (["--params", "1", "--max-batch"], "--max-batch needs the available memory"),
        (["--params", "1", "--max-batch", "--budget", "1G"], "--max-batch needs a program"),
        (["--layers", "1"], "nothing to estimate; give --params"),
        (["x:y", "--params", "1"], "--params describes a configuration"),
        (
            ["--params", "1", "--layers", "1e6", "--hidden", "1e7", "--sequence", "1e9"],
            "more than any machine has",
        ),
        (["x:y", "--flat-buffer"], "--flat-buffer describes a configuration"),
        (["x:y", "--script", "z"], "both given; allowed: one"),
        (
            ["--max-batch", "--budget", "1G", "--script", "z"],
            "--max-batch does not work with a script",
        ),
        (["--batch", "4", "--script", "z"], "--batch does not work with a script"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["estimate", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.startswith("umem estimate: ")
    assert err.count("\n") == 1


def test_the_text_says_what_formulas_leave_out(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "24", "--hidden", "2048", "--sequence", "1024"]
    assert cli.main(["estimate", "--params", "1e9", *sizes]) == 0
    plain = capsys.readouterr().out
    assert "what a program keeps: umem estimate FILE.py:function" in plain
    assert "33% more time" not in plain
    assert cli.main(["estimate", "--params", "1e9", *sizes, "--checkpointing", "sqrt"]) == 0
    assert "checkpoints (sqrt): about 33% more time, to recompute" in capsys.readouterr().out
