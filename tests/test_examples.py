"""The examples run as they are, on the embedded model, and say what they are there to show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SAYS = {  # what each must print
    "offline": r"(?s)Rain is\|.{50,}\n  [1-6]\.\d\d tokens a round\n.+Rain is\|",
    "chat": r"ends it\.\n.{5,}\n.{5,}\n$",
    "server_and_client": r"^The moon .{20,}\n$",
    "check_eagle3_head": r"(?s)taps +\S.+config\.json.+2\.\d\d tokens a round; right by place: 0\.[5-9]",
    "add_a_drafter": r"the same as plainly; [1-9]\d* of [1-9]\d* drafts right\n$",
}


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        input="Hello\nTell me about dogs.\n" if name == "chat" else "",
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert re.search(SAYS[name], result.stdout), result.stdout


def test_every_example_is_run_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == set(SAYS)
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"[{name}.py]({name}.py)" in listed for name in names)


def test_the_drafter_in_the_docs_is_the_one_that_runs() -> None:
    text = (EXAMPLES / "add_a_drafter.py").read_text()
    drafter = text[text.index("@drafters.register") : text.index("def main")].strip()
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding.md").read_text(), flags=re.DOTALL)
    assert shown.strip().endswith(drafter)
    imports = shown.strip().removesuffix(drafter).split("\n")
    assert all(line in text for line in imports)
