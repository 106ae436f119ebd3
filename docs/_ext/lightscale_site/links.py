"""Links from pages to files of the repository outside `docs`: they work there, and a site has only their names."""

from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[3]


class FileLinks(SphinxTransform):
    """In place of such a link, its text and the path in the repository. One that leads nowhere stays a fault."""

    default_priority = 500  # before files are gathered for downloads, and references are resolved

    def apply(self, **kwargs: object) -> None:
        """Replace the links of one page."""
        for node in list(self.document.findall(_is_link)):
            assert isinstance(node, nodes.Element)
            # The name of another page is relative to `docs`, the path of another file to this page.
            base = Path(self.env.srcdir)
            if node.get("refdomain") != "doc":
                base = Path(self.env.doc2path(node["refdoc"])).parent
            path = (base / node["reftarget"].partition("#")[0]).resolve()
            if node.get("refdomain") == "doc":
                path = path.with_name(f"{path.name}.md")
            if not path.exists() or path.is_relative_to(self.env.srcdir) or not path.is_relative_to(ROOT):
                continue
            text, name = node.astext(), str(path.relative_to(ROOT))
            shown = [nodes.literal(text=name)]
            node.replace_self(shown if name.endswith(text) else [nodes.Text(f"{text} ("), *shown, nodes.Text(")")])


def _is_link(node: nodes.Node) -> bool:
    is_link = isinstance(node, (addnodes.download_reference, addnodes.pending_xref))
    return is_link and node.get("reftype") == "myst"
