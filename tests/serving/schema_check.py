"""Sends thousands of requests made from the OpenAPI document to every route: none is a 5xx.

A third matches the document; a third also has no fields that exclude each other, so that hundreds are answered; a third
is broken. ``python tests/serving/schema_check.py`` runs it; ``--record`` writes ``schema_check.json`` beside this file.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / folder) for folder in ("src", "", "tests")]

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from harness_support import VOCABULARY
from soak_support import get, ready, run_parts, serving, steady_memory, wait_for

RECORD = Path(__file__).with_suffix(".json")
MOST_TOKENS = 8
POLICIES = ("fixed:1", "fixed:2", "gate:0.3", "entropy:2.5", "random:0.5")
QUIET = {"database": None, "deadline": None, "phases": (Phase.generate,), "suppress_health_check": list(HealthCheck)}


def check_answer(case: Any, response: requests.Response, responses: dict[str, Any]) -> None:
    """Checks that a status is no 5xx and in the document, and that an error has OpenAI's form."""
    about = f"{case.method} {case.path}: {response.status_code} {response.text[:300]} for {str(case.body)[:600]}"
    assert response.status_code < 500, about
    assert str(response.status_code) in responses or response.status_code in (404, 405, 414, 431), about
    if response.status_code >= 400 and response.content:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}, about
        assert error["message"], about


def agreeing(body: Any) -> Any:
    """Returns a body as a client would send it: short, and with no two fields that exclude each other."""
    if not isinstance(body, dict):
        return body
    body = _short(body)
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name) is not None:
            body[name] %= MOST_TOKENS + 1
    if body.get("max_tokens") is not None:
        body.pop("max_completion_tokens", None)
    if body.get("logit_bias"):
        body["logit_bias"] = {str(int(token) % VOCABULARY): bias for token, bias in body["logit_bias"].items()}
    if body.get("n") is not None:
        body["n"] = 1 + body["n"] % 3
    if body.get("best_of") is not None:
        body["best_of"] = body.get("n") or 1 if body.get("stream") else max(body["best_of"] % 5, body.get("n") or 1)
    if body.get("stream_options") is not None:
        body["stream"] = True
        body.pop("best_of", None)
    if body.get("stream") and body.get("echo"):
        body.pop("logprobs", None)
    if body.get("top_logprobs") is not None:
        body["logprobs"] = True
    if isinstance(body.get("adaponder"), dict):
        body["adaponder"] = _one_rule(body["adaponder"])
    return body


def _short(value: Any) -> Any:
    """Returns a copy with short lists and texts, in which 2.0, which a schema calls an integer, is 2."""
    if isinstance(value, dict):
        return {name: _short(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value[:3]]
    if isinstance(value, str):
        return value[:12]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _one_rule(extension: dict[str, Any]) -> dict[str, Any]:
    """Returns an extension with at most one rule, which the tiny model knows."""
    extension.pop("budget", None)  # it has no profiles
    if extension.get("policy") is not None:
        extension["policy"] = POLICIES[len(extension["policy"]) % len(POLICIES)]
        extension.pop("tau", None)
    if extension.get("min_tokens"):
        extension["min_tokens"] = 0
    if extension.get("depths"):
        extension["depths"] = {str(int(slot) % 2): depth for slot, depth in list(extension["depths"].items())[:2]}
    return extension


def run_cases(url: str, cases: int, number: int) -> dict[str, Counter[str]]:
    """Sends about ``cases`` requests, equally over operations and kinds; returns statuses by operation."""
    status, _, document = get(url, "/openapi.json")
    assert status == 200
    schema = schemathesis.openapi.from_dict(json.loads(document))
    operations = [operation.ok() for operation in schema.get_all_operations()]
    with_body = sum(bool(operation.body) for operation in operations)
    session = requests.Session()
    session.trust_env = False
    by_operation: dict[str, Counter[str]] = {}
    for operation in operations:
        statuses = by_operation[f"{operation.method.upper()} {operation.path}"] = Counter()
        # Routes without a body have few different cases.
        count = -(-cases // (3 * with_body)) if operation.body else max(1, cases // 100)
        for kind in ("plain", "agreeing", "broken") if operation.body else ("plain", "broken"):
            _run_operation(operation, kind, count, number, url, session, statuses)
    return by_operation


def _run_operation(
    operation: Any, kind: str, cases: int, number: int, url: str, session: requests.Session, statuses: Counter[str]
) -> None:
    responses = operation.definition.raw["responses"]
    mode = GenerationMode.NEGATIVE if kind == "broken" else GenerationMode.POSITIVE

    @seed(number)
    @settings(max_examples=cases, **QUIET)
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if kind == "agreeing":
            case.body = agreeing(case.body)
        response = case.call(base_url=url, session=session, timeout=60)
        statuses[str(response.status_code)] += 1
        check_answer(case, response, responses)

    try:
        send()
    except Exception as problem:
        if type(problem).__name__ not in ("Unsatisfiable", "Unsatisfied"):
            raise


def cases(options: argparse.Namespace) -> dict[str, Any]:
    with serving("--max-tokens", str(MOST_TOKENS)) as server:
        run_cases(server.url, 400, options.seed + 1)
        with steady_memory(server, 64) as memory:
            by_operation = run_cases(server.url, options.cases, options.seed)
            wait_for(lambda: not any(ready(server.url)[name] for name in ("requests", "jobs")), "nothing is under way")
        by_status = sum(by_operation.values(), Counter())
        for path in ("/v1/completions", "/v1/chat/completions", "/score", "/tokenize", "/detokenize"):
            counts = by_operation[f"POST {path}"]
            assert counts["200"] >= options.cases // 50, f"{path}: {counts}"
        assert by_status.total() >= options.cases, by_status
        return {
            "cases": by_status.total(),
            "by_status": dict(sorted(by_status.items())),
            "by_operation": {name: dict(sorted(counts.items())) for name, counts in by_operation.items()},
        } | memory


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", type=int, default=10_000)


if __name__ == "__main__":
    packages = ("schemathesis", "hypothesis", "fastapi", "starlette", "uvicorn", "pydantic")
    sys.exit(run_parts({"cases": cases}, RECORD, add_options, __doc__ or "", packages))
