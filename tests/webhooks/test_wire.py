"""What goes out to a tool."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from standardwebhooks import Webhook

from app.core.calls import webhook_id
from app.core.events import CustomUse, parse
from app.core.tools import SigningSecret, Tool
from app.webhooks.wire import build_body, has_callback, headers, sign, with_token
from tests.webhooks.conftest import SECRET, a_call, a_tool

ODD_INPUTS = [
    b'{"q":"a\\u0000b"}',
    b'{"q":"\\ud800 lone"}',
    b'{"big":1E400}',
    b'{"n":9007199254740993}',
    b'{"a":1,"a":2,"b":1.10}',
    '{"ключ":"é\u2028"}'.encode(),
    b'{ "spaced" : [ 1 , {"b":null} ] }',
    b'"not an object"',
    b"[1]",
    b"null",
]


def test_a_call_has_the_same_webhook_id_for_ever() -> None:
    assert webhook_id("default", "sesn_1", "sevt_1") == "call_ijcb5yc7zi5gxyvd6toyz6chmd"


def test_parts_of_the_identity_do_not_run_into_each_other() -> None:
    assert webhook_id("a", "bc", "d") != webhook_id("ab", "c", "d")


def test_the_signature_has_not_changed() -> None:
    signature = sign([SECRET], "call_x", 1_793_282_404, b'{"a":1}')
    assert signature == "v1,7BC0qwwGP5acNDVTjMJV0+hEx79Sm6qonb5H4lQRr7g="


def test_every_live_secret_signs_and_each_verifies_alone() -> None:
    new, old = b"n" * 32, b"o" * 24
    now = int(datetime.now(UTC).timestamp())
    body = build_body(a_call('{"ключ":"é"}'.encode()), "sesn_1")
    signature = sign([new, old], "call_x", now, body)
    fields = {"webhook-id": "call_x", "webhook-timestamp": str(now), "webhook-signature": signature}
    assert len(signature.split(" ")) == 2
    for secret in (new, old):
        assert Webhook(secret).verify(body.decode(), fields)["type"] == "tool.call"


def test_nothing_is_signed_without_a_secret() -> None:
    with pytest.raises(ValueError, match="secret"):
        sign([], "call_x", 1, b"")


def test_the_body_names_the_call_and_carries_its_input() -> None:
    """R-150: session, call id, name, kind, thread and the input as it came."""
    call = a_call('{"a":[1,{"b":null}],"ключ":"é"}'.encode(), id="ctu1", thread_id="th1")
    assert json.loads(build_body(call, "S")) == {
        "type": "tool.call",
        "timestamp": "2026-10-29T14:00:04.377Z",
        "data": {
            "call_id": "ctu1",
            "session_id": "S",
            "thread_id": "th1",
            "tool": "echo",
            "kind": "custom",
            "input": {"a": [1, {"b": None}], "ключ": "é"},
        },
    }


def test_a_call_without_a_time_takes_the_one_that_it_is_given() -> None:
    call = a_call(processed_at=None)
    assert json.loads(build_body(call, "S", "2026-01-01T00:00:00Z"))["timestamp"] == "2026-01-01T00:00:00Z"
    assert json.loads(build_body(call, "S"))["timestamp"] is None


@pytest.mark.parametrize("input_", ODD_INPUTS)
def test_the_input_travels_byte_for_byte(input_: bytes) -> None:
    """R-182: whatever its shape, the input is delivered as received."""
    assert build_body(a_call(input_), "S").endswith(b'"input":' + input_ + b"}}")


def test_a_missing_input_is_an_empty_object() -> None:
    """R-182: missing becomes {}."""
    use = parse(b'{"type":"agent.custom_tool_use","id":"sevt_1","name":"echo"}')
    assert isinstance(use, CustomUse)
    assert json.loads(build_body(a_call(bytes(use.input)), "S"))["data"]["input"] == {}


def test_odd_names_still_give_valid_json() -> None:
    call = a_call(tool='a"b\\c\n\u2028', id="ид")
    data = json.loads(build_body(call, "S"))["data"]
    assert (data["tool"], data["call_id"]) == ('a"b\\c\n\u2028', "ид")


def test_a_secret_signs_until_its_end_and_the_newest_goes_on() -> None:
    """C-060: the moment of sending decides, whenever the tool was read."""
    new, old = SigningSecret(b"n" * 32), SigningSecret(b"o" * 32, expires_at=100.5)
    tool = Tool("echo", "https://h.example/", (new, old))
    assert [2, 1, 1] == [len(tool.keys_at(now)) for now in (100.4, 100.5, 1e12)]
    assert (b"n" * 32, b"o" * 32) == tool.keys_at(0)


def _headers(**changes: object) -> dict[str, str]:
    known = {"webhook_id": "call_x", "now": 5.9, "body": b"{}", "attempt": 2, "deadline_s": 9.9}
    tool = a_tool("https://h.example/", headers=changes.pop("tool_headers", ()))
    return headers(tool, version="1.2.3", **(known | changes))  # type: ignore[arg-type]


def test_the_headers_say_who_calls_and_how_long_the_answer_is_awaited() -> None:
    """R-150: attempt and idempotency key go out with each delivery."""
    fields = _headers()
    assert fields == {
        "content-type": "application/json",
        "accept": "application/json, text/plain",
        "accept-encoding": "identity",
        "user-agent": "bascule/1.2.3",
        "webhook-id": "call_x",
        "webhook-timestamp": "5",
        "webhook-signature": sign([SECRET], "call_x", 5, b"{}"),
        "bascule-attempt": "2",
        "bascule-deadline": "9",
        "traceparent": "00-120711f1896f6d8b50948553d5cac54e-18509ecc2817cb55-01",
    }


def test_deliveries_of_one_call_share_a_trace_but_not_a_span() -> None:
    first, second = (_headers(attempt=n)["traceparent"].split("-") for n in (1, 2))
    assert first[1] == second[1]
    assert first[2] != second[2]


def test_a_call_that_is_not_traced_says_so() -> None:
    assert [fields["traceparent"][-2:] for fields in (_headers(), _headers(is_sampled=False))] == ["01", "00"]


@pytest.mark.parametrize(
    "name",
    ["Webhook-Id", "WEBHOOK-SIGNATURE", "Bascule-Attempt", "Host", "Content-Length", "Transfer-Encoding",
     "Connection", "Content-Type", "User-Agent", "Accept-Encoding", "traceparent", "Proxy-Authorization"],
)  # fmt: skip
def test_a_tool_cannot_set_a_header_of_ours(name: str) -> None:
    assert _headers(tool_headers=((name, "theirs"),)) == _headers()


@pytest.mark.parametrize(
    ("name", "value"), [("x\r\ny", "v"), ("x", "v\r\nhost: evil"), ("", "v"), ("é", "v")]
)
def test_a_header_that_would_break_the_request_is_left_out(name: str, value: str) -> None:
    assert _headers(tool_headers=((name, value),)) == _headers()


def test_a_tools_own_headers_go_along() -> None:
    assert _headers(tool_headers=(("Authorization", "Bearer t"),))["Authorization"] == "Bearer t"


def test_a_body_is_stored_without_the_token_and_sent_with_it() -> None:
    """Promise 4: nothing else of it changes, whatever the input ends with."""
    call = a_call(b'{"a":"\\"token\\":\\"\\"}}}"}')
    url = "https://bridge.example/sessions/S/calls/sevt_1/result"
    body = build_body(call, "S", callback_url=url)
    sent = with_token(body, "cbt.k.t.m")
    data = json.loads(sent)["data"]
    assert {"url": url, "token": "cbt.k.t.m"} == data.pop("callback")
    assert (True, False) == (has_callback(body), has_callback(build_body(call, "S")))
    assert body == sent.replace(b"cbt.k.t.m", b"")
    assert json.loads(build_body(call, "S"))["data"] == data
