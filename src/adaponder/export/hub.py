"""Sends an exported folder to the hub; nothing else in the package writes there."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from adaponder.errors import AdaPonderError, InputError, in_one_line


def require_name(name: str) -> None:
    """Raises unless ``name`` can be a repository of the hub, OWNER/MODEL."""
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"--push {name}: {in_one_line(error)}") from None
    if name.count("/") != 1:
        raise InputError(f"--push {name}: OWNER/MODEL is needed, as under https://huggingface.co/OWNER/MODEL")


def push(folder: Path, name: str, *, private: bool = False, api: HfApi | None = None) -> str:
    """Uploads every file of ``folder`` to the hub's repository ``name``, which is made if it is not there.

    Returns the address of the commit. The token is the one that ``hf auth login`` or ``HF_TOKEN`` left.
    """
    require_name(name)
    api = api or HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Model exported by adaponder", ignore_patterns=[".*"]
        )
    except (HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, OSError, ValueError) as error:
        raise AdaPonderError(
            f"--push {name}: the hub did not take it ({in_one_line(error)}); {folder} is complete: log in with "
            f"`hf auth login`, then `hf upload {name} {folder}`"
        ) from error
    return commit.commit_url
