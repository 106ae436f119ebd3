"""Real English and Chinese text from Debian packages: ``python tools/texts/real_text.py FOLDER [NAME…]``.

Writes FOLDER/NAME.jsonl of the names that are given, or of all of ``SOURCES``: an object with ``id`` and ``text`` a
line, each a document as a reader sees it, a page, a manual page as groff sets it, a poem. The packages are fetched by
name, unpacked and not installed.
"""

import argparse
import gzip
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

_NOT_ENGLISH = "translations"
_BLOCKS = frozenset({"p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "td", "th", "tr", "pre", "div", "br"})
_HIDDEN = frozenset({"script", "style", "head", "header", "footer", "aside", "nav", "button", "label"})
_TIMEOUT_S = 180
_GROFF = ["groff", "-Kutf8", "-t", "-mandoc", "-Tutf8", "-P-cbou", "-rHY=0"]
_GROFF += ["-rLL=2000n"]  # a paragraph is a line
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


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


@dataclass(frozen=True, kw_only=True)
class Source:
    """Texts of a package."""

    package: str
    folder: str
    """Below usr/share."""
    documents: Callable[[Path], Iterator[tuple[str, str]]]
    """(id, text) of each in the unpacked folder."""
    what: str


def fetch(name: str, folder: Path) -> Path:
    """The file of ``name``, one of ``SOURCES``, in ``folder``: an object a line, with ``id`` and ``text``.

    Raises ``UnavailableError`` where there is no apt-get, its index has no such package, or the text needs groff.
    """
    source, target = SOURCES[name], folder / f"{name}.jsonl"
    with tempfile.TemporaryDirectory() as temporary:
        unpacked, written = _download(source.package, Path(temporary)), Path(temporary) / "written"
        with written.open("w", encoding="utf-8") as lines:
            for document, text in source.documents(unpacked / "usr/share" / source.folder):
                lines.write(json.dumps({"id": document, "text": text}, ensure_ascii=False) + "\n")
        shutil.move(written, target)
    return target


def _download(package: str, folder: Path) -> Path:
    """The unpacked package."""
    if missing := [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]:
        raise UnavailableError(f"{package}: {missing[0]} is missing; the text is in a Debian package")
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


def _manual_pages(top: Path) -> Iterator[tuple[str, str]]:
    """Each as groff sets it; not the links, and those that only name another one."""
    if shutil.which("groff") is None:
        raise UnavailableError("groff is missing; it formats manual pages")
    for path in sorted(path for path in top.rglob("*.gz") if not path.is_symlink()):
        roff = gzip.decompress(path.read_bytes())
        if not roff.startswith(b".so "):
            page = subprocess.run(_GROFF, input=roff, capture_output=True, timeout=_TIMEOUT_S, check=True).stdout
            lines = (" ".join(line.split()) for line in page.decode().splitlines() if line.strip("_ ") or not line)
            yield str(path.relative_to(top)), re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _fortunes(top: Path) -> Iterator[tuple[str, str]]:
    """The texts between lines of a per cent sign, without the colours of a terminal."""
    for path in sorted(path for path in top.iterdir() if not path.suffix):
        for number, text in enumerate(re.split(r"^%$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)):
            if text := _COLOUR.sub("", text).strip():
                yield f"{path.name}/{number}", text


_KERNEL = "doc/linux-doc-6.1/html"
SOURCES = {
    "en": Source(
        package="libreoffice-help-en-us",
        folder="libreoffice/help/en-US/text",
        documents=_pages,
        what="LibreOffice help in English",
    ),
    "zh": Source(
        package="libreoffice-help-zh-cn",
        folder="libreoffice/help/zh-CN/text",
        documents=_pages,
        what="LibreOffice help",
    ),
    "kernel": Source(package="linux-doc-6.1", folder=_KERNEL, documents=_pages, what="kernel documentation in English"),
    "zh-kernel": Source(
        package="linux-doc-6.1",
        folder=f"{_KERNEL}/translations/zh_CN",
        documents=_pages,
        what="kernel documentation",
    ),
    "zh-man": Source(package="manpages-zh", folder="man/zh_CN", documents=_manual_pages, what="manual pages"),
    "zh-handbook": Source(
        package="debian-handbook",
        folder="doc/debian-handbook/html/zh-CN",
        documents=_pages,
        what="Debian handbook",
    ),
    "zh-fortunes": Source(
        package="fortunes-zh", folder="games/fortunes", documents=_fortunes, what="fortunes: poems, hints"
    ),
}


def main() -> None:
    """Fetch what is asked for."""
    parser = argparse.ArgumentParser(description="Download real English and Chinese text.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SOURCES)}; without any: all")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in SOURCES]:
        parser.error(f"{unknown[0]}: use some of {', '.join(SOURCES)}")
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.names or SOURCES:
        try:
            print(fetch(name, args.folder))
        except UnavailableError as error:
            raise SystemExit(f"{name}: {error}") from error


if __name__ == "__main__":
    main()
