"""Command name to typed function: this folder parses, and nothing else."""

from __future__ import annotations

import sys

from rich.markup import escape

from adaponder.cli import bench, evaluation, model, training  # noqa: F401  (registers their commands)
from adaponder.cli.app import app
from adaponder.errors import AdaPonderError, ConfigError, InputError
from adaponder.terminal import errors

__all__ = ["app", "main"]


def main() -> None:
    """The entry point: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    try:
        app()
    except AdaPonderError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        sys.exit(2 if isinstance(error, (InputError, ConfigError)) else 1)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)
