"""Whether the input of a call fits what its tool takes, and what the agent is told if not.

The input comes from outside, so it is measured before it is checked. Its bytes are only read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any, Final

from app.core.calls import Call, Result
from app.core.ledger import Remembered
from app.core.misfits import sentence
from app.core.outgoing import error_result
from app.core.schemas import SchemaRefused, compiled
from app.core.strict_json import Unreadable, read
from app.core.tools import AGENT_SCHEMA, Tool

INPUT_BYTES_MAX: Final = 1_048_576
"""A longer input is not checked, and so does not fit."""
STEPS_MAX: Final = 5_000_000
"""Of one check: the input's values times the schema's, and 20 for each of its bytes times the patterns."""
TOLD_STEPS_MAX: Final = 50_000
"""A check of more steps does not say where the input is unfit: it could find as many errors, each costly."""
ERRORS_MAX: Final = 5
"""How many errors are told."""
UNFIT: Final = "Not delivered: its input does not fit the tool's `input_schema`."
"""The `detail` of such a call."""

_PATTERN_STEPS: Final = 20


class InputChecks:
    """The checks of one session's calls. `agent` are the schemas of its own agent's custom tools, by name."""

    def __init__(self) -> None:
        self.agent: Mapping[str, str] = {}
        self._fitting: Remembered[tuple[str, bool]] = Remembered()

    def unfit(self, call: Call, tool: Tool) -> Result | None:
        """The answer to a call whose input does not fit what its tool takes, or None.

        One that was delivered is not checked any more. The agent's own schema counts as far as it is known
        and of use: a child thread runs another agent.
        """
        schema, is_agents = tool.input_schema, tool.input_schema == AGENT_SCHEMA
        if is_agents:
            is_known = call.kind == "custom" and call.thread_id is None
            schema = self.agent.get(call.tool) if is_known else None
        if schema is None or call.attempts > 0:
            return None
        checked = (schema, call.edited_input is not None)
        if self._fitting.get(call.id) == checked:
            return None
        try:
            why = misfit(schema, call.sent_input)
        except SchemaRefused:
            if is_agents:
                return None
            text = f"The tool {call.tool!r} was not called: its operator must register its schema again."
            return error_result(text)
        if why is None:
            self._fitting.keep(call.id, checked)
            return None
        text = f"The tool {call.tool!r} was not called, because the input does not fit its schema:\n{why}"
        return error_result(text)


def agent_schemas(agent_tools: Sequence[Any]) -> dict[str, str]:
    """Read the schemas of the custom tools out of a session's `agent.tools`, as JSON text by name.

    They are not judged yet. Equal texts are one object: the sessions of an agent share them.
    """
    schemas: dict[str, str] = {}
    for entry in agent_tools:
        if not isinstance(entry, Mapping) or entry.get("type") != "custom":
            continue
        name, schema = entry.get("name"), entry.get("input_schema")
        if isinstance(name, str) and isinstance(schema, Mapping):
            with suppress(ValueError, RecursionError):
                text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
                schemas[name] = sys.intern(text)
    return schemas


def misfit(text: str, input_: bytes) -> str | None:
    """Say in a few lines why an input does not fit a schema; None if it fits.

    Raises:
        SchemaRefused: the schema cannot be used.
    """
    schema = compiled(text)
    if len(input_) > INPUT_BYTES_MAX:
        return f"It has {len(input_)} bytes, and more than {INPUT_BYTES_MAX} are not checked."
    try:
        # Numbers are compared digit for digit, as the tool will see them.
        instance = read(input_, parse_float=Decimal)
        steps = _count(instance) * schema.values
        if steps + _PATTERN_STEPS * len(input_) * schema.patterns > STEPS_MAX:
            return "It is too large to be checked against this schema. Send less at once."
        if schema.validator.is_valid(instance):
            return None
        if steps > TOLD_STEPS_MAX:
            return "It is too large to say where."
        errors = list(schema.validator.iter_errors(instance))
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, Unreadable) else "it is nested too deeply, or not Unicode"
        return f"It cannot be checked: {why}."
    lines = [f"- {sentence(error)}" for error in errors[:ERRORS_MAX]]
    if len(errors) > ERRORS_MAX:
        lines.append(f"- and {len(errors) - ERRORS_MAX} more")
    return "\n".join(lines)


def _count(instance: Any) -> int:
    """The number of JSON values in the input, itself included."""
    count, below = 0, [instance]
    while below:
        value = below.pop()
        count += 1
        if isinstance(value, dict):
            below += value.values()
        elif isinstance(value, list):
            below += value
    return count
