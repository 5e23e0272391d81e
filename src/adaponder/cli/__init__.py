"""Command name to typed function: this folder parses, and nothing else."""

from __future__ import annotations

import sys
from typing import Any

import typer

from adaponder.cli import (  # noqa: F401  (registers commands)
    bench,
    evaluation,
    experiments,
    export,
    model,
    serving,
    training,
)
from adaponder.cli.app import app
from adaponder.cli.ending import FAILED, INTERRUPTED, MISUSED, code_of, fail
from adaponder.errors import AdaPonderError
from adaponder.terminal import errors

__all__ = ["app", "main"]

# What the parser raises. Typer carries its own copy of click in newer releases, so there is no name to import it by.
_ParserError: Any = typer.BadParameter.__mro__[2]


def main() -> None:
    """The entry point: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    try:
        code = app(standalone_mode=False)
    except AdaPonderError as error:
        code = code_of(error)
    except _ParserError as error:
        code = _misused(error)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except OSError as error:  # a disk that is full, a file that may not be read
        code = fail(str(error), FAILED)
    except (MemoryError, RuntimeError) as error:
        # torch is not imported to ask whether this is its error.
        if not isinstance(error, MemoryError) and type(error).__name__ != "OutOfMemoryError":
            raise
        code = fail(f"memory does not suffice: {error}", FAILED)
    if code == INTERRUPTED:
        errors.print("interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def _misused(error: Exception) -> int:
    """Says what the parser did not understand, and where to read on; bare ``adaponder`` has shown its help already."""
    context = getattr(error, "ctx", None)
    message = error.format_message().rstrip(".")
    if message and type(error).__name__ != "NoArgsIsHelpError":
        more = "" if context is None else f"; {context.command_path} --help says more"
        fail((message + more).replace("?;", "?"), MISUSED)
    return MISUSED
