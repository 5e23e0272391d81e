"""AdaPonderLM in one file: a Transformer processes each token again until the token's gate closes.

Needs torch and transformers (5.17 or newer). Equations are those of *AdaPonderLM: Gated Pondering Language Models with
Token-Wise Adaptive Depth*: one stock decoder makes ``K = config.iterations`` passes, ``i = 0 … K-1``. After each pass
but the last, a gate reads each token's hidden state; a token whose gate is below ``config.tau`` halts for good and
keeps its keys, values and hidden state. The expected next embedding is added to the input of an active token. Without
gates (``method: ponder``) every token takes K passes.

``_ponder`` is Algorithm 1. Two functions run its passes so that a halted token keeps its keys and values (eq. 10), with
equal results: ``_read_all`` computes every token, for training, and ``_read_active`` only active tokens, with a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import ModelOutput

from .configuration_adaponder import AdaPonderConfig

Read = Callable[[int, Tensor, Tensor], Tensor]
_LOGITS_AT_ONCE = 2**25  # while computing the expectation: 128 MiB in float32
# Not cuDNN: given a mask, its backward can return NaN on some GPUs.
_MASKED_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class AdaPonderOutput(ModelOutput):
    """The output of a forward.

    Attributes:
        loss: mean cross-entropy, if labels were given.
        logits: ``[batch, kept, vocabulary]`` after each token's last iteration, at the positions ``logits_to_keep``.
        past_key_values: the cache, if one was given or ``use_cache`` is set.
        hidden_states: on request, final-normed hidden states ``[batch, time, d]`` after each pass.
        depth: ``[batch, time]``, the iterations of each token; 0 for padding.
        gates: ``[batch, time, K - 1]``, the gates' probabilities; 0 once the token has halted.
        last_hidden_state: ``[batch, time, d]``, final-normed, after each token's last iteration.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: PonderCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    depth: Tensor | None = None
    gates: Tensor | None = None
    last_hidden_state: Tensor | None = None


@dataclass
class AdaPonderModelOutput(ModelOutput):
    """The output of ``AutoModel``'s forward; ``last_hidden_state`` is the input of the head."""

    last_hidden_state: Tensor | None = None
    past_key_values: PonderCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    depth: Tensor | None = None
    gates: Tensor | None = None


class Column(nn.Linear):
    """A linear layer in at least float32: near the logit of tau = 1e-4, bfloat16 values are 1/16 apart."""

    def forward(self, input: Tensor) -> Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        with torch.autocast(input.device.type, enabled=False):
            return functional.linear(input.to(wide), self.weight.to(wide), self.bias.to(wide))


