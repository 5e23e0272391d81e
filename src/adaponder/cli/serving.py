"""The command that serves a model."""

from __future__ import annotations

from adaponder.cli.app import app
from adaponder.cli.parsing import refuse
from adaponder.commands.options import ServeOptions
from adaponder.errors import InputError


@app.taking(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a checkpoint: OpenAI's routes at /v1, and at / a page that shows where it reads more often.

    Any OpenAI client works. What only this server has stands under [bold]adaponder[/] in requests and answers.

    [dim]adaponder serve runs/demo[/]

    [dim]curl localhost:8000/v1/completions -H "Content-Type: application/json" -d '{"model": "demo", "prompt":
    "import ", "adaponder": {"depth": true}}'[/]

    [dim]adaponder serve runs/demo --host 0.0.0.0 --api-key-file keys.txt --allow-host models.example.org[/]
    """
    try:
        import fastapi  # noqa: F401  (only whether it is there)
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as problem:
        raise InputError(f"serve: {problem.name} is missing; pip install 'adaponder[serve]'") from None
    if not options.ray:
        refuse(
            "one server: say --ray",
            replicas=options.replicas > 1,
            max_replicas=options.max_replicas,
            ray_address=options.ray_address,
        )
    from adaponder.commands import serve as command

    command.run(options)
