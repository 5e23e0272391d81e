"""The long checks of a running server, for seconds; ``make test-serve`` runs them whole."""

import pytest
from fuzz import attack
from schema_check import run_cases
from soak import hang_up, same_as_alone

from adaponder.serving.served import Served
from adaponder.serving.settings import Settings
from harness_support import reader, words
from serving_support import Running, serving
from soak_support import NAME, wait_for


@pytest.fixture(scope="module")
def server():
    with serving(Served(reader(), words(), name=NAME), Settings(lanes=16)) as running:
        yield running


def test_streams_at_once_equal_their_solo_runs_and_leave_no_row(server: Running):
    assert same_as_alone(server.address, 16, seed=3)["equal_to_solo"] == 16


def test_clients_that_hang_up_leave_nothing(server: Running):
    hang_up(server.address, 40, seed=4, at_once=20)


def test_broken_bytes_harm_no_other_client(server: Running):
    found = attack(server.address, requests=60, idlers=4, seed=5, good=8, seconds=1.0)
    assert sum(found["answers_by_status"].values()) >= 60


def test_cases_made_from_the_document_get_no_server_error(server: Running):
    statuses = run_cases(server.address, 12, number=6)
    assert set(statuses) >= {"POST /v1/completions", "POST /v1/chat/completions", "POST /score", "GET /v1/models"}
    assert sum(sum(counts.values()) for counts in statuses.values()) >= 12
    wait_for(lambda: not server.worker.sequences and not server.worker.jobs, "nothing is under way")
