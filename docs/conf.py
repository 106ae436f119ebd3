"""Sphinx's configuration for `make docs`."""

import logging
import sys
from pathlib import Path

from lightscale import __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

# Megatron core reports at its import how it was built.
logging.getLogger("megatron").setLevel(logging.WARNING)

project = "lightscale"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "lightscale_site"]
exclude_patterns = ["_ext", "_static"]

# Every link must lead somewhere; `make docs` makes errors of warnings.
nitpicky = True
# But the types in signatures: those of other packages have no page here, and those of internal modules need none.
# Pages refer to Python's names by {py:obj}, which is checked.
nitpick_ignore_regex = [("py:class", ".*")]
nitpick_ignore = [("py:exc", "UserError")]

myst_enable_extensions = ["attrs_block", "deflist", "dollarmath"]
myst_heading_anchors = 3

# Docstrings write code between single backticks, as Markdown does, and between double ones.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

# Text of commands and keys is quoted as it is typed.
smartquotes = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
# The summaries of results are fetched, which browsers refuse for pages that are opened from a folder.
html_show_search_summary = False
html_title = f"lightscale {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
