"""The cases of `egress_cases.json`: URLs, what their names resolve to, and what must become of them.

`answer` is what the resolver says of the URL's name, `allow` the operator's ranges. One of three is
expected: `refused` (the code for what is wrong by its text), `blocked` (the delivery's code once the name was
looked up) or `connects` (all that may be dialled, as "address port").
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.webhooks.egress import Egress
from tests.webhooks.dialling import place


@dataclass(frozen=True)
class Case:
    url: str
    answer: tuple[str, ...] | None = None
    allow: tuple[str, ...] = ()
    refused: str | None = None
    blocked: str | None = None
    connects: tuple[str, ...] = ()

    @property
    def egress(self) -> Egress:
        return Egress(self.allow)

    def __str__(self) -> str:
        return f"{ascii(self.url)[1:-1][:60]} {' '.join(self.answer or ())}"[:100].strip()


def _case(fields: dict[str, Any]) -> Case:
    expected = {"refused", "blocked", "connects"} & set(fields)
    assert len(expected) == 1, f"one outcome is expected of {fields}"
    fields["connects"] = [place(*each.split()) for each in fields.get("connects", ())]
    return Case(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})


CASES = [
    _case(fields)
    for fields in json.loads((Path(__file__).parent / "egress_cases.json").read_text(encoding="utf-8"))
]


class Names:
    """A recording `getaddrinfo`: each look-up gives the next answer, the last one repeats."""

    def __init__(self, *answers: str | Sequence[str]) -> None:
        self.answers = [answer.split() if isinstance(answer, str) else answer for answer in answers]
        self.asked: list[str] = []

    def __call__(self, host: str, port: int) -> list[Any]:
        answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
        self.asked.append(host)
        if not answer:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in text], socket.SOCK_STREAM, 6, "", (text, port)) for text in answer]
