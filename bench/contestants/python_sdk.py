"""The official Python SDK's runner, whose tool posts to the webhook: `python python_sdk.py URL SESSION…`.

It runs in an environment of its own and imports nothing of ours. One process serves all sessions, each with a
runner of its own, over one client; the tool's HTTP client is shared too, as a careful user would have it.
"""

import asyncio
import sys

import httpx2
from anthropic import AsyncAnthropic, beta_async_tool


async def main(url: str, session_ids: list[str]) -> None:
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with (
        httpx2.AsyncClient(limits=limits, timeout=60) as http,
        AsyncAnthropic(api_key="any", base_url=url, max_retries=0, timeout=60) as client,
    ):

        @beta_async_tool
        async def lookup_order(order_id: str) -> str:
            """Look up one order."""
            answer = await http.post(f"{url}/tool", json={"order_id": order_id})
            return answer.json()["content"]

        async def serve(session_id: str) -> None:
            runner = client.beta.sessions.events.tool_runner(session_id, tools=[lookup_order], max_idle=1.0)
            async for _ in runner:
                pass

        async with asyncio.TaskGroup() as group:
            for session_id in session_ids:
                group.create_task(serve(session_id))


asyncio.run(main(sys.argv[1], sys.argv[2:]))
