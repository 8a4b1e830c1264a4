"""The page of `farfield explore` in a browser: headless Chromium, driven by the DevTools protocol over two pipes."""

from __future__ import annotations

import fcntl
import json
import os
import random
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
from farfield_papers.cli.explore.features import SHARPNESS, features
from papers_helpers.explored import module_of

BROWSERS = ["chromium", "chromium-browser", "google-chrome", "chrome", "chromium-headless-shell"]
CHROMIUM = next((path for path in map(shutil.which, BROWSERS) if path), None)
missing = pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(BROWSERS)} is on PATH")
pytestmark = [pytest.mark.slow, missing]
# A row of the page may be off by this share of its largest weight: its queries and keys are rounded to 16 bits.
TOLERANCE = 1e-3
# The scores of siamese_ones sum 16 features in float32, whose magnitudes sum to at most √(16 · SHARPNESS), to 0.
SCORE_ROUNDING = 16 * 2.0**-24 * (16 * SHARPNESS) ** 0.5
# Of a response from merged tiles, by the largest number of the response: rounding of sums in float64.
ROUNDING = 1e-12
SIZES = {"wide": (1400, 900), "phone": (390, 844)}
# What is read, and what has the colour behind it.
TEXTS = {"body": "body", ".panel .text": ".panel", ".panel .response": ".panel", "#code": "#code"}
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
        while not self.evaluate("document.readyState === 'complete' && typeof rows !== 'undefined' && rows.length > 0"):
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
def grid(view: panels.PageContent) -> torch.Tensor:
    return features(view.photograph / 255.0, view.size)


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


def close_to(row: Any, expected: np.ndarray) -> bool:
    allowed = TOLERANCE * np.abs(expected).max() + SCORE_ROUNDING / expected.size
    return bool(np.abs(np.array(row) - expected).max() <= allowed)


def rows_of(browser: Browser) -> list[list[float]]:
    """The rows that the page draws, one a panel."""
    return list(browser.evaluate("rows.map((row) => Array.from(row))"))


@pytest.mark.parametrize("masked", [False, True])
def test_rows_under_the_mouse_are_those_of_the_library(masked: bool, browser: Browser, grid: torch.Tensor) -> None:
    height, width = grid.shape[2:]
    drawn, modules = random.Random(5), [module_of(name, grid) for name in NAMES]
    mask = (torch.arange(width).expand(1, height, width) >= width / 3) if masked else None
    if masked:
        browser.click("#mask")
    for _ in range(20):
        position = drawn.randrange(height), drawn.randrange(width)
        browser.move(*position)
        for name, module, row in zip(NAMES, modules, rows_of(browser), strict=True):
            expected = maps.attention_row(module, grid, position, mask=mask)[0, 0].flatten().double().numpy()
            assert close_to(row, expected), (name, position)
        assert browser.evaluate("$('position').textContent") == "row {}, column {} of 37 × 56".format(*position)


def test_panels_draw_their_rows_and_can_be_hovered(browser: Browser) -> None:
    browser.move(20, 11, "#panel5 canvas")
    assert browser.evaluate("state.position") == 20 * 56 + 11
    pixels = "canvas.getContext('2d').getImageData(0, 0, WIDTH, HEIGHT).data"
    canvases = browser.evaluate(f"[...document.querySelectorAll('.map canvas')].map((canvas) => Array.from({pixels}))")
    for image, row in zip(np.reshape(canvases, (len(NAMES), -1, 4)), np.array(rows_of(browser)), strict=True):
        # Without negative weights, the brightest pixel is where the largest weight is.
        if row.min() >= 0 and row.max() * row.size > TOLERANCE:
            assert image[row.argmax()].sum() == image.sum(1).max()


def test_a_row_in_one_colour_is_explained(browser: Browser) -> None:
    for masked in (False, True):
        browser.evaluate(f"set('masked', {str(masked).lower()})")
        browser.drawn()
        said = browser.evaluate("DATA.panels.map((_, index) => $(`panel${index}`).querySelector('.even').textContent)")
        valid = browser.evaluate("[...valid]")
        for name, text, row in zip(NAMES, said, rows_of(browser), strict=True):
            weights = [weight for weight, shown in zip(row, valid, strict=True) if shown]
            # siamese_ones weighs by sums that are 0 but for rounding.
            if name == "siamese_local":
                said_first, _, number = text.rpartition(" ")
                assert said_first == "every position has the weight"
                assert float(number) == pytest.approx(weights[0], rel=0.005)  # three digits
            elif name != "siamese_ones":
                assert text == ""


