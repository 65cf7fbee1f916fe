"""The dashboard: its files over HTTP, and the page in headless Chromium."""

import io
import re
import shutil
import socket
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import httpx
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from kunserve.core.config import ServerConfig
from kunserve_extras.dashboard.routes import FOLDER
from tests.e2e.api.dashboard_story import DROP_S, SECOND_DROP_S, TRIGGER, StoryEngine, tell
from tests.unit.server.live_server import LiveServer, live_server

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here (Debian: apt-get install chromium)"
)
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WEIGHTS, KV_USED, KV_FREE = (85, 96, 216), (13, 148, 136), (191, 230, 224)
DARK_WEIGHTS, DARK_KV_USED = (128, 136, 245), (43, 196, 178)
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 400, "height": 800}
PATIENCE_MS = 15_000


# Over HTTP


@pytest.fixture(scope="module")
def locked() -> Generator[LiveServer, None, None]:
    with live_server(StoryEngine(traffic=False), ServerConfig(api_key="secret")) as server:
        yield server


def test_the_page_is_open_and_its_data_is_not(locked: LiveServer) -> None:
    with locked.client() as client:
        for path in ["/dashboard", *(f"/dashboard/{file.name}" for file in FOLDER.iterdir())]:
            assert client.get(path).status_code == 200, path
        for path in ("/kunserve/state", "/kunserve/timeline", "/dashboards", "/v1/models"):
            assert client.get(path).status_code == 401, path
        for path in ("/dashboard/nothing.js", "/dashboard/..%2fapp.py"):
            assert client.get(path).status_code == 404, path
        assert client.post("/dashboard").status_code == 405


def test_headers_of_the_page(locked: LiveServer) -> None:
    with locked.client() as client:
        types = {"": "text/html", "/main.js": "text/javascript", "/page.css": "text/css"}
        for name, media_type in types.items():
            answer = client.get(f"/dashboard{name}")
            assert answer.headers["content-type"] == f"{media_type}; charset=utf-8"
            check_policy(answer)
            etag = answer.headers["etag"]
            assert answer.headers["cache-control"] == "no-cache"
            again = client.get(f"/dashboard{name}", headers={"if-none-match": f"W/{etag}"})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == etag
            stale = client.get(f"/dashboard{name}", headers={"if-none-match": '"other"'})
            assert stale.status_code == 200 and stale.content == answer.content


