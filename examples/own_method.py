"""A member of the family of your own: what a token does between two passes of the backbone, in one class.

    python examples/own_method.py [--steps 60]

You learn the three steps of a recurrence (start, receive, advance) and what comes for free with them: a model on any
decoder, halting, training, cached generation and the engine, all equal to one another.
"""

import argparse

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from adaponder import (
    AdaPonderConfig,
    AdaPonderForCausalLM,
    Engine,
    LearnedGate,
    Method,
    Policy,
    Request,
    register_method,
)
from adaponder.execution.base import Pass, Rows
from adaponder.methods import State


class Ear(nn.Linear):
    """How much a token wants to hear its echo, as a logit."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).squeeze(-1)


class Echo(Method):
    """A token's own hidden state, as loud as its gate says, is added to what the next pass reads."""

    halts = True
    gate_meaning = "loudness of the echo"

    def __init__(self, config: AdaPonderConfig):
        super().__init__(config)
        self.ear = Ear(config.hidden_size, 1)

    # start is inherited: the first pass reads the embeddings.

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        return State(state.input, rows.freeze(output.hidden, state.hidden))  # a halted token keeps its hidden state

    def advance(self, rows: Rows, state: State) -> State:
        loudness = torch.sigmoid(rows.gate((self.ear,), state.hidden))
        rows.decide(loudness, state.hidden)  # the policy halts tokens here, once
        louder = state.input + loudness[..., None].to(state.input.dtype) * state.hidden
        return State(torch.where(rows.active[..., None], louder, state.input), state.hidden)

    def default_policy(self, *, training: bool) -> Policy:
        return LearnedGate(self.config.tau)

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.ear.weight, std=10 * std)
        nn.init.constant_(self.ear.bias, self.config.gate_bias)


register_method("echo", Echo)  # configs, recipes and commands of this process know it by this name


def main(steps: int) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = {"method": "echo", "iterations": 3, "tau": 0.5, "gate_bias": 0.5}
    model = AdaPonderForCausalLM(AdaPonderConfig(backbone_config=LlamaConfig(vocab_size=64, **shape), **settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        first, stride = torch.randint(64, (16, 1)), torch.randint(1, 4, (16, 1))
        ids = (first + stride * torch.arange(16)) % 64  # counting by ones, twos or threes
        output = model(ids, labels=ids)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 5) == 0 or step == steps - 1:
            print(f"step {step:3d}  loss {output.loss.item():.3f}  mean depth {output.depth.float().mean():.2f}")

    model.eval()
    prompt = [0, 2, 4, 6]
    cached = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, 4:].tolist()
    [[completion]] = Engine(model, lanes=1).generate([Request(prompt, max_new_tokens=8, temperature=0)])
    print(f"{prompt} goes on with {completion.ids}, read {completion.depths} times")
    print(f"generate() says the same: {cached == completion.ids}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="of training")
    main(parser.parse_args().steps)
