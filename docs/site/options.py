"""The page of all options, made from the command line itself: what a command's ``--help`` says, as tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx
from typer.main import get_command

from adaponder.cli import app as command_line

PAGE, MARK = "docs/site/options", "<!-- every command -->"


def commands() -> Iterator[tuple[str, Any]]:
    """Every command with the words that call it, groups opened, in order of names."""
    for name, command in sorted(get_command(command_line).commands.items()):
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
        else:
            yield from ((f"{name} {each}", one) for each, one in inner.items())


def section(name: str, command: Any) -> str:
    """One command: what it does, examples, arguments and options."""
    # Examples stand in the help between tags of typer's.
    examples = "\n".join(re.findall(r"\[dim\](.+?)\[/\]", command.help))
    what = re.sub(r"\[dim\].+?\[/\]", "", command.help).strip()
    lines = [f"## adaponder {name}", "", what, ""]
    if examples:
        lines += ["```bash", examples, "```", ""]
    lines += ["| | default | |", "|---|---|---|"]
    lines += [_row(each) for each in command.params if not each.hidden and each.name != "help"]
    return "\n".join(lines) + "\n"


def _row(param: Any) -> str:
    if param.opts[0].startswith("-"):
        takes = f" {param.metavar}" if param.metavar else ""
        called = f"`{', '.join(param.opts)}{takes}`" + "".join(f" `{one}`" for one in param.secondary_opts)
    else:
        called = f"`{param.metavar or param.name.upper()}`"
    value = param.default
    if param.secondary_opts:
        value = param.opts[0] if value else param.secondary_opts[0]
    default = "required" if param.required else "" if value in (None, False, ()) else f"`{value}`"
    return f"| {called} | {default} | {_cell(param.help or '')} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")


def _fill(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname == PAGE:
        source[0] = source[0].replace(MARK, "\n".join(section(*each) for each in commands()))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
