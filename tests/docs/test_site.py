"""The documentation site: built without a warning, complete, drawn without errors and without a request to anywhere."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightscale.completion.tables import make_tables
from lightscale.config.fields import describe_fields
from lightscale.config.mixers import MIXERS

for package in ("sphinx", "myst_parser", "furo"):
    pytest.importorskip(package)

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
browser = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "helpers" / "browser.py")))

# The site is built once, within the time of the first test. It takes half a minute: `.ci/run` runs `make docs`, and a
# share of these tests.
pytestmark = pytest.mark.timeout(300)


def build(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does."""
    (rule,) = re.findall(r"-m sphinx (.*?)docs build/docs$", (ROOT / "Makefile").read_text(), re.DOTALL | re.MULTILINE)
    options = rule.replace("\\\n", "").replace("build/doctrees", str(out / "doctrees")).split()
    command = [sys.executable, "-m", "sphinx", *options, "-c", str(DOCS), str(source), str(out / "html")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    built = build(DOCS, out)
    # PyTorch's word about a CUDA toolkit on a machine without a GPU is none of the site's.
    said = [line for line in built.stderr.splitlines() if "No CUDA runtime is found" not in line]
    assert (built.returncode, said) == (0, [])
    return out / "html"


class Elements(HTMLParser):
    """The ids of a page, and what its browser loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.ids |= {named["id"]} if "id" in named else set()
        if tag in ("script", "img", "iframe", "source", "audio", "video", "embed"):
            self.loaded += [named[name] for name in ("src", "srcset") if name in named]
        # Of the other links, none is followed unasked.
        if tag == "link" and named.get("rel", "") not in ("next", "prev", "index", "search", "canonical"):
            self.loaded.append(named["href"])


def elements(page: Path) -> Elements:
    return Elements(page.read_text(encoding="utf-8"))


BROKEN = {
    "[a page](nowhere.md)": "nowhere.md",
    "[a place](other.md#nowhere)": "nowhere",
    "[a file](../../nowhere.py)": "nowhere.py",
    "{option}`lightscale train --nowhere`": "--nowhere",
    "{confval}`model.nowhere`": "model.nowhere",
    "{py:obj}`lightscale.nowhere`": "lightscale.nowhere",
    "$\\nowhere{x}$": "nowhere{x}",
}


@pytest.mark.parametrize("lines", [[*BROKEN], ["A [good link](other.md#place) and $x_t$."]], ids=["broken", "good"])
def test_a_broken_link_fails_the_build(tmp_path: Path, lines: list[str]) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "index.md").write_text("\n\n".join(["# Title", *lines, "```{toctree}\nother\n```\n"]))
    (source / "other.md").write_text("# Other\n\n## Place\n")
    built = build(source, tmp_path)
    warnings = [line for line in built.stderr.splitlines() if "index.md" in line and "WARNING" in line]
    wrong = [line for line in lines if line in BROKEN]
    assert built.returncode == bool(wrong), built.stderr
    assert len(warnings) == len(wrong), built.stderr
    for line in wrong:
        assert any(BROKEN[line] in warning for warning in warnings), (line, built.stderr)


@pytest.mark.long
def test_each_command_and_each_option_has_an_entry(site: Path) -> None:
    ids = elements(site / "reference" / "commands.html").ids
    # Completion walks the parsers on its own.
    lines = make_tables().lines
    commands = [
        f"{path} {line.partition(chr(9))[0]}"
        for (table, path), found in lines.items()
        if table == "commands"
        for line in found
    ]
    assert len(commands) > 30
    assert {f"lightscale{command}".replace(" ", "-") for command in commands} <= ids
    options = {
        f"cmdoption-lightscale{path.replace(' ', '-')}-{line.partition(chr(9))[0].lstrip('-')}"
        for (table, path), found in lines.items()
        if table == "options" and path
        for line in found
    }
    assert {one for one in options - ids if not one.endswith(("-h", "-help"))} == set()


@pytest.mark.long
def test_each_key_of_a_configuration_has_an_entry(site: Path) -> None:
    page = site / "reference" / "configuration.html"
    keys = {f"confval-{described.key}" for described in describe_fields()}
    assert keys - elements(page).ids == set()
    assert len(keys) > 150
    # A value of a file of another paper's recipe.
    text = re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))
    assert '"layernorm" in arch/causal-rn-printed' in text.replace("&quot;", '"')


@pytest.mark.long
def test_each_mixer_is_on_a_page_with_equations_and_counts(site: Path) -> None:
    pages = [path.read_text(encoding="utf-8") for path in sorted((site / "reference" / "architectures").glob("*.html"))]
    listed = subprocess.run(
        [sys.executable, "-m", "lightscale", "configs", "--json"], capture_output=True, text=True, check=True
    )
    runs = json.loads(listed.stdout)["configs"]
    for mixer in MIXERS:
        sizes = [f"{run['parameters']:,}" for run in runs if run["architecture"] == mixer]
        assert sizes, mixer
        assert any(
            re.search(r'<math [^>]*display="block"', page) and all(size in page for size in sizes) for page in pages
        ), mixer


@pytest.mark.long
def test_an_index_stands_behind_an_accented_letter(site: Path) -> None:
    text = (site / "reference" / "architectures" / "lightnet.html").read_text(encoding="utf-8")
    # k̄_t, three times; docutils alone would write t below k̄.
    assert len(re.findall(r"<msub>\s*<mover>\s*<mi>k</mi>", text)) == 3
    assert "<munderover>" not in text


@pytest.mark.long
def test_many_values_of_a_key_are_folded_away(site: Path) -> None:
    text = (site / "reference" / "configuration.html").read_text(encoding="utf-8")
    folded = text.partition('id="confval-model.hidden_size"')[2].partition("</details>")[0]
    count, *entries = re.findall(r"Shipped with (\d+) other values|<li>", folded)
    assert int(count) == len(entries) > 3


@pytest.mark.long
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    loaded = [(page.name, url) for page in site.rglob("*.html") for url in elements(page).loaded]
    assert len(loaded) > 100
    assert [one for one in loaded if re.match(r"(?i)(?:https?:)?//", one[1])] == []
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?i)(?:@import|url\(|href=)\s*[\"'(]*\s*(?:https?:)?//", text), path


@pytest.fixture(scope="module")
def page(site: Path, tmp_path_factory: pytest.TempPathFactory, needs: Callable[..., None]) -> Iterator[SimpleNamespace]:
    if browser.find_chromium() is None:
        needs("chromium")
    with browser.Page("about:blank", tmp_path_factory.mktemp("browser") / "profile") as page:
        for domain in ("Page", "Log", "Runtime", "Network"):
            page.call(f"{domain}.enable")
        yield page


def errors(page: SimpleNamespace) -> list[object]:
    """What the browser has complained of since last time, and its requests to others than files."""
    found: list[object] = []
    for event in page.events:
        kind, told = event["method"], event.get("params", {})
        if kind == "Log.entryAdded" and told["entry"]["level"] == "error":
            found.append(told["entry"])
        elif kind == "Runtime.exceptionThrown" or (kind == "Runtime.consoleAPICalled" and told["type"] == "error"):
            found.append(told)
        elif kind == "Network.requestWillBeSent" and not re.match(r"(?:file|data|about):", told["request"]["url"]):
            found.append(told["request"]["url"])
    page.events.clear()
    return found


def show(page: SimpleNamespace, file: Path, width: int) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
    page.call("Page.navigate", url=file.as_uri())
    page.wait_for(f"location.href === {json.dumps(file.as_uri())} && document.readyState === 'complete'")


@pytest.mark.long
@pytest.mark.parametrize("width", [1400, 390])
def test_every_page_is_drawn_without_errors(site: Path, page: SimpleNamespace, width: int) -> None:
    # The theme brings a file that is no page.
    files = sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)
    assert len(files) > 15
    for file in files:
        show(page, file, width)
        assert errors(page) == [], file
        # The page of the search is empty until it is asked.
        assert file.name == "search.html" or page.evaluate("document.querySelector('h1').innerText.length > 0"), file
        # What is wider scrolls by itself, not the page.
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), file


@pytest.mark.long
def test_errors_of_a_page_are_found(tmp_path: Path, page: SimpleNamespace) -> None:
    file = tmp_path / "page.html"
    for body in (
        "<script>gone()</script>",
        "<script>console.error('x')</script>",
        "<img src='gone.png'>",
        "<script src='http://127.0.0.1:9/x.js'></script>",
    ):
        file.write_text(f"<h1>Page</h1>{body}")
        show(page, file, 1400)
        assert errors(page) != [], body


@pytest.mark.long
def test_the_search_finds_a_key_without_a_server(site: Path, page: SimpleNamespace) -> None:
    page.call("Page.navigate", url=f"{(site / 'search.html').as_uri()}?q=intermediate_size")
    # Results appear one after the other.
    page.wait_for(
        "[...document.querySelectorAll('#search-results a')].map(link => link.href)",
        lambda links: any("configuration.html" in link for link in links),
    )
    assert errors(page) == []
