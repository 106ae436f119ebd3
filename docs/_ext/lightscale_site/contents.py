"""The pages of a folder in a chosen order."""

from lightscale_site.links import ROOT
from lightscale_site.markdown import directive


def contents(folder: str, *names: str) -> str:
    """A hidden table of contents of the pages `names` in `docs/folder`; a page that is not written yet is left out."""
    written = [name for name in names if (ROOT / "docs" / folder / f"{name}.md").exists()]
    return directive("toctree", "", "\n".join(written), [("hidden", "")])
