"""The report: what a build leaves for it, what is gathered, and the page in a real browser."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from max_build import load_settings, open_cache
from max_build.compilers.cuda_libraries import NVRTC
from max_build.errors import ToolchainError
from max_build.outcomes import Build
from max_build.report import history
from max_build.report.charts import savings, timeline
from max_build.report.gather import Artifact, Kernel, Report, Tier, of_cache, of_project
from max_build.report.history import Noted, Past, Span, build_noted, last_of, pasts
from max_build.report.markup import Markup, element
from max_build.report.page import page
from max_build.report.units import clock, seconds
from max_build.store.stats import Totals
from support import ROOT, max_build

SCREENSHOTS = ROOT / "build" / "screenshots"

PROJECT = """
[project]
name = "kernels"
version = "1"
[tool.max-build]
targets = ["sm_80", "sm_90a"]
[tool.max-build.kernels.saxpy]
source = "saxpy.cu"
names = ["axpby<float>"]
[tool.max-build.kernels.broken]
source = "broken.cu"
targets = ["sm_90a"]
[tool.max-build.kernels.stamp]
source = "stamp.cu"
targets = ["sm_90a"]
"""

SOURCES = {
    "saxpy.cu": "template <class T> __global__ void axpby(T a, const T* x, T* y) "
    "{ y[0] = a * x[0] + y[0]; }\n"
    'extern "C" __global__ void copy(float* x) { __shared__ float s[64]; '
    "s[threadIdx.x] = x[threadIdx.x]; __syncthreads(); x[threadIdx.x] = s[63 - threadIdx.x]; }\n",
    "broken.cu": 'extern "C" __global__ void broken(float* x) { x[0] = vec<3>; }\n',
    "stamp.cu": 'extern "C" __global__ void stamp(char* x) { x[0] = __TIME__[0]; }\n',
}

HOSTILE = "</script><img src=x onerror=alert(1)> ' \" & `<b>` \x00 \ud800"


@pytest.fixture
def kernels(tmp_path: Path) -> Path:
    """A project with kernels that compile, one that does not, and one that cannot be kept."""
    return write_kernels(tmp_path / "kernels")


def write_kernels(root: Path) -> Path:
    try:
        NVRTC.load()
    except ToolchainError as error:
        pytest.skip(f"needs NVRTC: {error.message}")
    root.mkdir()
    (root / "pyproject.toml").write_text(PROJECT)
    for name, text in SOURCES.items():
        (root / name).write_text(text)
    return root


def built(root: Path, **variables: str) -> Build:
    settings = load_settings(root, environ={**os.environ, **variables})
    with open_cache(settings.cache) as cache:
        return build_noted(settings, cache)


def report_of(root: Path, **variables: str) -> Report:
    settings = load_settings(root, environ={**os.environ, **variables})
    with open_cache(settings.cache) as cache:
        report = of_project(settings, cache)
    assert report is not None
    return report


def made_up(**changes: Any) -> Report:
    """A report without a build behind it."""
    past = Past(
        number=1,
        began=1.7e9,
        project="p",
        root="/p",
        mode="build",
        seconds=61.5,
        states={"cached": 1, "compiled": 1, "failed": 1},
        saved=30.0,
        spent=60.0,
    )
    spans = (
        Span(unit="a", target="cpu", compiler="max", state="cached", start=0, end=0.1, cost=30),
        Span(
            unit="b",
            target="cpu",
            compiler="max",
            state="compiled",
            reason="graph changed",
            lane=0,
            start=0.1,
            end=61.0,
            compiling=3.0,
            cost=58.0,
        ),
        Span(
            unit="c", target="cpu", compiler="max", state="failed", error="no\n\nhint: x", lane=1,
            start=0.1, end=2.0,
        ),
    )  # fmt: skip
    values: dict[str, Any] = {
        "title": "p",
        "made": 1.7e9,
        "version": "1",
        "build": Noted(past=past, spans=spans),
        "history": (past, past),
        "totals": Totals(hits={"local": 3}, faults={"shared/timeout": 2}, builds=2),
        "last": Totals(),
        "tiers": (
            Tier(
                name="shared",
                place="/team",
                access="read only",
                trust="off",
                usable=True,
                hits=3,
                received=10,
                sent=0,
                faults={"timeout": 2},
            ),
        ),
        "artifacts": (
            Artifact(
                unit="a",
                target="cpu",
                key="0" * 64,
                compiler="max 26.7.0",
                size=1000,
                host_code=900,
                device_code=0,
                cost=30.0,
                used=1.7e9,
            ),
        ),
        "kernels": (
            Kernel(
                unit="a",
                target="sm_90a",
                arch="sm_90a",
                name="k",
                source="",
                registers=40,
                shared=0,
                stack=None,
                code=512,
            ),
        ),
        "notes": ("one",),
    }
    return Report(**(values | changes))


# --- what a build leaves


def test_a_build_notes_what_became_of_every_unit(kernels: Path) -> None:
    result = built(kernels)
    settings = load_settings(kernels)
    with open_cache(settings.cache) as cache:
        noted = last_of(cache, settings)
    assert noted is not None
    assert [span.state for span in noted.spans] == [one.state for one in result.outcomes]
    assert noted.past.states == {"compiled": 2, "failed": 1, "uncached": 1}
    for span in noted.spans:
        assert 0 <= span.start <= span.end <= noted.past.seconds + 0.1
        assert span.lane >= 0
        assert span.compiling < 0 or span.start <= span.compiling <= span.end
    assert noted.past.spent == pytest.approx(sum(span.cost for span in noted.spans), abs=0.01)
    failed = next(span for span in noted.spans if span.state == "failed")
    assert "vec" in failed.error


def test_a_second_build_notes_its_hits_and_what_they_saved(kernels: Path) -> None:
    first = built(kernels)
    built(kernels)
    report = report_of(kernels)
    assert report.build is not None
    hits = [span for span in report.build.spans if span.state == "cached"]
    assert [(span.lane, span.tier) for span in hits] == [(-1, "local")] * 2
    cost = sum(
        one.record.seconds for one in first.outcomes if one.record and one.state == "compiled"
    )
    assert report.build.past.saved == pytest.approx(cost, abs=0.01)
    assert [past.number for past in report.history] == [1, 2]


def test_the_past_is_bounded_and_the_last_builds_are_kept_in_full(kernels: Path) -> None:
    built(kernels)
    settings = load_settings(kernels)
    with open_cache(settings.cache) as cache:
        (one,) = pasts(cache)
        many = [
            msgspec.structs.replace(one, number=n, project="other", root="/") for n in range(300)
        ]
        cache.memo.set("history", "builds", msgspec.json.encode(many))
        assert last_of(cache, settings) is None
        build_noted(settings, cache)
        kept = pasts(cache)
        assert len(kept) == history._SUMMARIES
        assert kept[-1].number == 300
        found = last_of(cache, settings)
        assert found is not None
        assert found.past == kept[-1]


def test_a_damaged_past_is_no_past(kernels: Path) -> None:
    settings = load_settings(kernels)
    with open_cache(settings.cache) as cache:
        build_noted(settings, cache)
        for damage in (b"", b"[", b"[1]", b'{"past": 3}'):
            cache.memo.set("history", "build 1", damage)
            assert last_of(cache, settings) is None
            cache.memo.set("history", "builds", damage)
            assert pasts(cache) == ()
        build_noted(settings, cache)
        assert last_of(cache, settings) is not None


def test_a_look_or_a_show_notes_nothing(project: Path, toy_cache: Path) -> None:
    settings = load_settings(project)
    with open_cache(settings.cache) as cache:
        before = len(pasts(cache))
    assert max_build("status", cwd=project).returncode == 0
    assert max_build("show", "affine", cwd=project).returncode == 0
    with open_cache(settings.cache) as cache:
        assert len(pasts(cache)) == before


# --- what is gathered


def test_kernels_come_with_registers_memory_and_code_size(kernels: Path) -> None:
    built(kernels)
    report = report_of(kernels)
    assert {(kernel.arch, kernel.source or kernel.name) for kernel in report.kernels} == {
        (arch, name) for arch in ("sm_80", "sm_90a") for name in ("axpby<float>", "copy")
    }
    copy = next(kernel for kernel in report.kernels if kernel.name == "copy")
    assert copy.registers > 0
    assert copy.code > 0
    assert copy.shared >= 256
    assert {artifact.unit for artifact in report.artifacts} == {"saxpy"}
    assert all(artifact.compiler.startswith("nvrtc ") for artifact in report.artifacts)


def test_the_cache_as_a_whole_leaves_recipes_out_and_counts_nothing(
    project: Path, toy_cache: Path
) -> None:
    settings = load_settings(project)
    with open_cache(settings.cache) as cache:
        report = of_cache(cache)
        assert not cache.stats.totals().hits
    assert {(one.unit, one.target) for one in report.artifacts} == {
        ("affine", "cpu"),
        ("affine", "sm_90a"),
    }
    assert all(one.host_code > 0 for one in report.artifacts)
    assert all(kernel.arch == "sm_90a" for kernel in report.kernels)
    assert report.kernels


def test_what_is_gone_since_is_said(kernels: Path, tmp_path: Path) -> None:
    built(kernels)
    shutil.rmtree(tmp_path / "cache" / "ac")
    report = report_of(kernels)
    assert not report.kernels
    assert "No longer in the cache: saxpy × sm_80, saxpy × sm_90a." in report.notes


def test_a_remote_with_a_password_is_shown_without(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_BUILD_REMOTE", "http://ci:s3cret@127.0.0.1:9/cache?token=t0ken")
    settings = load_settings(kernels)
    with open_cache(settings.cache) as cache:
        report = of_cache(cache)
    assert report.tiers[-1].place == "http://127.0.0.1:9/cache"
    text = page(report)
    assert "s3cret" not in text
    assert "t0ken" not in text


# --- the page as text


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def read(text: str) -> _Reader:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return reader


@given(st.text(st.characters(exclude_characters="\r\x00", exclude_categories=["Cs"])))
def test_text_comes_back_as_it_was_and_is_never_markup(text: str) -> None:
    reader = read(element("p", text, title=text))
    assert reader.tags == [("p", {"title": text})]
    assert reader.text == text


def test_hostile_names_and_messages_stay_text() -> None:
    def hostile(value: Any) -> Any:
        return msgspec.structs.replace(
            value,
            **{
                name: HOSTILE
                for name in value.__struct_fields__
                if isinstance(getattr(value, name), str) and name not in ("state", "key")
            },
        )

    plain = made_up()
    assert plain.build is not None
    wicked = made_up(
        title=HOSTILE,
        build=Noted(
            past=hostile(plain.build.past), spans=tuple(hostile(s) for s in plain.build.spans)
        ),
        history=tuple(hostile(p) for p in plain.history),
        tiers=tuple(hostile(t) for t in plain.tiers),
        artifacts=tuple(hostile(a) for a in plain.artifacts),
        kernels=tuple(hostile(k) for k in plain.kernels),
        notes=(HOSTILE,),
    )
    text = page(wicked).encode(errors="replace").decode()
    reader = read(text)
    tags = [tag for tag, _ in reader.tags]
    assert tags.count("script") == 1
    assert "img" not in tags
    assert not any(name.startswith("on") or name == "style" for _, a in reader.tags for name in a)


def test_the_page_names_no_other_address() -> None:
    text = page(made_up())
    assert "http://" not in text
    assert "https://" not in text
    assert all("src" not in attributes for _, attributes in read(text).tags)


@pytest.mark.parametrize("total", [0.0, 1e-9, 0.4, 61.5, 1e5])
def test_charts_stand_at_any_scale(total: float) -> None:
    span = Span(unit="a", target="cpu", compiler="max", state="cached", lane=0, start=0, end=total)
    past = made_up().history[0]
    empty = msgspec.structs.replace(past, saved=0.0, spent=0.0)
    for chart in (timeline([(0, span)], total), savings([empty, past]), savings([empty])):
        assert isinstance(chart, Markup)
        assert "nan" not in chart
        assert "-0." not in chart


def test_numbers_are_written_for_readers() -> None:
    assert [seconds(v) for v in (0, 0.0002, 0.012, 3.44, 125, 12000)] == [
        "0 s",
        "<1 ms",
        "12 ms",
        "3.4 s",
        "2 min 5 s",
        "3 h 20 min",
    ]
    assert [clock(v) for v in (0, 0.25, 12.5, 125)] == ["0 s", "250 ms", "12.5 s", "2:05"]


# --- the command


def test_report_writes_one_page_and_says_where(project: Path, toy_cache: Path) -> None:
    assert max_build("build", cwd=project).returncode == 0
    done = max_build("report", "-o", "out.html", cwd=project)
    assert (done.returncode, done.stdout) == (0, "out.html\n"), done.stderr
    text = (project / "out.html").read_text()
    assert "affine" in text
    assert "from the local tier" in text
    done = max_build("report", "--json", cwd=project)
    assert msgspec.json.decode(done.stdout)["build"]["past"]["states"] == {"cached": 1}
    done = max_build("report", "-o", "no/such/folder.html", cwd=project)
    assert done.returncode == 1
    assert "`no/such/folder.html` cannot be written" in done.stderr


def test_a_project_without_a_build_has_no_report(project: Path) -> None:
    done = max_build("report", cwd=project)
    assert done.returncode == 1
    assert "no build of `toy` is noted on this machine" in done.stderr
    assert "max-build report --cache" in done.stderr
    assert not (project / "max-build-report.html").exists()


def test_the_cache_has_a_report_outside_of_any_project(toy_cache: Path, tmp_path: Path) -> None:
    done = max_build("report", "--cache", "-o", "c.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "affine" in (tmp_path / "c.html").read_text()


# --- the page in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, with a log of what it asks the network for."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("needs chromium and chromedriver (Debian: chromium, chromium-driver)")
    if importlib.util.find_spec("selenium") is None:
        pytest.skip("needs selenium")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for flag in (
        "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --hide-scrollbars "
        "--disable-dev-shm-usage"
    ).split():
        options.add_argument(flag)
    found = webdriver.Chrome(options, Service(driver))
    yield found
    found.quit()


def show(browser: Any, path: Path, *, width: int = 1200, dark: bool = False) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [
        {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
        {"name": "prefers-reduced-motion", "value": "reduce"},
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(path.as_uri())


def photograph(browser: Any, name: str, width: int) -> None:
    height = browser.execute_script("return document.documentElement.scrollHeight")
    metrics = {"width": width, "height": min(height, 8000), "deviceScaleFactor": 1}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics | {"mobile": width < 500})
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    assert browser.get_screenshot_as_file(str(SCREENSHOTS / f"{name}.png"))


def cells(browser: Any, table: str, column: int) -> list[str]:
    script = (
        "return [...document.getElementById(arguments[0]).tBodies[0].rows].filter(r => !r.hidden)"
        ".map(r => r.cells[arguments[1]].textContent)"
    )
    found: list[str] = browser.execute_script(script, table, column)
    return found


# Contrast as WCAG 2.2 defines it, of every text that is drawn; below 4.5 is told.
PALE_TEXT = """
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
function rgba(colour) {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
}
function light([r, g, b]) {
  const part = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
}
function ground(element) {
  for (let at = element; at; at = at.parentElement) {
    const colour = rgba(getComputedStyle(at).backgroundColor);
    if (colour[3] === 255) return colour;
  }
  return [255, 255, 255, 255];
}
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || !element.checkVisibility()) continue;
  if (["SCRIPT", "title"].includes(element.tagName)) continue;
  const style = getComputedStyle(element);
  const ink = rgba(element instanceof SVGElement ? style.fill : style.color);
  const [a, b] = [light(ink), light(ground(element))].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  if (ratio < 4.5) found.push(`${element.tagName} ${element.className} ${ratio.toFixed(2)}`);
}
return found;
"""


@pytest.fixture(scope="module")
def built_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a real build: hits, compiles, a failure, and one that is not kept."""
    base = tmp_path_factory.mktemp("built")
    root, place = write_kernels(base / "kernels"), {"MAX_BUILD_CACHE_DIR": str(base / "cache")}
    built(root, **place)
    source = root / "saxpy.cu"
    source.write_text(source.read_text().replace("63", "31"))
    built(root, **place)
    path = base / "report.html"
    path.write_text(page(report_of(root, **place)), encoding="utf-8")
    return path


