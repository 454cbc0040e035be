"""The report in a headless Chromium: it draws, without errors, and pointer and keys work."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from support import synthetic

from umem.base.device_profiles import DeviceProfile
from umem.base.units import MIB
from umem.demo import table
from umem.report import make, page
from umem.trace.schema import Op
from umem.trace.step_builder import last_step

PAGE = 2 * MIB
LINK = DeviceProfile("link", PAGE / 10, PAGE / 20, 45.0, 1 << 40, "made up")
CHROMIUM = browser.find()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
SHOWN = "window.umemReport.view"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = last_step(synthetic.training(24, 4 * PAGE, 6 * PAGE, 3))
    contents = [
        make.content(
            step, LINK, step.peak_bytes // 3, title=f"a step under {policy}", policy=policy
        )
        for policy in ("lru", "auto")
    ]
    heads = table.columns([])[0]
    measured = [heads, ["resnet", "1/8", "plain torch", *("1360" for _ in heads[3:])]]
    path = tmp_path_factory.mktemp("report") / "r.html"
    page.write(path, [dataclasses.replace(content, measured=measured) for content in contents])
    return path


@pytest.fixture(scope="module")
def chromium() -> Iterator[browser.Browser]:
    assert CHROMIUM is not None
    with browser.started(CHROMIUM) as started:
        yield started


@pytest.fixture
def tab(chromium: browser.Browser, report: Path) -> Iterator[browser.Tab]:
    tab = chromium.tab()
    tab.size(1280, 900)
    tab.theme("light")
    tab.open(report)
    yield tab
    assert tab.problems == []


def width(tab: browser.Tab) -> float:
    return float(tab.run(f"{SHOWN}.end - {SHOWN}.begin"))


def colours(tab: browser.Tab, chart: str) -> int:
    """Return how many colours a chart has."""
    return int(
        tab.run(
            f"""(() => {{
              const canvas = document.getElementById("{chart}");
              const {{ width, height }} = canvas;
              const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
              const seen = new Set();
              for (let i = 0; i < pixels.length; i += 4)
                seen.add((pixels[i] << 16) | (pixels[i + 1] << 8) | pixels[i + 2]);
              return seen.size;
            }})()"""
        )
    )


def middle(tab: browser.Tab, chart: str) -> tuple[float, float]:
    tab.run(f"document.getElementById('{chart}').scrollIntoView({{block: 'center'}})")
    tab.settle()
    box = tab.run(
        f"(() => {{ const b = document.getElementById('{chart}').getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })()"
    )
    return box[0] + box[2] / 2, box[1] + box[3] / 2


def tip(tab: browser.Tab) -> str:
    tab.settle()
    return str(tab.run("document.getElementById('tip').hidden ? '' : "
                       "document.getElementById('tip').textContent"))  # fmt: skip


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_chart_and_table_is_drawn_in_both_themes(tab: browser.Tab, theme: str) -> None:
    tab.theme(theme)
    tab.settle()
    for chart, least in (("memory", 5), ("lanes", 5), ("map", 4)):
        assert colours(tab, chart) >= least, chart
    for part in ("findings", "waits", "causes", "policies", "top"):
        assert tab.run(f"document.getElementById('{part}').innerText.trim().length") > 20, part
    back = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") == (theme == "light")


def test_tables_fit_into_the_window(tab: browser.Tab) -> None:
    shown = "[...document.querySelectorAll('.wide')]"
    assert "time ratio" in tab.run("document.body.innerText")
    assert tab.run(f"{shown}.length") >= 4
    assert tab.run(f"{shown}.filter(e => e.scrollWidth > e.clientWidth).length") == 0


def test_no_text_is_smaller_than_12_pixels(tab: browser.Tab) -> None:
    smallest = tab.run(
        "Math.min(...[...document.body.querySelectorAll('*')].filter(e => e.innerText)"
        ".map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 12
    assert tab.run("document.getElementById('memory').getContext('2d').font").startswith("12px")


@pytest.mark.parametrize(
    ("chart", "words"), [("memory", "budget"), ("lanes", "compute"), ("map", "on the")]
)
def test_a_pointer_over_a_chart_shows_what_is_there(
    tab: browser.Tab, chart: str, words: str
) -> None:
    x, y = middle(tab, chart)
    if chart == "lanes":
        y = tab.run("document.getElementById('lanes').getBoundingClientRect().top") + 18
    if chart == "map":  # the live tensors in the middle of the step
        y = tab.run("document.getElementById('map').getBoundingClientRect().top") + 8
    tab.mouse("Moved", x, y)
    shown = tip(tab)
    assert words in shown or (chart == "lanes" and "stall" in shown)
    tab.mouse("Moved", 2, 2)
    assert tip(tab) == ""


def test_wheel_drag_and_double_click_zoom_and_move(tab: browser.Tab) -> None:
    x, y = middle(tab, "lanes")
    whole = width(tab)
    tab.mouse("Wheel", x, y, deltaX=0, deltaY=-240, modifiers=2)  # with Ctrl
    tab.settle()
    zoomed = width(tab)
    assert zoomed < 0.7 * whole
    begin = tab.run(f"{SHOWN}.begin")
    tab.mouse("Pressed", x, y, button="left", buttons=1, clickCount=1)
    tab.mouse("Moved", x - 120, y, button="left", buttons=1)
    tab.mouse("Released", x - 120, y, button="left", clickCount=1)
    tab.settle()
    assert tab.run(f"{SHOWN}.begin") > begin
    assert width(tab) == pytest.approx(zoomed)
    for count in (1, 2):
        tab.mouse("Pressed", x, y, button="left", buttons=1, clickCount=count)
        tab.mouse("Released", x, y, button="left", clickCount=count)
    tab.settle()
    assert width(tab) == pytest.approx(zoomed / 2)


def test_the_wheel_alone_scrolls_the_page(tab: browser.Tab) -> None:
    x, y = middle(tab, "memory")
    tab.run("document.activeElement.blur()")
    whole = width(tab)
    tab.mouse("Wheel", x, y, deltaX=0, deltaY=200)
    tab.settle()
    assert width(tab) == whole


def test_keys_zoom_move_and_go_to_stalls(tab: browser.Tab) -> None:
    tab.run("document.getElementById('lanes').focus()")
    whole = width(tab)
    tab.key("+")
    assert width(tab) == pytest.approx(whole / 2)
    begin = tab.run(f"{SHOWN}.begin")
    tab.key("ArrowRight")
    assert tab.run(f"{SHOWN}.begin") > begin
    tab.key("ArrowLeft")
    assert tab.run(f"{SHOWN}.begin") == pytest.approx(begin)
    tab.key("0")
    assert width(tab) == whole
    tab.key("n")
    assert tip(tab).startswith("stall:")
    first = tab.run(f"{SHOWN}.cursor")
    tab.key("n")
    assert tab.run(f"{SHOWN}.cursor") > first
    tab.key("p")
    assert tab.run(f"{SHOWN}.cursor") == pytest.approx(first)
    assert tab.run("document.getElementById('spoken').textContent").startswith("stall:")
    tab.key("Escape")
    assert tab.run(f"{SHOWN}.cursor") is None
    tab.key("ArrowRight", shift=True)
    assert tip(tab)


def test_all_controls_can_be_reached_with_the_tab_key(tab: browser.Tab) -> None:
    reached = set()
    for _ in range(12):
        tab.call("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab",
                 windowsVirtualKeyCode=9)  # fmt: skip
        tab.call("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab",
                 windowsVirtualKeyCode=9)  # fmt: skip
        reached.add(tab.run("document.activeElement.id"))
    assert {"steps", "zoom-in", "zoom-out", "next-stall", "whole", "memory", "lanes", "map"} <= (
        reached
    )


def test_another_step_of_the_page_can_be_chosen(tab: browser.Tab) -> None:
    assert tab.run("document.getElementById('title').textContent") == "a step under lru"
    tab.run(
        "(() => { const s = document.getElementById('steps'); s.value = '1';"
        " s.dispatchEvent(new Event('change')); })()"
    )
    for _ in range(100):
        try:
            if tab.run("document.getElementById('title')?.textContent") == "a step under auto":
                break
        except RuntimeError:  # while the page is being replaced
            continue
    assert tab.run("document.getElementById('title').textContent") == "a step under auto"


def test_a_step_without_times_has_no_ratios(chromium: browser.Browser, tmp_path: Path) -> None:
    events = (
        dataclasses.replace(event, us=None) if isinstance(event, Op) else event
        for event in synthetic.training(3, 4 * PAGE, 6 * PAGE, 2)
    )
    step = last_step(events)
    shown = make.content(step, LINK, step.peak_bytes, title="no times", policy="lru")
    assert shown.line.result.step_us == 0
    page.write(tmp_path / "r.html", [shown])
    tab = chromium.tab()
    tab.open(tmp_path / "r.html")
    text = tab.run("document.body.innerText")
    assert "no schedule of moves is faster" in text
    assert "NaN" not in text
    assert tab.problems == []


def test_a_phone_shows_all_of_it_without_scrolling_sideways(
    chromium: browser.Browser, report: Path
) -> None:
    tab = chromium.tab()
    tab.size(360, 740, phone=True)
    tab.open(report)
    assert tab.run("document.documentElement.scrollWidth") == 360
    for chart in ("memory", "lanes", "map"):
        assert colours(tab, chart) >= 4
    x, y = middle(tab, "memory")
    tab.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
    assert "on the device" in tip(tab)
    tab.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    # Two fingers that part zoom in.
    whole = width(tab)
    for kind, apart in (("Start", 20), ("Move", 40), ("Move", 60), ("Move", 80)):
        fingers = [{"x": x - apart, "y": y, "id": 0}, {"x": x + apart, "y": y, "id": 1}]
        tab.call("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=fingers)
    tab.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    tab.settle()
    assert width(tab) < 0.6 * whole
    assert tab.problems == []
