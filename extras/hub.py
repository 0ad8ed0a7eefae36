"""Policies at the Hugging Face hub: USER/NAME -> a folder in the cache, and a checkpoint -> a repository.

    folder = policy_folder("someone/act-pick")                   # downloads weights and JSON, once
    upload_policy("RUN/checkpoints/last", "someone/act-pick", {"steps": 100_000})

Needs huggingface_hub, for which both ask only when they are called. HF_HUB_CACHE, HF_HOME and HF_HUB_OFFLINE
mean what they always do.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
NOT_UPLOADED = ["pytorch_model_fsdp_0/*", "model_float32.safetensors", ".*"]


class UserError(ValueError):
    """The user's to mend, in one sentence: flag or file, rule, way out. Any other error is a bug."""


class MissingPackage(UserError, ImportError):
    """A package that is not installed; names its pip line."""


def policy_folder(path: str | os.PathLike) -> str:
    """`path`, or the folder in the hub's cache of the repository USER/NAME where there is no such path here.

    What is in the cache is taken as it is, and only what is not there is downloaded: weights and JSON, no
    folders.

    Raises:
        UserError: it has the form USER/NAME, and cannot be had.
    """
    name = os.fspath(path)
    if os.path.lexists(name) or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return name
    wanted: Any = {"allow_patterns": ["*.json", "*.safetensors"], "ignore_patterns": "*/*"}
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise _not_given(name, "huggingface_hub, which would ask for it, is not installed") from None
    try:
        cached = snapshot_download(name, local_files_only=True, **wanted)
        if (Path(cached) / "config.json").is_file() and any(Path(cached).glob("*.safetensors")):
            return cached
    except OSError:  # not there, or half of it; whatever else is wrong, the download says as well
        pass
    disable_progress_bars()  # one of each rank
    try:
        return snapshot_download(name, **wanted)
    except Exception as error:  # whatever the network, the hub or the credentials do
        why = _sentence(error.__cause__ or error).partition(". ")[0].rstrip(".")
        if type(error).__name__ == "RepositoryNotFoundError":  # its text is an address and an essay
            why = "it has no such model, or it is private"
        raise _not_given(name, why) from None


def _not_given(name: str, why: str) -> UserError:
    return UserError(
        f"{name} (--policy.path or --checkpoint) is no folder here, and the hub did not give it: {why}; "
        f"correct the path, or run `hf download {name} --local-dir DIR` where there is a "
        "network and name DIR."
    )


def upload_policy(
    path: str | os.PathLike, repo_id: str | None, facts: Mapping[str, Any] | None = None
) -> str:
    """Upload a checkpoint's pretrained_model/ with a model card; the address of the repository.

    Args:
        path: a step directory, `last` or pretrained_model/ itself.
        facts: rows of the card: dataset, steps, losses, success rate, ...
    Raises:
        UserError: the upload failed; says how to repeat it. The checkpoint is untouched.
        MissingPackage: huggingface_hub is not installed.
    """
    assert repo_id is not None
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars
    except ImportError:
        raise MissingPackage("--push-to-hub needs huggingface_hub: pip install huggingface_hub") from None
    folder = _model_folder(Path(path))
    if not (folder / WEIGHTS).is_file() and not (folder / ADAPTER).is_file():
        raise UserError(
            f"{folder} holds only shards; run: python ckpt.py convert --checkpoint-dir {folder.parent} "
            f"--push-to-hub {repo_id}"
        )
    card = _model_card(folder, repo_id, facts or {})
    try:
        (folder / "README.md").write_text(card)
        disable_progress_bars()  # of several threads: drawn over, and after, the error's sentence
        api = HfApi()
        address = api.create_repo(repo_id, repo_type="model", exist_ok=True)
        message = f"Checkpoint {folder.parent.name}"
        api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=message, ignore_patterns=NOT_UPLOADED
        )
    except Exception as error:  # whatever the network, the hub or the credentials do
        raise UserError(
            f"The upload to {repo_id} failed ({_sentence(error.__cause__ or error)}); {folder} is complete. "
            f"Repeat: python ckpt.py convert --checkpoint-dir {folder.parent} --push-to-hub {repo_id}"
        ) from None
    print(f"uploaded {folder} to {address}")
    return str(address)


def _model_folder(path: Path) -> Path:
    if path.is_file():  # `last`, where the file system refuses links: it holds the name
        path = path.parent / path.read_text().strip()
    folder = path / "pretrained_model"
    return folder if folder.is_dir() else path


def _model_card(folder: Path, repo_id: str, facts: Mapping[str, Any]) -> str:
    config = _read_json(folder / "config.json")
    train = _read_json(folder / "train_config.json") if (folder / "train_config.json").is_file() else {}
    dataset = (train.get("dataset") or {}).get("repo_id")
    rows = {"dataset": dataset, "steps": train.get("steps"), "batch size per rank": train.get("batch_size")}
    rows |= {"seed": train.get("seed"), "learning rate": (train.get("optimizer") or {}).get("lr")}
    rows |= {key: config.get(key) for key in ("chunk_size", "dim_model", "vision_backbone", "use_vae")}
    rows |= facts
    lines = ["---", "library_name: lerobot", "pipeline_tag: robotics", "tags: [robotics, lerobot, act]"]
    if dataset and not dataset.startswith("local/"):
        lines.append(f"datasets: [{dataset}]")
    lines += ["---", "", f"# {repo_id}", "", "An Action Chunking Transformer policy (arXiv:2304.13705).", ""]
    lines += ["| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items() if v is not None), ""]
    lines += ["```python", "from lerobot.policies.act.modeling_act import ACTPolicy", ""]
    lines += [f'policy = ACTPolicy.from_pretrained("{repo_id}")', "```", ""]
    return "\n".join(lines)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} cannot be used: it holds no JSON object.")
    return content


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
