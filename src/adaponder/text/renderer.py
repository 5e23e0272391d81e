"""Renders chat templates in a separate process: a template is a program in a checkpoint, and may run forever.

:class:`adaponder.text.prompts.TemplateRenderer` runs this file as a script, which does not import the package. It reads
one request per line and writes one answer per line. If a template uses more processor time than allowed, the kernel
ends the process.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

SECONDS = 1.0


def _answer(request: dict[str, Any], mebibytes: int, characters: int) -> dict[str, Any]:
    """Returns the ``text`` and its ``spans`` marked as generated, or the exceeded ``limit``, or an ``error``."""
    try:
        (text,), spans = render_jinja_template(**request)
    except MemoryError:
        return {"limit": f"{mebibytes} MiB of memory"}
    except Exception as problem:  # a template may raise anything
        return {"error": str(problem)[:1000] or type(problem).__name__}
    if len(text) > characters:
        return {"limit": f"{characters:,} characters of output"}
    return {"text": text, "spans": spans[0] if spans else []}


def main() -> None:
    """Answers requests until standard input ends; the arguments are limits: MiB of memory, characters of output."""
    mebibytes, characters = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    with suppress(OSError), open("/proc/self/statm") as sizes:  # Linux only
        size = int(sizes.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + mebibytes * 2**20, resource.RLIM_INFINITY))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # SIGPROF ends the process
        answer = _answer(json.loads(line), mebibytes, characters)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
