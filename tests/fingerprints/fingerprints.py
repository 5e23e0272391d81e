"""Computes what every method, execution, policy and stored file gives, to compare it bit for bit with ``values.json``.

``values.json`` holds the values of commit 9e23d55, and ``fixtures/`` holds files which that commit wrote: a checkpoint
of every method, a prepared data folder, and a run folder that was stopped after step 2 of 4. A refactoring leaves both
as they are; ``test_fingerprints.py`` compares.

Each tensor is stored as its shape, two numbers (its norm and a weighted sum) and the SHA-256 of its bytes. Whole
numbers (depths, token ids) must always be equal. The two numbers must agree to 1e-10 in float64 and 1e-5 in float32,
relative to the norm. The hash must be equal on the machine named in the file (same CPU model, torch and transformers):
another CPU may sum in another order, so elsewhere the hash is not compared.

After a deliberate change of numerics ``python tests/fingerprints/fingerprints.py --write`` computes the values anew
(commit them with the reason). ``--write-fixtures`` writes the files anew too, which only a deliberate change of a file
format needs.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

import support
from adaponder import AdaPonderConfig, AdaPonderForCausalLM, Engine, ForcedDepths, Objective, Request
from adaponder.policies import parse_policy
from support import FAMILIES, HALTING, ids, stir, tiny

HERE = Path(__file__).parent
VALUES, FIXTURES = HERE / "values.json", HERE / "fixtures"
# Methods that commit 9e23d55 had; later ones are held by the laws.
METHODS = tuple(name for name in support.METHODS if (FIXTURES / "checkpoints" / name).is_dir())
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
DTYPES = {"float64": torch.float64, "float32": torch.float32}

# Settings that change what a method computes, beside its defaults.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared gate": ("adaponder", {"shared_gate": True}),
    "linear gate": ("adaponder", {"gate_width": 0}),
    "top-k expectation": ("adaponder", {"expectation_top_k": 5}),
    "scaled embeddings": ("adaponder", {"embedding_scale": "sqrt(d)", "initial_multiplier": 2.0}),
    "reuse of keys and values": ("adaponder", {"reuse": "kv"}),
    "no reuse": ("adaponder", {"reuse": "none"}),
    "ponder loss on logits": ("adaponder", {"ponder_on": "logits"}),
    "closed pool": ("adaponder", {"ponder_pool": "closed"}),
    "pool per iteration": ("adaponder", {"ponder_pool": "each"}),
    "pause token": ("pause", {"pause_token_id": 60}),
    "mor capacities": ("mor", {"capacities": [1.0, 0.6, 0.3]}),
    "pondernet state scale": ("pondernet", {"state_scale": 0.5}),
    "anytime priors": ("anytime", {"halt_prior": 2.0, "loss_prior": [0.5, 0.3, 0.2], "lookahead_by": "nats"}),
    "anytime gates": ("anytime", {"gate_share": 0.4}),
}
POLICIES = (
    *("fixed:2", "gate:0.4", "gate:0.3,0.6", "entropy:3.2", "entropy:3.6", "kl:0.4", "change:0.5", "confidence:0.05"),
    *("confidence:0.1", "similarity:0.8", "similarity:0.95", "random:0.6", "random-rates:0.7", "uniform:0.5@0.4,0.6"),
    *("geometric:0.5@0.3,0.7", "shares:0.7,0.3@0.4,0.5", "ranked-uniform:0.5", "ranked-geometric:0.6"),
    "ranked-shares:0.8,0.4",
)
EXIT_POLICIES = ("exit:0.7", "sampled-exit")
METHOD_POLICIES = {"mor": ("router",), "ouro": EXIT_POLICIES, "act": EXIT_POLICIES, "pondernet": EXIT_POLICIES}
ENGINES: dict[str, dict[str, Any]] = {
    "stock body": {"body": "stock"},
    "drafts": {"drafts": 3},
    "top-k": {"expectation_top_k": 5},
    "late": {"late": True, "burst": 3},
    "few rows": {"rows": 160},
    "no sharing": {"share_prefixes": False},
}


def machine() -> dict[str, str]:
    """Names what decides in which order the CPU sums."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": f"{model or platform.processor()} {torch.backends.cpu.get_cpu_capability()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def fingerprint(value: Any) -> Any:
    """Returns a tensor of floats as "shape norm weighted-sum sha256"; anything whole stays as it is."""
    if isinstance(value, Tensor):
        value = value.detach()
        if not value.is_floating_point():
            return value.tolist()
        flat = value.double().flatten()
        weights = torch.cos(torch.arange(flat.numel(), dtype=torch.float64))
        sha = hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()[:16]
        return f"{list(value.shape)} {float(flat.norm())!r} {float(flat @ weights)!r} {sha}"
    if isinstance(value, float):
        return fingerprint(torch.tensor([value], dtype=torch.float64))
    return value


