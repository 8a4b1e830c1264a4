"""The page of `farfield explore` in a browser: headless Chromium, driven by the DevTools protocol over two pipes."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from farfield import cost, maps
from farfield.nn import GridAttention
from farfield.ops import OPERATORS
from farfield_papers.cli.explore import page, panels
from farfield_papers.cli.explore.features import features

BROWSERS = ["chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell"]
CHROMIUM = next((path for path in map(shutil.which, BROWSERS) if path), None)
missing = pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(BROWSERS)} is on PATH")
pytestmark = [pytest.mark.slow, missing]
SIZES = {"wide": (1400, 900), "phone": (390, 844)}
# What is read, and what has the colour behind it.
TEXTS = {"body": "body", ".panel .text": ".panel", ".panel .weights": ".panel", "#code": "#code"}
NAMES = list(OPERATORS)


class Browser:
    """A headless browser with one page; commands of the DevTools protocol go through one pipe, events another."""

    def __init__(self, profile: Path) -> None:
        # The browser reads from descriptor 3 and writes to 4; the ends stay above them until its process has started.
        theirs, self.commands = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in os.pipe())
        self.messages, mine = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in os.pipe())

        def connect() -> None:
            os.dup2(theirs, 3)
            os.dup2(mine, 4)

        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command = [str(CHROMIUM), *options, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, preexec_fn=connect, close_fds=False, **silent)
        os.close(theirs)
        os.close(mine)
        self.rest, self.number, self.session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        pages = self.call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in pages if each["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command and return its result; what happens meanwhile is appended to `events`."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            received = self.receive()
            if received.get("id") == self.number:
                assert "error" not in received, received
                return received["result"]
            self.events.append(received)

    def receive(self, seconds: float = 120) -> dict[str, Any]:
        """Return the next message."""
        while b"\0" not in self.rest:
            assert select.select([self.messages], [], [], seconds)[0], "the browser is silent"
            part = os.read(self.messages, 1 << 16)
            assert part, "the browser has ended"
            self.rest += part
        text, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(text))

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page, of a promise when it is fulfilled."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def open(self, file: Path, size: tuple[int, int], touch: bool = False) -> None:
        """Load a file in a window of this size and wait until its panels are drawn."""
        screen = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": touch}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        until = time.monotonic() + 60
        while not self.evaluate("document.readyState === 'complete' && 'drawn' in document.body.dataset"):
            assert time.monotonic() < until, "the page does not draw"
            time.sleep(0.05)

    def drawn(self) -> None:
        """Wait for two frames: the page draws in the next one after an event."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def close(self) -> None:
        """End the browser."""
        self.process.terminate()
        self.process.wait(30)
        os.close(self.commands)
        os.close(self.messages)

    def move(self, row: int, column: int, canvas: str = "#photograph") -> None:
        """Move the mouse to the middle of a position of a canvas."""
        x, y = self.middle(row, column, canvas)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.drawn()

    def middle(self, row: int, column: int, canvas: str) -> tuple[float, float]:
        """Return where the middle of a position is in the window."""
        left, top, width, height = self.box(canvas)
        shape = self.evaluate("[HEIGHT, WIDTH]")
        return left + (column + 0.5) * width / shape[1], top + (row + 0.5) * height / shape[0]

    def box(self, element: str) -> list[float]:
        """Return left, top, width and height of an element, after scrolling to it."""
        found = f"document.querySelector({json.dumps(element)})"
        self.evaluate(f"{found}.scrollIntoView({{ block: 'nearest' }})")
        rectangle = f"(({{ x, y, width, height }}) => [x, y, width, height])({found}.getBoundingClientRect())"
        return list(self.evaluate(rectangle))

    def click(self, element: str) -> None:
        """Click the middle of an element."""
        left, top, width, height = self.box(element)
        for kind in ("mousePressed", "mouseReleased"):
            place = {"x": left + width / 2, "y": top + height / 2}
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)
        self.drawn()

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.drawn()

    def touch(self, x: float, y: float, kind: str = "touchStart") -> None:
        """Put a finger down, or move it."""
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=[{"x": x, "y": y}])
        self.drawn()


