"""Kernels of a program's own: `umem.uses`, and operators of torch.library."""

from __future__ import annotations

import ctypes
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support import program  # noqa: E402
from support.filled import MIB, full  # noqa: E402

import umem  # noqa: E402
from umem.base.native import core  # noqa: E402
from umem.errors import ConfigError  # noqa: E402

BUDGET = "32MiB"


def recorded(path: Path, name: str) -> list[dict[str, Any]]:
    """The operators of this name in a trace."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    return [event for event in events if event.get("name") == name]


def double(source: torch.Tensor, target: torch.Tensor) -> None:
    """A kernel that umem cannot see: it adds the bytes of 32-bit numbers at two addresses."""
    n = source.numel()
    values = (ctypes.c_float * n).from_address(source.data_ptr())
    (ctypes.c_float * n).from_address(target.data_ptr())[:] = [2 * value for value in values]


@pytest.mark.usefixtures("on")
def test_what_cannot_be_announced_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls one layout new
        made = [torch.eye(4).to_sparse(), torch.eye(4).to_sparse_csr()]
    for sparse in made:
        with pytest.raises(ConfigError, match="no storage of its own"), umem.uses(sparse):
            pass
    for name in ("", "\ud800", "a\n"):
        with pytest.raises(ConfigError, match="a name that can be printed"), umem.uses(name=name):
            pass


@pytest.mark.usefixtures("on")
def test_tensors_are_brought_in_and_stay_while_the_block_runs() -> None:
    a, b = full(4), full(4)
    umem.evict([a, b])
    with umem.uses(a, writes=b):
        assert [umem.where(t).resident_bytes for t in (a, b)] == [4 * MIB] * 2
        assert [umem.where(t).in_use for t in (a, b)] == [True] * 2
        others = [full(4) for _ in range(10)]  # more than fits
        assert [umem.where(t).resident_bytes for t in (a, b)] == [4 * MIB] * 2
    assert not umem.where(a).in_use
    del others


def test_the_block_is_one_operator_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with umem.enable(budget=BUDGET, device="soft", policy="lru", trace=path):
        a, b, c = full(2), full(2), full(2)
        with umem.uses([a, {"more": b}], writes=[c], name="mine"):
            double(a, c)
        torch.relu(a)
    assert c[0].item() == 2 * a[0].item()
    (op,) = recorded(path, "mine")
    (relu,) = recorded(path, "aten::relu")
    assert (len(op["r"]), len(op["w"])) == (3, 1)
    assert relu["r"][0] in op["r"]
    assert op["w"][0] not in relu["r"]
    del a, b, c


@pytest.mark.parametrize("observer", ["native", "python"])
def test_a_step_of_such_kernels_is_planned(observer: str) -> None:
    umem.enable(budget="16MiB", device="soft", observer=observer)
    weights = [full(4, float(i)) for i in range(8)]
    out = full(4)
    for step in range(6):
        if step == 3:
            before = umem.stats()
        for weight in weights:
            with umem.uses(weight, writes=out, name="mine"):
                out.data_ptr()
        umem.step()
    now = umem.stats()
    assert now.plan_misses == before.plan_misses
    assert now.plan_hits - before.plan_hits >= 3 * len(weights)
    assert now.faults == before.faults
    assert [weight[0].item() for weight in weights] == [float(i) for i in range(8)]


@pytest.mark.usefixtures("on")
def test_what_is_no_tensor_is_refused() -> None:
    a = full(2)
    for bad in (3, "x", [a, None], 1.5):
        with pytest.raises(ConfigError, match=r"umem\.uses.*allowed: a tensor"), umem.uses(bad):
            pass
        with pytest.raises(ConfigError, match=r"umem\.uses"), umem.uses(a, writes=bad):
            pass
    with pytest.raises(ConfigError, match=r"umem\.uses\(name=''\)"), umem.uses(a, name=""):
        pass
    assert not umem.where(a).in_use


def test_without_umem_it_does_nothing() -> None:
    a = torch.ones(4)
    with umem.uses(a):
        pass
    with pytest.raises(ConfigError, match=r"umem\.uses"), umem.uses(3):
        pass


@pytest.mark.usefixtures("on")
def test_an_error_inside_ends_it() -> None:
    a = full(2)
    with pytest.raises(ZeroDivisionError), umem.uses(a):
        raise ZeroDivisionError
    assert not umem.where(a).in_use


@pytest.mark.usefixtures("on")
def test_blocks_may_end_out_of_order() -> None:
    a, b = full(2), full(2)
    first, second = umem.uses(a), umem.uses(b)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert (umem.where(a).in_use, umem.where(b).in_use) == (False, True)
    torch.relu(a)
    second.__exit__(None, None, None)
    torch.relu(a)
    assert not umem.where(b).in_use


def test_to_end_it_on_another_thread_is_an_error() -> None:
    status, out, err = program.run(
        """
        a = blocks(1)[0]
        block = umem.uses(a)
        block.__enter__()
        def leave():
            try:
                block.__exit__(None, None, None)
            except RuntimeError as error:
                print(error)
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        print(intact([torch.relu(a)]))
        """
    )
    assert status == 0, err
    assert out.splitlines() == ["an operator has to end on the thread that it began on", "True"]


def test_a_custom_operator_of_torch_is_seen_by_its_schema(tmp_path: Path) -> None:
    @torch.library.custom_op("umem_test::double", mutates_args=("target",))  # type: ignore[untyped-decorator]
    def doubling(source: torch.Tensor, target: torch.Tensor) -> None:
        double(source, target)

    path = tmp_path / "t.jsonl"
    with umem.enable(budget=BUDGET, device="soft", policy="lru", trace=path):
        a, b = full(2), full(2)
        umem.evict([a, b])
        doubling(a, b)
        assert core.faults_by_operator() == []

        # One that was defined while umem is on, for example by a library imported then.
        @torch.library.custom_op("umem_test::later", mutates_args=("target",))  # type: ignore[untyped-decorator]
        def later(source: torch.Tensor, target: torch.Tensor) -> None:
            double(source, target)

        umem.evict([a, b])
        later(a, b)
        assert core.faults_by_operator() == []
    for name in ("double", "later"):
        (op,) = recorded(path, f"umem_test::{name}")
        assert (len(op["r"]), len(op["w"])) == (2, 1)
    assert b[0].item() == 2 * a[0].item()
    enabled = getattr(later._opoverload, "_is_pyobj_dispatcher_enabled", lambda: True)
    assert enabled()  # torch's direct call, since 2.14, is back
    del a, b
