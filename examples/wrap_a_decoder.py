"""Make a Hugging Face decoder adaptive and look at what changed: nothing, until it is trained.

    python examples/wrap_a_decoder.py [NAME]

NAME is a decoder of the hub, such as EleutherAI/pythia-70m; without it, a small Llama with random weights is made here.
You learn what a wrapped model returns and who may decide how often each token is read.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from adaponder import AdaPonderForCausalLM, Confidence, FixedDepth, ForcedDepths


def stock_model(name: str | None) -> PreTrainedModel:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **shape))


def main(name: str | None = None) -> None:
    torch.manual_seed(0)
    stock = stock_model(name).eval()
    model = AdaPonderForCausalLM.from_backbone(stock, method="adaponder", iterations=4).eval()
    ids = torch.randint(stock.config.vocab_size, (1, 12))

    own = sum(parameter.numel() for parameter in model.method.parameters())
    print(f"{own:,} parameters were added to {stock.num_parameters():,}: a gate after each iteration but the last")

    with torch.no_grad():
        once = model(ids, max_iterations=1).logits
        print(f"read once, it is the stock model: largest difference {(once - stock(ids).logits).abs().max():.1e}")

        output = model(ids)
        print(f"gates begin open, at s = {output.gates.min():.3f}, so every token is read 4 times:")
        print(f"  {output.depth[0].tolist()}")

        # Any rule may decide instead of the gates: one depth for all, each token's own, a measure of doubt, a function.
        print(f"FixedDepth(2)      {model(ids, policy=FixedDepth(2)).depth[0].tolist()}")
        depths = torch.tensor([[1, 2, 3, 4] * 3])
        print(f"ForcedDepths(…)    {model(ids, policy=ForcedDepths(depths)).depth[0].tolist()}")
        print(f"Confidence(0.0003) {model(ids, policy=Confidence(0.0003)).depth[0].tolist()}")
        print(f"every other token  {model(ids, policy=lambda rows: rows.position % 2 == 0).depth[0].tolist()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
