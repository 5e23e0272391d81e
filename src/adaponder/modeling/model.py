"""Defines the Hugging Face models: :class:`AdaPonderForCausalLM`, and :class:`AdaPonderModel` for hidden states."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting
from transformers import AutoModelForCausalLM, PreTrainedModel

from adaponder.backbones.attention import refuse_attention
from adaponder.backbones.families import refuse_halting
from adaponder.backbones.wrapper import Backbone
from adaponder.config import AdaPonderConfig
from adaponder.errors import BackboneError, InputError
from adaponder.execution.base import Control, Execution, Iteration
from adaponder.execution.cached import Cached
from adaponder.execution.compact import Packed
from adaponder.execution.dense import Dense
from adaponder.execution.ledger import Ledger
from adaponder.execution.tokens import Tokens, arrange_tokens, check_inputs, require_tensors
from adaponder.halting import gate_probability
from adaponder.methods import Method, Objective, build_method
from adaponder.methods.objectives import CrossEntropy, LossFunction, Scorer, Trajectory, as_targets
from adaponder.modeling.arguments import (
    AdaPonderModelOutput,
    AdaPonderOutput,
    PolicyLike,
    RunTime,
    kept_positions,
    refuse_unknown,
)
from adaponder.modeling.generation import LedgerGenerationMixin, check_cache, generating
from adaponder.modeling.saving import StrictCheckpointMixin
from adaponder.policies import Policy, as_policy, sequence_seeds

# Cross-entropy and the method's own terms; built once, because torch.compile cannot trace its checks.
_DEFAULT_OBJECTIVE = Objective()


class AdaPonderForCausalLM(LedgerGenerationMixin, StrictCheckpointMixin, PreTrainedModel):
    """A stock Hugging Face decoder that runs up to K iterations per token, by the recurrence of ``config.method``.

    ``model.backbone`` is the stock model, of which only the attention implementation and ``padding_idx`` change.
    ``model.method`` holds the parameters that the method adds (gates, routers).
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
        # One shared config: resizing the vocabulary must change both.
        config.backbone_config = backbone.config
        self.backbone: PreTrainedModel = backbone
        self.method: Method = build_method(config)
        if self.method.halts:
            refuse_halting(backbone, config.method)
        self._wrapped = Backbone(backbone)
        self.gradient_checkpointing = False
        # Defaults of a forward in training mode; adaponder.integrations sets them before every step.
        self.training_objective: Objective | LossFunction | None = None
        self.training_policy: PolicyLike | None = None
        self.training_seed: int | None = None
        self._warned_of_objective = False
        self.post_init()
        self.wrapped.verify()

    @property
    def wrapped(self) -> Backbone:
        """Returns the wrapper that runs passes over ``backbone``; builds a new wrapper if ``backbone`` was replaced."""
        if self._wrapped.stock is not self.backbone:
            options, self._wrapped = self._wrapped.compile_options, Backbone(self.backbone)
            if options is not None:
                self._wrapped.compile(**options)
        return self._wrapped

    @classmethod
    def from_backbone(cls, stock: PreTrainedModel, **recurrence: Any) -> AdaPonderForCausalLM:
        """Wraps a stock decoder, sharing its weights; ``embedding_scale`` defaults to 1, as the decoder was trained.

        >>> model = AdaPonderForCausalLM.from_backbone(pythia, method="adaponder", iterations=4)
        """
        if not isinstance(stock, nn.Module) or isinstance(stock, AdaPonderForCausalLM):
            name = type(stock).__name__
            raise BackboneError(f"stock is a {name}: pass a decoder of transformers, as AutoModelForCausalLM opens it")
        recurrence.setdefault("embedding_scale", 1.0)
        recurrence.setdefault("attn_implementation", stock.config._attn_implementation)
        config = AdaPonderConfig(backbone_config=stock.config, dtype=stock.dtype, **recurrence)
        model = cls(config, backbone=stock)
        model.method.to(device=stock.device, dtype=stock.dtype)
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):  # generation ends at the stock model's end tokens
            setattr(model.generation_config, name, getattr(stock.generation_config, name, None))
        return model.train(stock.training)

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: backbone and method initialise themselves when they are built."""

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
        execution: str | Sequence[int] | None = None,
        allow_mismatch: bool = False,
        objective: Objective | LossFunction | None = None,
        output_logits: bool = True,
        output_gates: bool = True,
        output_iteration_logits: bool = False,
        output_hidden_states: bool | None = None,
        on_iteration: Callable[[Iteration], None] | None = None,
        seed: int | Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> AdaPonderOutput | tuple:
        """Runs up to K iterations per token and predicts the next token.

        Args:
            input_ids: ``[batch, time]``; with a cache, the tokens it does not hold yet.
            attention_mask: 0 for padding, left or right; with a cache, it includes the cached tokens.
            position_ids: by default derived from the mask, so left padding changes nothing.
            labels: shifted by one inside; -100 is ignored, as are padding and each document's last token.
            targets: labels that are already shifted: the token that each token should predict.
            past_key_values: the :class:`Ledger` of an earlier forward, to continue from.
            use_cache: return a ledger to continue from.
            logits_to_keep: return logits of the last n positions only, or of the given indices; 0 keeps all.
            inputs_embeds: ``[batch, time, hidden]`` instead of ids, as ``get_input_embeddings()`` computes them.
            document_ids: ids of documents packed into a sequence: attention stays within equal ids, positions restart.
            policy: decides depths instead of the method's default policy.
            max_iterations: maximum depth of each token.
            execution: ``dense`` or ``compact``; by default dense in training, else compact if that skips tokens. A
                list sets the number of rows that compact execution computes in each pass after the first; if more
                tokens are active in a pass (compare ``depth``), the output is wrong.
            allow_mismatch: skip halted tokens although ``reuse="kv"`` would update their hidden state.
            objective: the loss; by default ``training_objective`` in training, cross-entropy in evaluation.
            output_logits: return logits; if false, the loss computes them in chunks, which saves memory.
            output_gates: return all gates; those of halted tokens are evaluated on the frozen hidden state.
            output_iteration_logits: return logits after each iteration.
            output_hidden_states: return hidden states after each iteration; ``None``: as set in the config.
            on_iteration: called with an :class:`Iteration` after each pass.
            seed: seed of policies that draw random numbers: an int for all sequences (default 0), or ``[batch]``.
        """
        refuse_unknown(kwargs)
        require_tensors(input_ids=input_ids, inputs_embeds=inputs_embeds, labels=labels, targets=targets)
        require_tensors(attention_mask=attention_mask, position_ids=position_ids, document_ids=document_ids)
        # Without ids, a placeholder of the same shape stands for them.
        ids = check_inputs(
            input_ids, inputs_embeds, vocabulary=self.config.vocab_size, hidden_size=self.config.hidden_size
        )
        run_time = self._run_time(RunTime(policy, max_iterations, seed, on_iteration, allow_mismatch), ids.shape[0])
        iterations = self.most_iterations(run_time.max_iterations)
        ledger = self._ledger(past_key_values, use_cache=use_cache, iterations=iterations)
        tokens = arrange_tokens(
            ids, attention_mask=attention_mask, position_ids=position_ids, document_ids=document_ids, ledger=ledger
        )
        self._check_positions(tokens, given=position_ids is not None)
        targets = as_targets(ids, labels, targets, self.config.vocab_size, document=tokens.document)
        loss = None if targets is None else self._loss_function(objective)
        positions = kept_positions(logits_to_keep)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        keep_states = output_hidden_states or output_iteration_logits or getattr(loss, "needs_states", False)
        control = Control(
            iterations=iterations,
            policy=self._policy(run_time.policy, generates=ledger is not None),
            seed=0 if run_time.seed is None else run_time.seed,
            every_gate=output_gates or targets is not None,
            keep_states=bool(keep_states),
            hook=run_time.on_iteration,
        )
        control.policy.check_batch(ids.shape[0], tokens.last_slot + 1)
        rows = self._execution(execution, tokens, control, ledger, run_time.allow_mismatch)
        trajectory = self._recur(rows, ids if inputs_embeds is None else inputs_embeds, ledger)

        logits = None
        if output_logits:
            # The loss needs the logits of all positions; those to return are sliced from them below.
            logits = self.wrapped.logits(trajectory.hidden[:, positions] if loss is None else trajectory.hidden)
        values: dict[str, Any] = {}
        if targets is not None and loss is not None:
            items = kwargs.get("num_items_in_batch")
            score = Scorer(trajectory, logits, targets, tokens.real, self.wrapped.head(), items)
            losses = loss(trajectory, score, rows)
            values |= {"loss": losses.total, "terms": losses.terms}
            if logits is not None:
                logits = logits[:, positions]
        if output_hidden_states:
            values["hidden_states"] = tuple(trajectory.states)
        if output_gates and trajectory.gates is not None:
            values["gates"] = gate_probability(trajectory.gates)
        if output_iteration_logits:
            logits_by_pass = [self.wrapped.logits(state[:, positions]) for state in trajectory.states]
            values["iteration_logits"] = torch.stack(logits_by_pass)
        depth = rows.depth.unflatten(1, (ids.shape[1], -1)).sum(-1)
        output = AdaPonderOutput(**values, logits=logits, depth=depth, past_key_values=ledger)
        return output.to_tuple() if return_dict is False else output

    def _recur(self, rows: Execution, inputs: Tensor, ledger: Ledger | None) -> Trajectory:
        """Runs the method's recurrence over ``inputs``, token ids or embeddings; on an error restores the ledger."""
        past = 0 if ledger is None else ledger.slots - rows.tokens.slot.shape[1]
        try:
            embedded = inputs if inputs.is_floating_point() else self.wrapped.embed(inputs)
            return self.method(rows, embedded)
        except BaseException:
            # A policy or hook that raises, or Ctrl-C, must not leave half-computed tokens in the caller's cache.
            if ledger is not None:
                ledger.forget(past)
            raise

    def _run_time(self, settings: RunTime, sequences: int) -> RunTime:
        """Returns the caller's settings, with unset fields from the enclosing ``generate`` or the training defaults."""
        # Dynamo cannot read a context variable; a compiled forward gets its settings from generate's keyword arguments.
        run_time = settings if torch.compiler.is_compiling() else settings.over(generating(self))
        if self.training and run_time.policy is None:
            run_time = run_time.over(RunTime(policy=self.training_policy, seed=self._training_seeds(sequences)))
        run_time.check_batch(sequences)
        return run_time

    def _training_seeds(self, sequences: int) -> Tensor | None:
        """Returns a seed for each sequence, derived from ``training_seed``; ``None`` if that attribute is unset."""
        if self.training_seed is None:
            return None
        return sequence_seeds(0, (self.training_seed << 32) + torch.arange(sequences, device=self.device))

    def _loss_function(self, objective: Objective | LossFunction | None) -> LossFunction:
        """Returns the loss of ``objective``; ``None``: cross-entropy in evaluation, the method's loss in training."""
        if self.training and objective is None:
            objective = self.training_objective
        if objective is None and not self.training:
            return CrossEntropy()
        if objective is None:
            self._warn_of_objective()
            objective = _DEFAULT_OBJECTIVE
        if isinstance(objective, Objective):
            return self.method.objective(objective)
        if not callable(objective):
            raise InputError(
                f"objective={objective!r} must be an Objective or a callable(trajectory, score, execution)"
            )
        return objective

    def most_iterations(self, max_iterations: int | None) -> int:
        """Returns a forward's iteration limit: ``max_iterations`` or, if ``None``, the config's; raises if invalid."""
        most = self.config.iterations
        if max_iterations is None:
            return most
        is_int = isinstance(max_iterations, int) and not isinstance(max_iterations, bool)
        if not is_int or not 1 <= max_iterations <= most:
            raise InputError(f"max_iterations={max_iterations!r} must be between 1 and {most}, the model's iterations")
        return max_iterations

    def check_policy(self, policy: PolicyLike | None) -> None:
        """Raises if this policy cannot be used with this model; ``None`` is always accepted."""
        if policy is None:
            return
        if not self.method.halts:
            cure = "use max_iterations to run fewer for all" if self.config.iterations > 1 else "leave it out"
            raise InputError(f"policy: {self.config.method} cannot halt single tokens; {cure}")
        policy = as_policy(policy)
        policy.check_signal(self.method.signal, self.config.method, self.config.iterations)
        policy.check(self.config.method, self.config.iterations)

    def _policy(self, policy: PolicyLike | None, *, generates: bool) -> Policy:
        """Checks ``policy`` (``None``: the method's default) and returns it; ``generates`` requires a causal policy."""
        self.check_policy(policy)
        policy = self.method.default_policy(training=self.training) if policy is None else as_policy(policy)
        if generates and not policy.causal:
            raise InputError(
                f"policy={policy.spelling} reads later tokens: it can be evaluated, but it cannot generate "
                "(a model in training mode may have such a default: call model.eval())"
            )
        return policy

    def _ledger(self, past: Any, *, use_cache: bool | None, iterations: int) -> Ledger | None:
        """Returns ``past`` if given (checked), else a new ledger if ``use_cache`` is set, else ``None``."""
        if past is None:
            return self.new_ledger(iterations) if use_cache else None
        return check_cache(past, self.new_ledger(iterations))

    def new_ledger(self, max_iterations: int | None = None) -> Ledger:
        """Returns an empty cache for this model, to be filled by forwards with the same ``max_iterations``."""
        iterations, backbone = self.most_iterations(max_iterations), self.config.backbone_config
        return Ledger(
            layers=self.wrapped.layers,
            iterations=self.method.passes(iterations),
            slots_per_token=self.method.slots_per_token(iterations),
            reuse=self.method.reuse(),
            hidden_size=backbone.hidden_size,
            heads=(backbone.num_attention_heads, getattr(backbone, "num_key_value_heads", None)),
            dtype=self.dtype,
        )

    def _execution(
        self, name: Any, tokens: Tokens, control: Control, ledger: Ledger | None, allow_mismatch: bool
    ) -> Execution:
        """Builds the execution of a forward; ``name`` is the ``execution`` argument of :meth:`forward`.

        The default is compact if there is a ledger or if halted tokens can be skipped, else dense.
        """
        limits = tuple(name) if isinstance(name, list | tuple) else None
        if limits is None and name not in (None, "dense", "compact"):
            raise InputError(f"execution={name!r} must be dense or compact")
        passes = self.method.passes(control.iterations)
        if limits is not None and not (len(limits) == passes - 1 and ledger is None and self.wrapped.packs()):
            raise InputError(
                f"execution={limits} needs a number for each pass after the first, attention that takes packed rows "
                "('sdpa') and no cache"
            )
        if name == "dense" and ledger is not None:
            raise InputError("execution='dense' keeps no ledger: leave out use_cache and past_key_values")
        reuse, iterations = self.method.reuse(), control.iterations
        if allow_mismatch and reuse == "kv":
            warnings.warn(
                "allow_mismatch: halted tokens are skipped although reuse='kv' would update their hidden state; "
                "results differ from training",
                stacklevel=3,
            )
            reuse = "state"
        # An exported graph has one shape for any depths, so it computes every token.
        skips = self.method.halts and reuse in ("state", "absent") and not (self.training or is_exporting())
        options = {
            "reuse": reuse,
            "replay": self.gradient_checkpointing and self.training,
            "stream": self.method.needs_stream(iterations),
        }
        batch = (self.wrapped, self.method.arrange(tokens, iterations), control)
        if ledger is None:
            if name == "dense" or (name is None and not skips):
                return Dense(*batch, **options)
            if self.wrapped.packs():
                return Packed(*batch, **options, limits=limits)
            ledger = self.new_ledger(iterations)
        return Cached(*batch, **options, ledger=ledger)

    def _warn_of_objective(self) -> None:
        """Warns once if gates are trained without an objective: only its ponder term teaches them to halt."""
        trains = self.method.has_ponder_term and torch.is_grad_enabled()
        if not trains or self._warned_of_objective or torch.compiler.is_compiling():
            return
        self._warned_of_objective = True
        warnings.warn(
            "objective: none is given, so gates learn from cross-entropy alone and nothing teaches them to halt; under "
            "transformers.Trainer add adaponder.integrations.PonderCallback, in a loop of your own pass "
            "objective=Objective(ponder_weight=…, ponder_fraction=…), or Objective() to mean just this",
            stacklevel=4,
        )

    def _check_positions(self, tokens: Tokens, *, given: bool) -> None:
        """Raises if a position is beyond the backbone's; ``given``: whether the caller passed ``position_ids``."""
        limit = self.config.max_position_embeddings
        # Derived positions are at most the last slot, which is known without a device synchronisation.
        if limit is None or (not given and tokens.last_slot < limit):
            return
        last = int(tokens.position.max())
        if last >= limit:
            field = "position_ids" if given else "input_ids"
            raise InputError(f"{field} reaches position {last}, the backbone's positions end at {limit - 1}")

    def compile_passes(self, *, by: str = "layer", memory_budget: float = 1.0, **options: Any) -> None:
        """Compiles passes over the backbone, and small functions between them; ``options`` go to ``torch.compile``.

        One layer is compiled and used for all layers and iterations; ``by="pass"`` compiles a whole pass instead, which
        takes minutes with many layers. ``memory_budget=0.5`` recomputes half of a pass's activations in backward.
        """
        self.wrapped.compile(by=by, memory_budget=memory_budget, **options)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Keeps the activations of only one pass at a time: backward recomputes each iteration."""
        options = {"use_reentrant": False} | (gradient_checkpointing_kwargs or {})
        if options.pop("use_reentrant") or options:
            raise BackboneError(
                "gradient_checkpointing_kwargs: only use_reentrant=False gives correct gradients through reused K/V"
            )
        if any(value not in (None, 1, False) for value in kwargs.values()):
            raise BackboneError(f"gradient checkpointing here is per iteration and takes no {', '.join(kwargs)}")
        self.gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.gradient_checkpointing = False


class AdaPonderModel(AdaPonderForCausalLM):
    """The model that ``AutoModel`` opens: the same weights, but it returns hidden states instead of logits.

    It still has the head, because the recurrence needs the next-token distribution.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> AdaPonderModelOutput | tuple:
        """Returns the hidden states and depths of :meth:`AdaPonderForCausalLM.forward`, without logits or loss."""
        for name in ("labels", "targets", "objective", "output_logits", "output_iteration_logits"):
            value = kwargs.pop(name, None)
            if value is not None and value is not False:
                raise InputError(f"{name}: AutoModel returns hidden states only; open it with AutoModelForCausalLM")
        output_hidden_states = kwargs.pop("output_hidden_states", None)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        full: Any = super().forward(
            input_ids, attention_mask, position_ids, **kwargs, output_logits=False, output_hidden_states=True
        )
        output = AdaPonderModelOutput(
            last_hidden_state=full.hidden_states[-1],
            past_key_values=full.past_key_values,
            hidden_states=full.hidden_states if output_hidden_states else None,
            depth=full.depth,
            gates=full.gates,
        )
        return output.to_tuple() if return_dict is False else output

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("generate: AutoModel returns hidden states only; open it with AutoModelForCausalLM")


def _train_padding(stock: PreTrainedModel) -> None:
    """Unsets ``padding_idx``, so that the padding token's embedding gets gradients like all others.

    Texts may contain that token (padding itself is masked), and changing ``pad_token_id`` must not change training.
    """
    embedding = cast(Any, stock.get_input_embeddings())
    if getattr(embedding, "padding_idx", None) is not None:
        embedding.padding_idx = None
