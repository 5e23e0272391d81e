"""CALM's confidence rules through the model: by hand, in every execution, and turned to a depth."""

import pytest
import torch

from adaponder import AdaPonderForCausalLM, FixedDepth, PolicyInput
from adaponder.policies import Confidence, Policy, Similarity
from support import ids, tiny

K = 4
EXECUTIONS = ("dense", "compact")


def model_of(method: str) -> AdaPonderForCausalLM:
    """Gates of moderate opinion, so that iterations change something."""
    model = tiny(method, iterations=K)
    for parameter in model.method.parameters():
        parameter.data *= 0.3
    return model


def expected_depth(keep: torch.Tensor) -> torch.Tensor:
    """From what the rule says after each iteration ``[…, K - 1]``: a token that has halted stays so."""
    return 1 + keep.long().cumprod(-1).sum(-1)


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("threshold", [0.15, (0.1, 0.3, 0.05)])
def test_a_token_reads_on_while_its_two_best_guesses_are_close(execution, threshold):
    model, tokens = model_of("adaponder"), ids(3, 9)
    output = model(tokens, policy=Confidence(threshold), execution=execution, output_iteration_logits=True)
    best = output.iteration_logits[:-1].softmax(-1).sort(-1, descending=True).values
    gap = (best[..., 0] - best[..., 1]).movedim(0, -1)
    assert torch.equal(output.depth, expected_depth(gap <= torch.tensor(threshold, dtype=gap.dtype)))
    assert len(output.depth.unique()) > 2


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_token_reads_on_until_its_hidden_state_has_settled(execution):
    model, tokens = model_of("ouro"), ids(3, 9)
    states = torch.stack(model(tokens, policy=FixedDepth(K), output_hidden_states=True).hidden_states)
    threshold = float(torch.cosine_similarity(states[1], states[0], dim=-1).median())
    output = model(tokens, policy=Similarity(threshold), execution=execution, output_hidden_states=True)
    states = torch.stack(output.hidden_states)
    cosine = torch.cosine_similarity(states[1:-1], states[:-2], dim=-1).movedim(0, -1)
    keep = torch.cat([torch.ones_like(cosine[..., :1], dtype=torch.bool), cosine <= threshold], dim=-1)
    assert torch.equal(output.depth, expected_depth(keep))
    assert output.depth.min() == 2
    assert len(output.depth.unique()) > 1


@pytest.mark.parametrize(("method", "policy"), [("act", Confidence(0.2)), ("pondernet", Similarity(0.7))])
def test_dense_compact_and_cached_decide_alike(method, policy: Policy):
    model, tokens = model_of(method), ids(2, 10)
    dense, compact = (model(tokens, policy=policy, execution=execution) for execution in EXECUTIONS)
    torch.testing.assert_close(compact.logits, dense.logits, rtol=0, atol=1e-12)
    ledger, logits = None, []
    for start, end in ((0, 5), (5, 6), (6, 10)):
        output = model(tokens[:, start:end], policy=policy, past_key_values=ledger, use_cache=True)
        ledger = output.past_key_values
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, 1), dense.logits, rtol=0, atol=1e-12)
    assert torch.equal(ledger.depth, dense.depth)
    assert torch.equal(compact.depth, dense.depth)
    assert len(dense.depth.unique()) > 1


def test_at_its_ends_everybody_reads_to_the_end_or_halts_at_once():
    model, tokens = model_of("adaponder"), ids()
    assert model(tokens, policy=Confidence(1.0)).depth.unique().tolist() == [K]
    assert model(tokens, policy=Confidence(-1.0)).depth.unique().tolist() == [1]
    assert model(tokens, policy=Similarity(-2.0)).depth.unique().tolist() == [2], "nothing to compare with before"


def test_logits_exist_for_a_few_rows_at_a_time():
    most = 0

    def head(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(hidden))
        return hidden

    count = 3000
    whole = torch.zeros(count, dtype=torch.long)
    hidden = torch.randn(count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = PolicyInput(
        iteration=whole,
        gate=torch.zeros(count),
        hidden=hidden,
        position=whole,
        seed=whole,
        sequence=whole,
        slot=whole,
        active=whole.bool(),
        head=head,
    )
    best = hidden.softmax(-1).topk(2).values
    assert torch.equal(Confidence(0.2)(rows), best[:, 0] - best[:, 1] <= 0.2)
    assert most <= 1024
