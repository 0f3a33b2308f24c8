"""Where the files of a name are: a path is where it is, a hub id is fetched once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.checkpoints.checkpoint import HUB_EXCLUDED, HUB_PATTERNS, is_hub_id

TOKENIZER_PATTERNS = ["*.json", "*.jinja", "*.txt"]


@dataclass(frozen=True)
class Hub:
    """How a hub id is fetched, where that is not as usual."""

    revision: str | None = None  # a branch, a tag or a commit
    download_dir: str | None = None
    token: str | bool | None = None

    @property
    def is_usual(self) -> bool:
        return self == Hub()


def located(name: str | Path, hub: Hub = Hub(), patterns: Sequence[str] = HUB_PATTERNS) -> Path:  # noqa: B008
    """The directory or the file that a name means."""
    path = Path(name).expanduser()
    if path.exists():
        if hub.revision not in (None, "main"):
            raise ValueError(f"{name} is on this machine, and has no revision {hub.revision!r}: leave the revision out")
        return path
    if not is_hub_id(str(name)):
        raise ValueError(f"{name} does not exist; give a directory, a file, or a hub id like org/name")
    return _fetched(str(name), hub, patterns)


def _fetched(name: str, hub: Hub, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and local checkpoints do without it

    try:
        found = snapshot_download(
            name,
            revision=hub.revision,
            cache_dir=hub.download_dir,
            token=hub.token,
            allow_patterns=list(patterns),
            ignore_patterns=HUB_EXCLUDED,
        )
    except Exception as error:  # the hub's client raises its own, its transport's and the system's errors
        reason = str(error).split("\n", 1)[0]
        which = f"{name} at revision {hub.revision}" if hub.revision is not None else name
        raise ValueError(
            f"{which} cannot be fetched from the hub ({reason}); check the name, the network and your login, or "
            "download it and give the directory"
        ) from error
    return Path(found)
