"""The documentation as a site: `make docs`. Sphinx, since links, anchors and docstrings are checked while it builds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fastbert.version import __version__

project = "fastbert"
author = copyright = "the fastbert developers"
release = version = __version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
# Pages that end in .nb.md are run while the site is built, and what they print and draw is on the page.
source_suffix = {".nb.md": "myst-nb", ".md": "myst-nb"}
nb_custom_formats = {".nb.md": ["jupytext.reads", {"fmt": "md"}]}
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parents[1] / "build" / "docs-cache")
nb_execution_raise_on_error = True
nb_execution_timeout = 1800  # of a cell; one trains a model, and other work may be beside it
nb_merge_streams, nb_output_stderr = True, "remove"
nb_mime_priority_overrides = [("html", "image/svg+xml", 0)]
# The source is the whole repository, so that links between pages, results and README are those that the repository has.
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/results/**", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["mystnb.unknown_mime_type"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints, autodoc_typehints_format = "signature", "short"
python_maximum_signature_line_length = 90
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"fastbert {version}"
html_static_path, html_extra_path = ["_static"], ["_root"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": []}
pygments_style, pygments_dark_style = "friendly", "github-dark"

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what the pages run needs no network


def _entitle(app: Any, page: str, source: list[str]) -> None:
    """Tables of results have no heading, and a page needs one."""
    _, results, table = page.partition("benchmarks/results/")
    machine, _, table = table.partition("/")
    if results:
        source[0] = f"# {table.removesuffix('/results')} on {machine}\n\n{source[0]}"


def setup(app: Any) -> None:
    app.connect("source-read", _entitle)
