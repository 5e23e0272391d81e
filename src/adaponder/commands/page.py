"""adaponder page: writes the page of ``adaponder serve`` as static files that run a model in the browser."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

from adaponder.commands import shared
from adaponder.commands.serve import default_name, require_name
from adaponder.commands.shared import opt
from adaponder.terminal import console, line, write_json


@shared.command
def page(
    checkpoint: shared.Checkpoint,
    *,
    out: Annotated[Path, shared.folder("Where to write; must be new or empty.")],
    name: Annotated[str | None, opt("Name of the model on the page; default: the checkpoint's.", "MODEL")] = None,
    json: shared.Json = None,
) -> dict[str, Any]:
    """Write the page of adaponder serve as a static folder; the model runs in the visitor's browser.

    Nothing that visitors type leaves their browser. For GPT-NeoX backbones with at most 50 MB of weights.

    [dim]adaponder page sample --out page[/]
    [dim]python -m http.server --directory page[/]
    """
    from adaponder.conversion.convert import require_empty
    from adaponder.conversion.open import describe
    from adaponder.serving.folder import require_runnable, write_page
    from adaponder.serving.served import Served

    require_empty(out)
    require_name(name)
    require_runnable(describe(checkpoint), checkpoint)  # before weights are read
    model, folder, tokenizer = shared.NarrowOpening(dtype="float32").generator(checkpoint)
    with console.status(f"writing {out} …"):
        served = Served(model, tokenizer, folder, name=name or default_name(checkpoint))
        sizes = write_page(served, out, source=checkpoint)
    weights, other = (f"{size / 1e6:,.2f} MB" for size in sizes.values())
    contents = f" (weights {weights}, everything else {other})"
    console.print(line("→ ", (str(out), "bold"), contents), soft_wrap=True)
    console.print_whole("See it: " + shlex.join(["python", "-m", "http.server", "--directory", str(out)]))
    result = {"checkpoint": checkpoint, "out": str(out), "bytes": sizes}
    write_json(json, result)
    return result
