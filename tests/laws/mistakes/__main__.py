"""Makes each listed mistake in a copy of the source and holds the tests against it: every one must be caught.

``python tests/laws/mistakes`` tries all of them; ``-k beams -k masks`` those with one of these words in their name or
function; ``--record`` writes down in ``record.json`` beside this file what caught each, and at which commit.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mistakes.catalogue import FOLDERS, HERE, ROOT, Mistake, load, problems
from mistakes.trial import Outcome, run, warm

RECORD = HERE / "record.json"


def main() -> int:
    asked = _arguments()
    mistakes = [each for each in load() if any(word in f"{each.name} {each.function}".lower() for word in asked.k)]
    if rotten := problems(mistakes):
        print(*rotten, sep="\n")
        return 1
    if not mistakes:
        print(f"-k {' -k '.join(asked.k)}: no mistake has this in its name or function")
        return 2
    about = _source(asked.commit) if asked.record else None
    began = time.monotonic()
    warm()
    print(f"{len(mistakes)} mistakes; first, their tests on the source as it is", flush=True)
    if unsound := _unsound(mistakes, asked.jobs):
        print(*unsound, sep="\n")
        return 1
    outcomes = _try_all(mistakes, asked.jobs, about)
    survivors = [each.name for each in mistakes if outcomes[each.name].survived(each.caught_by)]
    print(f"{len(mistakes) - len(survivors)} of {len(mistakes)} caught in {_minutes(time.monotonic() - began)}")
    if survivors:
        print("not caught:", *survivors, sep="\n  ")
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", action="append", metavar="WORD", help="only mistakes with this in their name or function")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--record", action="store_true", help=f"write what is caught to {RECORD.relative_to(ROOT)}")
    parser.add_argument("--commit", help="for the record, where there is no git to ask")
    asked = parser.parse_args()
    asked.k = [word.lower() for word in asked.k or [""]]  # every name has an empty text in it
    return asked


def _unsound(mistakes: list[Mistake], jobs: int) -> list[str]:
    """Named tests that do not pass on the source as it is; those of one file run together."""
    names = sorted({name for each in mistakes for name in each.caught_by})
    parts = [tuple(part) for _, part in groupby(names, key=lambda name: name.partition("::")[0])]
    found = []
    for index, outcome in run([(None, part) for part in parts], jobs):
        if wrong := outcome.unsound(parts[index]):
            found += [_tail(outcome), *wrong]
    return found


def _try_all(mistakes: list[Mistake], jobs: int, about: dict | None) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    began = time.monotonic()
    for index, outcome in run([(each, each.caught_by) for each in mistakes], jobs):
        mistake = mistakes[index]
        outcomes[mistake.name] = outcome
        survived = outcome.survived(mistake.caught_by)
        if survived:
            print(_tail(outcome))
        elif about is not None:
            _record(mistake.name, outcome, about)
        left = (time.monotonic() - began) / len(outcomes) * (len(mistakes) - len(outcomes))
        print(
            f"[{len(outcomes):3}/{len(mistakes)}] {'SURVIVED' if survived else 'caught  '} {outcome.seconds:5.1f} s  "
            f"{mistake.name}  (about {_minutes(left)} left)",
            *survived,
            sep="\n          ",
            flush=True,
        )
    return outcomes


def _tail(outcome: Outcome) -> str:
    return "\n".join(outcome.log.splitlines()[-30:])


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _source(commit: str | None) -> dict:
    """Returns what a record says of the source; asks another process, since the trials begin without adaponder."""
    tried = (*FOLDERS.values(), "tests", f":!{RECORD.relative_to(ROOT)}")
    code = (
        "import json, sys; from benchmarks.harness import commit_of, versions; commit, *tried = json.loads(sys.argv[1])"
    )
    code += "; print(json.dumps([commit_of(commit, required=True, paths=tuple(tried)), versions()]))"
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    command = [sys.executable, "-c", code, json.dumps([commit, *map(str, tried)])]
    answer = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.PIPE)
    commit, versions = json.loads(answer.stdout)
    return {"date": datetime.date.today().isoformat(), "commit": commit, "versions": versions}


def _record(name: str, outcome: Outcome, about: dict) -> None:
    """Writes down what caught a mistake, and at which commit; forgets mistakes that have left the catalogue."""
    record = json.loads(RECORD.read_text())
    record["caught"][name] = {"commit": about["commit"], "by": sorted(outcome.refuted)}
    known = {mistake.name for mistake in load()}
    caught = {name: record["caught"][name] for name in sorted(known & record["caught"].keys())}
    commits = {entry["commit"] for entry in caught.values()}
    runs = {run["commit"]: run for run in [*record["runs"], about] if run["commit"] in commits}
    RECORD.write_text(json.dumps({"runs": list(runs.values()), "caught": caught}, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