def differences(expected: dict[str, Any], found: dict[str, Any], *, bits: bool) -> list[str]:
    """Lists the values that differ; ``bits`` compares hashes too."""
    wrong = [f"{name}: missing" for name in expected.keys() - found.keys()]
    wrong += [f"{name}: new" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        if expected[name] != found[name] and (bits or not _close(expected[name], found[name], name)):
            wrong.append(f"{name}: was {expected[name]}, is {found[name]}")
    return sorted(wrong)


def _close(expected: Any, found: Any, name: str) -> bool:
    if not (isinstance(expected, str) and isinstance(found, str)):
        return False
    (shape, *numbers), (other_shape, *other_numbers) = _parts(expected), _parts(found)
    tolerance = TOLERANCE["float32" if "float32" in name else "float64"] * max(1.0, abs(numbers[0]))
    return shape == other_shape and all(abs(a - b) <= tolerance for a, b in zip(numbers, other_numbers, strict=True))


def _parts(text: str) -> tuple[str, float, float]:
    shape, norm, projection, _ = text.rsplit(" ", 3)
    return shape, float(norm), float(projection)


def stored(method: str, dtype: torch.dtype) -> AdaPonderForCausalLM:
    """Opens the checkpoint of a method in ``fixtures/``."""
    return AutoModelForCausalLM.from_pretrained(FIXTURES / "checkpoints" / method, dtype=dtype).eval()


def built(method: str, dtype: torch.dtype, **recurrence: Any) -> AdaPonderForCausalLM:
    """Builds a model from its config, as training from scratch does, then draws the parameters of the method."""
    torch.manual_seed(5)
    settings = {"tau": 0.5, "exit_threshold": 0.6, "iterations": 3, "gate_width": 1} | recurrence
    config = AdaPonderConfig(backbone_config=FAMILIES["gpt_neox"], method=method, **settings)
    return stir(AutoModelForCausalLM.from_config(config, dtype=dtype)).eval()


def padded_batch() -> tuple[Tensor, Tensor]:
    """Returns token ids and an attention mask with padding on both sides."""
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, :4] = 0
    mask[2, 8:] = 0
    return ids(3, 11, seed=7), mask


def forward_values(model: AdaPonderForCausalLM, execution: str) -> Iterator[tuple[str, Any]]:
    """Yields loss, logits, gates, depths and the states of every iteration of one forward in evaluation mode."""
    tokens, mask = padded_batch()
    labels = tokens.masked_fill(mask == 0, -100)
    returned = {"output_iteration_logits": True, "output_hidden_states": True}
    with torch.no_grad():
        output = model(tokens, attention_mask=mask, labels=labels, execution=execution, seed=3, **returned)
    yield from {"loss": output.loss, "depth": output.depth}.items()
    for name in ("logits", "gates", "iteration_logits"):
        if (value := getattr(output, name)) is not None:
            yield name, value[..., mask.bool(), :]
    yield "hidden_states", torch.stack([state[mask.bool()] for state in output.hidden_states])


