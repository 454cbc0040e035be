"""Configuration of the documentation site: ``make docs``.

The source directory is the root of the repository, so that links between pages, examples, benches
and reports are the same on the site and in a checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "docs" / "_ext")]

from umem.base.version import __version__  # noqa: E402 - from the tree, whatever is installed

project = "umem"
author = "umem contributors"
copyright = author  # noqa: A001 - Sphinx's name
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "umem_site",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "bench/README.md",
    "bench/results/*.md",
    "examples/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
]
# Folders that hold no page are not searched.
exclude_patterns = [
    "docs/_build", "docs/_ext", "docs/_static", ".*",
    "build", "dist", "src", "tests", "tools", "umem",
]  # fmt: skip

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
# A link to a file that is no page, such as a source file, is a download of that file.
suppress_warnings = [
    "toc.empty_glob",  # pages that a checkout may lack, see docs/howto.md
    "myst.header",  # reports begin their sections where it suits them
]

# The API reference needs neither torch nor the native core, so that the site builds anywhere.
sys.modules["umem._core"] = mock.MagicMock(__version__=__version__)  # umem compares the versions
autodoc_mock_imports = ["torch", "cupy", "cuda", "lightning", "transformers"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
default_role = "code"
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 88

html_theme = "pydata_sphinx_theme"
html_title = f"umem {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "show_prev_next": True,
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "header_links_before_dropdown": 6,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_version_warning_banner": False,
}
# No list of sections where a page is the only one of its section.
html_sidebars: dict[str, list[str]] = {"docs/index": [], "docs/tutorial": [], "docs/comparison": []}
