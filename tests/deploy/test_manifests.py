"""The files for Compose and Kubernetes: fit for their schemas, and in keeping with what the service needs."""

from __future__ import annotations

import re
import subprocess
import sys
from ipaddress import ip_address, ip_network
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from sqlalchemy.ext.asyncio import AsyncEngine

from app.runner.fleet import DRAIN_S
from app.serve import STOP_LIMIT_S
from app.settings import Settings
from app.store.leases import SEND_S
from app.webhooks import egress
from tests.api.reader import reading
from tests.console.service import serving
from tests.deploy.proxying import proxying
from tests.installed import program
from tests.store.rows import add_attachment

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
PROXY = (COMPOSE / "haproxy.cfg").read_text(encoding="utf-8")
SERVICES = yaml.safe_load((COMPOSE / "compose.yaml").read_text(encoding="utf-8"))["services"]
MANIFESTS = {
    manifest["kind"]: manifest
    for manifest in yaml.safe_load_all((ROOT / "deploy/kubernetes/bascule.yaml").read_text(encoding="utf-8"))
}
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
KUBERNETES = ("1.30", "1.36")
"""The oldest and newest version that the manifests are checked against."""
STOPS_IN_S = STOP_LIMIT_S + SEND_S + DRAIN_S


def known_settings() -> set[str]:
    return {f"BASCULE_{name.upper()}" for name in Settings.model_fields} | {"ANTHROPIC_API_KEY"}


def test_the_compose_file_fits_its_schema() -> None:
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    subprocess.run([*check, COMPOSE / "compose.yaml"], check=True)


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_fits_the_schema_of_its_kind(kind: str, version: str) -> None:
    kubernetes_validate.validate(MANIFESTS[kind], version, strict=True)


def test_every_setting_that_is_set_exists() -> None:
    set_ = {*SERVICES["bascule"]["environment"], *MANIFESTS["ConfigMap"]["data"]}
    assert set_ <= known_settings()


def test_the_documented_secret_has_what_the_service_requires() -> None:
    page = (ROOT / "docs" / "deploying.md").read_text(encoding="utf-8")
    given = {*re.findall(r"--from-literal (\w+)=", page)}
    assert {"BASCULE_DATABASE_URL", "BASCULE_SECRET_KEY", "BASCULE_ADMIN_KEY"} <= given <= known_settings()
    asked = {*re.findall(r"\$\{(\w+):\?", (COMPOSE / "compose.yaml").read_text(encoding="utf-8"))}
    assert asked <= {*re.findall(r"^\s*(\w+)=", page, re.MULTILINE)}


def test_a_replica_has_time_to_stop() -> None:
    (command, pause_s) = CONTAINER["lifecycle"]["preStop"]["exec"]["command"]
    assert "sleep" == command
    assert POD["terminationGracePeriodSeconds"] > int(pause_s) + STOPS_IN_S
    assert int(SERVICES["bascule"]["stop_grace_period"].removesuffix("s")) > STOPS_IN_S


def test_pods_are_confined() -> None:
    assert POD["securityContext"]["runAsNonRoot"] is True
    for container in (CONTAINER, *POD["initContainers"]):
        confined = container["securityContext"]
        assert (True, False) == (
            confined["readOnlyRootFilesystem"], confined["allowPrivilegeEscalation"]
        )  # fmt: skip
        assert ["ALL"] == confined["capabilities"]["drop"]


def test_selectors_and_ports_meet() -> None:
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    specs = {kind: MANIFESTS[kind]["spec"] for kind in ("Deployment", "PodDisruptionBudget", "Service")}
    assert labels == specs["Deployment"]["selector"]["matchLabels"] == specs["Service"]["selector"]
    assert labels == specs["PodDisruptionBudget"]["selector"]["matchLabels"]
    assert labels == MANIFESTS["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    (port,) = CONTAINER["ports"]
    assert ("http", Settings().port) == (port["name"], port["containerPort"])
    assert f"bascule:{Settings().port}" in PROXY


def test_the_probes_ask_paths_that_are_served() -> None:
    document = yaml.safe_load((ROOT / "openapi.yaml").read_text(encoding="utf-8"))["paths"]
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        assert CONTAINER[probe]["httpGet"]["path"] in document


def test_no_metadata_address_can_be_reached() -> None:
    blocks = [
        (ip_network(to["ipBlock"]["cidr"]), [ip_network(text) for text in to["ipBlock"].get("except", [])])
        for rule in MANIFESTS["NetworkPolicy"]["spec"]["egress"]
        for to in rule["to"]
        if "ipBlock" in to
    ]
    reached = [
        address
        for address in egress._METADATA
        for block, excepted in blocks
        if address in block and not any(address in network for network in excepted)
    ]
    assert [] == reached
    assert any(ip_address("9.9.9.9") in block for block, _ in blocks)


@pytest.mark.anyio
async def test_the_proxy_spreads_requests_streams_events_and_hides_the_metrics(
    engine: AsyncEngine, migrated_url: str
) -> None:
    haproxy = program("haproxy", "haproxy")
    async with engine.begin() as connection:
        await add_attachment(connection)
    async with (
        serving(engine, migrated_url) as one,
        serving(engine, migrated_url) as other,
        proxying(haproxy, PROXY, [one.base, other.base]) as http,
    ):
        http.headers.update(one.http.headers)
        assert 200 == (await http.get("/sessions/sesn_1")).status_code
        assert 404 == (await http.get("/metrics")).status_code
        async with reading(http, "/sessions/sesn_1/events", after=0) as reader:
            assert "status" == (await reader.next()).type
