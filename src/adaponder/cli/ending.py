"""How a command ends: its exit code, and one line about what went wrong."""

from __future__ import annotations

import re

from adaponder.errors import AdaPonderError, ConfigError, InputError
from adaponder.terminal import errors, line

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


def code_of(error: AdaPonderError) -> int:
    """Says in one line what went wrong, and returns the exit code: 2 for wrong use, 1 for a failure."""
    return fail(str(error), MISUSED if isinstance(error, (InputError, ConfigError)) else FAILED)


def fail(message: str, code: int) -> int:
    """Says in one line what went wrong, and returns ``code``."""
    errors.print(line(("error:", "bold red"), " ", re.sub(r"\s*\n\s*", " ", message.strip())), soft_wrap=True)
    return code
