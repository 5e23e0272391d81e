"""Loads and saves through Hugging Face's methods, but runs no remote code and refuses missing or unexpected keys."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
from adaponder.checkpoints.manifest import MANIFEST, share_weights, verify_files, write_manifest
from adaponder.checkpoints.special_tokens import require_agreement
from adaponder.config import AdaPonderConfig
from adaponder.errors import CheckpointError, InputError, listed
from adaponder.files import checksums_wanted, read_json

_REFUSED = {
    "trust_remote_code": "loading weights never executes code here",
    "use_safetensors": "weights are read from safetensors only, a pickle could execute code",
    "ignore_mismatched_sizes": "a tensor of another shape is an error here",
    "subfolder": "name the folder itself",
}


class StrictCheckpointMixin:
    """The strict ``from_pretrained``, ``load_state_dict`` and ``save_pretrained`` of our models."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | Path, *args: Any, verify: bool | None = None, **kwargs: Any
    ) -> Any:
        """Runs Hugging Face's ``from_pretrained``: safetensors only; missing, unexpected or mismatched keys raise.

        Compares every file with the manifest, if there is one (a second or two per gigabyte); config, generation config
        and tokenizer must name the same end and padding tokens. ``verify=False`` or ``ADAPONDER_VERIFY=0`` skips both.
        """
        for name, reason in _REFUSED.items():
            # Accepts values without effect: lm-eval passes subfolder="" and trust_remote_code=False.
            if kwargs.pop(name, None) not in (None, "", name == "use_safetensors"):
                raise InputError(f"{name}: {reason}")
        if pretrained_model_name_or_path is None:
            raise InputError("from_pretrained(None): name a folder, or build cls(config) and call load_state_dict")
        hub: dict[str, Any] = {name: kwargs[name] for name in ("revision", "cache_dir", "token") if name in kwargs}
        folder = fetch(pretrained_model_name_or_path, NEEDED, **hub)
        refuse_unsafe(folder)
        kind = read_json(folder / "config.json").get("model_type")
        if kind not in (None, AdaPonderConfig.model_type):
            raise CheckpointError(
                f"{folder} holds a {kind} model: open it with AutoModelForCausalLM and wrap it with "
                "AdaPonderForCausalLM.from_backbone, or use adaponder convert"
            )
        verify = checksums_wanted() if verify is None else verify
        if verify:
            verify_files(folder, may_be_missing=NOT_NEEDED)
            require_agreement(folder)
        wants_info = kwargs.pop("output_loading_info", False)
        with in_our_words(folder):
            require_room(folder, AdaPonderConfig.from_pretrained(folder))
            # Mismatched sizes are accepted here so that all of them can be listed below.
            loaded: Any = super().from_pretrained(
                folder,
                *args,
                **kwargs,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
        model, info = loaded
        require_exact_keys(str(folder), info)
        require_finite(str(folder), model.state_dict().items())
        model.wrapped.verify()
        if verify and not (folder / MANIFEST).exists():
            warnings.warn(f"{folder}: unverified, there is no {MANIFEST}; doctor --seal writes one", stacklevel=2)
        return (model, info) if wants_info else model

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Runs torch's ``load_state_dict``, but unknown keys are an error with ``strict=False`` too.

        ``transformers.Trainer`` resumes with ``strict=False``, which would silently skip a head that was
        saved under another name.
        """
        unknown = sorted(set(state_dict) - set(self.state_dict())) if not strict else []
        if unknown:
            raise CheckpointError(
                f"load_state_dict: the model has no {listed(unknown)}, whose values would be lost; open the folder "
                "with from_pretrained, which knows other names, and save it again"
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def save_pretrained(
        self, save_directory: str | Path, *args: Any, manifest: bool = True, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """Runs Hugging Face's ``save_pretrained`` and adds a model card and a manifest of checksums.

        If the folder already has a tokenizer, it must name the same end and padding tokens as the model.
        """
        folder = Path(save_directory)
        for name, module in self.named_modules():
            if not getattr(module, "can_be_saved", True):
                raise CheckpointError(f"{name} is quantised (--weights): save the original model")
        if folder.is_dir():
            require_agreement(folder, self.config.backbone_config.to_dict(), self.generation_config.to_dict())
        # Weights keep the model's names. Hugging Face would write older ones (GPT-NeoX: embed_out), under which its
        # Trainer does not find them again.
        kwargs.setdefault("save_original_format", False)
        super().save_pretrained(save_directory, *args, is_main_process=is_main_process, **kwargs)
        if not is_main_process:
            return
        share_weights(folder)
        card = folder / "README.md"
        if not card.exists():
            added = sum(parameter.numel() for parameter in self.method.parameters())
            card.write_text(model_card(self.config, self.num_parameters(), added))
        if manifest:
            # Tokenizers and cards are often written or edited afterwards, so the manifest leaves them out.
            patterns = ("config.json", "generation_config.json", "model*.safetensors", "model*.safetensors.index.json")
            write_manifest(folder, [path.name for pattern in patterns for path in folder.glob(pattern)])
