"""A rule of your own decides how often each token is read.

    python examples/own_policy.py [--max-new-tokens 24]

You learn to write a policy: a class in one file, which generation, evaluation, the engine and the command line take
like those of the package. Here on the model of Python code that comes with it.
"""

import argparse
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import AutoTokenizer

from adaponder import AdaPonderForCausalLM, Engine, Policy, PolicyInput, Request, sample_path

PROMPT = "def mean(values):\n    return "


@dataclass(frozen=True)
class UntilLikely(Policy):
    """A token is read again until its likeliest successor has at least this probability."""

    probability: float
    word: ClassVar[str] = "until-likely"  # its text form is until-likely:0.5
    value_field: ClassVar[str] = "probability"

    def __call__(self, rows: PolicyInput) -> Tensor:
        # One answer for each row: a token after one iteration. Rows may stand at different iterations, so compare
        # tensors and never branch on their values. rows.gate, rows.hidden and rows.position are there as well.
        return torch.softmax(rows.logits.float(), dim=-1).amax(-1) < self.probability

    def heads(self, iteration: int) -> int:
        """How often the rule computes a token's logits to decide; the meter counts it."""
        return 1


def main(tokens: int) -> None:
    model = AdaPonderForCausalLM.from_pretrained(sample_path()).eval()
    tokenizer = AutoTokenizer.from_pretrained(sample_path())
    engine = Engine(model, lanes=3)
    policies = {"its own gates": None} | {f"until {p:.0%}": UntilLikely(p) for p in (0.3, 0.9)}
    prompt = tokenizer(PROMPT).input_ids
    requests = [Request(prompt, max_new_tokens=tokens, temperature=0, policy=policy) for policy in policies.values()]
    for name, [completion] in zip(policies, engine.generate(requests), strict=True):
        print(f"{name}: mean depth {completion.mean_depth:.2f}")
        print(PROMPT + tokenizer.decode(completion.ids), "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", "--tokens", type=int, default=24, help="how many to generate")
    main(parser.parse_args().max_new_tokens)
