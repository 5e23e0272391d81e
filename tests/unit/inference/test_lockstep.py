"""Lock-step batching says the same as depth batching, and takes the ticks that its rule says."""

import pytest

from adaponder.errors import InputError
from adaponder.inference import Engine, Request
from support import stir, tiny

DEPTHS = [[1 + (3 * place + lane) % 4 for place in range(6)] for lane in range(4)]


def requests() -> list[Request]:
    return [
        Request(prompt=[7 * lane + 1], max_new_tokens=6, temperature=0.0, depths=depths)
        for lane, depths in enumerate(DEPTHS)
    ]


def run(batching: str, **options) -> tuple[Engine, list]:
    model = tiny("adaponder", iterations=4).eval()
    stir(model)
    engine = Engine(model, drafts=0, lanes=4, tokens=30, batching=batching, **options)
    return engine, [(done[0].ids, done[0].depths) for done in engine.generate(requests())]


def test_lock_step_says_the_same_and_takes_longer():
    depth, expected = run("depth")
    deepest = [max(lane[place] for lane in DEPTHS) for place in range(6)]
    longest = max(sum(lane[:6]) for lane in DEPTHS)
    assert depth.statistics["ticks"] == longest
    for batching in ("padded", "dropping"):
        engine, said = run(batching)
        assert said == expected
        assert engine.statistics["ticks"] == sum(deepest) > longest
        assert engine.statistics["rows"] == depth.statistics["rows"]
        assert run(batching, burst=5, late=True)[1] == expected


def test_dropping_needs_to_know_depths():
    engine = Engine(tiny("adaponder", iterations=4).eval(), lanes=1, tokens=30, batching="dropping")
    with pytest.raises(InputError, match="depths: with batching='dropping'"):
        engine.submit(Request(prompt=[1], max_new_tokens=4))
    with pytest.raises(InputError, match="batching='waves'"):
        Engine(tiny("adaponder", iterations=4).eval(), batching="waves")
