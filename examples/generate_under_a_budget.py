"""Generate at a mean depth of your choice, from one checkpoint.

    python examples/generate_under_a_budget.py [--max-new-tokens 32]

You learn to use a budget: thresholds that `adaponder calibrate` found for a mean depth, stored beside the weights by
name. The model of Python code that comes with the package has them from budget-1.25 to budget-3.75; for your own run

    adaponder calibrate runs/demo --data data/stdlib-train-bpe-2048 --budget 3.2

A budget is met on average over text like that it was calibrated on; a single prompt may be easier or harder.
"""

import argparse

from transformers import AutoTokenizer

from adaponder import AdaPonderForCausalLM, Engine, Request, load_profile, sample_path

PROMPTS = ["import os\n", "class Stack:\n    def push(self, item):\n", "def area(radius):\n    return ", "for name in "]
BUDGETS = (1.25, 1.5, 2, 2.5, 2.75)


def main(tokens: int) -> None:
    model = AdaPonderForCausalLM.from_pretrained(sample_path()).eval()
    tokenizer = AutoTokenizer.from_pretrained(sample_path())
    engine = Engine(model, lanes=len(PROMPTS) * len(BUDGETS))
    # Requests with different budgets share every pass: in the engine each token costs the rows that it uses.
    requests = [
        Request(tokenizer(prompt).input_ids, max_new_tokens=tokens, temperature=0, policy=policy)
        for policy in (load_profile(sample_path(), f"budget-{budget:g}") for budget in BUDGETS)
        for prompt in PROMPTS
    ]
    completions = [completion for [completion] in engine.generate(requests)]
    by_budget = {budget: completions[i * len(PROMPTS) :][: len(PROMPTS)] for i, budget in enumerate(BUDGETS)}
    for budget, mine in by_budget.items():
        depths = [depth for completion in mine for depth in completion.depths]
        same = sum(one.ids == most.ids for one, most in zip(mine, by_budget[BUDGETS[-1]], strict=True))
        print(
            f"budget {budget:<4g}  mean depth {sum(depths) / len(depths):.2f}  {sum(depths):4d} rows computed  "
            f"{same} of {len(PROMPTS)} texts as at {BUDGETS[-1]:g}"
        )
    for budget in (1.5, 2.75):
        print(f"\nat {budget:g}:\n{PROMPTS[2]}{tokenizer.decode(by_budget[budget][2].ids)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-new-tokens", "--tokens", type=int, default=32, help="how many for each prompt")
    main(parser.parse_args().max_new_tokens)
