"""Fine-tune the shipped model of Python code on English with LoRA, and see what that does to loss and depth.

    pip install -e '.[finetune]'
    python examples/finetune_with_lora.py [--steps 60] [--out runs/lora]

You learn to adapt a checkpoint with peft: adapters on the backbone, gates trained beside them, the ponder loss going
on, and the merged model, which every command opens. The text is Python's own help pages; two minutes on two cores.
Recipes for that, chat templates, transformers.Trainer and TRL: docs/finetune.md.
"""

import argparse
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoTokenizer

from adaponder import AdaPonderForCausalLM, Objective, sample_path

SEQUENCE, BATCH = 96, 4


def windows_of(text: str, tokenizer) -> torch.Tensor:
    ids = torch.tensor(tokenizer(text, verbose=False).input_ids)
    return ids[: len(ids) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)


@torch.no_grad()
def loss_and_depth(model: PeftModel, windows: torch.Tensor) -> str:
    output = model.eval()(windows, labels=windows)
    return f"loss {output.loss.item():.3f}, mean depth {output.depth.float().mean().item():.2f}"


def main(steps: int, out: str) -> None:
    torch.manual_seed(0)
    checkpoint = sample_path("sample-adaponder")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    windows = windows_of("\n\n".join(topics.values())[:200_000], tokenizer)
    held_out, windows = windows[:16], windows[16:]

    plain = AdaPonderForCausalLM.from_pretrained(checkpoint)
    # Adapters on every linear map of the backbone; modules_to_save trains the gates themselves, without one.
    config = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["method"], task_type="CAUSAL_LM")
    model = get_peft_model(plain, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    print(f"{sum(p.numel() for p in trained):,} of {sum(p.numel() for p in model.parameters()):,} parameters train")
    print(f"before: {loss_and_depth(model, held_out)}")

    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    objective = Objective(ponder_weight=0.1, ponder_fraction=0.5)  # stage 2 of the paper goes on
    for step in range(steps):
        batch = windows[torch.randint(len(windows), (BATCH,))]
        output = model.train()(batch, labels=batch, objective=objective)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 6) == 0:
            loss, depth = output.terms["cross_entropy"], output.depth.float().mean()
            print(f"step {step:3d}  loss {loss:.3f}  mean depth {depth:.2f}")
    print(f"after:  {loss_and_depth(model, held_out)}")

    adapted = model.eval()(held_out[:1]).logits
    merged = model.merge_and_unload()
    print(f"merged, logits differ by {(merged(held_out[:1]).logits - adapted).abs().max():.0e}")
    merged.save_pretrained(out)
    tokenizer.save_pretrained(out)  # adaponder generate runs/lora --prompt "The "


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="runs/lora", help="the folder of the merged model")
    main(**vars(parser.parse_args()))
