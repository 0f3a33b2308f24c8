"""Parts of Outrider that need packages a plain installation leaves out, and what to say where they are missing."""

from __future__ import annotations


def extra_missing(what: str, extra: str, error: ImportError) -> ValueError:
    """For `what` was asked, which needs the packages of `extra`; `error` says which of them failed, and how."""
    name = error.name or "a module"
    if name == "outrider" or name.startswith("outrider."):
        raise error  # a fault of our own, which no installation mends
    reason = f"{name} is not installed" if isinstance(error, ModuleNotFoundError) else f"{name} is broken ({error})"
    remedy = f"pip install '.[{extra}]' in a copy of Outrider's repository"
    return ValueError(f"{what} needs the extra {extra}, and {reason}: {remedy}")