def training_values(model: AdaPonderForCausalLM, execution: str, objective: Objective, **options: Any) -> Iterator:
    """Yields the terms of a training loss, and the gradients of the backbone and of what the method adds."""
    tokens, mask = padded_batch()
    model.train().zero_grad(set_to_none=True)
    labels = tokens.masked_fill(mask == 0, -100)
    output = model(
        tokens, attention_mask=mask, labels=labels, execution=execution, objective=objective, seed=2, **options
    )
    output.loss.backward()
    yield "loss", output.loss
    yield "depth", output.depth
    yield from output.terms.items()
    for part, inside in (("backbone", True), ("method", False)):
        named = sorted((name, p.grad) for name, p in model.named_parameters() if name.startswith("backbone.") is inside)
        gradients = [gradient.flatten() for _, gradient in named if gradient is not None]
        if gradients:
            yield f"gradient of {part}", torch.cat(gradients)
        yield f"parameters of {part} without gradient", [name for name, gradient in named if gradient is None]
    model.eval()


@torch.no_grad()
def cached_values(model: AdaPonderForCausalLM) -> Iterator[tuple[str, Any]]:
    """Yields logits and depths of decoding through a cache in chunks, and what ``generate`` writes."""
    tokens, mask = padded_batch()
    ledger, logits = None, []
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 11)):
        output = model(
            tokens[:, start:end], attention_mask=mask[:, :end], past_key_values=ledger, use_cache=True, seed=3
        )
        ledger = output.past_key_values
        logits.append(output.logits)
    yield "logits", torch.cat(logits, 1)[mask.bool()]
    yield "depth", ledger.depth
    prompt = {"attention_mask": mask[:2], "max_new_tokens": 8, "pad_token_id": 0, "seed": 4}
    yield "greedy ids", model.generate(tokens[:2], do_sample=False, **prompt)
    torch.manual_seed(1)
    yield "sampled ids", model.generate(tokens[:2], do_sample=True, temperature=0.8, top_k=20, **prompt)


def engine_requests(method: str, iterations: int) -> list[Request]:
    """Returns requests that use every option once."""
    prompts = ids(6, 13, seed=9).tolist()
    prompts[1][:9] = prompts[0][:9]
    details = {"log_probabilities": 3, "prompt_log_probabilities": 2, "iteration_top": 2, "gates": True}
    sampling = {"top_k": 20, "top_p": 0.9, "min_p": 0.01, "logit_bias": {3: 5.0, 11: -50.0}, "samples": 2}
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}
    requests = [
        Request(prompts[0], max_new_tokens=6, temperature=0.0, **details),
        Request(prompts[1], max_new_tokens=6, temperature=0.9, seed=3, **sampling, **penalties, **details),
        Request(prompts[2][:2], max_new_tokens=9, temperature=0.0, stop_ids=tuple(range(0, 61, 4)), min_new_tokens=2),
    ]
    if method in HALTING:
        requests += [
            Request(prompts[3], max_new_tokens=4, temperature=0.0, policy=parse_policy("random:0.6"), seed=8),
            Request(prompts[4], max_new_tokens=4, temperature=0.0, depths=[1, 3, 0, 2]),
        ]
    if iterations > 1 and method != "pause":
        requests.append(Request(prompts[5], max_new_tokens=4, temperature=0.0, max_iterations=2))
    return requests


def engine_values(model: AdaPonderForCausalLM, **options: Any) -> Iterator[tuple[str, Any]]:
    """Yields the completions of the batching engine."""
    engine = Engine(model, **({"lanes": 3, "chunk": 21, "tokens": 40, "prefix_block": 4} | options))
    requests = engine_requests(model.config.method, model.config.iterations)
    for number, completions in enumerate(engine.generate(requests)):
        for done in completions:
            name = f"request {number} sample {done.sample}"
            yield f"{name} ids", done.ids
            yield f"{name} depths", done.depths
            yield f"{name} end", [done.finish_reason, done.stop_id, done.cached_tokens, done.error]
            numbers = [value for token in done.tokens for value in token.gates]
            numbers += [token.log_probability for token in done.tokens if token.log_probability is not None]
            tops = [top for token in done.tokens for top in (token.top, *token.iteration_top)]
            for token in done.prompt_log_probabilities or ():
                numbers += [] if token.log_probability is None else [token.log_probability]
                tops.append(token.top)
            yield f"{name} top ids", [id for top in tops for id, _ in top]
            numbers += [number for top in tops for _, number in top]
            if numbers:
                yield f"{name} numbers", torch.tensor(numbers, dtype=torch.float64)


