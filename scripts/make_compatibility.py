"""Writes the tables of docs/compatibility.md anew, from the rules that the code goes by.

PYTHONPATH=src python scripts/make_compatibility.py
"""

from __future__ import annotations

from pathlib import Path

from outrider.compatibility.table import PARTS, replaced
from outrider.server.compatibility import PARTS as SERVER_PARTS

FILE = Path(__file__).parent.parent / "docs" / "compatibility.md"


def main() -> None:
    text = FILE.read_text(encoding="utf-8")
    for name, make in {**PARTS, **SERVER_PARTS}.items():
        text = replaced(text, name, make())
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
