"""The dashboard and the alerts ask for what the service tells, and the alerts fire when they should."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.core.calls import END_STATES, STATES
from app.core.protocol import Failure, Progress
from app.simulator.server import running
from app.simulator.world import World
from app.webhooks.attempt import FailureCode
from app.webhooks.delivery import NotTried
from app.webhooks.reply import ReplyCode
from tests.installed import program
from tests.runner.collector import collecting
from tests.runner.receiver import receiving
from tests.runner.scripts import custom, in_state, turn
from tests.runner.service import Service, replicating

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "bascule.json").read_text(encoding="utf-8"))
(GROUP,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
RULES = GROUP["rules"]

OF_THE_SCRAPE = {"job", "instance"}
VALUES = {
    "state": STATES - END_STATES,
    "status": {*get_args(get_type_hints(Progress)["status"])},
    "which": {"used", "max"},
}
OUTCOMES = {
    "bascule_delivery_seconds": {"ok", *get_args(FailureCode), *get_args(ReplyCode), *get_args(NotTried)},
    "bascule_spans": {"exported", "failed", "dropped"},
    "bascule_post_seconds": {"accepted", *get_args(get_type_hints(Failure)["reach"])},
}


def expressions() -> Iterator[tuple[str, str]]:
    """Every query with the name of its panel or alert."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$__rate_interval", "1m")
    for rule in RULES:
        yield rule["alert"], rule["expr"]


def selectors(expression: str) -> list[promql_parser.VectorSelector]:
    found: list[promql_parser.VectorSelector] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


async def told(engine: AsyncEngine, url: str) -> dict[str, set[str]]:
    """The labels by sample name, of a service that delivered, posted and traced, and has one of each kind."""
    async with receiving() as tool, running(World(pace=0)) as upstream, collecting() as collector:
        async with replicating(engine, url, upstream.url, collector_url=collector.url) as http:
            service = Service(http, upstream, tool, engine)
            session = upstream.create(turn(custom("lookup")))
            await service.register("lookup")
            await service.attach(session.id)
            upstream.say(session.id)
            await in_state(service, session.id, "posted")
        async with engine.begin() as connection:
            await connection.execute(text("update calls set state = 'queued'"))
            await connection.execute(text("update attachments set flags = '{no_credential}'"))
        async with replicating(
            engine, url, upstream.url
        ) as http:  # the spans of the first left as it stopped
            answer = await http.get("/metrics")
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            shown.setdefault(sample.name, set()).update(sample.labels)
    return shown


@pytest.mark.anyio
async def test_every_query_asks_for_what_a_running_service_tells(
    engine: AsyncEngine, migrated_url: str
) -> None:
    shown = await told(engine, migrated_url)
    shown["up"] = set()
    for name, expression in expressions():
        asked = selectors(expression)
        assert asked, name
        for selector in asked:
            assert selector.name in shown, f"{name}: {selector.name}"
            for matcher in selector.matchers.matchers:
                assert matcher.name in shown[selector.name] | OF_THE_SCRAPE, f"{name}: {matcher.name}"
        known = set().union(*(shown[selector.name] for selector in asked)) | OF_THE_SCRAPE
        grouped = re.findall(r"\b(?:by|on|ignoring) ?\(([^)]*)\)", expression)
        assert {label for labels in grouped for label in labels.split(", ")} <= known, name


def test_every_label_is_compared_with_values_that_exist() -> None:
    for name, expression in expressions():
        for selector in selectors(expression):
            for matcher in selector.matchers.matchers:
                if matcher.name in OF_THE_SCRAPE:
                    continue
                metric = re.sub("_(count|bucket|total)$", "", selector.name)
                values = OUTCOMES[metric] if matcher.name == "outcome" else VALUES[matcher.name]
                assert {*matcher.value.split("|")} <= values, name


def test_every_figure_is_shown_and_documented_and_the_panels_lie_beside_each_other() -> None:
    metrics = (DEPLOY.parent / "app" / "metrics.py").read_text(encoding="utf-8")
    page = (DEPLOY.parent / "docs" / "operating.md").read_text(encoding="utf-8")
    asked = {s.name for _, expression in expressions() for s in selectors(expression)}
    bases = {re.sub("_(count|bucket|total)$", "", name) for name in asked}
    figures = {*re.findall(r'"(bascule_\w+)"', metrics)}
    assert figures <= bases
    assert [] == [figure for figure in sorted(figures) if f"`{figure}" not in page]
    panels = DASHBOARD["panels"]
    assert len(panels) == len({panel["id"] for panel in panels})
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x, y in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
    ]
    assert len(cells) == len({*cells})
    assert {x for x, _ in cells} == {*range(24)}


def test_the_alerts_fire_in_trouble_and_keep_quiet_in_health() -> None:
    promtool = program("promtool", "prometheus")
    for command in (["check", "rules", ALERTS.name], ["test", "rules", "alerts_test.yaml"]):
        ended = subprocess.run(
            [promtool, *command], cwd=ALERTS.parent, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    tried = (ALERTS.parent / "alerts_test.yaml").read_text(encoding="utf-8")
    assert [] == [rule["alert"] for rule in RULES if f'alertname="{rule["alert"]}"' not in tried]
