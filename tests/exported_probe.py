"""A user's script: opens exported folders where this package cannot be imported, and writes down what they compute.

``python exported_probe.py JOB RESULT``; ``JOB`` holds ``{"folders": {name: path}, "ids", "mask", "prompts",
"prompt_mask", "also": names, "words": path, "again": path, "lm_eval": arguments}`` as torch saved it.
"""

# ruff: noqa: E402 (the package is hidden before anything is imported)

import sys
import types
from importlib.util import find_spec


class Hidden:
    """Makes a package impossible to import."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "adaponder":
            raise ImportError(f"{name} is hidden")


sys.meta_path.insert(0, Hidden())

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)


def widen_norms(model) -> None:
    """RMSNorm in the precision it is given: stock ones round to float32."""

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(forward, module)


def opened(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    widen_norms(model)
    return model.eval()


def said(output) -> dict:
    return {"logits": output.logits.detach(), "depth": output.depth, "gates": output.gates.detach()}


def by_tokens(model, ids, mask) -> torch.Tensor:
    """Logits of a text read in pieces: five tokens, then one by one, then what is left."""
    cache, logits, start = None, [], 0
    for size in (5, 1, 1, 1, ids.shape[1] - 8):
        end = start + size
        output = model(ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        cache, start = output.past_key_values, end
        logits.append(output.logits)
    return torch.cat(logits, 1)


def rows_read(model, ids, mask) -> tuple[int, int]:
    """(rows that the decoder computed over a cache, sum of the tokens' depths)."""
    rows = []
    handle = model.backbone.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["inputs_embeds"].shape[:2].numel()), with_kwargs=True
    )
    depth = model(ids, attention_mask=mask, use_cache=True).depth
    handle.remove()
    return sum(rows), int(depth.sum())


def gradients(model, ids, mask) -> dict:
    loss = model(ids, attention_mask=mask, labels=ids).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {"loss": loss.detach(), "gradients": found}


@torch.no_grad()
def everything(model, job) -> dict:
    ids, mask = job["ids"], job["mask"]
    prompts = {"input_ids": job["prompts"], "attention_mask": job["prompt_mask"], "pad_token_id": 0}
    greedy = model.generate(**prompts, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    found = {
        "plain": said(model(ids)),
        "padded": said(model(ids, attention_mask=mask)),
        "cached": said(model(ids, attention_mask=mask, use_cache=True)),
        "limited": said(model(ids, max_iterations=2)),
        "by tokens": by_tokens(model, ids, mask),
        "rows": rows_read(model, ids, mask),
        "greedy": greedy.sequences,
        "greedy depth": greedy.past_key_values.depth,
        "uncached": model.generate(**prompts, max_new_tokens=6, do_sample=False, use_cache=False),
        "alone": model.generate(prompts["input_ids"][:1, 3:], max_new_tokens=6, do_sample=False, pad_token_id=0),
    }
    with torch.enable_grad():
        found |= gradients(model, ids, mask)
    return found


def other_generation(model, job) -> dict:
    """What sampling with a seed and what beams write."""
    prompts = {"input_ids": job["prompts"], "attention_mask": job["prompt_mask"], "pad_token_id": 0}
    torch.manual_seed(5)
    sampled = model.generate(**prompts, max_new_tokens=6, do_sample=True, top_k=20, temperature=0.8)
    return {"sampled": sampled, "beams": model.generate(**prompts, max_new_tokens=4, do_sample=False, num_beams=3)}


def pipelined(folder) -> str:
    write = pipeline("text-generation", model=folder, trust_remote_code=True)
    return write("She opened the", max_new_tokens=8, do_sample=False)[0]["generated_text"]


def saved_again(model, folder, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return opened(folder)


def harness(arguments: list[str]) -> bool:
    """lm-eval's own command line; false where it is not installed."""
    if find_spec("lm_eval") is None:
        return False
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.tasks import TaskManager

    whole = TaskManager.__init__

    def indexed(self, *args, **kwargs):
        whole(self, *args, **kwargs | {"include_defaults": False})  # an index of all its tasks takes ten seconds

    TaskManager.__init__ = indexed
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()
    return True


def main(job_path: str, result_path: str) -> None:
    job = torch.load(job_path)
    found = {}
    for name, folder in job["folders"].items():
        model = opened(folder)
        found[name] = everything(model, job) | {"class": f"{type(model).__module__}.{type(model).__name__}"}
        if name in job["also"]:
            found[name] |= other_generation(model, job)
    model = opened(job["words"])
    tokenizer = AutoTokenizer.from_pretrained(job["words"], trust_remote_code=True)
    again = saved_again(model, job["again"], tokenizer)
    found["words"] = {
        "pipeline": pipelined(job["words"]),
        "logits": model(job["ids"]).logits.detach(),
        "again": again(job["ids"]).logits.detach(),
        "harness": harness(job["lm_eval"]),
    }
    found["imported"] = sorted(name for name in sys.modules if name.partition(".")[0] == "adaponder")
    torch.save(found, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
