"""adaponder inspect: shows the sizes of a checkpoint and the cost of a token at each depth, from its config alone."""

from __future__ import annotations

from typing import Annotated, Any

from adaponder.commands.shared import Checkpoint, Json, opt
from adaponder.errors import InputError
from adaponder.terminal import console, table, write_json


def inspect(
    checkpoint: Checkpoint,
    *,
    context: Annotated[
        int | None, opt("Tokens before the counted token; default 2047, or as many as the backbone allows.", "N", min=0)
    ] = None,
    json: Json = None,
) -> dict[str, Any]:
    """Show shapes, parameters with and without what the method adds, and the cost of a token at each depth."""
    from adaponder.backbones.shape import shape_of
    from adaponder.conversion.open import describe
    from adaponder.methods import method_class
    from adaponder.methods.cost import parameters_of, per_depth

    config = describe(checkpoint)
    limit = config.max_position_embeddings
    if context is None:
        context = min(2048, limit or 2048) - 1
    if context < 0 or (limit is not None and context >= limit):
        raise InputError(f"--context {context} must be between 0 and {(limit or 0) - 1}, the backbone's last position")
    shape = shape_of(config)
    counted = parameters_of(config, shape=shape)
    costs = per_depth(config, context=context, shape=shape)
    backbone = config.backbone_config
    facts = {
        "method": config.method,
        "iterations (K)": config.iterations,
        "backbone": backbone.model_type,
        "layers": shape.layers,
        "hidden size": shape.hidden,
        "vocabulary": shape.vocabulary,
        "positions": config.max_position_embeddings,
        "embedding scale": f"{config.embedding_scale:g}",
        "parameters": f"{counted.total:,}",
        "  of the backbone": f"{counted.backbone:,}",
        "  added by the method": f"{counted.added:,}",
    }
    facts |= method_class(config.method).described(config)
    console.print(table(checkpoint, ("", ""), facts.items()))
    rows = []
    for depth, cost in enumerate(costs, 1):
        flops = (cost.body + cost.attention, cost.expectation, cost.gates, cost.head, cost.flops)
        cells = (f"{value / 1e6:,.2f}" for value in flops)
        rows.append((depth, *cells, f"{cost.ratio:.2f}", f"{cost.kv_bytes / 1024:.1f}"))
    columns = ("read", "body", "expectation", "gates", "head", "MFLOP", "x vanilla", "K/V KiB")
    console.print()
    console.print(table(f"One more token after {context:,} (MFLOP; keys and values in bfloat16)", columns, rows))
    result = {"checkpoint": checkpoint, "context": context, "config": config.to_dict()}
    result |= {"parameters": {"backbone": counted.backbone, "added": counted.added}}
    result |= {"depths": [{"flops": c.flops, "ratio": c.ratio, "kv_bytes": c.kv_bytes} for c in costs]}
    write_json(json, result)
    return result
