"""Whatever bytes come in, every operation answers as documented, and never that the service failed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.api.problems import BODY_BYTES_MAX, CODES
from tests.api.service import Service, problem, served
from tests.contract.documented import JSON, Operation, check, operations
from tests.store.rows import emptied

TAKING = [one for one in operations() if "requestBody" in one.declared]
NAMING = [one for one in operations() if one.declared.get("parameters")]
ONCE = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
CONTENT_TYPES = (
    JSON, JSON, JSON, "application/json; charset=utf-16", "application/problem+json", "text/plain",
    "text/plain; charset=no-such", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
    "no type", "",
)  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**62, max_value=2**70)
    | st.floats()
    | st.text(st.characters(exclude_categories=()), max_size=12)
    | st.sampled_from(["\0", "a\0b", "\ud800", "\udfff\ud800", "1e999", "\u202e", "x" * 20_000])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
raw = st.binary(max_size=40) | st.sampled_from(
    [b"", b"\x00", b"\xff", b"..", b"%", b"a/b", b"\xed\xa0\x80", b"'--", b"9" * 5_000, b"x" * 3_000]
)


@st.composite
def bodies(draw: st.DrawFn, operation: Operation) -> bytes:
    """Bytes that are no JSON, JSON that means nothing, and the example with something in it that is odd."""
    _, example = next(iter(operation.body_examples()))
    known = list(example) if isinstance(example, dict) else ["content"]
    name, value = draw(st.sampled_from(known) | st.text(max_size=5)), draw(values)
    whole = example if isinstance(example, dict) else {}
    deep = draw(st.integers(min_value=200, max_value=30_000))
    nested = draw(st.sampled_from([(b"[", b"]"), (b'{"a":', b"}")]))
    head = json.dumps(whole)[:-1].encode()
    twice = json.dumps(name).encode() + b": " + json.dumps(value).encode()
    return draw(
        st.sampled_from(
            [
                draw(st.binary(max_size=60)),
                json.dumps(value).encode(),
                json.dumps(whole | {name: value}).encode(),
                head + b", " + twice + b", " + twice + b"}",
                json.dumps({**whole, name: "@"})
                .encode()
                .replace(b'"@"', nested[0] * deep + nested[1] * deep),
                json.dumps(whole | {name: str(value)}, ensure_ascii=False).encode("utf-16", "surrogatepass"),
                json.dumps({**whole, name: 0}).encode().replace(b": 0", b": " + b"9" * deep),
            ]
        )
    )


class Asking:
    """The service on a loop of its own, outside of which Hypothesis draws."""

    def __init__(self, portal: BlockingPortal, service: Service) -> None:
        self._portal, self._service = portal, service

    def __call__(self, method: str, url: str, **given: Any) -> httpx.Response:
        return self._portal.call(partial(self._service.http.request, method, url, **given))


@pytest.fixture(scope="module")
def ask(migrated_url: str) -> Iterator[Asking]:
    with start_blocking_portal() as portal, contextlib.ExitStack() as stack:
        enter = lambda manager: stack.enter_context(portal.wrap_async_context_manager(manager))  # noqa: E731
        engine = enter(emptied(migrated_url))
        yield Asking(portal, enter(served(engine, migrated_url, lambda _: None)))


@pytest.mark.parametrize("operation", TAKING, ids=lambda one: one.id)
@given(data=st.data())
@ONCE
def test_no_body_breaks_the_service(ask: Asking, operation: Operation, data: Any) -> None:
    """C-012: NUL, half characters, depth, digits, names given twice, bytes that are no text."""
    content, content_type = data.draw(bodies(operation)), data.draw(st.sampled_from(CONTENT_TYPES))
    headers = {"content-type": content_type} if content_type else {}
    answer = ask(operation.method, _path(operation), content=content, headers=headers)
    check(answer)
    _check(answer)


@pytest.mark.parametrize("operation", TAKING, ids=lambda one: one.id)
def test_no_operation_takes_a_body_over_the_limit(ask: Asking, operation: Operation) -> None:
    content = b'"' + b"x" * BODY_BYTES_MAX + b'"'
    headers = {"content-type": JSON}
    answer = ask(operation.method, _path(operation), content=content, headers=headers)
    check(answer)
    # The token of a callback is looked at before its body.
    assert problem(answer)[1] in ("body_too_large", "unauthenticated")


@pytest.mark.parametrize("operation", NAMING, ids=lambda one: one.id)
@given(data=st.data())
@ONCE
def test_no_name_or_parameter_breaks_the_service(ask: Asking, operation: Operation, data: Any) -> None:
    path, query, headers = operation.path, [], {}
    for parameter in operation.declared["parameters"]:
        name, value = parameter["name"], data.draw(raw)
        match parameter["in"]:
            case "path" if value:
                path = path.replace(f"{{{name}}}", quote(value, safe=""))
            case "query" if data.draw(st.booleans()):
                # One that is right would be waited for.
                query.append(name + "=" + quote(b"-" + value if name == "wait_s" else value, safe=""))
            case "header":
                headers[name] = value.translate(None, b"\r\n\0")
    url = _path(operation, path) + ("?" + "&".join(query) if query else "")
    answer = ask(operation.method, url, headers=headers)
    _check(answer)


def _path(operation: Operation, path: str | None = None) -> str:
    """An address of nothing, so that no outcome is waited for; what is made is made by its own name."""
    ids = {"key_id": "key_", "test_id": "test_", "rule_id": "rul_", "send_id": "send_"}
    names = [one["name"] for one in operation.declared.get("parameters", ()) if one["in"] == "path"]
    places = {name: ids[name] + "0" * 24 if name in ids else operation.id for name in names}
    return (path or operation.path).format(**places)


def _check(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    # A repeated request gets the first one's answer, with that one's id.
    if answer.status_code >= 400 and "idempotency-replayed" not in answer.headers:
        assert problem(answer)[1] in CODES
