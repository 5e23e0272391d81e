"""The documentation site: `make docs`. The root of its sources is the repository, so links read the same on a host."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "src")]

from adaponder.version import __version__  # noqa: E402 (found by the line above)

project = "AdaPonder"
author = "The AdaPonder developers"
project_copyright = "The AdaPonder developers, Apache-2.0"
version = release = __version__

extensions = [
    "formulas",
    "live",
    "myst_parser",
    "options",
    "pages",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/site/*.md",
    "examples/*",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "experiments/*.md",
]
exclude_patterns = [
    "experiments/*.template.md",
    *(".*", "build", "src", "tests", "runs", "data", "**/records", "**/__pycache__"),  # not walked through
]

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4

autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True
copybutton_exclude = ".linenos, .gp, .go, .c1"  # a comment behind a command stays on the page

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "AdaPonder"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["root"]
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#3b4cc0", "color-brand-content": "#3b4cc0"},
    "dark_css_variables": {"color-brand-primary": "#9db4ff", "color-brand-content": "#9db4ff"},
    "footer_icons": [],
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