def test_the_page_works_in_a_browser(browser: Any, built_page: Path) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get_log("performance")
    show(browser, built_page)
    assert browser.title == "kernels · max-build report"

    # headings sort, and turn round
    click = "document.querySelector(`#outcomes thead th:nth-child(${arguments[0]}) button`).click()"
    browser.execute_script(click, 1)
    assert cells(browser, "outcomes", 0) == ["broken", "saxpy", "saxpy", "stamp"]
    browser.execute_script(click, 1)
    assert cells(browser, "outcomes", 0) == ["stamp", "saxpy", "saxpy", "broken"]
    order = "return document.querySelector('#outcomes th').getAttribute('aria-sort')"
    assert browser.execute_script(order) == "descending"
    browser.execute_script(click, 5)
    took = browser.execute_script(
        "return [...document.querySelectorAll('#outcomes tbody td:nth-child(5)')]"
        ".map(c => +c.dataset.sort)"
    )
    assert took == sorted(took, reverse=True)

    # words and chips filter
    field = browser.find_element("css selector", "[data-filter=outcomes]")
    field.send_keys("saxpy sm_90a")
    assert cells(browser, "outcomes", 0) == ["saxpy"]
    assert browser.find_element("css selector", "[data-count=outcomes]").text == "1 of 4 rows"
    field.clear()
    field.send_keys("x\b")
    chip = browser.find_element("css selector", "[data-pick=failed]")
    chip.click()
    assert cells(browser, "outcomes", 0) == ["broken"]
    assert chip.get_attribute("aria-pressed") == "true"

    # a bar of the timeline leads to its row, though it is filtered out
    browser.execute_script(
        "[...document.querySelectorAll('.timeline a')]"
        ".find(a => a.getAttribute('aria-label').startsWith('stamp')).focus()"
    )
    browser.switch_to.active_element.send_keys("\ue007")
    focused = (
        "return document.activeElement.matches('tr') && document.activeElement.cells[0].textContent"
    )
    # the browser tells of a new fragment when it gets to it, not before the key press returns
    WebDriverWait(browser, 20).until(lambda page: page.execute_script(focused) == "stamp")

    # the theme goes round: auto, light, dark
    toggle = browser.find_element("id", "theme")
    paper = "return getComputedStyle(document.body).backgroundColor"
    shades = []
    for _ in range(3):
        shades.append((toggle.text, browser.execute_script(paper)))
        toggle.click()
    assert [name for name, _ in shades] == ["Theme: auto", "Theme: light", "Theme: dark"]
    assert shades[0][1] == shades[1][1] != shades[2][1]

    # nothing was complained of, and nothing but the file itself was asked for
    assert browser.get_log("browser") == []
    events = [
        msgspec.json.decode(one["message"])["message"] for one in browser.get_log("performance")
    ]
    asked = {
        one["params"]["request"]["url"]
        for one in events
        if one["method"] == "Network.requestWillBeSent"
    }
    assert {url.partition("#")[0] for url in asked} == {built_page.as_uri()}