@pytest.fixture(scope="module")
def view() -> panels.PageContent:
    return panels.panels_of_features(None, NAMES, 56)


@pytest.fixture(scope="module")
def file(view: panels.PageContent, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "explore.html"
    page.write(view, path)
    return path


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def browser(started: Browser, file: Path) -> Iterator[Browser]:
    """A new page in a wide window; no test may leave an error in it, or read anything but the file."""
    started.open(file, SIZES["wide"])
    yield started
    check_events(started, file)


def check_events(browser: Browser, file: Path) -> None:
    browser.drawn()
    sent = [each["params"]["request"] for each in browser.events if each["method"] == "Network.requestWillBeSent"]
    assert [each["url"] for each in sent if not each["url"].startswith("data:")] == [file.as_uri()]
    wrong = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    assert [each for each in browser.events if each["method"] in wrong] == []


def picture_of(browser: Browser, canvas: str) -> np.ndarray:
    """The pixels that a canvas shows, `(height, width, 4)`."""
    copy = f"""(() => {{
      const copy = new OffscreenCanvas(WIDTH, HEIGHT).getContext("2d", {{ willReadFrequently: true }});
      copy.drawImage(document.querySelector({json.dumps(canvas)}), 0, 0);
      return Array.from(copy.getImageData(0, 0, WIDTH, HEIGHT).data); }})()"""
    return np.reshape(browser.evaluate(copy), (*browser.evaluate("DATA.size"), 4))


def test_rows_of_the_query_next_to_the_mouse_are_shown(browser: Browser, view: panels.PageContent) -> None:
    rows, columns = panels.query_axes(view.size)
    for place, canvas in (((5, 40), "#photograph"), ((20, 11), "#panel5 canvas"), ((36, 55), "#photograph")):
        browser.move(*place, canvas)
        row = min(rows, key=lambda each: abs(each - place[0]))
        column = min(columns, key=lambda each: abs(each - place[1]))
        assert browser.evaluate("$('position').textContent") == f"row {row}, column {column} of 37 × 56"
        for index, panel in enumerate(view.panels):
            shown = panel.rows[rows.index(row) * len(columns) + columns.index(column)].numpy()
            image = picture_of(browser, f"#panel{index} canvas")
            # Without negative weights, the brightest pixel is where the largest weight is.
            if shown.min() >= 0 and panel.name != "siamese_ones":
                at = np.unravel_index(shown.argmax(), shown.shape)
                assert image[at].sum() == image.sum(-1).max(), panel.name


def test_keys(browser: Browser) -> None:
    row, column = browser.evaluate("[state.row, state.column]")
    moves = {"ArrowDown": (40, 1, 0), "ArrowRight": (39, 0, 1), "ArrowUp": (38, -1, 0), "ArrowLeft": (37, 0, -1)}
    for key, (code, down, right) in moves.items():
        browser.press(key, code)
        row, column = row + down, column + right
        assert browser.evaluate("[state.row, state.column]") == [row, column]
    for _ in range(12):
        browser.press("ArrowUp", 38)
    assert browser.evaluate("state.row") == 0
    browser.press("7", 55)
    assert browser.evaluate("state.chosen") == 6
    # Whatever the tab key leads to shows that it has the focus.
    stops = []
    browser.evaluate("$('theme').focus()")
    for _ in range(6):
        browser.press("Tab", 9)
        stops.append(browser.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", stops
    assert {"photograph", "size"} <= set(stops)


def test_touch_moves_the_query_and_scrolls_on_panels(started: Browser, file: Path) -> None:
    started.open(file, SIZES["phone"], touch=True)
    for place in ((3, 10), (31, 52)):
        started.touch(*started.middle(*place, "#photograph"))
        assert started.evaluate("position()") == list(place)
    started.touch(*started.middle(17, 17, "#photograph"), "touchMove")
    assert started.evaluate("position()") == [17, 17]
    started.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    x, y = started.middle(20, 30, "#panel2 canvas")
    started.call("Input.synthesizeScrollGesture", x=x, y=y, yDistance=-300, gestureSourceType="touch", speed=2000)
    assert started.evaluate("scrollY") > 100
    assert started.evaluate("position()") == [17, 17]
    # The photograph stays where a finger reaches it.
    started.evaluate("scrollTo(0, 900)")
    assert 0 <= started.evaluate("$('photograph').getBoundingClientRect().top") < 20
    check_events(started, file)


def test_the_slider_changes_costs(browser: Browser) -> None:
    numbers = "[...document.querySelectorAll('.numbers')].map((line) => line.textContent.replaceAll('\\u00a0', ' '))"
    before = browser.evaluate(numbers)
    assert before[0].startswith(f"{cost.predict('softmax', channels=16, size=(56, 56)).macs / 1e6:.0f} M MACs")
    browser.evaluate("$('size').focus()")
    for _ in range(2):
        browser.press("ArrowRight", 39)
    assert browser.evaluate("$('grid').textContent") == "224 × 224"
    after = browser.evaluate(numbers)
    assert all(one != other for one, other in zip(before, after, strict=True))
    assert after[0].startswith(f"{cost.predict('softmax', channels=16, size=(224, 224)).macs / 1e9:.1f} G MACs")


@pytest.mark.parametrize("name", ["softmax", "kronecker_qkv", "factorized", "factorized_gaussian"])
def test_the_line_of_code_computes_what_is_shown(name: str, browser: Browser, view: panels.PageContent) -> None:
    grid, index = features(view.photograph / 255.0, view.size), NAMES.index(name)
    names = {"maps": maps, "GridAttention": GridAttention, "torch": torch, "grid": grid}
    browser.click(f"#panel{index}")
    browser.move(10, 31)
    line = browser.evaluate("$('code').textContent")
    assert line == f'maps.attention_row(GridAttention(16, "{name}"), grid, (10, 31))[0, 0]'
    assert torch.equal(eval(line, dict(names)), view.panels[index].rows[browser.evaluate("query()")])
    basis = view.panels[index].basis
    if basis is not None:
        narrow = browser.box(".slots button:nth-child(3) canvas")[2]
        browser.click(".slots button:nth-child(3)")
        assert torch.equal(eval(browser.evaluate("$('code').textContent"), dict(names)), basis[2])
        assert browser.box(".slots button:nth-child(3) canvas")[2] > 2.5 * narrow
        shown, small = (
            picture_of(browser, f"#{part} canvas") for part in (f"panel{index}", "detail button:nth-child(3)")
        )
        assert (shown == small).all()
    browser.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    browser.click("#copy")
    assert browser.evaluate("$('copy').textContent") == "copied"
    assert browser.evaluate("navigator.clipboard.readText()") == browser.evaluate("$('code').textContent")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_and_can_be_read(size: str, scheme: str, started: Browser, file: Path) -> None:
    started.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    started.open(file, SIZES[size], touch=size == "phone")
    assert started.evaluate("document.documentElement.scrollWidth <= innerWidth")
    right = "[...document.querySelectorAll('body *')].map((each) => each.getBoundingClientRect().right)"
    assert started.evaluate(f"{right}.every((edge) => edge <= innerWidth)")
    started.click("#theme")
    started.click("#theme")
    for text, behind in TEXTS.items():
        first, second = (f"getComputedStyle(document.querySelector('{each}'))" for each in (text, behind))
        colours = started.evaluate(f"[{first}.color, {second}.backgroundColor]")
        ink, paper = (luminance(colour) for colour in colours)
        # WCAG 2, level AA.
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5
        assert (ink > paper) == (scheme == "dark")
    check_events(started, file)
    started.call("Emulation.setEmulatedMedia", features=[])


def luminance(colour: str) -> float:
    """The relative luminance of `rgb(r, g, b)`."""
    parts = [int(number) / 255 for number in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot((0.2126, 0.7152, 0.0722), linear))
