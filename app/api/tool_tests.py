"""Test calls of tools: the wish, the wait for its outcome, and the outcome afterwards."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any, Final, Literal
from urllib.parse import quote

import msgspec
from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict, Field

from app.api.access import Authenticated, GuardedRoute, requires
from app.api.bridge import Bridge, Given
from app.api.calls import ResultView
from app.api.deliveries import shown_url
from app.api.lists import TestId, ToolName, json_response
from app.api.mutations import Mutating
from app.api.problems import Problem, documented, invalid, not_found
from app.store import tool_tests, tools
from app.store.tool_tests import ToolTest
from app.store.wakeups import session_key

POLL_S: Final = 0.25
"""How often the store is looked at meanwhile, should no wake-up come."""
TIMEOUT_DEFAULT_S: Final = 120.0

router = APIRouter(tags=["tools"], route_class=GuardedRoute)


class ToolTestBody(BaseModel):
    """What a test call carries."""

    model_config = ConfigDict(strict=True, extra="forbid")

    input: dict[str, Any] = Field(default_factory=dict, description="The input of the call.")


class ToolTestView(BaseModel):
    """A test call and what came back, as the agent would get it."""

    id: str = Field(description="The `call_id` that the tool was sent.")
    tool: str
    status: Literal["waiting", "running", "done", "lost"] = Field(
        description="`lost`: the replica that made it ended; ask again."
    )
    replica: str | None
    requested_at: datetime
    finished_at: datetime | None
    result: ResultView | None
    code: str | None = Field(description="A delivery's code; null when a result was read.")
    http_status: int | None
    duration_ms: int | None
    url: str | None = Field(description="Where it went, without the query.")
    reply_excerpt: str | None


@router.post(
    "/tools/{name}/test",
    response_model=ToolTestView,
    summary="Send a signed test call and report what came back",
    responses={
        202: {"model": ToolTestView, "description": "No outcome yet; `location` shows it later"},
        **documented("tool_not_found", "too_many_tests", "invalid_request"),
    },
    **requires("tools"),
)
async def test_tool(
    name: ToolName,
    bridge: Given,
    mutation: Mutating,
    caller: Authenticated,
    body: ToolTestBody | None = None,
) -> Response:
    try:
        input_ = json.dumps((body or ToolTestBody()).input, allow_nan=False)
    except ValueError as error:
        raise invalid("input", "must hold no NaN and no infinity") from error
    async with mutation.begin_step() as connection:
        found = await tools.get(connection, bridge.secrets, caller.tenant, name)
        if found is None:
            raise not_found("tool_not_found")
        timeout_s = float(found.policy.get("timeout_s", TIMEOUT_DEFAULT_S))
        try:
            id_ = await tool_tests.wish(connection, caller.tenant, name, input_, timeout_s=timeout_s)
        except tool_tests.TooManyTestsError as error:
            raise Problem(
                "too_many_tests",
                f"The tenant has {tool_tests.OPEN_MAX} tests under way; wait for one to end.",
            ) from error
        if mutation.is_keyed and (wished := await tool_tests.get(connection, caller.tenant, name, id_)):
            await mutation.keep(connection, _answer(wished))
    return _answer(await _outcome(bridge, caller.tenant, name, id_, timeout_s))


def _answer(test: ToolTest) -> Response:
    answer = json_response(_object(test), 200 if test.status == "done" else 202)
    answer.headers["location"] = f"/tools/{quote(test.tool, safe='')}/tests/{test.id}"
    return answer


@router.get(
    "/tools/{name}/tests/{test_id}",
    response_model=ToolTestView,
    summary="Show a test call",
    responses=documented("test_not_found"),
    **requires("tools"),
)
async def get_tool_test(name: ToolName, test_id: TestId, bridge: Given, caller: Authenticated) -> Response:
    async with bridge.engine.connect() as connection:
        found = await tool_tests.get(connection, caller.tenant, name, test_id)
    if found is None:
        raise not_found("test_not_found")
    return json_response(_object(found))


async def _outcome(bridge: Bridge, tenant: str, name: str, id_: str, timeout_s: float) -> ToolTest:
    """Return the test once it is over, or as it stands when its time is."""
    now = asyncio.get_running_loop().time
    deadline = now() + timeout_s
    with bridge.wakeups.listen(session_key(tenant, id_)) as signal:
        while True:
            async with bridge.engine.connect() as connection:
                found = await tool_tests.get(connection, tenant, name, id_)
            if found is None:
                raise not_found("tool_not_found")  # it was deleted meanwhile
            left_s = deadline - now()
            if found.status in ("done", "lost") or left_s <= 0:
                return found
            await signal.wait(min(POLL_S, left_s))
            signal.take()


def _object(test: ToolTest) -> dict[str, Any]:
    outcome = test.outcome
    result = None
    if outcome is not None:
        result = {"content": msgspec.Raw(outcome.result.encode()), "is_error": outcome.is_error}
    return {
        "id": test.id,
        "tool": test.tool,
        "status": test.status,
        "replica": test.replica_id,
        "requested_at": test.requested_at,
        "finished_at": test.finished_at,
        "result": result,
        "code": outcome and outcome.code,
        "http_status": outcome and outcome.http_status,
        "duration_ms": outcome and outcome.duration_ms,
        "url": shown_url(outcome.url) if outcome and outcome.url else None,
        "reply_excerpt": outcome and outcome.reply_excerpt,
    }
