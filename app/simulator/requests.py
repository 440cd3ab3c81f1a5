"""What the world remembers of each HTTP request."""

from dataclasses import dataclass, field
from typing import Any

from app.simulator.refusal import Json
from app.simulator.switches import Fault


@dataclass(eq=False)
class Request:
    """One HTTP request as it came in, without its secrets, and how it was answered.

    `status` is None until an answer was given, and stays None when the connection was dropped instead.
    """

    at_us: int
    method: str
    path: str
    query: list[tuple[str, str]]
    headers: dict[str, str]
    body: Any
    endpoint: str | None
    session_id: str | None
    auth: str | None
    """`x-api-key`, `bearer`, `both`, or None."""
    request_id: str
    status: int | None = None
    fault: Fault | None = None
    was_done: bool = False
    """Whether the request took effect, even if its answer was an error or got lost."""
    events: list[Json] = field(default_factory=list)
    """What a send accepted."""
