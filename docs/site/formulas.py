"""Formulas as MathML, which browsers draw themselves: no page loads anything from elsewhere."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx


def _inline(writer: Any, node: nodes.Element) -> None:
    writer.body.append(str(tex2mathml(node.astext())))
    raise nodes.SkipNode


def _block(writer: Any, node: nodes.Element) -> None:
    writer.body.append(str(tex2mathml(node.astext(), as_block=True)))
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
