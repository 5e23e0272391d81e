"""Implements lm-eval's model interface for a checkpoint; answers do not depend on batch size or request order.

Requests are encoded, truncated and scored as by lm-eval's own ``hf`` model, so a vanilla checkpoint gets the same score
for each item. Depth is adaptive, halted tokens are skipped, and the cost is counted per task.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
    resolve_max_length,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from adaponder.errors import InputError, shown
from adaponder.evaluation.meter import Meter
from adaponder.evaluation.scoring import OWN, ScoringOptions
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.ops.precision import wide_dtype
from adaponder.text import TextStream, chat_text

Answer = tuple[float, bool]  # log-likelihood, and whether the continuation is the most likely one
Counting = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


class HarnessLM(TemplateLM):
    """Implements lm-eval's model interface for a checkpoint: log-likelihood, rolling log-likelihood, generation.

    Args:
        model: in evaluation mode, on its device.
        batch_size: texts per forward; changes only speed and rounding.
        how: policy, maximum iterations, and sampling seed.
        counting: ``with counting(task, number) as advance`` shows progress; see :func:`adaponder.terminal.counting`.

    Attributes:
        meters: cost by task name, over all real tokens including prompts. Padding, and tokens generated after a
            sequence has stopped, are not counted.
    """

    def __init__(
        self,
        model: AdaPonderForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int = 8,
        how: ScoringOptions = OWN,
        counting: Counting = lambda task, texts: nullcontext(lambda count: None),
    ):
        super().__init__()
        if batch_size < 1:
            raise InputError(f"--batch-size {batch_size} must be at least 1")
        if len(tokenizer) > model.config.vocab_size:
            raise InputError(
                f"--tokenizer has {len(tokenizer)} tokens, the model {model.config.vocab_size}; "
                "pass the one that the checkpoint was trained with"
            )
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            raise InputError("--tokenizer has neither a start nor an end token; one must precede every text")
        self.model, self.batch_size, self.how = model, batch_size, how
        model.check_policy(self.how.policy)
        self.tokenizer: Any = tokenizer
        self.meters: dict[str, Meter] = {}
        self._counting, self._task = counting, ""
        self._blank = Meter(model.config, dtype=model.dtype, device=model.device)
        pad = self.tokenizer.pad_token_id
        self._pad_id = self.prefix_token_id if pad is None else pad

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def eot_token_id(self) -> int | None:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Returns the token that precedes texts without context: BOS, or EOS if the tokenizer has no BOS."""
        start = self.tokenizer.bos_token_id
        return self.tokenizer.eos_token_id if start is None else start

    @property
    def max_length(self) -> int:
        return resolve_max_length(self.model.config.backbone_config, self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encodes a text; adds no BOS token if the text already begins with it."""
        if add_special_tokens is None and string.startswith(str(self.tokenizer.decode(self.prefix_token_id))):
            add_special_tokens = False
        return self.tokenizer.encode(string, **_special(add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Formats a task's messages with the tokenizer's chat template."""
        return chat_text("--apply_chat_template", self.tokenizer, chat_history, answers=add_generation_prompt)

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        encode_and_score = super().loglikelihood
        return self._by_task(requests, lambda of_task: encode_and_score(of_task, disable_tqdm=True))

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        return self._by_task(requests, self._roll)

    def _roll(self, requests: list[Instance]) -> list[float]:
        """Returns the log-likelihood of each text, from disjoint windows that each see only one token of context."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            of_request = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in of_request:
                windows.append((None, *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[Answer]:
        """Scores ``(key, context, continuation)`` requests; one row serves all that differ only in the last token."""
        texts: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise InputError(
                    f"{self._task}: a continuation of {len(continuation)} tokens cannot be scored with "
                    f"{self.max_length} positions"
                )
            # lm-eval moves trailing spaces of a context to the continuation, so a context of only spaces is empty here.
            before = context or [self.prefix_token_id]
            # Texts that are too long are truncated on the left; the last token is a target, never an input.
            texts.setdefault(tuple((before + continuation[:-1])[-self.max_length :]), []).append(index)
        answers: list[Answer] = [(0.0, False)] * len(requests)
        for batch in self._batches(texts, key=lambda text: (-len(text), text)):
            rows = [row for row, text in enumerate(batch) for _ in texts[text]]
            indices = [index for text in batch for index in texts[text]]
            scored = self._score(batch, rows, [requests[index][2] for index in indices])
            for index, answer in zip(indices, scored, strict=True):
                answers[index] = answer
                if requests[index][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
        return answers

    @torch.no_grad()
    def _score(self, texts: Sequence[Sequence[int]], rows: list[int], continuations: list[list[int]]) -> list[Answer]:
        """Returns the log-likelihood of each continuation, and whether all its tokens are the argmax.

        ``texts[rows[i]]`` is the context of ``continuations[i]`` followed by that continuation without its last token.
        """
        ids, mask = self._padded(texts)
        scored = [0] * len(texts)
        for row, continuation in zip(rows, continuations, strict=True):
            scored[row] = max(scored[row], len(continuation))
        # Left padding aligns the ends of all texts, so only the last positions need logits.
        longest = max(scored)
        with self._meter as meter:
            output = self.model(
                ids, attention_mask=mask, logits_to_keep=longest, output_gates=False, **self.how.arguments()
            )
        meter.add(output.depth, max_iterations=self.how.max_iterations, logits=sum(scored), policy=self.how.policy)
        log_p = torch.log_softmax(output.logits, -1, dtype=wide_dtype(output.logits.dtype))
        answers = []
        for row, continuation in zip(rows, continuations, strict=True):
            at_end, targets = log_p[row, -len(continuation) :], torch.tensor(continuation, device=self.device)
            total = at_end.gather(1, targets[:, None]).double().sum()
            answers.append((total.item(), bool((at_end.argmax(-1) == targets).all())))
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return self._by_task(requests, self._generate_all)

    def _generate_all(self, requests: list[Any]) -> list[str]:
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(index)
        answers = [""] * len(requests)
        for group in groups.values():
            settings = generation_settings(requests[group[0]].args[1], self.tokenizer)
            if settings.max_new_tokens >= self.max_length:
                raise InputError(
                    f"{self._task}: generating {settings.max_new_tokens} tokens leaves no room for a prompt in "
                    f"{self.max_length} positions"
                )
            prompts = {index: self._prompt(requests[index].args[0], settings) for index in group}
            generate = self._sampled if settings.sampled else self._greedy
            for index, text in generate(prompts, settings):
                answers[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return answers

    def _prompt(self, text: str, settings: GenerationSettings) -> tuple[int, ...]:
        """Encodes a prompt, truncated on the left to leave room for the answer."""
        start = self.tokenizer.bos_token
        has_start = isinstance(start, str) and text.startswith(start)
        tokens = self.tokenizer.encode(text, **_special(False if has_start else None)) or [self.prefix_token_id]
        return tuple(tokens[-(self.max_length - settings.max_new_tokens) :])

    def _greedy(self, prompts: dict[int, tuple[int, ...]], settings: GenerationSettings) -> Iterator[tuple[int, str]]:
        for batch in self._batches(prompts, key=lambda index: (-len(prompts[index]), prompts[index])):
            yield from zip(batch, self._generate([prompts[index] for index in batch], settings), strict=True)

    def _sampled(self, prompts: dict[int, tuple[int, ...]], settings: GenerationSettings) -> Iterator[tuple[int, str]]:
        """Yields (index, answer); each prompt is sampled alone with its own seed, so no answer depends on others."""
        repetitions: Counter[tuple[int, ...]] = Counter()
        devices = [self.device] if self.device.type == "cuda" else []
        with self._counting(self._task, len(prompts)) as advance:
            for index, prompt in prompts.items():
                repetitions[prompt] += 1
                draw = hashlib.sha256(f"{self.how.seed} {repetitions[prompt]} {prompt}".encode()).digest()
                with torch.random.fork_rng(devices):
                    torch.manual_seed(int.from_bytes(draw[:7], "big"))
                    yield index, self._generate([prompt], settings)[0]
                advance(1)

    def _generate(self, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> list[str]:
        ids, mask = self._padded(prompts)
        width = ids.shape[1]
        stop = StopAtStrings(self.tokenizer, settings.until, rows=len(prompts))
        with self._meter:
            result = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=settings.max_new_tokens,
                do_sample=settings.sampled,
                stopping_criteria=StoppingCriteriaList([stop]),
                eos_token_id=self.eot_token_id,
                pad_token_id=self._pad_id,
                return_dict_in_generate=True,
                **settings.others,
                **{name: value for name, value in self.how.arguments().items() if value is not None},
            )
        new = result.sequences[:, width:].tolist()
        lengths = [length or len(tokens) for length, tokens in zip(stop.lengths, new, strict=True)]
        self._count_generation(result.past_key_values.depth.cpu(), width, lengths)
        return [
            postprocess_generated_text(
                str(self.tokenizer.decode(tokens[:length], skip_special_tokens=True)), settings.until, None
            )
            for tokens, length in zip(new, lengths, strict=True)
        ]

    def _by_task(self, requests: list[Instance], answer: Callable[[list[Instance]], list[Any]]) -> list[Any]:
        """Returns the answers in the order of ``requests``; computes them task by task, to count each task's cost."""
        tasks: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            tasks.setdefault(request.task_name or "", []).append(index)
        answers: list[Any] = [None] * len(requests)
        for self._task, indices in tasks.items():
            for index, result in zip(indices, answer([requests[index] for index in indices]), strict=True):
                answers[index] = result
        return answers

    @property
    def _meter(self) -> Meter:
        """Returns the current task's meter; copies ``_blank`` on first use, because a new meter computes the shape."""
        return self.meters.setdefault(self._task, copy.copy(self._blank))

    def _count_generation(self, depth: Tensor, width: int, lengths: list[int]) -> None:
        """Adds the cost of a generation: a prefill of ``width`` slots, then ``lengths[i]`` new tokens of sequence i.

        ``depth``, ``[sequences, slots]``, is the depth of each token, 0 for padding.
        """
        # The last new token of a sequence is never an input.
        read = torch.arange(depth.shape[1]) < width - 1 + torch.tensor(lengths)[:, None]
        depth = torch.where(read, depth, 0)
        arguments: dict[str, Any] = {"max_iterations": self.how.max_iterations, "policy": self.how.policy}
        self._meter.add(depth[:, :width], logits=len(lengths), **arguments)
        for slot in range(width, depth.shape[1]):
            step = depth[:, slot : slot + 1]
            self._meter.add(step, past=depth[:, :slot], logits=int((step > 0).sum()), **arguments)

    def _batches(self, items: Any, *, key: Callable[[Any], Any]) -> Iterator[list[Any]]:
        """Yields batches of items, sorted by a ``key`` that puts long items first: out-of-memory errors occur early."""
        ordered = iter(sorted(items, key=key))
        with self._counting(self._task, len(items)) as advance:
            while batch := list(islice(ordered, self.batch_size)):
                yield batch
                advance(len(batch))

    def _padded(self, texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Returns the ids ``[texts, longest]``, padded on the left, and their attention mask."""
        rows = [torch.tensor(text) for text in texts]
        ids = pad_sequence(rows, batch_first=True, padding_value=self._pad_id, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
        return ids.to(self.device), mask.to(self.device)


def _special(add: bool | None) -> dict[str, bool]:
    """Returns arguments for ``encode``: whether to ``add`` special tokens; ``None`` keeps the tokenizer's default."""
    return {} if add is None else {"add_special_tokens": add}


class GenerationSettings(NamedTuple):
    """Settings of a generation request; ``others`` is passed to ``generate`` unchanged."""

    until: list[str]
    max_new_tokens: int
    sampled: bool
    others: dict[str, Any]


def generation_settings(request: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> GenerationSettings:
    """Returns the settings of an lm-eval request: by default 256 tokens, greedy. The end token always stops.

    Raises for settings that ``generate`` does not have, and for several beams or sequences.
    """
    kwargs: dict[str, Any] = dict(normalize_gen_kwargs(request, default_max_gen_toks=256))
    end = tokenizer.eos_token
    until = handle_stop_sequences(kwargs.pop("until"), eos=None if end is None else str(end))
    sampled = kwargs.pop("do_sample")
    if not sampled:
        kwargs.pop("temperature", None)
    max_new_tokens, known = kwargs.pop("max_gen_toks"), vars(GenerationConfig())
    for name, value in kwargs.items():
        if name not in known:
            raise InputError(f"generation_kwargs: generate has no setting {shown(name)}; leave it out")
        if name in ("num_beams", "num_return_sequences") and value != 1:
            raise InputError(f"generation_kwargs: {name}={shown(value)} must be 1: one text is generated at a time")
    return GenerationSettings([text for text in until if text], max_new_tokens, sampled, kwargs)


class StopAtStrings(StoppingCriteria):
    """Stops each sequence once its new text contains a stop string.

    ``lengths[row]`` is the number of new tokens of that sequence when a stop string was complete; 0 before.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: list[str], *, rows: int):
        self._streams = [TextStream(tokenizer, stops=stops) for _ in range(rows)]
        self._steps = 0
        self.lengths = [0] * rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self._steps += 1
        for row, token in enumerate(input_ids[:, -1].tolist()):
            if not self.lengths[row]:
                self._streams[row].add(token)
                self.lengths[row] = self._steps if self._streams[row].stop is not None else 0
        return torch.tensor([length > 0 for length in self.lengths], device=input_ids.device)
