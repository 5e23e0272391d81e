"""Save what a release's own code computes, to compare with.

    python examples/save_published_outputs.py ByteDance/Ouro-1.4B --out published.safetensors [--revision COMMIT]

You learn whether a looped checkpoint computes here what its publishers meant. This program runs *their* code, in your
process: read it first, pin it with `--revision`, and use the versions that they ask for (Ouro: transformers 4.54). It
needs torch, transformers and safetensors, not this package. Then, wherever adaponder is installed,

    adaponder doctor ByteDance/Ouro-1.4B --against published.safetensors

which never runs code of a checkpoint, prints the largest difference of the logits of each loop and of the exit gates,
and the depths.
"""

import argparse

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXT = "A token that is easy to predict needs one loop; a hard one may take them all. 12 + 30 ="
THRESHOLDS = (0.3, 0.5, 0.7, 0.9)


@torch.no_grad()
def outputs(model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns logits, [loops, time, vocabulary], and for models with an exit gate its probabilities and exits."""
    loops = getattr(model.config, "total_ut_steps", None)
    if loops is None:  # no exit gate: the last loop's logits
        return {"ids": ids, "logits": model(ids[None], use_cache=False).logits}
    steps = [model(ids[None], use_cache=False, exit_at_step=step).logits[0] for step in range(loops)]
    *_, gates = model.model(ids[None], use_cache=False)
    probabilities = torch.stack([torch.sigmoid(gate[0, :, 0]) for gate in gates], -1)
    exits = []
    for threshold in THRESHOLDS:
        chosen = model(ids[None], use_cache=False, exit_threshold=threshold).logits[0]
        # The loop whose logits these are; the first, where two are equal.
        exits.append(torch.stack([(chosen == step).all(-1) for step in steps]).int().argmax(0) + 1)
    return {
        "ids": ids,
        "logits": torch.stack(steps),
        "gates": probabilities,
        "exits": torch.stack(exits),
        "thresholds": torch.tensor(THRESHOLDS, dtype=torch.float64),
    }


def main(name: str, out: str, text: str, dtype: str, revision: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name, revision=revision)
    model = AutoModelForCausalLM.from_pretrained(
        name, revision=revision, trust_remote_code=True, torch_dtype=getattr(torch, dtype)
    ).eval()
    # Rotary frequencies are buffers that no checkpoint holds; transformers 5 leaves those of some releases at zero.
    if lost := [name for name, buffer in model.named_buffers() if name.endswith("inv_freq") and not buffer.any()]:
        raise SystemExit(f"{lost[0]} is all zeros: load the release with the transformers that its config.json names")
    saved = outputs(model, tokenizer(text, return_tensors="pt").input_ids[0])
    save_file({name: tensor.contiguous() for name, tensor in saved.items()}, out)
    print(f"{out}: {', '.join(f'{name} {list(tensor.shape)}' for name, tensor in saved.items())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="the release: hub name or folder")
    parser.add_argument("--out", default="published.safetensors")
    parser.add_argument("--text", default=TEXT, help="a text of some twenty tokens")
    parser.add_argument("--dtype", default="float32", help="float32, or float64 for differences of 1e-7 and less")
    parser.add_argument("--revision", help="the commit of the release whose code you have read")
    arguments = parser.parse_args()
    main(arguments.name, arguments.out, arguments.text, arguments.dtype, arguments.revision)
