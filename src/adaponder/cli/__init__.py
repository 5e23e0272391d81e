"""Command name to typed function: this folder parses, and nothing else."""

from __future__ import annotations

import re
import sys
from typing import Any

import typer

from adaponder.cli import bench, evaluation, experiments, model, training  # noqa: F401  (registers their commands)
from adaponder.cli.app import app
from adaponder.errors import AdaPonderError, ConfigError, InputError
from adaponder.terminal import errors, line

__all__ = ["app", "main"]

# What the parser raises. Typer carries its own copy of click in newer releases, so there is no name to import it by.
_ParserError: Any = typer.BadParameter.__mro__[2]


def main() -> None:
    """The entry point: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    try:
        code = app(standalone_mode=False)
    except AdaPonderError as error:
        code = _fail(str(error), 2 if isinstance(error, (InputError, ConfigError)) else 1)
    except _ParserError as error:
        code = _misused(error)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except OSError as error:  # a disk that is full, a file that may not be read
        code = _fail(str(error), 1)
    except (MemoryError, RuntimeError) as error:
        # torch is not imported to ask whether this is its error.
        if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
            raise
        code = _fail(f"memory does not suffice: {error}", 1)
    if code == 130:
        errors.print("interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    """Says in one line what went wrong."""
    errors.print(line(("error:", "bold red"), " ", re.sub(r"\s*\n\s*", " ", message.strip())), soft_wrap=True)
    return code


def _misused(error: Exception) -> int:
    """Says what the parser did not understand, and where to read on; bare ``adaponder`` has shown its help already."""
    context = getattr(error, "ctx", None)
    message = error.format_message().rstrip(".")
    if message and type(error).__name__ != "NoArgsIsHelpError":
        more = "" if context is None else f"; {context.command_path} --help says more"
        _fail((message + more).replace("?;", "?"), 2)
    return 2
