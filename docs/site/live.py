"""The page with a model in it, `try/`, on which the site opens: the visitor's browser computes it."""

from __future__ import annotations

import shutil
from pathlib import Path

from sphinx.application import Sphinx

from adaponder.commands.page import page

TOOLS = '<div class="tools">'


def write(app: Sphinx, problem: Exception | None) -> None:
    """Writes the page beside the documentation, with a link to it."""
    if problem is not None:
        return
    folder = Path(app.outdir) / "try"
    shutil.rmtree(folder, ignore_errors=True)
    page("sample-hops", out=folder)
    index = folder / "index.html"
    link = f'{TOOLS}\n        <a href="../docs/index.html">Documentation</a>'
    index.write_text(index.read_text().replace(TOOLS, link))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
