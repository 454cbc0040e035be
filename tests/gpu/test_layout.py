"""Static layouts on a GPU: a step that fits makes no driver calls, and computes the same.

Mapped memory of a layout is one piece, which leaves as a whole when something else needs room.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.gpu
Program = Callable[..., tuple[str, str]]

TRAINING = """
import _core_testing
from umem.base.native import core
MOVES = ("cuMemAllocManaged", "cuMemFree", "cuMemPrefetchAsync", "cuMemPrefetchBatchAsync",
         "cuMemDiscardBatchAsync", "cuMemDiscardAndPrefetchBatchAsync", "cuMemCreate", "cuMemMap",
         "cuMemUnmap", "cuMemSetAccess", "cuMemRelease")
class Scale(torch.nn.Module):  # of a linear layer's blocks, and computed in no time
    def __init__(self, width):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(width, width, device="cuda"))
    def forward(self, x):
        return x * self.weight
def training(count=4, width=1024):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(Scale(width) for _ in range(count)))
    for i, weight in enumerate(net.parameters()):  # a fill: the software driver computes those
        torch.nn.init.constant_(weight, (i + 1) / 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, foreach=False)
    x = torch.ones(width, width, device="cuda")
    def step():
        optimizer.zero_grad()
        net(x).relu().square().mean().backward()
        optimizer.step()
    return net, step
"""


@pytest.mark.parametrize("backing", ["managed", "mapped"])
def test_a_step_that_fits_makes_no_driver_call(program: Program, backing: str) -> None:
    out, _ = program(
        TRAINING
        + f"""
enable(budget="256MiB", policy="auto", layout="auto", backing="{backing}")
"""
        + """
net, step = training()
for _ in range(6):
    step()
torch.cuda.synchronize()
_core_testing.instrument()
before = sum(_core_testing.calls(name) for name in MOVES)
for _ in range(3):
    step()
torch.cuda.synchronize()
status = core.layout_status()
assert status["followed"] and status["misses"] == 0 and status["hits"] >= 9 * 4, status
assert sum(_core_testing.calls(name) for name in MOVES) == before
assert umem.stats().hook_errors == 0
print("fine")
"""
    )
    assert out == "fine\n"


def test_short_memory_computes_the_same(program: Program) -> None:
    out, _ = program(
        TRAINING
        + """
import hashlib
if soft:
    load.compute()
def run(layout):
    with umem.enable(budget="28MiB", policy="auto", layout=layout, device="cuda"):
        before = core.layout_status()["hits"]  # of a layout that blocks of another run lie in
        net, step = training()
        for _ in range(8):
            step()
        torch.cuda.synchronize()
        bytes_ = b"".join(p.detach().cpu().numpy().tobytes() for p in net.parameters())
        return hashlib.sha256(bytes_).hexdigest(), core.layout_status()["hits"] - before
(without, none), (with_layout, hits) = run("off"), run("on")
assert with_layout == without
assert hits > 0 and none == 0, (hits, none)
print("fine")
"""
    )
    assert out == "fine\n"


JOINED = (
    TRAINING
    + """
import hashlib, time
load.compute()
def digest(net):
    bytes_ = b"".join(p.detach().cpu().numpy().tobytes() for p in net.parameters())
    return hashlib.sha256(bytes_).hexdigest()
def on_device():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) // MIB
def plain():
    umem.disable()  # what `act` may have enabled
    with umem.enable(budget="256MiB", policy="none", device="cuda", backing="mapped"):
        net, step = training()
        for _ in range(12):
            step()
        return digest(net)
def joined(act, **options):
    \"\"\"Train with a layout, act with gradients of the last step in it, and train on.\"\"\"
    with umem.enable(budget="256MiB", policy="auto", device="cuda", backing="mapped", **options):
        net, step = training()
        for _ in range(6):
            step()
        torch.cuda.synchronize()
        assert core.layout_status()["followed"], core.layout_status()
        act(net)
        for _ in range(6):
            step()
        assert umem.stats().hook_errors == 0 and soft.races() == [], soft.races()
        return digest(net)
"""
)


def _joined(program: Program, act: str) -> str:
    """Run `act(net)`; its output, after the weights were found equal to plain ones."""
    out, _ = program(
        JOINED + act + "\nassert joined(act) == plain()\nprint('equal')\n",
        SOFTCUDA_BYTES=str(512 << 20),
    )
    *printed, last = out.splitlines()
    assert last == "equal"
    return "\n".join(printed)


@pytest.mark.usefixtures("softcuda")
def test_a_layout_leaves_when_others_need_its_memory(program: Program) -> None:
    out = _joined(
        program,
        """
