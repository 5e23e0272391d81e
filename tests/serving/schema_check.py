"""Thousands of requests made from the OpenAPI document, valid ones and broken ones, on every route: none is a 5xx.

``python tests/serving/schema_check.py`` runs it; ``--record`` writes down in ``schema_check.json`` beside this file
what was run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from soak_support import get, run_parts, serving, wait_for, write_checkpoint

RECORD = Path(__file__).with_suffix(".json")
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
_EVERY_CHECK = [
    HealthCheck.too_slow,
    HealthCheck.data_too_large,
    HealthCheck.filter_too_much,
    HealthCheck.large_base_example,
]


def check_answer(case: Any, response: requests.Response, responses: dict[str, Any]) -> None:
    """Never 5xx; a status that the document knows; an error is told in OpenAI's shape."""
    about = f"{case.method} {case.path}: {response.status_code} {response.text[:300]} for {str(case.body)[:600]}"
    assert response.status_code < 500, about
    assert str(response.status_code) in responses or response.status_code in (404, 405, 414, 431), about
    if response.status_code >= 400 and response.content:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, about
        assert error["message"], about


def run_cases(url: str, cases: int, number: int) -> dict[str, Counter[str]]:
    """About so many cases, equally over the operations and over valid and broken ones; statuses by operation."""
    status, _, document = get(url, "/openapi.json")
    assert status == 200
    schema = schemathesis.openapi.from_dict(json.loads(document))
    operations = [one.ok() for one in schema.get_all_operations()]
    told: dict[str, Counter[str]] = {}
    session = requests.Session()
    session.trust_env = False
    bodies = [one for one in operations if one.body]
    for operation in operations:
        # Routes without a body have few different cases.
        each = -(-cases // (2 * len(bodies))) if operation in bodies else max(1, cases // 100)
        statuses = told[f"{operation.method.upper()} {operation.path}"] = Counter()
        for mode in MODES:
            _run_operation(operation, mode, each, number, url, session, statuses)
    return told


def run_in_processes(url: str, cases: int, number: int, jobs: int) -> dict[str, Counter[str]]:
    """The same, made by so many processes at once, each with its own seed."""
    each = -(-cases // jobs)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(run_cases, [url] * jobs, [each] * jobs, range(number, number + jobs)))
    return {name: sum((part[name] for part in parts), Counter()) for name in parts[0]}


def _run_operation(
    operation: Any,
    mode: GenerationMode,
    cases: int,
    number: int,
    url: str,
    session: requests.Session,
    statuses: Counter[str],
) -> None:
    responses = operation.definition.raw["responses"]

    @seed(number)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate,),
        suppress_health_check=_EVERY_CHECK,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        response = case.call(base_url=url, session=session, timeout=60)
        statuses[str(response.status_code)] += 1
        check_answer(case, response, responses)

    try:
        one()
    except Exception as problem:
        if type(problem).__name__ not in ("Unsatisfiable", "Unsatisfied"):
            raise


def cases(options: argparse.Namespace) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(write_checkpoint(Path(folder)), "--max-tokens", "8") as server,
    ):
        run_cases(server.url, 400, options.seed + 1)
        before = server.rss()
        told = run_in_processes(server.url, options.cases, options.seed, options.jobs)
        wait_for(lambda: not busy(server.url), "nothing is under way")
        after = server.rss()
        total = sum(sum(counts.values()) for counts in told.values())
        by_status = sum(told.values(), Counter())
        assert total >= options.cases, f"only {total} cases"
        assert before is None or after is None or after < before + (64 << 20), (before, after)
        return {
            "cases": total,
            "by_status": dict(sorted(by_status.items())),
            "by_operation": {name: dict(sorted(counts.items())) for name, counts in told.items()},
            "server_errors": sum(count for status, count in by_status.items() if status.startswith("5")),
            "rss_before": before,
            "rss_after": after,
        }


def busy(url: str) -> int:
    """Completions and texts under way."""
    counts = json.loads(get(url, "/ready")[2])
    return counts["requests"] + counts["jobs"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2, help="processes that make cases")


if __name__ == "__main__":
    packages = ("schemathesis", "hypothesis", "fastapi", "starlette", "uvicorn", "pydantic")
    sys.exit(run_parts({"cases": cases}, RECORD, add_options, __doc__ or "", packages))
