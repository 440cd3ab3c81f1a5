"""A whole turn by the client that was generated from `openapi.yaml`: BASE KEY SESSION TOOL_URL.

Prints the tool's signing secret, and then what it saw, as lines of JSON. It is type-checked with the client.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from bascule_client import AuthenticatedClient
from bascule_client.api.calls import get_call
from bascule_client.api.confirmations import confirm, list_session_confirmations
from bascule_client.api.messages import poll_text
from bascule_client.api.sessions import attach_session, detach_session, get_session, send_events
from bascule_client.api.tools import put_tool
from bascule_client.models import (
    AttachBody,
    CallDetail,
    CallObject,
    ConfirmBody,
    ConfirmBodyResult,
    EventsBody,
    ListOfCallObject,
    NewToolView,
    ProblemBody,
    SendView,
    SessionView,
    TextList,
    ToolBody,
    UserMessage,
)

LIMIT_S = 20.0
T = TypeVar("T")


def main(base: str, key: str, session_id: str, tool_url: str) -> None:
    client = AuthenticatedClient(base_url=base, token=key, raise_on_unexpected_status=True)
    missing = get_session.sync(session_id, client=client)
    assert isinstance(missing, ProblemBody)
    tool = put_tool.sync("bash", client=client, body=ToolBody(url=tool_url))
    assert isinstance(tool, NewToolView)
    print(json.dumps(tool.signing_secret), flush=True)

    attached = attach_session.sync(session_id, client=client, body=AttachBody(max_idle_s=None))
    assert isinstance(attached, SessionView)
    message = UserMessage(type_="user.message", content="List the reports.")
    sent = send_events.sync(session_id, client=client, body=EventsBody(events=[message]))
    assert isinstance(sent, SendView)
    held = _until(
        lambda: list_session_confirmations.sync(session_id, client=client, wait_s=5.0),
        lambda shown: isinstance(shown, ListOfCallObject) and len(shown.data) == 1,
    )
    assert isinstance(held, ListOfCallObject)
    call = held.data[0]
    decision = ConfirmBody(tool_use_id=call.id, result=ConfirmBodyResult.ALLOW)
    decided = confirm.sync(session_id, client=client, body=decision)
    assert isinstance(decided, CallObject)
    posted = _until(
        lambda: get_call.sync(session_id, call.id, client=client),
        lambda shown: isinstance(shown, CallDetail) and shown.state == "posted",
    )
    text = _until(
        lambda: poll_text.sync(session_id, client=client, after=0),
        lambda shown: isinstance(shown, TextList) and len(shown.data) == 2,
    )
    assert isinstance(posted, CallDetail) and isinstance(text, TextList)
    detached = detach_session.sync(session_id, client=client)
    assert isinstance(detached, SessionView)
    saw = {
        "missing": missing.code,
        "held": [call.state, call.input_],
        "posted": posted.posted,
        "text": [[message.state, message.text] for message in text.data],
        "detached": detached.status,
    }
    print(json.dumps(saw), flush=True)


def _until(look: Callable[[], T], is_so: Callable[[T], bool]) -> T:
    end = time.monotonic() + LIMIT_S
    while not is_so(shown := look()):
        assert time.monotonic() < end, f"still {shown}"
        time.sleep(0.05)
    return shown


if __name__ == "__main__":
    main(*sys.argv[1:])
