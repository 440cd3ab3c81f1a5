"""No breaking change without a version note: `CHANGELOG.md` names each one as `Breaking: GET /path`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from app.openapi import document
from tests.contract.compatibility import PINNED, breaks, pinned
from tests.interop.environments import ROOT

Document = dict[str, Any]


def test_what_breaks_clients_of_the_pinned_document_is_in_the_changelog() -> None:
    notes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    old = json.loads(PINNED.read_text(encoding="utf-8"))
    found = [one for one in breaks(old, pinned(document())) if f"Breaking: {one[0]}" not in notes]
    assert [] == found, "name them in CHANGELOG.md, or take them back"


def test_nothing_breaks_by_itself() -> None:
    assert [] == list(breaks(pinned(document()), pinned(document())))


def schema(whole: Document, name: str) -> Document:
    found: Document = whole["components"]["schemas"][name]
    return found


BREAKING: dict[str, Callable[[Document], Any]] = {
    "PATCH /sessions/{session_id}: is gone": lambda new: new["paths"]["/sessions/{session_id}"].pop("patch"),
    "GET /tools: query limit is gone": lambda new: new["paths"]["/tools"]["get"]["parameters"].pop(0),
    "GET /tools: query limit: maximum 100": lambda new: new["paths"]["/tools"]["get"]["parameters"][0][
        "schema"
    ].update(maximum=100),
    "GET /tools: security differs": lambda new: new["paths"]["/tools"]["get"].update(
        security=[{"key": ["admin"]}]
    ),
    "DELETE /keys/{key_id}: query tenant is required": lambda new: next(
        one for one in new["paths"]["/keys/{key_id}"]["delete"]["parameters"] if one["name"] == "tenant"
    ).update(required=True),
    "POST /keys: body: tenant required on one side, and not on the other": lambda new: schema(new, "KeyBody")[
        "required"
    ].append("tenant"),
    "POST /keys: body.name: maxLength 20": lambda new: schema(new, "KeyBody")["properties"]["name"].update(
        maxLength=20
    ),
    "POST /keys: body.scopes[]: fewer values": lambda new: schema(new, "KeyBody")["properties"]["scopes"][
        "items"
    ]["enum"].pop(),
    "POST /keys: body.name: string instead of integer": lambda new: schema(new, "KeyBody")["properties"][
        "name"
    ].update(type="integer"),
    "POST /keys: body.tenant: gone": lambda new: schema(new, "KeyBody")["properties"].pop("tenant"),
    "POST /keys: 201: key gone": lambda new: schema(new, "NewKeyView")["properties"].pop("key"),
    "POST /keys: no 201": lambda new: new["paths"]["/keys"]["post"]["responses"].pop("201"),
    "GET /healthz: 200.status: null instead of string": lambda new: schema(new, "Health").update(
        properties={"status": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
    ),
}


@pytest.mark.parametrize("wanted", BREAKING)
def test_what_breaks_a_client_is_found(wanted: str) -> None:
    old = pinned(document())
    new = copy.deepcopy(old)
    BREAKING[wanted](new)
    assert wanted in [f"{where}: {what}" for where, what in breaks(old, new)]


def test_what_is_added_breaks_nobody() -> None:
    old = pinned(document())
    new = copy.deepcopy(old)
    new["paths"]["/new"] = new["paths"]["/healthz"]
    new["paths"]["/healthz"]["get"]["parameters"] = [
        {"in": "query", "name": "deep", "schema": {"type": "boolean"}}
    ]
    schema(new, "KeyBody")["properties"]["team"] = {"type": "string"}
    schema(new, "KeyBody")["properties"]["name"]["maxLength"] = 1000
    schema(new, "KeyView")["properties"]["team"] = {"type": "string"}
    schema(new, "KeyView")["required"].append("team")
    assert [] == list(breaks(old, new))