class Gate(nn.Module):
    """Maps hidden states ``[rows, d]`` to ``s = sigmoid(W2 gelu(W1 h + b1) + b2)``, ``[rows]`` (eq. 2 and 3)."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.inner = nn.Linear(hidden_size, width * hidden_size) if width else None
        self.out = Column(width * hidden_size if width else hidden_size, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.inner is not None:
            hidden = functional.gelu(self.inner(hidden))
        return torch.sigmoid(self.out(hidden).squeeze(-1))


class Gates(nn.Module):
    """The gates of all iterations; without gates (``method: ponder``), ``forward`` returns 1 for every token."""

    def __init__(self, config: AdaPonderConfig):
        super().__init__()
        self.gates = nn.ModuleList(Gate(config.hidden_size, config.gate_width) for _ in range(config.gates))

    def forward(self, iteration: int, hidden: Tensor) -> Tensor:
        if not self.gates:
            return hidden.new_ones(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
        return self.gates[min(iteration, len(self.gates) - 1)](hidden)


class PonderCache(Cache):
    """The keys and values that each iteration reads.

    ``rows[layer]`` is (keys, values), each ``[K, batch, slots, heads, size]``. Iteration i writes its rows for i and
    all later iterations, and a later iteration of the token overwrites them. So iteration j reads row ``min(j, D - 1)``
    of a token of depth D: eq. 10. ``real [batch, slots]`` is false for padding; ``depth`` has the same shape.
    """

    def __init__(self, iterations: int):
        super().__init__(layers=[])
        self.iterations = iterations
        self.rows: dict[int, tuple[Tensor, ...]] = {}
        self.real = self.depth = torch.empty(0, 0)

    def extend(self, real: Tensor) -> None:
        """Adds slots for new tokens, ``real [batch, time]``, false for padding."""
        if self.real.numel() == 0:
            self.real, self.depth = real, torch.zeros_like(real, dtype=torch.long)
            return
        self.real = torch.cat([self.real, real], 1)
        self.depth = functional.pad(self.depth, (0, real.shape[1]))
        room = self.rows[0][0].shape[2] if self.rows else self.real.shape[1]  # padding alone leaves no rows
        if (lacking := self.real.shape[1] - room) > 0:  # adds spare slots, so that not every token copies all rows
            self._each(lambda rows: functional.pad(rows, (0, 0, 0, 0, 0, lacking + 128)))

    def swap(self, layer: int, iteration: int, sequences: Tensor, slots: Tensor, new: tuple[Tensor, Tensor]) -> Any:
        """Writes ``new``, the rows of ``slots [n, count]`` in ``sequences [n]``; returns all rows of the sequences.

        ``new`` and the result are (keys, values), ``[n, heads, slots, size]`` each, as ``iteration`` reads them.
        """
        if layer not in self.rows:
            shape = (self.iterations, *self.real.shape)
            self.rows[layer] = tuple(rows.new_zeros(*shape, rows.shape[1], rows.shape[3]) for rows in new)
        for rows, computed in zip(self.rows[layer], new, strict=True):
            rows[iteration:, sequences[:, None], slots] = computed.transpose(1, 2)
        return tuple(rows[iteration, sequences, : self.real.shape[1]].transpose(1, 2) for rows in self.rows[layer])

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        self.rows = {layer: tuple(map(change, rows)) for layer, rows in self.rows.items()}

    # The interface that generate() uses.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.real.shape[1]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.real, self.depth = self.real[beam_idx], self.depth[beam_idx]
        self._each(lambda rows: rows[:, beam_idx.to(rows.device)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.reorder_cache(torch.arange(self.real.shape[0], device=self.real.device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last ``-tokens_to_remove`` tokens (Hugging Face passes a negative number)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop({tokens_to_remove}): give the number of tokens to remove as a negative number")
        kept = max(0, self.real.shape[1] + tokens_to_remove)
        self.real, self.depth, self.rows = self.real[:, :kept], self.depth[:, :kept], self.rows if kept else {}


class OnePass(Cache):
    """The cache of one pass; ``answer(layer, new)`` returns the (keys, values) to attend to, given the new ones."""

    def __init__(self, answer: Callable[[int, tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]):
        super().__init__(layers=[])
        self.answer, self.calls = answer, 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.answer(layer_idx, (key_states.to(value_states.dtype), value_states))


class Tokens(NamedTuple):
    """The tokens of a forward.

    Attributes:
        real: false for padding, ``[batch, time]``.
        position: position of each token, ``[batch, time]``.
        past: number of slots in the cache before this forward.
    """

    real: Tensor
    position: Tensor
    past: int


def scattered(where: Tensor, rows: Tensor) -> Tensor:
    """Returns ``[batch, time, …]``: ``rows``, in order, at the true entries of ``where [batch, time]``, else 0."""
    grid = rows.new_zeros(*where.shape, *rows.shape[1:])
    grid[where] = rows
    return grid


class AdaPonderForCausalLM(PreTrainedModel, GenerationMixin):
    """A stock decoder (``backbone``) that makes up to K passes over each token, and its gates (``method``)."""

    config: AdaPonderConfig
    config_class = AdaPonderConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: AdaPonderConfig):
        super().__init__(config)
        self.gradient_checkpointing = False
        options = {"attn_implementation": config._attn_implementation, "dtype": torch.get_default_dtype()}
        self.backbone: Any = AutoModelForCausalLM.from_config(config.backbone_config, **options)
        config.backbone_config = self.backbone.config
        self.method = Gates(config)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None: ...  # weights are loaded

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any] | None = None) -> None:
        """Makes backward compute each whole pass again, because layers that checkpoint themselves drop the cache."""
        if (gradient_checkpointing_kwargs or {}).get("use_reentrant"):
            raise ValueError("gradient_checkpointing_kwargs: only use_reentrant=False works with reused keys")
        self.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.gradient_checkpointing = False

    def get_input_embeddings(self) -> Any:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> Any:
        return self.backbone.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.backbone.set_output_embeddings(new_embeddings)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: PonderCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        max_iterations: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> AdaPonderOutput | tuple:
        """Makes up to K passes over each token and predicts the next token.

        Args:
            input_ids: ``[batch, time]``; with a cache, the tokens it does not hold yet.
            attention_mask: 0 for padding, left or right; with a cache, over cached tokens too.
            position_ids: by default real tokens are counted from 0, so that left padding changes nothing.
            past_key_values: the cache of the forward to continue.
            labels: ``[batch, time]``, shifted by ``forward``; -100 and predictions made at padding do not count.
            use_cache: return a cache. With a cache, halted tokens are not computed; without one, all tokens are.
            logits_to_keep: only the last n positions' logits, or those at the given indices; 0 keeps all.
            max_iterations: limit on each token's iterations.
            num_items_in_batch: divisor of the summed loss; by default the number of targets.
            output_hidden_states: return hidden states after each pass; ``None``: as set in the config.
        """
        unknown = kwargs.keys() - {"cache_position", "tokenizer", "token_type_ids"}  # Hugging Face passes them to all
        if names := sorted(name for name in unknown if kwargs[name] is not None and kwargs[name] is not False):
            raise ValueError(f"{', '.join(names)}: forward has no such argument")
        most = self.config.iterations if max_iterations is None else max_iterations
        if not 1 <= most <= self.config.iterations:
            raise ValueError(f"max_iterations={max_iterations} must be between 1 and {self.config.iterations}")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids, inputs_embeds: give one of them")
        embedded = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        cache = PonderCache(self.config.iterations) if use_cache and past_key_values is None else past_key_values
        tokens = _arrange(embedded, attention_mask, position_ids, _ponder_cache(cache))
        self._check_positions(tokens, given=position_ids is not None)
        read = self._read_all(tokens) if cache is None else self._read_active(tokens, cache)
        states, depth, gates = self._ponder(embedded, tokens.real, most, read)
        hidden = states[-1]
        if cache is not None:
            cache.depth[:, tokens.past :] = depth
        head, loss = self.get_output_embeddings(), None
        kept = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = head(hidden if labels is not None else hidden[:, kept])
        if labels is not None:
            loss, logits = _loss(logits, labels, tokens.real, num_items_in_batch), logits[:, kept]
        with_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output = AdaPonderOutput(loss, logits, cache, tuple(states) if with_states else None, depth, gates, hidden)
        return output.to_tuple() if return_dict is False else output

    def _check_positions(self, tokens: Tokens, *, given: bool) -> None:
        limit = self.config.max_position_embeddings
        if limit is None or (not given and tokens.past + tokens.real.shape[1] <= limit):
            return
        if (last := int(tokens.position.max())) >= limit:
            raise ValueError(f"input_ids reaches position {last}, the backbone's positions end at {limit - 1}")

    def _ponder(
        self, embedded: Tensor, real: Tensor, iterations: int, read: Read
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Returns (hidden states after each pass, depths, gates) of ``embedded [batch, time, d]`` (Algorithm 1).

        ``read(i, x, active)`` is the Transformer in iteration i; its values of inactive tokens are undefined.
        """
        config = self.config
        x = embedded * (config.embedding_scale * config.initial_multiplier)  # E^0
        active, depth = real, real.long()  # m^0: padding is never read
        hidden = read(0, x, active)  # eq. 1: h^0 = Transformer(E^0)
        states = [hidden]
        gates = hidden.new_zeros(*real.shape, config.iterations - 1, dtype=torch.promote_types(x.dtype, torch.float32))
        for i in range(iterations - 1):
            s = scattered(active, self.method(i, hidden[active]))  # eq. 2 and 3: s^i = sigmoid(MLP_i(h^i))
            gates[..., i] = s
            active = active & (s.float() >= config.tau)  # eq. 4 and 5: m^{i+1} = m^i * (s^i >= tau)
            expected = scattered(active, self.expected_embedding(hidden[active]))  # eq. 6 to 8: e^i
            x = x + (active * s).to(x.dtype)[..., None] * expected  # eq. 9: E^{i+1} = E^i + (m^{i+1} s^i) e^i
            new = read(i + 1, x, active)  # eq. 1: h^{i+1} = Transformer(E^{i+1})
            hidden = torch.where(active[..., None], new, hidden)  # a halted token's representation stays as it is
            states.append(hidden)
            depth = depth + active
        return states, depth, gates

    def expected_embedding(self, hidden: Tensor) -> Tensor:
        """Returns ``embedding_scale * softmax(head(h)) @ table`` for each row h of ``hidden [rows, d]`` (eq. 6-8)."""
        table, top_k = self._table(hidden.device), self.config.expectation_top_k
        head, wide, parts = self.get_output_embeddings(), torch.promote_types(hidden.dtype, torch.float32), []
        for rows in hidden.split(max(1, _LOGITS_AT_ONCE // table.shape[0])):
            logits = head(rows).to(wide)
            if top_k is not None:
                best, index = logits.topk(min(top_k, logits.shape[-1]))
                logits = torch.full_like(logits, -torch.inf).scatter(-1, index, best)
            parts.append(torch.softmax(logits, -1).to(table.dtype) @ table)
        return torch.cat(parts) * self.config.embedding_scale

    def _table(self, device: torch.device) -> Tensor:
        """Returns the embedding table, ``[vocabulary, d]``; an adapted or offloaded module is called with every id."""
        embedding = self.get_input_embeddings()
        if type(embedding) is nn.Embedding and embedding.weight.device.type != "meta":
            return embedding.weight
        return embedding(torch.arange(self.config.vocab_size, device=device))

    def _read_all(self, tokens: Tokens) -> Read:
        """Returns a function that runs a pass over all tokens; halted tokens keep keys and values (Algorithm 2)."""
        before: dict[int, tuple[Tensor, Tensor]] = {}
        slots = torch.arange(tokens.real.shape[1], device=tokens.real.device).expand(tokens.real.shape)
        # A pass that is plainly causal needs no mask: attention is faster without.
        mask = None if bool(tokens.real.all()) else self._mask(slots, tokens.real)

        def read(i: int, x: Tensor, active: Tensor) -> Tensor:
            # Backward may run this pass again, when ``before`` has rows of the last pass: the same for halted tokens.
            def answer(layer: int, new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
                if i > 0:
                    (keys, values), (old_keys, old_values) = new, before[layer]
                    is_active = active[:, None, :, None]
                    new = torch.where(is_active, keys, old_keys), torch.where(is_active, values, old_values)  # eq. 10
                before[layer] = new
                return new

            arguments = (x, tokens.position, mask, answer)
            if self.gradient_checkpointing and self.training:
                return checkpoint(self._pass, *arguments, use_reentrant=False)
            return self._pass(*arguments)

        return read

    def _read_active(self, tokens: Tokens, cache: PonderCache) -> Read:
        """Returns a function that runs a pass over active tokens; the cache has keys and values of all other tokens.

        Sequences with equally many active tokens are computed together. In decoding every active sequence has one, so
        that each iteration takes one pass.
        """
        cache.extend(tokens.real)

        def read(i: int, x: Tensor, active: Tensor) -> Tensor:
            hidden, counts = torch.zeros_like(x), active.sum(1)
            for count in counts[counts > 0].unique().tolist():
                sequences = (counts == count).nonzero()[:, 0]
                time = active[sequences].nonzero()[:, 1].view(-1, count)
                at, slots = (sequences[:, None], time), tokens.past + time

                def answer(layer: int, new: tuple[Tensor, Tensor], sequences=sequences, slots=slots) -> Any:
                    return cache.swap(layer, i, sequences, slots, new)

                mask = self._mask(slots, cache.real[sequences])
                hidden[at] = self._pass(x[at], tokens.position[at], mask, answer)
            return hidden

        return read

    def _pass(self, x: Tensor, position: Tensor, mask: Any, answer: Callable[..., Any]) -> Tensor:
        """Runs the whole decoder over ``x [sequences, tokens, d]``; returns its final-normed hidden states."""
        layers = OnePass(answer)
        with nullcontext() if mask is None else sdpa_kernel(_MASKED_ATTENTION):
            output = self.backbone.base_model(
                inputs_embeds=x, position_ids=position, attention_mask=mask, past_key_values=layers, use_cache=True
            )
        if layers.calls != self.config.num_hidden_layers:
            raise RuntimeError(
                f"{layers.calls} of {self.config.num_hidden_layers} layers used the cache: the backbone's own gradient "
                "checkpointing drops it; switch it off"
            )
        return output.last_hidden_state

    def _mask(self, slots: Tensor, real: Tensor) -> Any:
        """Returns the causal mask of queries ``slots [n, count]``; ``real [n, all slots]`` is false for padding keys.

        A sliding window counts tokens, not padding. Every slot attends to itself, so that no softmax is empty.
        """
        backbone = self.backbone.config
        window: Any = getattr(backbone, "sliding_window", None)
        query, key, order = slots[:, :, None], torch.arange(real.shape[1], device=slots.device), real.cumsum(1)
        distance = order.gather(1, slots)[:, :, None] - order[:, None, :]
        full = (key <= query) & real[:, None, :]
        near = full if window is None else full & (distance < window)
        masks = {}
        for kind in dict.fromkeys(getattr(backbone, "layer_types", None) or ["sliding_attention"]):
            mask = ((near if kind == "sliding_attention" else full) | (key == query))[:, None]
            if backbone._attn_implementation == "eager":
                mask = torch.zeros_like(mask, dtype=self.dtype).masked_fill_(~mask, torch.finfo(self.dtype).min)
            masks[kind] = mask
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if (kind := generation_config.cache_implementation) not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r} keeps one row per token, not K: leave it out")
        if generation_config.assistant_early_exit is not None:
            raise ValueError("assistant_early_exit leaves layers out, which every iteration needs: leave it out")
        cache = _ponder_cache(model_kwargs.get("past_key_values"))
        if cache is not None:
            cache._is_user_defined = True  # so that generate leaves it complete
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = PonderCache(self.config.iterations)


class AdaPonderModel(AdaPonderForCausalLM):
    """The model that ``AutoModel`` opens: the same weights; returns hidden states instead of logits."""

    def forward(self, *args: Any, return_dict: bool | None = None, **kwargs: Any) -> AdaPonderModelOutput | tuple:
        if kwargs.get("labels") is not None:
            raise ValueError("labels: AutoModel returns hidden states only; open it with AutoModelForCausalLM")
        output: Any = super().forward(*args, **kwargs, logits_to_keep=1)
        names = ("last_hidden_state", "past_key_values", "hidden_states", "depth", "gates")
        output = AdaPonderModelOutput(**{name: output.get(name) for name in names})
        return output.to_tuple() if return_dict is False else output

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("generate: AutoModel returns hidden states only; open it with AutoModelForCausalLM")


def _ponder_cache(cache: Any) -> PonderCache | None:
    """Returns ``cache`` if it is a :class:`PonderCache` or ``None``; raises for other caches."""
    if cache is not None and not isinstance(cache, PonderCache):
        raise ValueError(f"past_key_values is a {type(cache).__name__}: only a PonderCache holds K rows per token")
    return cache


def _arrange(embedded: Tensor, mask: Tensor | None, position: Tensor | None, cache: PonderCache | None) -> Tokens:
    """Builds :class:`Tokens`; a token's default position is the number of real tokens before it, cached ones too."""
    batch, time, _ = embedded.shape
    past = 0 if cache is None else cache.get_seq_length()
    before = torch.zeros(batch, 1, dtype=torch.long, device=embedded.device)
    if cache is not None and past:
        if cache.real.shape[0] != batch:
            raise ValueError(f"past_key_values holds {cache.real.shape[0]} sequences, the batch has {batch}")
        before = cache.real.sum(1, keepdim=True)
    if mask is None:
        real = torch.ones(batch, time, dtype=torch.bool, device=embedded.device)
    elif mask.shape == (batch, past + time):
        real = mask[:, past:].to(embedded.device).bool()
    else:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}, it must be {(batch, past + time)}")
    if position is None:
        position = (real.cumsum(1) - 1 + before).clamp_min(0)
    elif mask is None and not past and bool((position.diff(dim=1) != 1).any()):
        raise ValueError("position_ids restart: documents packed into one sequence are not kept apart here")
    return Tokens(real, position.expand(batch, time), past)


def _loss(logits: Tensor, labels: Tensor, real: Tensor, items: Tensor | int | None) -> Tensor:
    """Returns the summed cross-entropy of the next tokens divided by ``items``; ``None``: by the number of targets.

    Predictions made at padding do not count.
    """
    targets = labels[:, 1:].masked_fill(~real[:, :-1], -100)
    wide = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    count = (targets != -100).sum().clamp(min=1) if items is None else items
    return functional.cross_entropy(wide.flatten(0, 1), targets.flatten().to(wide.device), reduction="sum") / count
