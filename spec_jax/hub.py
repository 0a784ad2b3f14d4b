"""Models of the Hugging Face hub: in its cache, or downloaded.

``huggingface_hub`` is imported when it is first needed. Its settings decide where the cache is,
whether the network may be used, and who is logged in.
"""

from __future__ import annotations

import contextlib
import logging
import pathlib
import re

from spec_jax.errors import WeightsError
from spec_jax.models import gguf
from spec_jax.models.shards import weight_files

_log = logging.getLogger(__name__)
_ID = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(/(?P<file>\w[\w.-]*\.gguf))?(@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
BESIDE_WEIGHTS = (  # what is read of a model's directory, or a head's
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
# Weights by preference: a single file, the index of several, and a pattern of them all.
_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json", "model*.safetensors"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin"),
)


def is_id(name: str) -> bool:
    """Whether a name has the form of an id.

    That is ``owner/name`` or ``owner/name/FILE.gguf``, perhaps with ``@revision`` after it.
    """
    return _ID.fullmatch(name) is not None


def cached_directory(name: str) -> pathlib.Path | None:
    """Returns the directory of what the cache holds of a repository, or a file; None for nothing.

    Args:
      name: any text; of a repository, see ``directory_of``.
    """
    found = _ID.fullmatch(name)
    if found is None:
        return None
    repo, revision = found["repo"], found["revision"]
    try:
        import huggingface_hub as hub

        folder = hub.snapshot_download(repo, revision=revision, local_files_only=True)
        return pathlib.Path(folder, found["file"] or "")
    except Exception:  # versions of the hub raise errors of many types
        return None


def directory_of(name: str, *, has_weights: bool = True) -> pathlib.Path:
    """Returns the local directory of a repository's files: cached, or else downloaded.

    Only the files that are needed are downloaded: config, tokenizer, chat templates and
    safetensors, or the files of torch if there are no safetensors; or one GGUF file, whose path is
    returned. Cached files are used without checking for a newer version.

    Args:
      name: see ``is_id``; the revision is a branch, a tag or a commit. Without a file, the only
        GGUF file of a repository that has no other weights is meant.
      has_weights: whether the weights are needed too, or the config alone.

    Raises:
      WeightsError: it is neither in the cache nor can it be downloaded; the message has the
        command to run.
    """
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise WeightsError(
            f"{name} is looked for on the Hugging Face hub, which needs huggingface_hub: "
            "pip install huggingface_hub"
        ) from error
    found = _ID.fullmatch(name)
    if found is None:
        raise WeightsError(
            f"{name!r} is not an id of the Hugging Face hub, such as Qwen/Qwen3-0.6B"
        )
    repo, revision = found["repo"], found["revision"]
    refusals: list[str] = []

    def download(**options) -> tuple[pathlib.Path, bool]:
        """The directory, and whether it has config.json and all files of some weights."""
        if found["file"]:
            options |= {"revision": revision, "allow_patterns": [found["file"]]}
            file = pathlib.Path(hub.snapshot_download(repo, **options)) / found["file"]
            return file, file.exists()
        for weights in _WEIGHTS if has_weights else (("config.json", "", ""),):
            patterns = [*BESIDE_WEIGHTS[: None if has_weights else 2], *filter(None, weights)]
            options |= {"revision": revision, "allow_patterns": patterns}
            directory = pathlib.Path(hub.snapshot_download(repo, **options))
            if _is_whole(directory, weights, refusals):
                return directory, True
        return directory, False

    with contextlib.suppress(Exception):  # versions of the hub raise errors of many types
        directory, is_whole = download(local_files_only=True)
        if is_whole:
            return directory
    ids = [] if found["file"] else _gguf_files(repo, revision)
    if len(ids) == 1:
        return directory_of(ids[0])
    if ids:
        raise WeightsError(f"{name} has several GGUF files; name one of them: {', '.join(ids)}")
    try:
        _log.info("%s is not in the cache of the Hugging Face hub: it is downloaded", name)
        directory, is_whole = download()
    except Exception as error:
        raise WeightsError(_why(repo, revision, error)) from error
    if is_whole:
        return directory
    if found["file"]:
        raise WeightsError(f"{repo} has no file {found['file']}")
    remedy = f"if the download was cut off, run `{_command(repo, revision)}`"
    if refusals:
        remedy = refusals[-1]
    raise WeightsError(
        f"{name} has no config.json with model.safetensors or pytorch_model.bin, in {directory}: "
        f"{remedy}"
    )


def _gguf_files(repo: str, revision: str | None) -> list[str]:
    """Returns the ids of the GGUF files, cached ones offline, where there are no other weights."""
    import huggingface_hub as hub

    suffix = f"@{revision}" if revision else ""
    try:
        names = hub.list_repo_files(repo, revision=revision)
    except Exception:  # versions of the hub raise errors of many types
        folder = cached_directory(repo + suffix)
        names = [path.name for path in folder.iterdir()] if folder else []
    if any(name.endswith((".safetensors", ".bin")) for name in names):
        return []
    files = sorted(name for name in names if name.endswith(gguf.SUFFIX) and "/" not in name)
    return [f"{repo}/{file}{suffix}" for file in files]


def _is_whole(directory: pathlib.Path, weights: tuple[str, str, str], refusals: list[str]) -> bool:
    """Whether a directory of the hub's cache has config.json and all files of the weights.

    ``refusals`` gets the message about an index that is refused.
    """
    single, index, _ = weights
    try:
        files = weight_files(directory, single, index) if index else [directory / single]
    except WeightsError as error:
        refusals.append(str(error))
        return False
    return all(file.exists() for file in (directory / "config.json", *files))


def _command(repo: str, revision: str | None) -> str:
    return f"hf download {repo}" + (f" --revision {revision}" if revision else "")


def _why(repo: str, revision: str | None, error: Exception) -> str:
    """Returns what the user can do about an error of the hub."""
    from huggingface_hub import errors

    command = _command(repo, revision)
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{repo} is gated: accept its terms on https://huggingface.co/{repo}, then run "
            f"`hf auth login` and `{command}`"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}; expected a branch, a tag or a commit of it"
    if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
        return (
            f"there is no model {repo}, or none that you may read: check the name; if it is "
            f"private, run `hf auth login` and `{command}`"
        )
    said = str(error).partition("\n")[0]
    return (
        f"{repo} is not in the cache, and it could not be downloaded: where there is a network, "
        f"run `{command}`; elsewhere give the directory that holds it "
        f"({type(error).__name__}: {said})"
    )
