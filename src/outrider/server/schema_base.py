"""What all parts of a request have in common: null is the same as nothing, and what nobody knows is told apart."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from outrider.compatibility.rules import Rules

MAX_FOREIGN = 8  # unknown fields that are named in an error
FOREIGN = "foreign_fields"  # the type of that error


def _nullable(schema: dict[str, Any]) -> None:
    """Whatever may be left out may be null, in the OpenAPI document as well."""
    required = schema.get("required", ())
    for name, given in schema.get("properties", {}).items():
        options = given.get("anyOf", [given])
        if name not in required and {"type": "null"} not in options:
            kept = {key: given[key] for key in ("title", "default", "description") if key in given}
            bare = {key: value for key, value in given.items() if key not in kept}
            schema["properties"][name] = {"anyOf": [*bare.get("anyOf", [bare]), {"type": "null"}], **kept}


class _Part(BaseModel):
    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        own = own_names(cls)
        return {name: value for name, value in given.items() if value is not None or name not in own}


class Strict(_Part):
    """Takes its own fields alone."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), json_schema_extra=_nullable)


class Lenient(_Part):
    """Leaves out what it does not know."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), json_schema_extra=_nullable)


def own_names(model: type[BaseModel]) -> set[str]:
    """What its fields are called in JSON."""
    return {field.alias or name for name, field in model.model_fields.items()}


def _written(name: str) -> str:
    """Short, and valid Unicode."""
    return name[:64].encode("utf-8", errors="replace").decode()


def settle_fields(model: type[BaseModel], rules: Rules, given: Any) -> Any:
    """A request without the fields that have no effect here. Those that are refused or unknown are named together."""
    if not isinstance(given, dict):
        return given
    own = own_names(model)
    others = [name for name in given if name not in own]
    if not others:
        return given
    known = set(rules.names())
    unknown = [name for name in others if name not in known][:MAX_FOREIGN]
    asked = {_written(name): given[name] for name in others if name in known or name in unknown}
    try:
        rules.settle(asked, "a request", own)
    except RecursionError:
        told = {"message": "the request is nested too deeply", "param": next(iter(asked))}
        raise PydanticCustomError(FOREIGN, "{message}", told) from None
    except ValueError as error:
        told = {"message": str(error), "param": _first_refused(rules, asked)}
        raise PydanticCustomError(FOREIGN, "{message}", told) from None
    return {name: value for name, value in given.items() if name in own}


def _first_refused(rules: Rules, asked: dict[str, Any]) -> str:
    for name, value in asked.items():
        try:
            rules.settle({name: value}, "a request")
        except ValueError:
            return name
    raise AssertionError("what was refused together is refused alone")
