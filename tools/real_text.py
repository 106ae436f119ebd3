"""Real English and Chinese text from Debian packages: ``python tools/real_text.py FOLDER``.

Writes FOLDER/en.jsonl and FOLDER/zh.jsonl: the pages of LibreOffice's help (MPL-2.0), 2,561 in both languages under the
same names; and FOLDER/kernel.jsonl: the English documentation of the Linux kernel (GPL-2), 30 MB of text. The packages
are fetched by name, unpacked and not installed.
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

PACKAGES = {"en": "libreoffice-help-en-us", "zh": "libreoffice-help-zh-cn", "kernel": "linux-doc-6.1"}
_FOLDERS = {
    "en": "libreoffice/help/en-US/text",
    "zh": "libreoffice/help/zh-CN/text",
    "kernel": "doc/linux-doc-6.1/html",
}
_NOT_ENGLISH = "translations"
_BLOCKS = frozenset({"p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "td", "th", "tr", "pre", "div", "br"})
_HIDDEN = frozenset({"script", "style", "head", "header", "aside", "nav", "button", "label"})
_TIMEOUT_S = 180


class UnavailableError(Exception):
    """The texts cannot be had on this machine; the message says why."""


class _Page(HTMLParser):
    """The text of a page, a block a line."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._lines: list[str] = [""]
        self._depth_hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in _HIDDEN:
            self._depth_hidden += 1
        if tag in _BLOCKS:
            self._lines.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in _HIDDEN and self._depth_hidden:
            self._depth_hidden -= 1
        if tag in _BLOCKS:
            self._lines.append("")

    def handle_data(self, data: str) -> None:
        if not self._depth_hidden:
            self._lines[-1] += data

    def text(self) -> str:
        """The lines that have anything on them."""
        lines = (" ".join(line.split()) for line in self._lines)
        return "\n".join(line for line in lines if line)


def fetch(name: str, folder: Path) -> Path:
    """The file of ``name`` ("en", "zh" or "kernel") in ``folder``: an object a line, with ``id`` and ``text``.

    Raises ``UnavailableError`` where there is no apt-get, or its index has no such package.
    """
    target = folder / f"{name}.jsonl"
    with tempfile.TemporaryDirectory() as temporary:
        unpacked = _download(PACKAGES[name], Path(temporary))
        with target.open("w", encoding="utf-8") as lines:
            for page, text in _pages(unpacked / "usr/share" / _FOLDERS[name]):
                lines.write(json.dumps({"id": page, "text": text}, ensure_ascii=False) + "\n")
    return target


def _download(package: str, folder: Path) -> Path:
    """The unpacked package."""
    if missing := [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        raise UnavailableError(f"{package}: {missing[0]} is missing; the text comes from a Debian package")
    try:
        command = ["apt-get", "download", package]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{package}: not downloaded within {_TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())[:200]
        raise UnavailableError(f"{package}: apt-get cannot download it ({said})") from error
    (archive,) = folder.glob("*.deb")
    subprocess.run(["dpkg-deb", "-x", archive, folder / "unpacked"], check=True)
    return folder / "unpacked"


def _pages(top: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(top.rglob("*.html")):
        if _NOT_ENGLISH in path.relative_to(top).parts:
            continue
        page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
        page.close()
        yield str(path.relative_to(top)), page.text()


def main() -> None:
    """Fetch all of them."""
    parser = argparse.ArgumentParser(description="Fetch real English and Chinese text.")
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        print(fetch(name, folder))


if __name__ == "__main__":
    main()