def test_keys(browser: Browser) -> None:
    before = browser.evaluate("state.position")
    moves = {"ArrowDown": (40, 56), "ArrowRight": (39, 1), "ArrowUp": (38, -56), "ArrowLeft": (37, -1)}
    for key, (code, change) in moves.items():
        browser.press(key, code)
        assert browser.evaluate("state.position") == (before := before + change)
    # Keys work after a click on a control, too.
    browser.click("#mask")
    browser.press("ArrowDown", 40)
    assert browser.evaluate("[state.position, state.masked]") == [before + 56, True]
    for key in ("m", "t", "s", "7"):
        browser.press(key, ord(key.upper()))
    shown = "[$('mask').checked, $('tiles').value, $('shuffle').checked, state.chosen]"
    assert browser.evaluate(shown) == [False, "2", True, 6]
    # Whatever the tab key leads to shows that it has the focus.
    stops = []
    browser.evaluate("$('theme').focus()")
    for _ in range(8):
        browser.press("Tab", 9)
        stops.append(browser.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert browser.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", stops
    assert {"photograph", "mask", "tiles", "size"} <= set(stops)


def test_touch_moves_the_query_and_scrolls_on_panels(started: Browser, file: Path) -> None:
    started.open(file, SIZES["phone"], touch=True)
    for place in ((5, 8), (30, 50)):
        started.touch(*started.middle(*place, "#photograph"))
        assert started.evaluate("state.position") == place[0] * 56 + place[1]
    started.touch(*started.middle(20, 20, "#photograph"), "touchMove")
    assert started.evaluate("state.position") == 20 * 56 + 20
    started.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    x, y = started.middle(20, 30, "#panel2 canvas")
    started.call("Input.synthesizeScrollGesture", x=x, y=y, yDistance=-300, gestureSourceType="touch", speed=2000)
    assert started.evaluate("scrollY") > 100
    assert started.evaluate("state.position") == 20 * 56 + 20
    # The photograph stays where a finger reaches it.
    started.evaluate("scrollTo(0, 900)")
    assert 0 <= started.evaluate("$('photograph').getBoundingClientRect().top") < 20
    check_events(started, file)


@pytest.mark.parametrize("name", [name for name, operator in OPERATORS.items() if operator.basis is not None])
def test_a_slot_shows_its_basis(name: str, browser: Browser, grid: torch.Tensor) -> None:
    browser.click(f"#panel{NAMES.index(name)}")
    expected = maps.basis_masks(module_of(name, grid), grid)[0, 0].flatten(1).double().numpy()
    bases = browser.evaluate("bases.map((basis) => Array.from(basis))")
    assert all(close_to(basis, each) for basis, each in zip(bases, expected, strict=True))
    narrow = browser.box(".slots button:last-child canvas")[2]
    browser.click(".slots button:last-child")
    assert browser.evaluate("state.slot") == len(bases) - 1
    assert browser.box(".slots button:last-child canvas")[2] > 2.5 * narrow
    assert browser.evaluate("document.querySelector('.slots [aria-pressed=true] span').textContent").startswith("slot ")


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


def test_broken_grids_respond_as_the_whole(browser: Browser) -> None:
    shown = "[...document.querySelectorAll('.exact')].map((line) => line.textContent)"
    assert browser.evaluate(shown) == [""] * len(NAMES)
    browser.click("#mask")
    browser.press("t", 84)
    browser.press("t", 84)
    browser.click("#shuffle")
    browser.move(12, 40)
    assert browser.evaluate("[state.masked, state.tiles, state.shuffled]") == [True, 4, True]
    differences = [float(text.removeprefix("differs by ")) for text in browser.evaluate(shown)]
    assert len(differences) == len(NAMES)
    assert 0 < max(differences) <= ROUNDING


@pytest.mark.parametrize("name", ["softmax", "kronecker_qkv", "factorized", "factorized_gaussian"])
def test_the_line_of_code_computes_what_is_shown(name: str, browser: Browser, grid: torch.Tensor) -> None:
    names = {"maps": maps, "GridAttention": GridAttention, "torch": torch, "grid": grid}
    browser.click(f"#panel{NAMES.index(name)}")
    for masked in (False, True):
        if masked:
            browser.click("#mask")
        browser.move(9, 33)
        line = browser.evaluate("$('code').textContent")
        assert line.startswith(f'maps.attention_row(GridAttention(16, "{name}"), grid, (9, 33)')
        assert close_to(rows_of(browser)[NAMES.index(name)], eval(line, dict(names)).flatten().double().numpy())
        if OPERATORS[name].basis:
            browser.click(".slots button:nth-child(3)")
            computed = eval(browser.evaluate("$('code').textContent"), dict(names)).flatten().double().numpy()
            assert close_to(browser.evaluate("Array.from(bases[2])"), computed)
            browser.click(".slots button:nth-child(3)")
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


def test_size_and_time_of_a_move(browser: Browser, file: Path, capsys: Any) -> None:
    """From a move of the mouse to the frame with all rows; it is printed."""
    browser.evaluate("""let times = [];
      $("photograph").addEventListener("pointermove", (event) => requestAnimationFrame(() => {
        // A task after the frame: its drawing is done.
        const channel = new MessageChannel();
        channel.port1.onmessage = () => times.push(performance.now() - event.timeStamp);
        channel.port2.postMessage(null);
      }));""")
    drawn = random.Random(3)
    for _ in range(40):
        browser.move(drawn.randrange(37), drawn.randrange(56))
    times = browser.evaluate("times")
    assert len(times) >= 40
    size, middle = file.stat().st_size, float(np.median(times))
    with capsys.disabled():
        print(f"\n{size / 1e6:.2f} MB; {middle:.0f} ms a move, the median of {len(times)}; at most {max(times):.0f} ms")
    assert size < 2e6
    assert middle < 500