def act(net):
    others = blocks(120)  # 240 MiB
    print(on_device() <= 256, intact(others), core.layout_status()["entries"])
""",
    )
    assert out.split()[:2] == ["True", "True"]


@pytest.mark.usefixtures("softcuda")
def test_a_lower_budget_takes_the_layout_apart(program: Program) -> None:
    out = _joined(
        program,
        """
def act(net):
    gradients = [p.grad.clone() for p in net.parameters()]
    umem.set_budget("24MiB")
    for _ in range(500):  # evictions end later
        if on_device() > 24:
            time.sleep(0.01)
    print(on_device() <= 24, umem.stats().evictions > 0)
    print(all(torch.equal(p.grad.cpu(), g.cpu()) for p, g in zip(net.parameters(), gradients)))
""",
    )
    assert out.split() == ["True", "True", "True"]


@pytest.mark.usefixtures("softcuda")
def test_a_layout_sleeps_with_the_rest(program: Program) -> None:
    out = _joined(
        program,
        """
def act(net):
    before = [p.grad.clone() for p in net.parameters()]
    umem.sleep()
    print(on_device() <= 4)
    torch.ones(8, device="cuda").add_(1)
    print(on_device() <= 6)
    umem.wake()
    print(all(torch.equal(p.grad.cpu(), g.cpu()) for p, g in zip(net.parameters(), before)))
""",
    )
    assert out.split() == ["True", "True", "True"]


@pytest.mark.usefixtures("softcuda")
@pytest.mark.parametrize("lost", [False, True])
def test_memory_that_the_driver_did_not_take_back_is_given_back_later(
    program: Program, lost: bool
) -> None:
    """`lost`: the layout leaves without contents."""
    keep = '"discard"' if lost else '"host"'
    out = _joined(
        program,
        f"""
def act(net):
    umem.sleep(tags=["param"])
    before = [p.grad.clone() for p in net.parameters()]
    torch.cuda.synchronize()
    soft.inject("cuMemRelease", 1, 1)
    umem.sleep(tags=["grad"], keep={keep})
    print(on_device() <= 24)
    umem.wake()
    for p, g in zip(net.parameters(), before):
        p.grad.copy_(g)
    umem.sleep()
    print(on_device() <= 4)
    umem.wake()
""",
    )
    assert out == "True\nTrue"


@pytest.mark.usefixtures("softcuda")
@pytest.mark.parametrize("policy", ["none", "lru", "auto"])
def test_a_layout_outlives_its_session(program: Program, policy: str) -> None:
    """Blocks of it live on under another session's policy and lower budget."""
    _joined(
        program,
        f"""
def act(net):
    before = [p.grad.clone() for p in net.parameters()]
    umem.disable()
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before))
    enable(budget="{256 if policy == "none" else 32}MiB", policy="{policy}", backing="mapped")
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before))
""",
    )


@pytest.mark.usefixtures("softcuda")
def test_a_layout_that_cannot_part_stays_where_it_is(program: Program) -> None:
    """Its blocks are 16 MiB, and the host has room for 8."""
    out = _joined(
        program,
        """
def act(net):
    umem.set_budget("256MiB", host_budget="8MiB")
    before = [p.grad.clone() for p in net.parameters()]
    for policy in ("none", "lru"):
        umem.disable()
        enable(budget="256MiB", host_budget="8MiB", policy=policy, backing="mapped")
        errors = umem.stats().hook_errors
        assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), before))
    print(umem.stats().hook_errors - errors, umem.stats().zero_copy_bytes)
    print([umem.where(p.grad).resident_bytes >> 20 for p in net.parameters()])
""",
    )
    assert out.split("\n") == ["0 0", "[4, 4, 4, 4]"]


@pytest.mark.usefixtures("softcuda")
@pytest.mark.parametrize("budget", [12, 16])
def test_operators_above_the_budget_use_what_was_taken_apart(program: Program, budget: int) -> None:
    """The gradients are 16 MiB."""
    out = _joined(
        program,
        f"""
def act(net):
    sums = [p.grad.sum().item() for p in net.parameters()]
    umem.set_budget("{budget}MiB")
    together = torch.cat([p.grad.flatten() for p in net.parameters()])
    print([part.sum().item() for part in together.cpu().split(1 << 20)] == sums)
    del together
    umem.set_budget("256MiB")
""",
    )
    assert out == "True"


