"""The matrix command: complete, and generated from what is registered."""

import json

from typer.testing import CliRunner

from outrider.cli import app
from outrider.drafters.base import drafters
from outrider.models.base import targets


def test_json_holds_every_pair() -> None:
    result = CliRunner().invoke(app, ["matrix", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["targets"]) == set(targets)
    assert set(found["drafters"]) == set(drafters)
    assert {name: set(row) for name, row in found["matrix"].items()} == {name: set(drafters) for name in targets}
    assert found["matrix"]["LlamaForCausalLM"]["eagle3"] is True


def test_the_table_names_them_all() -> None:
    result = CliRunner().invoke(app, ["matrix"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in [*targets, *drafters])
