"""Pages that are no Markdown: a script is shown below its first lines, a notebook with its saved outputs."""

from __future__ import annotations

import ast
import base64
import json
import re
from pathlib import Path
from typing import Any

from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx


class ScriptPage(MystParser):
    """The page of ``examples/NAME.py``: what its docstring says, then the code."""

    supported = ("script",)

    def parse(self, inputstring: str, document: Any) -> None:
        tree = ast.parse(inputstring)
        headline, _, rest = str(ast.get_docstring(tree)).partition("\n")
        code = "\n".join(inputstring.splitlines()[tree.body[0].end_lineno :]).strip()
        name = Path(document.settings.env.docname).name
        super().parse(f"# {name}.py\n\n{headline}\n\n{_as_blocks(rest)}\n\n```python\n{code}\n```\n", document)


class NotebookPage(MystParser):
    """The page of a notebook: its cells in order, each with what it printed and drew when it was last run."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        env = document.settings.env
        pictures = Path(env.srcdir) / "build" / "pictures"
        pictures.mkdir(parents=True, exist_ok=True)
        parts = []
        for number, cell in enumerate(json.loads(inputstring)["cells"]):
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                parts.append(source)
                continue
            drawn, printed = [], []
            for place, output in enumerate(cell["outputs"]):
                data = output.get("data", {})
                if "image/png" in data:
                    picture = pictures / f"{Path(env.docname).name}-{number}-{place}.png"
                    picture.write_bytes(base64.b64decode("".join(data["image/png"])))
                    caption = _caption(source)
                    drawn.append(f"![{caption}](/{picture.relative_to(env.srcdir)})\n\n*{caption}.*")
                elif text := "".join(output.get("text", data.get("text/plain", []))).strip("\n"):
                    printed.append(f"```text\n{text}\n```")
            code = f"```python\n{source}\n```"
            if drawn:  # how to draw is beside the point
                code = f"<details><summary>How this was drawn</summary>\n\n{code}\n\n</details>"
            parts += [*drawn, code, *printed]
        super().parse("\n\n".join(parts), document)


def _as_blocks(text: str) -> str:
    """Indented lines of a docstring, which are commands, as fenced blocks of the shell."""
    return re.sub(r"(?m)((?:^    .+\n?)+)", lambda match: _fenced(match.group()), text)


def _fenced(lines: str) -> str:
    return "```bash\n" + re.sub(r"(?m)^    ", "", lines).rstrip("\n") + "\n```\n"


def _caption(source: str) -> str:
    """The comment that a cell begins with says what its picture shows."""
    first = source.splitlines()[0] if source else ""
    return first.removeprefix("#").strip() if first.startswith("#") else "What this cell drew"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_source_suffix(".py", "script")
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(ScriptPage)
    app.add_source_parser(NotebookPage)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
