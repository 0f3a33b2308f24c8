"""Models that are on this machine already: the embedded pair, and what was fetched from the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import outrider.drafters
import outrider.models  # noqa: F401  (both register what they have)
from outrider.drafters.base import Sureness, recognised
from outrider.models.base import targets
from outrider.pair import DEFAULT_DIRECTORY, EMBEDDED_DRAFTERS

TARGET, DRAFTER, OTHER = "target", "drafter", "not supported"


@dataclass(frozen=True)
class LocalModel:
    name: str  # as it is given to --model or --draft
    kind: str  # TARGET, DRAFTER or OTHER
    what: str  # a target's architecture, a drafter's method
    num_bytes: int
    path: Path


def local_models(download_dir: Path | None = None) -> list[LocalModel]:
    """Those of the hub's cache, or of a directory that stood in for it, after the embedded ones."""
    embedded = [
        _described(f"embedded {part}", DEFAULT_DIRECTORY / part) for part in ("target", *EMBEDDED_DRAFTERS.values())
    ]
    return embedded + sorted(_fetched(download_dir), key=lambda model: model.name.lower())


def as_json(models: list[LocalModel]) -> list[dict[str, Any]]:
    return [{**vars(model), "path": str(model.path)} for model in models]


def _fetched(directory: Path | None) -> list[LocalModel]:
    from huggingface_hub import CacheNotFound, scan_cache_dir  # slow to import

    try:
        found = scan_cache_dir(directory)
    except CacheNotFound:
        return []
    newest = {
        repository.repo_id: max(repository.revisions, key=lambda each: each.last_modified)
        for repository in found.repos
        if repository.repo_type == "model" and repository.revisions
    }
    return [_described(name, revision.snapshot_path) for name, revision in newest.items()]


def _described(name: str, directory: Path) -> LocalModel:
    files = [path for path in directory.rglob("*") if path.is_file()]
    kind, what = _kind_of(directory, files)
    return LocalModel(name, kind, what, sum(path.stat().st_size for path in files), directory)


def _kind_of(directory: Path, files: list[Path]) -> tuple[str, str]:
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        ggufs = sorted(path.name for path in files if path.suffix == ".gguf")
        return (TARGET, ", ".join(ggufs)) if ggufs else (OTHER, "no config.json")
    if not isinstance(config, dict):
        return OTHER, "config.json is no object"
    method, sureness = recognised(config)
    if sureness >= Sureness.BY_KEYS:
        return DRAFTER, method
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else "no architecture"
    return (TARGET if architecture in targets else OTHER), architecture
