"""A hypothesis state machine over umem's public functions, with a shadow in other memory.

Each tensor has a copy in NumPy's memory, which umem does not serve. Each operation is applied to
both; the machine compares bytes on request and at the end, and umem's reports with the facts after
each operation.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import umem
from umem.errors import OutOfMemoryError, StateError

MIB = 1 << 20
SIZES = [1, 700, 4096, MIB, 2 * MIB, 2 * MIB + 1, 3 * MIB, 5 * MIB, 9 * MIB, 20 * MIB]
BUDGETS = [8, 12, 16, 24, 40]  # MiB
POLICIES = ["lru", "conv_lru", "none", "auto"]
TAGS = ["param", "grad", "optimizer", "activation"]
LIVE = 40 * MIB  # sum over all tensors
MOST = 8  # views and tensors

which = st.integers(0, 1 << 16)  # of the tensors existing then
value = st.integers(0, 255)


def pattern(size: int, byte: int) -> np.ndarray[Any, Any]:
    """Bytes that differ from page to page."""
    pages = (np.arange(-(-size // 4096)) * 7 + byte).astype(np.uint8)
    return np.repeat(pages, 4096)[:size]


@dataclass(eq=False)
class Pair:
    """A tensor or view and its shadow; `owner` for all views of one memory."""

    tensor: torch.Tensor
    shadow: np.ndarray[Any, Any]
    owner: object
    lost: bool = False  # its bytes were discarded


class ApiMachine(RuleBasedStateMachine):
    """Set `device` to "soft" or "cuda" in a subclass."""

    device = "soft"

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[Pair] = []
        self.sleeps: list[umem.Sleep] = []
        self.holds: list[umem.PinHandle] = []

    # -- helpers ------------------------------------------------------------------------------

    def pick(self, index: int) -> Pair:
        return self.pairs[index % len(self.pairs)]

    def others(self, pair: Pair) -> list[Pair]:
        return [one for one in self.pairs if one.owner is pair.owner]

    def enable(self) -> None:
        umem.enable(
            budget=f"{self.budget}MiB",
            policy=self.policy,
            device=self.device,
            host_budget="unlimited",
        )

    def where(self) -> str:
        """As torch names the device."""
        return "cpu" if self.device == "soft" else "cuda"

    def put(self, tensor: torch.Tensor, shadow: np.ndarray[Any, Any]) -> None:
        self.pairs.append(Pair(tensor, shadow, object()))

    def bytes_of(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """Its bytes; on the host where they are, without an operator.

        Not by `numpy()` there: torch resizes no storage that NumPy has seen.
        """
        if self.device == "cuda":
            return tensor.cpu().numpy()
        memory = (ctypes.c_uint8 * tensor.numel()).from_address(tensor.data_ptr())
        return np.ctypeslib.as_array(memory)

    def compare(self, pair: Pair) -> None:
        if pair.lost:
            return
        wrong = np.flatnonzero(self.bytes_of(pair.tensor) != pair.shadow)
        assert wrong.size == 0, f"{wrong.size} bytes differ, the first at {wrong[0]}"

    @staticmethod
    @contextlib.contextmanager
    def thread(act: Callable[[], object]) -> Iterator[None]:
        """Run `act` on a thread concurrently with the block, and raise its exception after both."""
        errors: list[BaseException] = []

        def body() -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        thread = threading.Thread(target=body)
        thread.start()
        try:
            yield
        finally:
            thread.join()
        if errors:
            raise errors[0]

    def in_thread(self, act: Callable[[], object]) -> None:
        with self.thread(act):
            pass

    # -- tensors ------------------------------------------------------------------------------

    @initialize(budget=st.sampled_from(BUDGETS), policy=st.sampled_from(POLICIES))
    def begin(self, budget: int, policy: str) -> None:
        self.budget, self.policy = budget, policy
        self.enable()

    @precondition(lambda self: len(self.pairs) < MOST)
    @rule(size=st.sampled_from(SIZES), byte=value)
    def make(self, size: int, byte: int) -> None:
        if sum(pair.shadow.size for pair in self.pairs) + size > LIVE:
            return
        shadow = pattern(size, byte)
        tensor = torch.empty(size, dtype=torch.uint8, device=self.where())
        tensor.copy_(torch.from_numpy(shadow))
        self.put(tensor, shadow)

    @precondition(lambda self: self.pairs)
    @rule(index=which)
    def drop(self, index: int) -> None:
        self.pairs.remove(self.pick(index))

    @precondition(lambda self: 0 < len(self.pairs) < MOST)
    @rule(index=which, begin=st.integers(0, 100), end=st.integers(0, 100))
    def view(self, index: int, begin: int, end: int) -> None:
        base = self.pick(index)
        first, last = (base.shadow.size * part // 100 for part in sorted((begin, end)))
        tensor, shadow = base.tensor[first:last], base.shadow[first:last]
        self.pairs.append(Pair(tensor, shadow, base.owner, base.lost))

    @precondition(lambda self: 0 < len(self.pairs) < MOST)
    @rule(index=which)
    def clone(self, index: int) -> None:
        pair = self.pick(index)
        if not pair.lost and sum(one.shadow.size for one in self.pairs) < LIVE:
            self.put(pair.tensor.clone(), pair.shadow.copy())

    @precondition(lambda self: self.pairs)
    @rule(index=which, byte=value)
    def fill(self, index: int, byte: int) -> None:
        pair = self.pick(index)
        pair.shadow[...] = pattern(pair.shadow.size, byte)
        pair.tensor.copy_(torch.from_numpy(pair.shadow))
        pair.lost = False

    @precondition(lambda self: self.pairs)
    @rule(one=which, other=which)
    def add(self, one: int, other: int) -> None:
        to, source = self.pick(one), self.pick(other)
        if to.lost or source.lost:
            return
        size = min(to.shadow.size, source.shadow.size)
        to.tensor[:size].add_(source.tensor[:size].clone())
        to.shadow[:size] += source.shadow[:size].copy()

    @precondition(lambda self: self.pairs)
    @rule(index=which)
    def check(self, index: int) -> None:
        self.compare(self.pick(index))

    @precondition(lambda self: self.pairs)
    @rule(index=which, size=st.sampled_from(SIZES))
    def resize(self, index: int, size: int) -> None:
        """A storage of another size: the common bytes are kept."""
        pair = self.pick(index)
        if len(self.others(pair)) > 1 or pair.shadow.size == 0 or pair.lost:
            return
        if sum(one.shadow.size for one in self.pairs) - pair.shadow.size + size > LIVE:
            return
        if pair.tensor.storage_offset() != 0:  # a view whose base was dropped
            return
        both = min(size, pair.shadow.size)
        pair.tensor.resize_(size)
        pair.tensor[both:].zero_()
        pair.shadow = np.concatenate([pair.shadow[:both], np.zeros(size - both, np.uint8)])

    @rule()
    def too_much(self) -> None:
        """A size beyond any host is refused, and nothing changes."""
        try:
            torch.empty(1 << 50, dtype=torch.uint8, device=self.where())
        except (torch.OutOfMemoryError, RuntimeError):
            return
        raise AssertionError("a petabyte was handed out")

    # -- hints --------------------------------------------------------------------------------

    @precondition(lambda self: self.pairs)
    @rule(index=which)
    def prefetch(self, index: int) -> None:
        with contextlib.suppress(OutOfMemoryError):  # with what is pinned, not all of it fits
            umem.prefetch(self.pick(index).tensor)

    @precondition(lambda self: self.pairs)
    @rule(index=which)
    def evict(self, index: int) -> None:
        try:
            umem.evict(self.pick(index).tensor)
        except StateError:
            assert self.holds

    @precondition(lambda self: self.pairs)
    @rule(index=which, kind=st.sampled_from([umem.pin, umem.keep, umem.exclude]))
    def hold(self, index: int, kind: Callable[[object], umem.PinHandle]) -> None:
        with contextlib.suppress(OutOfMemoryError):  # no reserve for ops would be left
            self.holds.append(kind(self.pick(index).tensor))

    @precondition(lambda self: self.holds)
    @rule(index=which)
    def let_go(self, index: int) -> None:
        self.holds.pop(index % len(self.holds)).remove()

    @precondition(lambda self: self.pairs)
    @rule(index=which, advice=st.sampled_from(["read_mostly", "none"]))
    def advise(self, index: int, advice: str) -> None:
        umem.advise(self.pick(index).tensor, advice)

    @precondition(lambda self: self.pairs)
    @rule(index=which, tag=st.sampled_from(TAGS))
    def tag(self, index: int, tag: str) -> None:
        umem.tag(self.pick(index).tensor, tag)

    @precondition(lambda self: self.pairs)
    @rule(index=which, byte=value)
    def discard(self, index: int, byte: int) -> None:
        """The bytes are undefined until they are written, which may be much later."""
        pair = self.pick(index)
        try:
            umem.discard(pair.tensor)
        except umem.UmemError:
            return  # no page of its own
        for one in self.others(pair):
            one.lost = True

    @precondition(lambda self: any(pair.lost for pair in self.pairs))
    @rule(byte=value)
    def write_what_was_lost(self, byte: int) -> None:
        """All that share a memory, so that each byte of each is written."""
        lost = next(pair for pair in self.pairs if pair.lost)
        for pair in self.others(lost):
            pair.tensor.fill_(byte)
            pair.shadow[...] = byte
            pair.lost = False

    # -- the session --------------------------------------------------------------------------

    @rule(tags=st.sampled_from([None, ["param"], ["param", "grad"]]))
    def sleep(self, tags: list[str] | None) -> None:
        self.sleeps.append(umem.sleep(tags))

    @precondition(lambda self: self.sleeps)
    @rule(index=which)
    def wake(self, index: int) -> None:
        with contextlib.suppress(OutOfMemoryError):  # the budget was lowered meanwhile
            self.sleeps.pop(index % len(self.sleeps)).wake()

    @rule(budget=st.sampled_from(BUDGETS))
    def set_budget(self, budget: int) -> None:
        try:
            umem.set_budget(f"{budget}MiB")
        except OutOfMemoryError:
            assert self.holds  # below pins and the reserve for ops
        else:
            self.budget = budget

    @rule()
    def step(self) -> None:
        umem.step()

    @rule(policy=st.sampled_from(POLICIES))
    def off_and_on_again(self, policy: str) -> None:
        """On another thread; existing tensors are unchanged, with umem off too."""
        self.in_thread(umem.disable)
        for pair in self.pairs[:2]:
            self.compare(pair)
        self.holds.clear()
        self.sleeps.clear()
        self.policy = policy
        self.in_thread(self.enable)

    @precondition(lambda self: self.pairs)
    @rule(index=which, byte=value)
    def from_a_thread(self, index: int, byte: int) -> None:
        self.in_thread(lambda: self.fill(index, byte))

    @precondition(lambda self: len({id(pair.owner) for pair in self.pairs}) > 1)
    @rule(index=which, byte=value, act=st.sampled_from(["evict", "prefetch", "sleep", "budget"]))
    def beside_another_thread(self, index: int, byte: int, act: str) -> None:
        """One thread computes while this one moves what it uses."""
        pair = self.pick(index)

        def compute() -> None:
            for turn in range(8):
                pair.tensor.fill_(byte)
                pair.tensor.add_(turn)
                pair.shadow[...] = byte
                pair.shadow += np.uint8(turn)

        with self.thread(compute):
            for _ in range(4):
                # In use by the other thread's op, or no capacity next to the pinned blocks.
                with contextlib.suppress(StateError, OutOfMemoryError):
                    if act == "sleep":
                        umem.sleep().wake()
                    elif act == "budget":
                        umem.set_budget("8MiB")
                        umem.set_budget(f"{self.budget}MiB")
                    else:
                        getattr(umem, act)([one.tensor for one in self.pairs])
        pair.lost = False
        self.compare(pair)

    @precondition(lambda self: self.device == "soft" and self.pairs)
    @rule(index=which, byte=value)
    def fork(self, index: int, byte: int) -> None:
        """A child has its own copy of everything."""
        child = os.fork()
        if child == 0:
            code = 1
            signal.alarm(120)
            try:
                for pair in self.pairs:
                    self.compare(pair)
                self.fill(index, byte)
                self.compare(self.pick(index))
                code = 0
            except BaseException:  # noqa: BLE001 - the parent fails
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0

    # -- what always holds --------------------------------------------------------------------

    @invariant()
    def what_umem_reports_is_so(self) -> None:
        if not umem.is_enabled():
            return
        stats = umem.stats()
        storages = {
            pair.tensor.untyped_storage().data_ptr(): pair.tensor.untyped_storage().nbytes()
            for pair in self.pairs
            if pair.tensor.untyped_storage().nbytes()
        }
        assert stats.live_bytes >= sum(storages.values())
        assert stats.resident_bytes <= self.budget * MIB
        assert stats.budget_bytes == self.budget * MIB or not storages  # a GPU opens at first use
        assert stats.hook_errors == 0
        end = 0
        for address, size in sorted(storages.items()):
            assert address >= end, "two tensors share addresses"
            end = address + size

    def teardown(self) -> None:
        try:
            while self.pairs:
                self.compare(self.pairs.pop())
        finally:
            self.pairs.clear()
            self.holds.clear()
            self.sleeps.clear()
            gc.collect()
            live = umem.stats().live_bytes
            umem.disable()
        assert live == 0, f"{live} bytes are live without a tensor"