@pytest.mark.usefixtures("softcuda")
def test_what_the_program_keeps_comes_back_at_once(program: Program) -> None:
    """Pinned and excluded blocks do not hold the layout's memory, and stay resident."""
    out = _joined(
        program,
        """
def resident(tensors):
    return [umem.where(t).resident_bytes >> 20 for t in tensors]
def act(net):
    first, second, *rest = (p.grad for p in net.parameters())
    umem.pin(first)
    with umem.exclude(second):
        umem.set_budget("32MiB")
        print(resident([first, second]), core.layout_status()["entries"])
    umem.set_budget("256MiB")
    umem.sleep(tags=["param"])
    print(resident([first]))
    umem.wake()
    umem.unpin(first)
""",
    )
    assert out.split("\n")[0].startswith("[4, 4]")
    assert out.split("\n")[1] == "[4]"


@pytest.mark.usefixtures("softcuda")
def test_a_layout_returns_to_addresses_that_were_freed(program: Program) -> None:
    """A late free of the old layout must not unmap the next one."""
    _joined(
        program,
        """
def act(net):
    for budget in ("24MiB", "256MiB") * 2:
        umem.set_budget(budget)
        for _ in range(4):
            for p in net.parameters():
                p.grad = torch.full_like(p, 2.0)
            assert all(bool(p.grad.cpu().eq(2.0).all()) for p in net.parameters())
""",
    )


@pytest.mark.usefixtures("softcuda")
@pytest.mark.parametrize(
    ("call", "nth"), [("cuMemcpyAsync", 2), ("cuMemCreate", 2), ("cuMemUnmap", 1)]
)
def test_a_layout_that_cannot_leave_stays_whole(program: Program, call: str, nth: int) -> None:
    _joined(
        program,
        f"""
def act(net):
    torch.cuda.empty_cache()
    before, placed = soft.calls("{call}"), core.layout_status()["entries"]
    soft.inject("{call}", {nth}, 2)
    try:
        umem.sleep()
    except umem.UmemError as error:
        print(error)
    assert soft.calls("{call}") - before >= {nth}
    assert core.layout_status()["entries"] == placed > 0
    soft.reset()
""",
    )


@pytest.mark.usefixtures("softcuda")
def test_brief_blocks_of_a_step_that_does_not_fit_are_mapped_once(program: Program) -> None:
    """Their memory stays beside what is evicted, and leaves when nothing else can."""
    out, _ = program(
        JOINED
        + """
from umem.session import layouts
layouts._SAVED_US = 1e6  # on the software driver a call costs little, and moves much
def brief(*_):
    for pages in range(1, 8):  # dead blocks of so many sizes do not fit
        torch.zeros(pages << 19, device="cuda")
def fill():
    entries = core.layout_status()["entries"]
    half = torch.zeros(16 << 18, device="cuda")
    more = torch.zeros(1 << 19, device="cuda")  # a parted layout is given up here
    assert entries == core.layout_status()["entries"] > 0
    del half, more
    whole = torch.ones(32 << 18, device="cuda")
    assert bool((whole == 1).all()) and on_device() <= 32
    assert core.layout_status()["entries"] == 0
def trained(layout, act):
    with umem.enable(budget="32MiB", policy="auto", layout=layout, device="cuda", backing="mapped"):
        net, step = training(count=6, width=768)
        for layer in net:
            layer.register_forward_hook(brief)
        for _ in range(6):
            step()
        torch.cuda.synchronize()
        _core_testing.instrument()
        before, moved = _core_testing.calls("cuMemMap"), umem.stats().bytes_out
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        maps, now = _core_testing.calls("cuMemMap") - before, umem.stats()
        assert now.peak_resident_bytes <= 32 * MIB and now.bytes_out > moved > 0
        status = core.layout_status()
        act()
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        assert umem.stats().hook_errors == 0 and soft.races() == [], soft.races()
        return digest(net), maps, status
weights, without, none = trained("off", lambda: None)
same, fewer, status = trained("on", fill)
print(weights == same, none["entries"], status["followed"], status["misses"])
assert 0 < 10 * fewer < 9 * without, (fewer, without)
""",
        SOFTCUDA_BYTES=str(512 << 20),
    )
    assert out == "True 0 True 0\n"


@pytest.mark.usefixtures("softcuda")
def test_a_device_without_room_has_no_layout(program: Program) -> None:
    """Others hold what the budget promised: steps are as without a layout."""
    out, _ = program(
        TRAINING
        + """
install = core.install_layout
def refused(*args):
    print("refused")
    soft.inject("cuMemCreate", 1, 2)
    install(*args)
core.install_layout = refused
enable(budget="256MiB", policy="auto", backing="mapped")
net, step = training()
for _ in range(6):
    step()
torch.cuda.synchronize()
print(core.layout_status()["entries"], umem.stats().hook_errors)
"""
    )
    assert out == "refused\n0 0\n"
