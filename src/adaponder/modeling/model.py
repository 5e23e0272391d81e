"""The Hugging Face face of the family: forward, generate, save, load, and nothing else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import ModelOutput

from adaponder.backbones.attention import refuse_attention
from adaponder.backbones.families import refuse_halting
from adaponder.backbones.wrapper import Backbone
from adaponder.checkpoints.loading import (
    NEEDED,
    NOT_NEEDED,
    fetch,
    in_our_words,
    model_card,
    refuse_unsafe,
    require_exact_keys,
    require_finite,
    require_room,
)
from adaponder.checkpoints.manifest import verify_files, write_manifest
from adaponder.checkpoints.special_tokens import require_agreement
from adaponder.config import AdaPonderConfig
from adaponder.errors import BackboneError, CheckpointError, InputError
from adaponder.execution.ledger import Ledger
from adaponder.execution.runs import CompactRun, DenseRun, PackedRun, Run
from adaponder.execution.tokens import Tokens, arrange_tokens, check_reads, require_whole
from adaponder.files import checksums_wanted
from adaponder.halting import gate_probability
from adaponder.methods import Iteration, Method, Objective, build_method
from adaponder.methods.base import Ask, Trajectory, plain_loss
from adaponder.modeling.generation import ASKED, LedgerGenerationMixin, check_cache
from adaponder.modeling.losses import as_targets, scorer, within_documents
from adaponder.policies import Policy, PolicyInput, as_policy

PolicyLike = Policy | Callable[[PolicyInput], Tensor]

# Cross-entropy and the method's own terms; made once, so that no compiler traces its checks.
_PLAIN = Objective()

# Hugging Face callers hand these to every model; none asks for anything this model has.
_HARMLESS = {"num_items_in_batch", "cache_position", "token_type_ids"}

_NEVER = {
    "trust_remote_code": "loading weights never executes code here",
    "use_safetensors": "weights are read from safetensors only, a pickle could execute code",
    "ignore_mismatched_sizes": "a tensor of another shape is an error here",
    "subfolder": "name the folder itself",
}


@dataclass
class AdaPonderOutput(ModelOutput):
    """What a forward returns; absent parts are ``None``.

    Attributes:
        loss: cross-entropy, plus the method's own terms in training or where an ``objective`` was given.
        logits: ``[batch, kept, vocabulary]``, after each token's last iteration.
        past_key_values: the ledger, where one was asked for.
        hidden_states: on request, final-normed hidden states ``[batch, time, hidden]`` after each pass, the last of
            which the head reads (Hugging Face's own models give one per layer).
        depth: ``[batch, time]``, how often each token was read; 0 for padding.
        gates: ``[batch, time, gates]`` probabilities: adaponder's ``s``, mor's router, ouro's exit ``lambda``.
        iteration_logits: ``[passes, batch, kept, vocabulary]``, on request (pause makes one pass).
        terms: the loss by name, e.g. ``cross_entropy`` and ``ponder``.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: Ledger | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    depth: Tensor | None = None
    gates: Tensor | None = None
    iteration_logits: Tensor | None = None
    terms: dict[str, Tensor] | None = None


@dataclass
class AdaPonderModelOutput(ModelOutput):
    """What ``AutoModel``'s forward returns; ``last_hidden_state`` is each token's last, as the head reads it."""

    last_hidden_state: Tensor | None = None
    past_key_values: Ledger | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    depth: Tensor | None = None
    gates: Tensor | None = None


class AdaPonderForCausalLM(LedgerGenerationMixin, PreTrainedModel):
    """A stock Hugging Face decoder, read again and again by one method of the family.

    ``model.backbone`` is the unmodified stock model; ``model.method`` holds what the method adds (gates, routers).
    """

    config: AdaPonderConfig
    config_class = AdaPonderConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: AdaPonderConfig, backbone: PreTrainedModel | None = None):
        config.check()  # again: Hugging Face sets overrides on a config after it was built
        refuse_attention(config._attn_implementation)
        super().__init__(config)
        if backbone is None:
            built: PreTrainedModel = AutoModelForCausalLM.from_config(
                config.backbone_config,
                attn_implementation=config._attn_implementation,
                dtype=torch.get_default_dtype(),
                trust_remote_code=False,
            )
            backbone = built
        _train_padding(backbone)
        # One config, whoever looks: resizing the vocabulary must reach both.
        config.backbone_config = backbone.config
        self.backbone: PreTrainedModel = backbone
        self.method: Method = build_method(config)
        if self.method.halts:
            refuse_halting(backbone, config.method)
        self._wrapped = Backbone(backbone)
        self.gradient_checkpointing = False
        # What a forward in training takes where its caller names none: adaponder.integrations sets them step by step.
        self.training_objective: Objective | None = None
        self.training_policy: PolicyLike | None = None
        self._told_of_objective = False
        self.post_init()
        self.wrapped.verify()

    @property
    def wrapped(self) -> Backbone:
        """The backbone as the recurrence sees it."""
        if self._wrapped.stock is not self.backbone:
            options, self._wrapped = self._wrapped.compile_options, Backbone(self.backbone)
            if options is not None:
                self._wrapped.compile(**options)
        return self._wrapped

    @classmethod
    def from_backbone(cls, stock: PreTrainedModel, **recurrence: Any) -> AdaPonderForCausalLM:
        """Wraps a stock decoder, sharing its weights. ``embedding_scale`` is 1 unless told: so it was trained.

        >>> model = AdaPonderForCausalLM.from_backbone(pythia, method="adaponder", iterations=4)
        """
        recurrence.setdefault("embedding_scale", 1.0)
        recurrence.setdefault("attn_implementation", stock.config._attn_implementation)
        config = AdaPonderConfig(backbone_config=stock.config, dtype=stock.dtype, **recurrence)
        model = cls(config, backbone=stock)
        model.method.to(device=stock.device, dtype=stock.dtype)
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):  # it stops where the stock model stops
            setattr(model.generation_config, name, getattr(stock.generation_config, name, None))
        return model.train(stock.training)

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing is left to do: the backbone follows its own rule, and a method initialises itself when built."""

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        refuse_attention(attn_implementation)
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.backbone.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.backbone.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.backbone.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.backbone.set_output_embeddings(new_embeddings)

    # --- forward ------------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Ledger | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        inputs_embeds: Tensor | None = None,
        targets: Tensor | None = None,
        document_ids: Tensor | None = None,
        policy: PolicyLike | None = None,
        max_iterations: int | None = None,
        execution: str | None = None,
        allow_mismatch: bool = False,
        objective: Objective | None = None,
        output_logits: bool = True,
        output_gates: bool = True,
        output_iteration_logits: bool = False,
        output_hidden_states: bool | None = None,
        on_iteration: Callable[[Iteration], None] | None = None,
        seed: int = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> AdaPonderOutput | tuple:
        """Reads each token up to K times and predicts the next.

        Args:
            input_ids: ``[batch, time]``; with a cache, the tokens it does not hold yet.
            attention_mask: 0 for padding, left or right; with a cache, over cached tokens too.
            position_ids: derived from the mask when absent, so left padding changes nothing.
            labels: shifted inside, -100 is ignored. What padding predicts, or a document's last token, does not count.
            targets: labels shifted already: what each token should predict, so that no position is spent on a token
                that predicts nothing.
            past_key_values: the :class:`Ledger` of an earlier forward, to go on from.
            use_cache: return a ledger to go on from.
            logits_to_keep: only the last n positions' logits (or those at the given indices); 0 keeps all.
            inputs_embeds: ``[batch, time, hidden]`` instead of ids: what ``get_input_embeddings()`` would give.
            document_ids: documents packed into one row: equal ids see each other, and positions restart.
            policy: who decides depth instead of the learned rule.
            max_iterations: read each token at most this often.
            execution: ``dense`` or ``compact``; by default dense in training, compact where work can be skipped.
            allow_mismatch: skip halted tokens' work although ``reuse="kv"`` lets their hidden state move on.
            objective: the training loss around cross-entropy; in training by default ``training_objective``.
            output_logits: return logits; without, training holds a chunk of them at a time.
            output_gates: return gates, those of halted tokens included (they read the frozen state).
            output_iteration_logits: return logits after each iteration.
            output_hidden_states: return hidden states after each iteration; by default as the config says.
            on_iteration: called with an :class:`Iteration` after each pass.
            seed: for policies that draw.
        """
        _refuse_foreign(kwargs)
        sizes = {"vocabulary": self.config.vocab_size, "hidden_size": self.config.hidden_size}
        grid = check_reads(input_ids, inputs_embeds, **sizes)
        if not isinstance(seed, int):
            raise InputError(f"seed={seed!r}: a whole number is needed")
        # Dynamo cannot read a context variable; a compiled forward gets its settings from generate's keyword arguments.
        during = {} if torch.compiler.is_compiling() else ASKED.get()
        if during.get("model") is self:
            policy, max_iterations = policy or during.get("policy"), max_iterations or during.get("max_iterations")
            seed, on_iteration = seed or during.get("seed", 0), on_iteration or during.get("on_iteration")
            allow_mismatch = allow_mismatch or during.get("allow_mismatch", False)
        if self.training:
            objective = self.training_objective if objective is None else objective
            policy = self.training_policy if policy is None else policy
        iterations = self._iterations(max_iterations)
        ledger = self.new_ledger(iterations) if use_cache or past_key_values is not None else None
        if ledger is not None and past_key_values is not None:
            ledger = check_cache(past_key_values, ledger)
        targets = as_targets(grid, labels, targets, self.config.vocab_size)
        kept = _kept(logits_to_keep)
        states: list[Iteration] = []
        trains = targets is not None and (self.training or objective is not None)
        if trains and objective is None:
            self._tell_of_objective()
        shows_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        collects = output_iteration_logits or shows_states or (trains and self.method.loss_needs_states)
        ask = Ask(
            iterations=iterations,
            policy=self._policy(policy, generates=ledger is not None),
            seed=seed,
            every_gate=output_gates or targets is not None,
            show=_hooks(on_iteration, states.append if collects else None),
        )
        tokens = arrange_tokens(
            grid,
            attention_mask=attention_mask,
            position_ids=position_ids,
            document_ids=document_ids,
            ledger=ledger,
        )
        self._check_positions(tokens, given=position_ids is not None)
        if labels is not None and targets is not None and tokens.document is not None:
            targets = within_documents(targets, tokens.document)
        past = 0 if ledger is None else ledger.slots
        try:
            run = self._run(tokens, iterations, ledger, execution, allow_mismatch)
            ask.policy.check_batch(run.tokens.slot.shape[0], run.tokens.last_slot + 1)
            embedded = self.wrapped.embed(grid) if inputs_embeds is None else inputs_embeds
            seen: Trajectory = self.method(run, embedded, ask)
        except BaseException:
            # A policy or hook that raises, or Ctrl-C, must not leave half-read tokens in the caller's cache.
            if ledger is not None:
                ledger.forget(past)
            raise
        seen.states = [iteration.hidden for iteration in states]

        logits = None
        if output_logits:
            # The loss needs every position's logits: then they are computed once, and the kept ones are a slice.
            logits = self.wrapped.logits(seen.hidden if targets is not None else seen.hidden[:, kept])
        losses = None
        if targets is not None:
            score = scorer(seen, logits, targets, tokens.real, self.wrapped.head(), kwargs.get("num_items_in_batch"))
            losses = self.method.loss(seen, score, run, objective or _PLAIN) if trains else plain_loss(seen, score)
        by_iteration = None
        if output_iteration_logits:
            by_iteration = torch.stack([self.wrapped.logits(state[:, kept]) for state in seen.states])
        output = AdaPonderOutput(
            loss=None if losses is None else losses.total,
            logits=logits if losses is None or logits is None else logits[:, kept],
            past_key_values=ledger,
            hidden_states=tuple(seen.states) if shows_states else None,
            depth=run.depth.unflatten(1, (grid.shape[1], -1)).sum(-1),
            gates=gate_probability(seen.gates) if output_gates and seen.gates is not None else None,
            iteration_logits=by_iteration,
            terms=None if losses is None else losses.terms,
        )
        return output.to_tuple() if return_dict is False else output

    def _iterations(self, asked: int | None) -> int:
        if asked is None:
            return self.config.iterations
        if not isinstance(asked, int) or isinstance(asked, bool) or not 1 <= asked <= self.config.iterations:
            raise InputError(f"max_iterations={asked}: from 1 to {self.config.iterations}, the model's iterations")
        return asked

    def check_policy(self, asked: PolicyLike | None) -> None:
        """Raises where this policy cannot decide for this model; ``None`` always can."""
        if asked is None:
            return
        if not self.method.halts:
            raise InputError(
                f"policy: {self.config.method} reads every token equally often; use max_iterations to read less"
            )
        policy = as_policy(asked)
        policy.check_signal(self.method.signal, self.config.method, self.config.iterations)
        policy.check(self.config.method, self.config.iterations)

    def _policy(self, asked: PolicyLike | None, *, generates: bool) -> Policy:
        self.check_policy(asked)
        policy = self.method.default_policy(training=self.training) if asked is None else as_policy(asked)
        if generates and not policy.causal:
            raise InputError(
                f"policy={policy.fingerprint} looks at the future: it can be evaluated, not generated with "
                "(a model in training mode may choose such a one by itself: call model.eval())"
            )
        return policy

    def new_ledger(self, max_iterations: int | None = None) -> Ledger:
        """An empty cache for this model, to be filled by forwards with the same ``max_iterations``."""
        iterations, backbone = self._iterations(max_iterations), self.config.backbone_config
        return Ledger(
            layers=self.wrapped.layers,
            iterations=self.method.passes(iterations),
            slots_per_token=self.method.slots_per_token(iterations),
            reuse=self.method.reuse(),
            hidden_size=backbone.hidden_size,
            heads=(backbone.num_attention_heads, getattr(backbone, "num_key_value_heads", None)),
            dtype=self.dtype,
        )

    def _run(
        self, tokens: Tokens, iterations: int, ledger: Ledger | None, execution: str | None, allow_mismatch: bool
    ) -> Run:
        if execution not in (None, "dense", "compact"):
            raise InputError(f"execution={execution!r}: dense or compact")
        if execution == "dense" and ledger is not None:
            raise InputError("execution='dense' keeps no ledger: leave out use_cache and past_key_values")
        reuse = self.method.reuse()
        if allow_mismatch and reuse == "kv":
            warnings.warn(
                "allow_mismatch: halted tokens are skipped although reuse='kv' would move their hidden state on; "
                "results differ from training",
                stacklevel=3,
            )
            reuse = "state"
        skips = self.method.halts and reuse in ("state", "absent") and not self.training
        replay = self.gradient_checkpointing and self.training
        stream = self.method.needs_stream(iterations)
        arranged = self.method.arrange(tokens, iterations)
        if execution == "compact" or ledger is not None or (execution is None and skips):
            if ledger is None and self.wrapped.packs():
                return PackedRun(self.wrapped, arranged, reuse=reuse, replay=replay, stream=stream)
            ledger = self.new_ledger(iterations) if ledger is None else ledger
            return CompactRun(self.wrapped, arranged, reuse=reuse, ledger=ledger, replay=replay, stream=stream)
        return DenseRun(self.wrapped, arranged, reuse=reuse, replay=replay, stream=stream)

    def _tell_of_objective(self) -> None:
        """Warns, once, that gates are being trained without the term that teaches them to close."""
        if not self.method.has_ponder_term or self._told_of_objective or not torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():
            return
        self._told_of_objective = True
        warnings.warn(
            "objective: none is given, so gates learn from cross-entropy alone and nothing teaches them to halt; under "
            "transformers.Trainer add adaponder.integrations.PonderCallback, in a loop of your own pass "
            "objective=Objective(ponder_weight=…, ponder_fraction=…), or Objective() to mean just this",
            stacklevel=3,
        )

    def _check_positions(self, tokens: Tokens, *, given: bool) -> None:
        limit = self.config.max_position_embeddings
        # Slots bound the positions we derive, and their number is known without asking the device.
        if limit is None or (not given and tokens.last_slot < limit):
            return
        last = int(tokens.position.max())
        if last >= limit:
            field = "position_ids" if given else "input_ids"
            raise InputError(f"{field} reaches position {last}, the backbone's positions end at {limit - 1}")

    # --- training aids ------------------------------------------------------------------------------------------

    def compile_passes(self, *, by: str = "layer", memory_budget: float = 1.0, **options: Any) -> None:
        """Compiles passes over the backbone, and gates and the like; ``options`` are those of ``torch.compile``.

        One layer is compiled for all of them and for all iterations; ``by="pass"`` makes a graph of a whole pass, which
        takes a minute or two with many layers. ``memory_budget=0.5`` keeps half of a pass's activations for backward
        and computes the rest again. The model can be saved, loaded and changed as before. ``torch.compile(model)``
        works too, and makes one graph of all iterations: it takes K times as long to compile as a pass.
        """
        self.wrapped.compile(by=by, memory_budget=memory_budget, **options)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Keeps one pass's activations at a time; each iteration is replayed in backward."""
        options = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        if options.pop("use_reentrant") or options:
            raise BackboneError(
                "gradient_checkpointing_kwargs: only use_reentrant=False gives right gradients through reused K/V"
            )
        if any(value not in (None, 1, False) for value in kwargs.values()):
            raise BackboneError(f"gradient checkpointing here is per iteration and takes no {', '.join(kwargs)}")
        self.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.gradient_checkpointing = False

    # --- save and load ------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *args: Any, verify: bool | None = None, **kwargs: Any
    ) -> Any:
        """Hugging Face's ``from_pretrained``, strict: safetensors only, and any key that does not fit is an error.

        Where the folder has a manifest, every file in it is read once more and its checksum compared (a second or two
        for each gigabyte); config, generation config and tokenizer must name the same end and padding tokens.
        ``verify=False`` leaves both out, and so does ``ADAPONDER_VERIFY=0`` unless ``verify`` is given.
        """
        for name, reason in _NEVER.items():
            # lm-eval passes subfolder="" and trust_remote_code=False: what is empty or off asks for nothing.
            if kwargs.pop(name, None) not in (None, "", name == "use_safetensors"):
                raise InputError(f"{name}: {reason}")
        hub: dict[str, Any] = {name: kwargs[name] for name in ("revision", "cache_dir", "token") if name in kwargs}
        where = fetch(pretrained_model_name_or_path, NEEDED, **hub)
        refuse_unsafe(where)
        if checksums_wanted() if verify is None else verify:
            verify_files(where, may_be_missing=NOT_NEEDED)
            require_agreement(where)
        wants_info = kwargs.pop("output_loading_info", False)
        with in_our_words(where):
            require_room(where, AdaPonderConfig.from_pretrained(where))
            # Mismatched sizes are let through here so that all of them can be listed below.
            loaded: Any = super().from_pretrained(
                where,
                *args,
                **kwargs,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        model, info = loaded
        require_exact_keys(str(where), info)
        require_finite(str(where), model.state_dict().items())
        model.wrapped.verify()
        return (model, info) if wants_info else model

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """torch's, but weights that would be thrown away are an error with ``strict=False`` too.

        ``transformers.Trainer`` resumes so, and a head under another name would stay as it was.
        """
        unknown = sorted(set(state_dict) - set(self.state_dict())) if not strict else []
        if unknown:
            raise CheckpointError(
                f"load_state_dict: the model has no {', '.join(unknown[:4])}{', …' if unknown[4:] else ''}, whose "
                "values would be lost; open the folder with from_pretrained, which knows other names, and save it again"
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def save_pretrained(
        self, save_directory: str | Path, *args: Any, manifest: bool = True, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """Hugging Face's, with a model card and a manifest of checksums that loading verifies.

        A tokenizer that lies in the folder already must name the same end and padding tokens as the model.
        """
        folder = Path(save_directory)
        if folder.is_dir():
            require_agreement(folder, self.config.backbone_config.to_dict(), self.generation_config.to_dict())
        # Weights are named as the model names them. Hugging Face would write older names (GPT-NeoX: embed_out), under
        # which its Trainer does not find them again.
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, *args, is_main_process=is_main_process, **kwargs)
        if not is_main_process:
            return
        card = folder / "README.md"
        if not card.exists():
            added = sum(parameter.numel() for parameter in self.method.parameters())
            card.write_text(model_card(self.config, self.num_parameters(), added))
        if manifest:
            # Tokenizers and cards are often written or edited afterwards: they are not vouched for here.
            patterns = ("config.json", "generation_config.json", "model*.safetensors", "model*.safetensors.index.json")
            write_manifest(folder, [path.name for pattern in patterns for path in folder.glob(pattern)])


def _hooks(*hooks: Callable[[Iteration], None] | None) -> Callable[[Iteration], None]:
    wanted = [hook for hook in hooks if hook is not None]

    def show(iteration: Iteration) -> None:
        for hook in wanted:
            hook(iteration)

    return show


def _refuse_foreign(kwargs: dict[str, Any]) -> None:
    """Raises on arguments of ``forward`` that ask for something this model does not have."""
    asked_for = {key for key, value in kwargs.items() if value is not None and value is not False}
    if "output_attentions" in asked_for:
        raise InputError("output_attentions: attention weights are not kept; hooks on backbone layers can see them")
    if foreign := asked_for - _HARMLESS:
        raise InputError(f"{', '.join(sorted(foreign))}: forward has no such argument")


def _kept(logits_to_keep: int | Tensor) -> slice | Tensor:
    """Which positions have logits."""
    if isinstance(logits_to_keep, Tensor):
        require_whole("logits_to_keep", logits_to_keep)
        return logits_to_keep
    if not isinstance(logits_to_keep, int) or logits_to_keep < 0:
        raise InputError(f"logits_to_keep={logits_to_keep}: 0 (all), so many of the last positions, or their indices")
    return slice(-logits_to_keep, None) if logits_to_keep else slice(None)


class AdaPonderModel(AdaPonderForCausalLM):
    """What ``AutoModel`` opens: the same weights, asked for hidden states.

    The head stays: the recurrence mixes embeddings by the distribution that it predicts.
    """

    def forward(self, *args: Any, return_dict: bool | None = None, **kwargs: Any) -> AdaPonderModelOutput | tuple:
        """Reads as :meth:`AdaPonderForCausalLM.forward` does, and predicts nothing."""
        for name in ("labels", "targets", "objective", "output_logits", "output_iteration_logits"):
            asked = kwargs.pop(name, None)
            if asked is not None and asked is not False:
                raise InputError(f"{name}: AutoModel gives hidden states alone; open it with AutoModelForCausalLM")
        every = kwargs.pop("output_hidden_states", None)
        every = self.config.output_hidden_states if every is None else every
        read: Any = super().forward(*args, **kwargs, output_logits=False, output_hidden_states=True)
        output = AdaPonderModelOutput(
            last_hidden_state=read.hidden_states[-1],
            past_key_values=read.past_key_values,
            hidden_states=read.hidden_states if every else None,
            depth=read.depth,
            gates=read.gates,
        )
        return output.to_tuple() if return_dict is False else output

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("generate: AutoModel gives hidden states alone; open it with AutoModelForCausalLM")


def _train_padding(stock: PreTrainedModel) -> None:
    """Lets the token that pads be trained like any other, where texts hold it.

    Some families build the embedding of ``pad_token_id`` without a gradient, and which token that is may change after
    the build: a saved model, built anew, would train others than before. Padding itself is masked and gives none.
    """
    embedding = cast(Any, stock.get_input_embeddings())
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = None


AutoConfig.register("adaponder", AdaPonderConfig, exist_ok=True)
AutoModelForCausalLM.register(AdaPonderConfig, AdaPonderForCausalLM, exist_ok=True)
AutoModel.register(AdaPonderConfig, AdaPonderModel, exist_ok=True)
