from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from app.__main__ import app
from app.api.problems import CODES
from app.openapi import document, document_yaml

ROOT = Path(__file__).parents[2]


def test_the_yaml_says_what_the_service_serves() -> None:
    assert yaml.safe_load(document_yaml()) == document()
    assert document_yaml() == document_yaml()


def test_a_stale_file_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "openapi.yaml"
    runner = CliRunner()
    assert runner.invoke(app, ["openapi", "--check", str(file)]).exit_code == 1
    file.write_text(runner.invoke(app, ["openapi"]).stdout, encoding="utf-8")
    assert runner.invoke(app, ["openapi", "--check", str(file)]).exit_code == 0
    file.write_text(file.read_text(encoding="utf-8") + "x: 1\n", encoding="utf-8")
    stale = runner.invoke(app, ["openapi", "--check", str(file)])
    assert stale.exit_code == 1
    assert "make openapi" in stale.output


def test_the_file_in_the_repository_is_current() -> None:
    assert (ROOT / "openapi.yaml").read_text(encoding="utf-8") == document_yaml()


def test_every_reference_leads_somewhere_and_every_failure_is_a_problem() -> None:
    whole = document()

    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [ref for member in value.values() for ref in references(member)]
        return [ref for member in value for ref in references(member)] if isinstance(value, list) else []

    kinds = ("schemas", "headers")
    there = {f"#/components/{kind}/{name}" for kind in kinds for name in whole["components"][kind]}
    assert set(references(whole)) == there
    for path, operations in whole["paths"].items():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if int(status) >= 400 and path != "/readyz":
                    assert list(answer["content"]) == ["application/problem+json"], path
    names = [operation["operationId"] for path in whole["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)
    assert whole["components"]["schemas"]["ProblemBody"]["properties"]["code"]["enum"] == sorted(CODES)


def test_every_operation_that_takes_a_value_says_that_it_may_refuse_it() -> None:
    for path, operations in document()["paths"].items():
        for method, operation in operations.items():
            values = [one for one in operation.get("parameters", ()) if one["in"] != "path"]
            if values or "requestBody" in operation:
                assert {"422", "400"} & operation["responses"].keys(), f"{method} {path}"