def test_everything_is_reached_by_keyboard(browser: Any, built_page: Path) -> None:
    show(browser, built_page)
    reached: list[str] = []
    from selenium.webdriver import ActionChains

    for _ in range(200):
        ActionChains(browser).send_keys("\ue004").perform()
        here = browser.execute_script(
            "const e = document.activeElement; return e === document.body ? '' : "
            "e.tagName.toLowerCase() + ' ' + (e.getAttribute('href') ?? e.textContent)"
        )
        if not here and reached:
            break
        reached.append(here)
    assert reached[0] == "a #main"
    assert "button Theme: auto" in reached
    assert any(one.startswith("button Unit") for one in reached)
    bars = browser.execute_script("return document.querySelectorAll('.timeline a').length")
    assert sum(one.startswith("a #row-") for one in reached) == bars > 0
    summaries = browser.execute_script("return document.querySelectorAll('summary').length")
    assert sum(one.startswith("summary") for one in reached) >= summaries > 0


@pytest.mark.parametrize(
    ("name", "width", "dark"),
    [("light", 1200, False), ("dark", 1200, True), ("phone", 360, False)],
)
def test_the_page_can_be_read(
    browser: Any, built_page: Path, name: str, width: int, dark: bool
) -> None:
    show(browser, built_page, width=width, dark=dark)
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    assert browser.execute_script(PALE_TEXT) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") == width
    cut = browser.execute_script(
        "return [...document.querySelectorAll('main *')].filter(e => !(e instanceof SVGElement)"
        " && e.checkVisibility() && e.getBoundingClientRect().right > innerWidth + 1"
        " && !e.closest('.hidden')).map(e => e.tagName + ' ' + e.textContent.slice(0, 40))"
    )
    assert cut == []
    photograph(browser, f"report-{name}", width)


def test_hostile_text_does_nothing_in_a_browser(browser: Any, tmp_path: Path) -> None:
    report = made_up(title=HOSTILE, notes=(HOSTILE, "<script>document.title = 'owned'</script>"))
    path = tmp_path / "hostile.html"
    path.write_text(page(report), encoding="utf-8", errors="replace")
    show(browser, path)
    assert "onerror" in browser.title
    assert browser.execute_script("return document.images.length") == 0
    assert browser.get_log("browser") == []


def test_the_report_of_the_toy_cache_can_be_read(
    browser: Any, project: Path, toy_cache: Path, tmp_path: Path
) -> None:
    settings = load_settings(project)
    with open_cache(settings.cache) as cache:
        text = page(of_cache(cache))
    path = tmp_path / "cache.html"
    path.write_text(text, encoding="utf-8")
    show(browser, path, width=360)
    assert browser.execute_script(PALE_TEXT) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") == 360
    photograph(browser, "cache-phone", 360)
    assert os.path.getsize(SCREENSHOTS / "cache-phone.png") > 10_000
