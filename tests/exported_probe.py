"""A user's script: opens exported folders where this package cannot be imported, and saves what they compute.

``python exported_probe.py JOB RESULT``; ``JOB`` holds ``{"folders": {name: path}, "ids", "again": path}``, saved by
torch.
"""

# ruff: noqa: E402 (the package is hidden before anything is imported)

import sys


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "adaponder":
            raise ImportError(f"{name} is hidden")


sys.meta_path.insert(0, Hidden())

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)
GREEDY = {"max_new_tokens": 8, "do_sample": False}


@torch.no_grad()
def answers(folder, ids) -> dict:
    """Returns the results of a folder's model for the same tokens by each call that users make."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    output = model(ids)
    prompt = tokenizer("She opened the", return_tensors="pt")
    write = pipeline("text-generation", model=folder, trust_remote_code=True)
    return {
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "logits": output.logits,
        "body": AutoModel.from_pretrained(folder, trust_remote_code=True).eval()(ids).last_hidden_state,
        "depth": output.depth,
        "greedy": model.generate(**prompt, **GREEDY),
        "pipeline": write("She opened the", **GREEDY)[0]["generated_text"],
    }


def save_again(folder, target) -> None:
    for kind in (AutoModelForCausalLM, AutoTokenizer):
        kind.from_pretrained(folder, trust_remote_code=True).save_pretrained(target)


def main(job_path: str, result_path: str) -> None:
    job = torch.load(job_path)
    folders = dict(job["folders"])
    save_again(folders["adaponder"], job["again"])
    folders["saved again"] = job["again"]
    found = {name: answers(folder, job["ids"]) for name, folder in folders.items()}
    found["imported"] = sorted(name for name in sys.modules if name.partition(".")[0] == "adaponder")
    torch.save(found, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
