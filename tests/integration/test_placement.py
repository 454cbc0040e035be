"""Reports on tensors, by names and scopes, and the example of docs/hints.md."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from support import program  # noqa: E402
from support.filled import MIB, Net, full  # noqa: E402

import umem  # noqa: E402
from umem.errors import ConfigError  # noqa: E402


@pytest.mark.usefixtures("on")
def test_scopes_name_blocks_on_their_own_thread() -> None:
    with umem.scope("model"):
        a = full(4)
        with umem.scope("encoder"):
            b, small = full(4), torch.ones(10)
        c = full(4)
    d = full(4)

    @umem.scope("helper")
    def make() -> torch.Tensor:
        return full(4)

    e = make()
    assert [umem.where(t).scope for t in (a, b, small, c, d, e)] == [
        "model", "model/encoder", "model/encoder", "model", "", "helper",
    ]  # fmt: skip
    text = str(umem.tensors())
    assert "model/encoder" in text
    assert "helper" in text
    address = b.data_ptr()
    del b
    again = full(4)
    assert again.data_ptr() == address
    assert umem.where(again).scope == ""
    with pytest.raises(RuntimeError), umem.scope("broken"):
        raise RuntimeError
    assert umem.where(full(4)).scope == ""
    names: tuple[Any, ...] = ("", "a/b", 3)
    for name in names:
        with pytest.raises(ConfigError, match=r"umem\.scope"), umem.scope(name):
            pass


@pytest.mark.usefixtures("on")
def test_a_wrapper_is_what_it_holds() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = full(4), full(4, 2.0)
    assert umem.evict(TwoTensor(a, b))
    assert [umem.where(t).evicted_bytes for t in (a, b)] == [4 * MIB] * 2


@pytest.mark.usefixtures("on")
def test_the_report_adds_up() -> None:
    net, held = Net(), [full(4) for _ in range(6)]
    rows = umem.tensors()
    stats = umem.stats()
    assert sum(row.bytes for row in rows) <= stats.live_bytes
    for row in rows:
        assert row.bytes == (
            row.resident_bytes + row.evicted_bytes + row.discarded_bytes + row.unknown_bytes
        )
    addresses = {row.address for row in rows}
    assert {t.data_ptr() for t in [*held, *net.parameters()]} <= addresses
    with umem.pin(held[-1]):
        text = str(umem.tensors({"last": held[-1], "foreign": torch.empty(0)}))
    assert "4 MiB pinned" in text
    assert "not managed" in text
    assert text.splitlines()[-1].split()[:2] == ["total", "2"]


@pytest.mark.usefixtures("on")
def test_figures_of_a_device_are_those_of_the_device_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)  # of another kind
    block = torch.ones(1 << 20)
    assert umem.stats(0).live_bytes == umem.stats("cpu").live_bytes == umem.stats().live_bytes > 0
    assert umem.stats(torch.device("cpu:0")).allocs == umem.stats().allocs
    wrongs: list[Any] = [True, -1, 99, 1 << 40, 1.5, object(), "", "bogus", "meta", "cuda:0"]
    for wrong in wrongs:
        with pytest.raises(umem.ConfigError):
            umem.stats(wrong)
    del block


def test_scopes_of_a_server_for_each_request_have_a_name_in_common_at_last() -> None:
    code = """
first = None
for i in range(10_000):
    with umem.scope(f"request-{i}"):
        last = torch.empty(2)
        first = last if first is None else first
with umem.scope("request-0"):
    known = torch.empty(2)
print(*(umem.where(tensor).scope for tensor in (first, last, known)))
"""
    status, out, err = program.run(code)
    assert status == 0, err
    assert out.split() == ["request-0", "other", "request-0"]