def policy_values(model: AdaPonderForCausalLM) -> Iterator[tuple[str, Any]]:
    """Yields the depths that each policy, read from its text, gives."""
    tokens = ids(2, 12, seed=4)
    for line in POLICIES + METHOD_POLICIES.get(model.config.method, ()):
        with torch.no_grad():
            yield line, model(tokens, policy=parse_policy(line), seed=6, output_logits=False).depth
    forced = ForcedDepths(1 + torch.arange(24).view(2, 12) % 3)
    with torch.no_grad():
        yield "forced logits", model(tokens, policy=forced).logits


def method_values(method: str, precisions: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yields everything that a method computes by name."""
    for precision in precisions:
        model = stored(method, DTYPES[precision])
        objective = Objective(ponder_weight=0.7, ponder_fraction=0.4)
        parts = {f"training, {execution}": training_values(model, execution, objective) for execution in EXECUTIONS}
        parts |= {execution: forward_values(model, execution) for execution in EXECUTIONS}
        parts |= {"cached": cached_values(model), "engine": engine_values(model)}
        parts["training, no logits"] = training_values(model, "dense", objective, output_logits=False)
        if method in HALTING:
            parts["policy"] = policy_values(model)
        if method == "ouro":
            parts["training, stage 2"] = training_values(model, "dense", Objective(exit_stage=2))
        if method == "adaponder" and precision == "float64":
            parts |= {f"engine, {name}": engine_values(model, **options) for name, options in ENGINES.items()}
        for part, values in parts.items():
            yield from ((f"{method} {precision} {part}: {name}", value) for name, value in values)


EXECUTIONS = ("dense", "compact")


def variant_values() -> Iterator[tuple[str, Any]]:
    """Yields the initial weights, losses and gradients of models with other settings than the defaults."""
    for variant, (method, recurrence) in VARIANTS.items():
        for precision, dtype in DTYPES.items():
            model = built(method, dtype, **recurrence)
            name = f"{variant} {precision}"
            yield f"{name}: weights", torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])
            execution = "dense" if recurrence.get("reuse") == "kv" else "compact"
            objective = Objective(ponder_weight=0.7, ponder_fraction=0.4)
            yield from ((f"{name} forward: {key}", value) for key, value in forward_values(model, execution))
            trained = training_values(model, "dense", objective)
            yield from ((f"{name} training: {key}", value) for key, value in trained)
    for method in METHODS:
        torch.manual_seed(3)
        config = AdaPonderConfig(backbone_config=FAMILIES["llama"], method=method)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        weights = [parameter.detach().flatten() for _, parameter in sorted(model.named_parameters())]
        yield f"new {method} float32: weights", torch.cat(weights)


def family_values() -> Iterator[tuple[str, Any]]:
    """Yields what adaponder computes around each family of backbones."""
    for family in FAMILIES:
        model = tiny("adaponder", family)
        objective = Objective(ponder_weight=0.7, ponder_fraction=0.4)
        parts = {execution: forward_values(model, execution) for execution in EXECUTIONS}
        parts |= {"training": training_values(model, "dense", objective)}
        parts |= {"cached": cached_values(model), "engine": engine_values(model)}
        for part, values in parts.items():
            yield from ((f"{family} float64 {part}: {name}", value) for name, value in values)


def packed_values() -> Iterator[tuple[str, Any]]:
    """Yields logits of several documents packed into one sequence."""
    documents = torch.tensor([[0] * 4 + [1] * 5 + [2] * 3] * 2)
    for method in METHODS:
        model = stored(method, torch.float64)
        for execution in EXECUTIONS:
            with torch.no_grad():
                output = model(ids(2, 12, seed=2), document_ids=documents, execution=execution, labels=ids(2, 12))
            yield f"{method} float64 packed, {execution}: logits", output.logits
            yield f"{method} float64 packed, {execution}: loss", output.loss


def adaponder(*arguments: str, folder: Path) -> None:
    """Runs a command of the package in ``folder``, in this process: importing transformers again would take longest."""
    given, sys.argv = sys.argv, ["adaponder", *arguments]
    try:
        with contextlib.chdir(folder):
            runpy.run_module("adaponder", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"adaponder {' '.join(arguments)} exits with {end.code}") from end
    finally:
        sys.argv = given


def prepared_values(folder: Path) -> Iterator[tuple[str, Any]]:
    """Prepares the text of ``fixtures/training`` and yields the tokens, the tokenizer and the manifest."""
    shutil.copy(FIXTURES / "training" / "text.jsonl", folder)
    adaponder(*PREPARE, "--out", "again", folder=folder)
    for path in sorted((folder / "again").rglob("*")):
        if path.suffix == ".bin" or path.name == "tokenizer.json":
            yield f"prepared {path.relative_to(folder / 'again')}", hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = json.loads((folder / "again" / "manifest.json").read_text())
    yield "prepared manifest", sorted(manifest)


PREPARE = ("prepare", "text.jsonl", "--tokenizer", "train-bpe:300", "--validation", "0.1", "--workers", "1")
METRICS = {"loss", "cross_entropy", "ponder", "grad_norm", "lr", "mean_depth", "halted", "validation_loss"}
TRAIN = ("train", "recipe.yaml", "--out", "run", "--resume", "auto")


def resumed_values(folder: Path) -> Iterator[tuple[str, Any]]:
    """Resumes the stopped run of ``fixtures/training`` and yields its losses and its final weights."""
    shutil.copytree(FIXTURES / "training", folder, dirs_exist_ok=True)
    adaponder(*TRAIN, folder=folder)
    for line in (folder / "run" / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        for name in METRICS & metrics.keys():
            values = torch.tensor(metrics[name], dtype=torch.float64)
            yield f"resumed float32 step {metrics['step']}: {name}", values
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "final")
    weights = [parameter.detach().flatten() for _, parameter in sorted(model.named_parameters())]
    yield "resumed float32: final weights", torch.cat(weights)


def write_fixtures() -> None:
    """Writes the checkpoints, the data folder and the stopped run with the present code; text and recipe stay."""
    training = FIXTURES / "training"
    for folder in (FIXTURES / "checkpoints", training / "shards", training / "run"):
        shutil.rmtree(folder, ignore_errors=True)
    for method in METHODS:
        built(method, torch.float32).save_pretrained(FIXTURES / "checkpoints" / method)
    adaponder(*PREPARE, "--out", "shards", folder=training)
    adaponder(*TRAIN, folder=training)
    for name in ("final", "tensorboard"):
        shutil.rmtree(training / "run" / name)
    (training / "run" / ".lock").unlink()


GROUPS = (*METHODS, "variants", "families", "packed", "prepared", "resumed")


def group_values(group: str, folder: Path, precisions: Sequence[str] = tuple(DTYPES)) -> dict[str, Any]:
    """Returns the fingerprints of one group by name; ``folder`` is a new place for files."""
    folder.mkdir(parents=True)
    with_files = {"prepared": prepared_values, "resumed": resumed_values}
    without = {"variants": variant_values, "families": family_values, "packed": packed_values}
    if group in METHODS:
        values = method_values(group, precisions)
    else:
        values = with_files[group](folder) if group in with_files else without[group]()
    return {name: fingerprint(value) for name, value in values}


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the fingerprints of the present code.")
    parser.add_argument("--write", action="store_true", help="write values.json")
    parser.add_argument("--write-fixtures", action="store_true", help="write fixtures/ first")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if arguments.write_fixtures:
        write_fixtures()
    if arguments.write:
        with tempfile.TemporaryDirectory() as folder:
            values = {group: group_values(group, Path(folder) / group) for group in GROUPS}
        content = json.dumps({"machine": machine(), "values": values})
        VALUES.write_text(re.sub(r'(?<=[{,]) ?(?="[^"]*": ["\[{])', "\n", content) + "\n")


if __name__ == "__main__":
    main()
