"""What every client is asked to do, with the embedded model: say something whole and streamed, call a tool, fill in a
schema. Each script prints what came of it as one JSON object; the test compares."""

import json
import sys
from typing import Any, Literal

from pydantic import BaseModel, Field

QUESTION = "Tell me about walking."
MAX_TOKENS = 24
KEY = "none"
MODEL = "default"
# a tool, as OpenAI has it
WALK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "walk",
        "description": "Go somewhere",
        "parameters": {
            "type": "object",
            "properties": {"hours": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["hours"],
        },
    },
}


class Step(BaseModel):
    """One part of a walk."""

    place: Literal["wood", "hill"]
    hours: int = Field(ge=1, le=9)


def addresses() -> tuple[str, str]:
    """Of the server, and of one whose model always calls the tool."""
    return f"{sys.argv[1]}/v1", f"{sys.argv[2]}/v1"


def report(**found: Any) -> None:
    print(json.dumps(found))
