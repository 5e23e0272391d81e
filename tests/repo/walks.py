"""Counts the moves between modules on two walks through the package, and how many go against the import order.

The walks are what a reader follows: ``input_ids`` from ``AdaPonderForCausalLM.forward`` down to the ops, and a recipe
from the command line to the first forward of the training loop. Every call is recorded at run time, on a tiny model.
A move is a distinct pair (caller, called) of different top-level modules or folders of the package, the rooms whose
order tests/repo/test_house.py holds; a move goes up where the called room stands above the calling one in its
``ORDER``. Calls that go through torch, transformers or typer count from the last file of the package that was left.
Moves between files are counted beside: they grow with every file that is split in two, inside one room or not.

    python tests/repo/walks.py                             this tree
    PYTHONPATH=OTHER/src python tests/repo/walks.py        another tree, by its own order
    python tests/repo/walks.py --moves                     also lists every move; ``^`` marks those that go up

tests/repo/walks.json holds the figures of the tree before its root was sorted into folders.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

if "PYTHONPATH" not in os.environ:
    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import adaponder

PACKAGE = Path(str(adaponder.__file__)).parent
_PREFIX = f"{PACKAGE}{os.sep}"

Move = tuple[str, str]


class Count(NamedTuple):
    """Distinct moves of a walk between rooms and between files, and those of each that go up."""

    rooms: int
    rooms_up: int
    files: int
    files_up: int


def import_order() -> list[str]:
    """``ORDER`` in the tests of the tree that ``adaponder`` is imported from."""
    for node in ast.parse((PACKAGE.parents[1] / "tests" / "repo" / "test_house.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "ORDER":
            return ast.literal_eval(node.value)
    raise SystemExit("tests/repo/test_house.py has no ORDER")


def room_of(file: str) -> str:
    return Path(file).parts[0].removesuffix(".py")


def count(moves: set[Move], order: list[str]) -> Count:
    def goes_up(caller: str, called: str) -> bool:
        return order.index(room_of(called)) > order.index(room_of(caller))

    between_rooms = {(room_of(a), room_of(b)) for a, b in moves if room_of(a) != room_of(b)}
    up = {move for move in moves if goes_up(*move)}
    return Count(len(between_rooms), len({(room_of(a), room_of(b)) for a, b in up}), len(moves), len(up))


@contextmanager
def recorded(moves: set[Move], *, start: str | None = None, stop: str | None = None) -> Iterator[None]:
    """Adds every move made inside to ``moves``; what happens while a module is imported is left out.

    ``start`` and ``stop`` are qualified names of functions of the package: recording begins with the first call of
    one, and ends before the first call of the other.
    """
    importing, on = 0, start is None

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal importing, on
        code = frame.f_code
        if code.co_name == "<module>" and event in ("call", "return"):
            importing += 1 if event == "call" else -1
        if event != "call" or importing or not code.co_filename.startswith(_PREFIX):
            return
        if code.co_qualname == stop:
            sys.setprofile(None)
        elif code.co_qualname == start:
            on = True
        elif on:
            caller = frame.f_back
            while caller is not None and not caller.f_code.co_filename.startswith(_PREFIX):
                caller = caller.f_back
            if caller is not None and caller.f_code.co_filename != code.co_filename:
                moves.add((caller.f_code.co_filename[len(_PREFIX) :], code.co_filename[len(_PREFIX) :]))

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)


def walk_of_input_ids() -> set[Move]:
    """One dense forward in training, with a loss, and one compact forward of the same tiny model."""
    import torch

    from adaponder import AdaPonderConfig, AdaPonderForCausalLM, Objective

    torch.manual_seed(0)
    backbone = _SHAPE | {"vocab_size": 61}
    config = AdaPonderConfig(backbone_config=backbone, method="adaponder", iterations=3, tau=0.5, gate_bias=0.0)
    model, ids = AdaPonderForCausalLM(config), torch.randint(61, (2, 9))
    moves: set[Move] = set()
    with recorded(moves, start="AdaPonderForCausalLM.forward"):
        model.train()(ids, labels=ids, objective=Objective(ponder_weight=0.1, ponder_fraction=0.5), execution="dense")
    with recorded(moves, start="AdaPonderForCausalLM.forward"), torch.no_grad():
        model.eval()(ids, execution="compact")
    return moves


def walk_of_a_recipe() -> set[Move]:
    """``adaponder train`` with a recipe of one step on data that is prepared, up to the loop's first forward."""
    moves: set[Move] = set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = [{"text": " ".join(f"word{(number * 7 + i) % 50}" for i in range(30))} for number in range(200)]
        (folder / "text.jsonl").write_text("\n".join(map(json.dumps, text)))
        recipe = {
            "model": {"backbone": _SHAPE, "iterations": 3},
            "data": {"source": str(folder / "shards"), "sequence": 32},
            "train": {"steps": 1, "global_batch": 2, "eval_tokens": 64},
        }
        (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
        shards = ["--tokenizer", "train-bpe:300", "--validation", "0.2", "--workers", "1", "--out", f"{folder}/shards"]
        _command("prepare", f"{folder}/text.jsonl", *shards)
        with recorded(moves, stop="AdaPonderForCausalLM.forward"):
            _command("train", f"{folder}/recipe.yaml", "--out", f"{folder}/run")
    return moves


def _command(*arguments: str) -> None:
    """Runs ``adaponder ARGUMENTS`` in this process, in silence."""
    from adaponder.cli import main

    before, sys.argv = sys.argv, ["adaponder", *arguments]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            main()
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"adaponder {' '.join(arguments)}:\n{said.getvalue()}") from None
    finally:
        sys.argv = before


_SHAPE: dict[str, Any] = {
    "model_type": "gpt_neox",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
WALKS: dict[str, Callable[[], set[Move]]] = {"input_ids": walk_of_input_ids, "recipe": walk_of_a_recipe}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--moves", action="store_true", help="list every move")
    parser.add_argument("--json", metavar="PATH", help="write the figures there")
    options = parser.parse_args()
    order, counts = import_order(), {}
    print(f"{'walk':<12}{'moves':>8}{'up':>6}{'between files':>18}{'up':>6}")
    for name, walk in WALKS.items():
        moves = walk()
        counts[name] = found = count(moves, order)
        print(f"{name:<12}{found.rooms:>8}{found.rooms_up:>6}{found.files:>18}{found.files_up:>6}")
        for caller, called in sorted(moves) if options.moves else ():
            mark = "^" if order.index(room_of(called)) > order.index(room_of(caller)) else " "
            print(f"  {mark} {caller} -> {called}")
    if options.json:
        Path(options.json).write_text(json.dumps({name: each._asdict() for name, each in counts.items()}, indent=1))


if __name__ == "__main__":
    main()
