"""Renders chat templates in a process of its own: a template is a program of the checkpoint, and may run without end.

The process is started by its path (:class:`adaponder.text.prompts.TemplateRenderer`) and does not import the package.
It reads one request per line and writes one answer per line. If a template uses more processor time than
allowed, the kernel ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

SECONDS, MEBIBYTES, CHARACTERS = 1.0, 64, 1_000_000


def _answer(request: dict[str, Any]) -> dict[str, str]:
    """Returns the rendered ``text``, or why there is none: a ``limit`` that was exceeded, or an ``error``."""
    try:
        (text,), _ = render_jinja_template(**request)
    except MemoryError:
        return {"limit": f"{MEBIBYTES} MiB of memory"}
    except Exception as problem:  # a template may raise anything
        return {"error": str(problem)[:1000] or type(problem).__name__}
    return {"text": text} if len(text) <= CHARACTERS else {"limit": f"{CHARACTERS:,} characters of output"}


def main() -> None:
    """Answers requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    with suppress(OSError), open("/proc/self/statm") as sizes:  # Linux only
        size = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEBIBYTES * 2**20, resource.RLIM_INFINITY))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process
        answer = _answer(json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
