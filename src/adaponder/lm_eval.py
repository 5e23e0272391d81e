"""``python -m adaponder.lm_eval …`` runs lm-eval's own command line with AdaPonder models registered.

``--model hf`` opens an AdaPonder checkpoint like any other; ``--model adaponder`` also accepts policies and profiles
(:class:`adaponder.commands.lm_eval_model.AdaPonderLM`). Both evaluate at adaptive depth.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from adaponder.cli import exit_code
from adaponder.errors import AdaPonderError, InputError

if find_spec("lm_eval") is not None:
    from adaponder.commands import lm_eval_model  # noqa: F401  (registers it)


def main() -> None:
    """Runs lm-eval's command line; errors of this package are one line each, with the exit codes of ``adaponder``."""
    try:
        if find_spec("lm_eval") is None:
            raise InputError("lm-eval is not installed: pip install 'adaponder[eval]'")
        from lm_eval.__main__ import cli_evaluate

        from adaponder.checkpoints.loading import refuse_code

        for folder in _folders(sys.argv[1:]):
            refuse_code(folder)  # lm-eval's own models refuse code too, but with a long traceback
        cli_evaluate()
    except AdaPonderError as error:
        sys.exit(exit_code(error))


def _folders(words: Sequence[str]) -> list[Path]:
    """Returns the local folders that ``--model_args`` names as ``pretrained`` or ``tokenizer``."""
    named = re.findall(r"""(?:pretrained|tokenizer)["']?\s*[=:]\s*["']?([^,"'}]+)""", " ".join(words))
    return [folder for folder in (Path(name.split()[0]) for name in named if name.strip()) if folder.is_dir()]


if __name__ == "__main__":
    main()