def check_policy(answer: httpx.Response) -> None:
    policy = dict(
        part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in str(policy) and "http" not in str(policy)
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_the_files_are_short_and_know_no_other_host(path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert forbidden not in text
    known = ("http://www.w3.org/2000/svg",)  # a name, never fetched
    for name in known:
        text = text.replace(name, "")
    assert "//" not in text.replace("// ", "") and "@import" not in text


def test_the_timeline_repeats_no_transition_that_is_over() -> None:
    with live_server(StoryEngine()) as server, server.client() as client:
        tell(server, SECOND_DROP_S + 1)

        def seen(since_s: float) -> dict[int, str]:
            view = client.get(f"/kunserve/timeline?since={since_s}").json()
            assert view["run_id"] == client.get("/kunserve/timeline").json()["run_id"]
            return {one["transition_id"]: one["outcome"] for one in view["transitions"]}

        rolled_back = seen(DROP_S)[1]
        assert rolled_back.startswith("rolled back")
        assert seen(DROP_S) == {0: "done", 1: rolled_back, 2: "running"}
        assert seen(DROP_S + 5) == {1: rolled_back, 2: "running"}
        assert seen(SECOND_DROP_S) == {2: "running"}
        group = client.get("/kunserve/timeline").json()["samples"][0]["groups"][0]
        assert group["need_blocks"] >= group["used_blocks"]


# In a browser


@pytest.fixture(scope="module")
def browser() -> Generator[Browser, None, None]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@dataclass
class Visit:
    """An open page, and everything it complained about or asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self._hear(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def open(self, server: LiveServer) -> Page:
        self.page.goto(f"{server.url}/dashboard")
        return self.page

    def check(self, server: LiveServer) -> None:
        """Nothing went wrong and no other host was asked."""
        assert self.complaints == []
        assert self.asked
        foreign = [url for url in self.asked if not url.startswith((f"{server.url}/", "data:"))]
        assert foreign == []


@pytest.fixture
def visit(browser: Browser) -> Generator[Callable[..., Visit], None, None]:
    """``visit(**options of the page)``: a page of a fresh profile."""
    contexts = []

    def begin(**options) -> Visit:
        context = browser.new_context(**({"viewport": WIDE, "color_scheme": "light"} | options))
        context.set_default_timeout(PATIENCE_MS)
        contexts.append(context)
        return Visit(context.new_page())

    expect.set_options(timeout=PATIENCE_MS)
    yield begin
    for context in contexts:
        context.close()


@pytest.fixture
def story() -> Generator[LiveServer, None, None]:
    """A server that has been through all of the story."""
    with live_server(StoryEngine()) as server:
        tell(server)
        yield server


def picture(page: Page, selector: str) -> Image.Image:
    shot = page.locator(selector).screenshot(animations="disabled")
    return Image.open(io.BytesIO(shot)).convert("RGB")


def share_of(image: Image.Image, colour: tuple[int, int, int]) -> float:
    """The share of the pixels that have nearly this colour."""
    counts = image.getcolors(maxcolors=1 << 24)
    near = sum(
        count
        for count, pixel in counts
        if max(abs(a - b) for a, b in zip(pixel, colour, strict=True)) <= 6
    )
    return near / (image.width * image.height)


@needs_chromium
def test_a_dropped_cluster_is_shown(story: LiveServer, visit: Callable[..., Visit]) -> None:
    one = visit()
    page = one.open(story)
    whole, dropped = (page.locator(f"[data-instance='{number}']") for number in (0, 3))
    expect(page.locator("#status")).to_have_text("live")
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator("#lost")).to_be_hidden()
    expect(page.locator("#empty")).to_be_hidden()
    expect(page.locator(".instance")).to_have_count(4)
    expect(whole).to_contain_text("layers 0-29 of 30")
    expect(whole).to_contain_text("weights 256 MiB")
    expect(dropped).to_contain_text("layers 15-29 of 30")
    expect(dropped).to_contain_text("group 5, stage 1")
    expect(dropped).to_contain_text("weights 155 MiB")
    expect(dropped).to_contain_text("from dropped layers 101 MiB")
    bar = dropped.get_by_role("img")
    expect(bar).to_have_attribute("aria-label", re.compile("101 MiB freed from dropped layers"))
    pipeline = page.locator("[data-group='5']")
    assert [" ".join(text.split()) for text in pipeline.locator(".stage").all_inner_texts()] == [
        "Instance 2 leader layers 0-14",
        "Instance 3 layers 15-29",
    ]
    expect(pipeline).to_contain_text("capacity 490 MiB")
    for name in ("running", "waiting", "stalled"):
        expect(pipeline).to_contain_text(name)
    expect(page.locator("[data-tile='Drops']")).to_contain_text("2")
    expect(page.locator("[data-tile='Arrivals']")).to_contain_text(re.compile(r"[\d,]+ refused"))
    for tile, chart in (("Arrivals", "arrivals"), ("Output tokens", "output")):
        said = page.locator(f"[data-tile='{tile}'] .value").inner_text()
        expect(page.locator(f"[data-chart='{chart}'] li b")).to_have_text(said)
    expect(page.locator("[data-tile='TTFT p99']")).to_contain_text(re.compile(r"n=[\d,]+"))
    expect(page.locator("[data-tile='Wait avoided'] .value")).to_have_text(
        re.compile(r"[1-9].* s$")
    )
    shown = [float(b.inner_text().split()[0]) for b in dropped.locator(".amount b").all()[:3]]
    assert sum(shown) == pytest.approx(400, abs=1), "weights, used and free are all of the memory"
    one.check(story)


@needs_chromium
def test_transitions_are_listed_and_marked(story: LiveServer, visit: Callable[..., Visit]) -> None:
    one = visit()
    page = one.open(story)
    rows = page.locator("#transitions tr")
    expect(rows).to_have_count(4)
    restore, _, rolled_back, drop = (rows.nth(index) for index in range(4))
    for text in ("drop", TRIGGER, "0 + 1 → 4", "+203 MiB", "2.3 ms", "11.8 ms", "412 ms", "done"):
        expect(drop).to_contain_text(text)
    expect(drop).to_contain_text("23 requests (61 MiB)")
    expect(rolled_back).to_contain_text("rolled back: instance 3")
    expect(restore).to_contain_text("−203 MiB")
    charts = page.locator(".chart")
    expect(charts).to_have_count(8)
    for chart in charts.all():
        expect(chart.locator("[data-mark='drop']")).to_have_count(3)
        assert {"Drop", "Restore"} <= set(chart.locator(".mark > text").all_text_contents())
        lines = chart.locator("path.line").all()
        assert lines and max(len(line.get_attribute("d") or "") for line in lines) > 1000
    assert TRIGGER in page.locator("[data-mark='drop'] title").first.text_content()
    one.check(story)


@needs_chromium
def test_legends_follow_the_pointer_and_the_window_its_button(
    story: LiveServer, visit: Callable[..., Visit]
) -> None:
    one = visit()
    page = one.open(story)
    kv = page.locator("[data-chart='kv']")
    expect(kv.locator("li", has_text="capacity")).to_have_text("capacity 777 MiB")
    kv.locator("svg").hover(position={"x": 200, "y": 80})
    expect(kv.locator("li", has_text="capacity")).to_have_text("capacity 575 MiB")
    page.mouse.move(0, 0)
    expect(kv.locator("li", has_text="capacity")).to_have_text("capacity 777 MiB")
    page.get_by_role("button", name="1 min").click()
    expect(kv.locator("[data-mark='drop']")).to_have_count(0)
    expect(kv.locator("[data-mark='restore']")).to_have_count(1)
    page.get_by_role("button", name="20 min").click()
    expect(page.get_by_role("button", name="20 min")).to_have_attribute("aria-pressed", "true")
    expect(kv.locator("[data-mark='drop']")).to_have_count(3)
    one.check(story)


@needs_chromium
def test_bubbles_are_drawn_while_there_are_pipelines(
    story: LiveServer, visit: Callable[..., Visit]
) -> None:
    one = visit()
    page = one.open(story)
    expect(page.locator("[data-group='5'] .bubble-ratio")).to_have_text("bubbles 13 %")
    expect(page.locator("[data-group='6'] .bubble-ratio")).to_be_hidden()
    bubbles = page.locator("[data-chart='bubbles']")
    expect(bubbles.locator("li")).to_have_text("idle 13 %")
    expect(bubbles.locator(".nothing")).to_be_hidden()
    line = bubbles.locator("path.line")
    expect(line).to_have_count(1)
    # Measured inside the page, because the chart is drawn anew three times a second.
    share = page.evaluate(
        """() => {
          const svg = document.querySelector("[data-chart='bubbles'] svg");
          const line = svg.querySelector("path.line");
          return line.getBoundingClientRect().width / svg.getBoundingClientRect().width;
        }"""
    )
    assert 0.3 < share < 0.5, "130 of 300 s"
    bubbles.locator("svg").hover(position={"x": 80, "y": 80})
    expect(bubbles.locator("li")).to_have_text("idle –")
    one.check(story)


@needs_chromium
@pytest.mark.parametrize(
    ("scheme", "size"), [("light", WIDE), ("dark", NARROW)], ids=["light-wide", "dark-narrow"]
)
def test_memory_is_painted(
    story: LiveServer, visit: Callable[..., Visit], scheme: str, size: dict[str, int]
) -> None:
    one = visit(viewport=size, color_scheme=scheme)
    page = one.open(story)
    expect(page.locator("[data-instance='3']")).to_contain_text("from dropped layers 101 MiB")
    weights, used = (WEIGHTS, KV_USED) if scheme == "light" else (DARK_WEIGHTS, DARK_KV_USED)
    whole = picture(page, "[data-instance='0'] .bar")
    dropped = picture(page, "[data-instance='3'] .bar")
    assert share_of(whole, weights) == pytest.approx(256 / 400, abs=0.03)
    assert share_of(dropped, weights) == pytest.approx(155 / 400, abs=0.03)
    assert share_of(whole, used) > 0.05 and share_of(dropped, used) > 0.05
    if scheme == "light":
        assert share_of(dropped, KV_FREE) > 0.2
    assert len(picture(page, "[data-chart='ttft']").getcolors(1 << 24)) > 50
    overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert overflow <= 0, "the page must not scroll sideways"
    one.check(story)


@needs_chromium
def test_no_traffic_then_a_request(visit: Callable[..., Visit]) -> None:
    with live_server(StoryEngine(traffic=False)) as server:
        one = visit()
        page = one.open(server)
        expect(page.locator("#empty")).to_contain_text("No traffic yet")
        expect(page.locator("[data-chart='ttft'] .nothing")).to_have_text("No traffic yet.")
        expect(page.locator("#no-transitions")).to_be_visible()
        expect(page.locator("[data-tile='TTFT p99'] .value")).to_have_text("–")
        expect(page.locator("[data-group='0']")).to_contain_text("demand 0 B (0 %)")
        with server.client() as client:
            body = {"prompt": "hello", "max_tokens": 4}
            assert client.post("/v1/completions", json=body).status_code == 200
        expect(page.locator("#empty")).to_be_hidden()
        expect(page.locator("[data-tile='TTFT p99'] .value")).to_have_text(re.compile("s$"))
        expect(page.locator("[data-tile='Arrivals']")).to_contain_text("1 in all")
        one.check(server)


@needs_chromium
def test_a_dead_instance_is_marked(story: LiveServer, visit: Callable[..., Visit]) -> None:
    one = visit()
    page = one.open(story)
    victim = page.locator("[data-instance='3']")
    expect(victim).to_contain_text("layers 15-29")
    story.configure(dead=frozenset({3}))
    expect(victim).to_have_class(re.compile("dead"))
    expect(victim.locator(".role")).to_have_text("dead")
    expect(page.locator("[data-group='5']")).to_have_count(0)
    expect(page.locator("[data-group='12']")).to_contain_text("whole model")
    one.check(story)


@needs_chromium
def test_a_lost_server_is_told_and_found_again(visit: Callable[..., Visit]) -> None:
    # The port stays ours while nobody listens on it.
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        address = reserved.getsockname()
        one = visit()
        with live_server(
            StoryEngine(), listener=socket.create_server(address, reuse_port=True)
        ) as server:
            tell(server)
            page = one.open(server)
            expect(page.locator("#transitions tr")).to_have_count(4)
            one.check(server)
        expect(page.locator("#lost")).to_contain_text("Connection lost at")
        expect(page.locator("#status")).to_have_text("connection lost")
        fresh = StoryEngine(traffic=False)
        with live_server(fresh, listener=socket.create_server(address, reuse_port=True)):
            expect(page.locator("#lost")).to_be_hidden()
            expect(page.locator("#status")).to_have_text("live")
            # Another run of the server: nothing of the last one is left.
            expect(page.locator("#transitions tr")).to_have_count(0)
            expect(page.locator("#empty")).to_be_visible()


@needs_chromium
def test_the_page_asks_for_the_key(locked: LiveServer, visit: Callable[..., Visit]) -> None:
    page = visit().open(locked)
    expect(page.get_by_label("This server wants its API key:")).to_be_focused()
    expect(page.locator("#main")).to_be_hidden()
    expect(page.locator("#key")).to_have_css("display", "flex")
    for key, then in (("wrong", "#key-wrong:has-text('wrong')"), ("secret", "#empty")):
        page.get_by_label("This server wants its API key:").fill(key)
        page.get_by_role("button", name="Show").click()
        expect(page.locator(then)).to_be_visible()
    expect(page.locator("#key")).to_be_hidden()
    page.reload()
    expect(page.locator("#empty")).to_be_visible()


@needs_chromium
def test_it_says_why_nothing_is_done(visit: Callable[..., Visit]) -> None:
    why = "group 5: the restore waits, because a request needs 300 blocks"
    with live_server(StoryEngine(reasons=(why,), is_scale_up_wanted=True)) as server:
        tell(server)
        one = visit()
        page = one.open(server)
        expect(page.locator("#reasons li")).to_have_text([why])
        expect(page.locator("#status")).to_have_text("live, more instances wanted")
        one.check(server)


@needs_chromium
def test_it_says_for_how_long_a_group_forms(visit: Callable[..., Visit]) -> None:
    with live_server(StoryEngine(forming_s=34.0, traffic=False)) as server:
        tell(server)
        one = visit()
        page = one.open(server)
        card = page.locator("#groups .group")
        expect(card.first.locator(".badge")).to_have_text("forms for 34 s")
        expect(card.nth(1).locator(".badge")).to_be_hidden()
        one.check(server)
        with server.client() as client:
            assert "kunserve:longest_forming_seconds{" in client.get("/metrics").text


@needs_chromium
def test_text_from_the_server_stays_text(visit: Callable[..., Visit]) -> None:
    """A record's words are shown as they are, never run."""
    with live_server(StoryEngine(trigger="<img src=x onerror=alert(1)>")) as server:
        tell(server)
        one = visit()
        page = one.open(server)
        drop = page.locator("#transitions tr[data-kind='drop']").first
        expect(drop).to_contain_text("<img src=x onerror=alert(1)>")
        expect(page.locator("img")).to_have_count(0)
        one.check(server)
