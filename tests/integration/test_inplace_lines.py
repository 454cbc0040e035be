"""Generated programs: the lines that may be in place, written so, change no bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.utils.checkpoint import checkpoint  # noqa: E402

from umem.capture import program  # noqa: E402
from umem.lint import inplace  # noqa: E402
from umem.lint.watcher import Watcher  # noqa: E402

# A line of a generated program: as written, and over its first or second operand.
UNARY = {
    "{}.relu()": "{}.relu_()", "{}.tanh()": "{}.tanh_()", "{}.sigmoid()": "{}.sigmoid_()",
    "{}.neg()": "{}.neg_()", "{}.abs()": "{}.abs_()", "{}.sin()": "{}.sin_()",
    "{} * 2": "{}.mul_(2)", "{} + 1": "{}.add_(1)", "1 - {}": "", "{}.clamp(-1, 1)": "",
    "{}.exp()": "{}.exp_()", "F.leaky_relu({}, 0.1)": "F.leaky_relu({}, 0.1, inplace=True)",
    "F.gelu({})": "", "{} @ w": "", "{}.detach()": "", "{}.t()": "", "{}.view(8, 8)": "",
    "{}[:4].repeat(2, 1)": "", "{}.clone()": "", "checkpoint(part, {}, use_reentrant=False)": "",
    "F.hardtanh({})": "F.hardtanh({}, inplace=True)", "F.softmax({}, 1)": "",
}  # fmt: skip
BINARY = {"{} + {}": "add_", "{} * {}": "mul_", "{} - {}": "sub_", "{} @ {}": ""}

_line = st.one_of(
    st.tuples(st.sampled_from(sorted(UNARY)), st.integers(0, 3), st.just(0)),
    st.tuples(st.sampled_from(sorted(BINARY)), st.integers(0, 3), st.integers(0, 3)),
)


def _program(lines: list[tuple[str, int, int]], over: dict[int, int]) -> Callable[..., Any]:
    """A function of x and w; line i is written over its operand `over[i]`."""
    source = ["def run(x, w):", " v0 = x * 1"]
    for index, (form, *back) in enumerate(lines):
        # Operands are among the latest values, so that some are used once and some again.
        operands = [f"v{max(index - distance, 0)}" for distance in back]
        text = form.format(*operands)
        if index in over and form in UNARY:
            text = UNARY[form].format(operands[0])
        elif index in over:
            first, second = operands if over[index] == 0 else operands[::-1]
            text = f"{first}.{BINARY[form]}({second})"
        source.append(f" v{index + 1} = {text}")
    source.append(f" return v{len(lines)}.square().sum()")
    scope: dict[str, Any] = {"F": F, "checkpoint": checkpoint, "part": lambda v: v.sin().relu()}
    exec(compile("\n".join(source), GENERATED, "exec"), scope)
    run: Callable[..., Any] = scope["run"]
    return run


GENERATED = "/generated.py"
FOUND: list[int] = []


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(st.lists(_line, min_size=1, max_size=9))
def test_every_line_that_may_be_in_place_changes_no_bit(lines: list[tuple[str, int, int]]) -> None:
    def make() -> Any:
        x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
        u = torch.randn(8, 8, requires_grad=True)

        def step() -> None:
            loss = run(x @ u, w)
            if loss.requires_grad:  # it may be detached
                loss.backward()
            w.grad = u.grad = None

        return step

    run = _program(lines, {})
    watcher = Watcher()
    program.trace(make, 2, watcher)
    sites = inplace.find(watcher.watched).sites
    over = {
        int(site.line.rpartition(":")[2]) - 3: site.position
        for site in sites
        if site.line.startswith(GENERATED) and int(site.line.rpartition(":")[2]) >= 3
    }
    over = {i: p for i, p in over.items()
            if i < len(lines) and (UNARY.get(lines[i][0]) or BINARY.get(lines[i][0]))}  # fmt: skip
    FOUND.append(len(over))

    def gradients(program: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(3)
        x, w, u = torch.randn(8, 8), *(torch.randn(8, 8, requires_grad=True) for _ in range(2))
        loss = program(x @ u, w)
        if loss.requires_grad:
            loss.backward()
        return [loss.detach(), w.grad, u.grad]

    before, after = gradients(run), gradients(_program(lines, over))
    for one, other in zip(before, after, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one.view(torch.int32), other.view(torch.int32)), over


def test_the_generated_programs_had_lines_in_place() -> None:
    if not FOUND:
        pytest.skip("the test of generated programs did not run")
    assert sum(FOUND) > len(FOUND) / 4
