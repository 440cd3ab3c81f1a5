"""Uses the official SDK against a server and prints what it saw as one JSON value.

Runs in an environment of its own, as `python sdk_driver.py COMMAND URL SESSION_ID [JSON]`, and imports
nothing of ours.
"""

import asyncio
import json
import sys
from typing import Any

import anthropic
from anthropic import AsyncAnthropic, beta_async_tool
from pydantic import BaseModel

EVENTS_MAX = 1_000


@beta_async_tool
async def lookup_order(order_id: str) -> str:
    """Look up one order."""
    return f"{order_id} is shipped"


@beta_async_tool
async def bash(command: str) -> str:
    """Run a command."""
    return f"ran {command}"


async def runner(client: AsyncAnthropic, session_id: str, _given: Any) -> Any:
    """Run tools until the session has been idle for a moment."""
    tools = [lookup_order, bash]
    return [
        {
            "id": call.tool_use_id,
            "name": call.name,
            "posted": call.posted,
            "is_error": call.is_error,
            "confirmation": call.confirmation,
        }
        async for call in client.beta.sessions.events.tool_runner(session_id, tools=tools, max_idle=0.3)
    ]


async def pages(client: AsyncAnthropic, session_id: str, given: Any) -> Any:
    """List in pages and by iteration."""
    page = await client.beta.sessions.events.list(session_id, **given)
    sizes = [len(page.data)]
    while page.has_next_page() and len(sizes) < EVENTS_MAX:
        page = await page.get_next_page()
        sizes.append(len(page.data))
    ids = [event.id async for event in client.beta.sessions.events.list(session_id, **given)]
    return {"sizes": sizes, "ids": ids}


async def talk(client: AsyncAnthropic, session_id: str, _given: Any) -> Any:
    """Open a stream, send a message, answer the call, and read to the end of the turn."""
    events = client.beta.sessions.events
    seen, sent = [], []
    async with await events.stream(session_id) as stream:
        content = [{"type": "text", "text": "Where is order A-1042?"}]
        sent.append(await events.send(session_id, events=[{"type": "user.message", "content": content}]))
        async for event in stream:
            seen.append(event.type)
            if event.type == "agent.custom_tool_use":
                text = [{"type": "text", "text": "shipped"}]
                result = {"type": "user.custom_tool_result", "custom_tool_use_id": event.id, "content": text}
                sent.append(await events.send(session_id, events=[result]))
            if event.type == "session.status_idle" and event.stop_reason.type == "end_turn":
                break
    listed = [event.type async for event in events.list(session_id)]
    session = await client.beta.sessions.retrieve(session_id)
    environment = await client.beta.environments.retrieve(session.environment_id)
    threads = [thread async for thread in client.beta.sessions.threads.list(session_id)]
    return {
        "seen": seen,
        "listed": listed,
        "sent": [[event.type, event.id] for each in sent for event in each.data],
        "status": session.status,
        "environment": environment.config.type,
        "missing": [*missing(session), *missing(environment), *missing(threads[0])],
        "threads": [thread.status for thread in threads],
    }


async def watch(client: AsyncAnthropic, session_id: str, given: Any) -> Any:
    """Read a number of events from the stream, previews included."""
    found = []
    deltas = ["agent.message", "agent.thinking"]
    async with await client.beta.sessions.events.stream(session_id, event_deltas=deltas) as stream:
        async for event in stream:
            found.append(described(event))
            if len(found) == given.get("count") or event.type == given.get("until"):
                return found
    return found


async def listing(client: AsyncAnthropic, session_id: str, given: Any) -> Any:
    """List everything, of more sessions than one if wished."""
    found = []
    for each in (session_id, *given.get("more", [])):
        found += [described(event) async for event in client.beta.sessions.events.list(each, limit=7)]
    return found


async def failing(client: AsyncAnthropic, session_id: str, _given: Any) -> Any:
    """Send something that is refused and say what the SDK makes of it."""
    try:
        await client.beta.sessions.events.send(session_id, events=[{"type": "user.message", "content": []}])
    except anthropic.APIStatusError as error:
        return {"class": type(error).__name__, "status": error.status_code, "request_id": error.request_id}
    return {}


def described(event: Any) -> dict[str, Any]:
    """Return an event's class, what its model misses, and the event as the SDK gives it back."""
    return {
        "type": event.type,
        "class": type(event).__name__,
        "missing": missing(event),
        "event": event.to_dict(mode="json", exclude_unset=True),
    }


def missing(value: Any, path: str = "") -> list[str]:
    """Return the required fields that were not given, and the given ones that no model declares."""
    if isinstance(value, list):
        return [each for place, item in enumerate(value) for each in missing(item, f"{path}[{place}]")]
    if not isinstance(value, BaseModel):
        return []
    fields = type(value).model_fields
    given = value.model_fields_set
    bad = [f"{path}.{name}" for name, field in fields.items() if field.is_required() and name not in given]
    bad += [f"{path}.{name} is unknown" for name in given if name not in fields]
    for name in fields:
        bad += missing(getattr(value, name, None), f"{path}.{name}")
    return bad


async def main(command: str, url: str, session_id: str, given: str = "{}") -> None:
    """Run one command and print what it returns."""
    commands = {each.__name__: each for each in (runner, pages, talk, watch, listing, failing)}
    async with AsyncAnthropic(api_key="key", base_url=url, max_retries=0, timeout=30) as client:
        print(json.dumps(await commands[command](client, session_id, json.loads(given))))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
