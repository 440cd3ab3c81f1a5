"""Standing rules: decisions of a tenant on calls to come."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from app.api.access import Authenticated, GuardedRoute, requires
from app.api.bridge import Given
from app.api.lists import (
    LIMIT_DEFAULT,
    TOOL_NAME_CHARS_MAX,
    Cursor,
    Limit,
    ListOf,
    RuleId,
    encode_cursor,
    json_response,
    position_after,
    printable,
)
from app.api.mutations import Mutating
from app.api.problems import Problem, documented, invalid, not_found
from app.core.events import Kind
from app.core.rules import OPERATORS, ArgumentTest, Effect, Operator, is_comparable, is_pointer
from app.store import audit, rules
from app.store.decisions import DENY_MESSAGE_CHARS_MAX
from app.store.rules import EXPIRES_IN_S_MAX, RULES_MAX, Draft, RuleView, TooManyRulesError

TESTS_MAX: Final = 20
ARGUMENTS_MAX: Final = 100
ARGUMENT_CHARS_MAX: Final = 256
VALUE_BYTES_MAX: Final = 16_384
NOTE_CHARS_MAX: Final = 500

router = APIRouter(tags=["rules"], route_class=GuardedRoute)

ArgumentName = Annotated[str, Field(max_length=ARGUMENT_CHARS_MAX)]


class ArgumentTestBody(BaseModel):
    """A test of one argument, with exactly one of the operators."""

    model_config = ConfigDict(strict=True, extra="forbid")

    argument: str = Field(
        max_length=ARGUMENT_CHARS_MAX,
        description="Where it is in the input: a JSON pointer, such as `/amount` or `/to/0/email`.",
    )
    equals: Any = Field(None, description="This JSON value; numbers by their value.")
    one_of: list[Any] | None = Field(None, description="One of these JSON values.")
    at_most: float | None = Field(None, description="A number of at most this; a string of digits is none.")
    at_least: float | None = Field(None, description="A number of at least this.")
    is_given: bool | None = Field(None, description="It is there, or it is not.")

    @property
    def operator(self) -> Operator:
        (given,) = (one for one in OPERATORS if one in self.model_fields_set)
        return given

    @model_validator(mode="after")
    def _agrees(self) -> ArgumentTestBody:
        if not is_pointer(self.argument) or "\0" in self.argument:
            raise ValueError("argument must be a JSON pointer, such as /amount")
        given = [one for one in OPERATORS if one in self.model_fields_set]
        if len(given) != 1 or (given[0] != "equals" and getattr(self, given[0]) is None):
            raise ValueError(f"give exactly one of {', '.join(OPERATORS)}")
        return self


class RuleBody(BaseModel):
    """A rule. Deny beats ask, ask beats allow. What is null or left out means any."""

    model_config = ConfigDict(strict=True, extra="forbid")

    effect: Literal["allow", "ask", "deny"]
    tool: Annotated[
        Annotated[str, Field(min_length=1, max_length=TOOL_NAME_CHARS_MAX), printable] | None,
        Field(description="The calls' exact name. A rule that allows must name it."),
    ] = None
    kind: Literal["custom", "builtin", "mcp"] | None = None
    session_id: str | None = Field(None, pattern="^[A-Za-z0-9_-]{1,128}$")
    tests: list[ArgumentTestBody] = Field([], max_length=TESTS_MAX, description="All of them must hold.")
    only: list[ArgumentName] | None = Field(
        None, max_length=ARGUMENTS_MAX, description="The top-level arguments that there may be; null: any."
    )
    deny_message: str | None = Field(
        None, max_length=DENY_MESSAGE_CHARS_MAX, description="Told to the agent. Only with `deny`."
    )
    note: str | None = Field(None, max_length=NOTE_CHARS_MAX, description="For people: what it is for.")
    expires_in_s: float | None = Field(
        None, gt=0, le=EXPIRES_IN_S_MAX, allow_inf_nan=False, description="Null: until it is revoked."
    )

    @field_validator("deny_message", "note")
    @classmethod
    def _storable(cls, value: str | None) -> str | None:
        if value is not None and "\0" in value:
            raise ValueError("must not hold NUL")
        return value

    @field_validator("only")
    @classmethod
    def _storable_names(cls, value: list[str] | None) -> list[str] | None:
        if any("\0" in name for name in value or ()):
            raise ValueError("must not hold NUL")
        return value

    @model_validator(mode="after")
    def _agrees(self) -> RuleBody:
        if self.effect == "allow" and self.tool is None:
            raise ValueError("tool must be named by a rule that allows")
        if self.effect != "deny" and self.deny_message is not None:
            raise ValueError("deny_message goes with deny only")
        return self


class RuleObject(BaseModel):
    """A rule as it stands, and what it has done."""

    id: str
    effect: Effect
    tool: str | None
    kind: Kind | None
    session_id: str | None
    tests: list[dict[str, Any]] = Field(description="As they were given.")
    only: list[str] | None
    deny_message: str | None
    note: str | None
    is_live: bool
    created_by: str = Field(description="A key's id. It allows only what this key may allow alone.")
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    revoked_by: str | None
    uses: int = Field(description="How many calls it allowed or denied.")
    last_used_at: datetime | None


@router.post(
    "/rules",
    status_code=201,
    response_model=RuleObject,
    summary="Make a standing rule",
    responses=documented("invalid_request", "too_many_rules"),
    **requires("admin"),
)
async def create_rule(
    request: Request, body: RuleBody, mutation: Mutating, caller: Authenticated
) -> Response:
    draft = Draft(
        body.effect, body.tool, body.kind, body.session_id, await _tests(request, body),
        None if body.only is None else frozenset(body.only),
        body.deny_message, body.note, body.expires_in_s,
    )  # fmt: skip
    async with mutation.begin() as connection:
        try:
            made = await rules.create(connection, caller.tenant, draft, by=caller.id)
        except TooManyRulesError as error:
            raise too_many() from error
        entry = rules.entry(caller.tenant, "rule.created", made, caller.id, "api")
        await audit.append(connection, [entry])
    return json_response(rule_object(made), status=201)


@router.get(
    "/rules",
    response_model=ListOf[RuleObject],
    summary="List the live rules, newest first",
    responses=documented("invalid_request"),
    **requires("admin"),
)
async def list_rules(
    bridge: Given,
    caller: Authenticated,
    limit: Limit = LIMIT_DEFAULT,
    cursor: Cursor = None,
    with_ended: Annotated[bool, Query(description="Those too that were revoked or have expired.")] = False,
) -> Response:
    before = position_after(cursor) or None
    async with bridge.engine.connect() as connection:
        found = await rules.page(
            connection, caller.tenant, before=before, limit=limit + 1, has_ended=with_ended
        )
    shown, has_more = found[:limit], len(found) > limit
    next_cursor = encode_cursor([shown[-1].position]) if has_more else None
    return json_response({"data": [rule_object(one) for one in shown], "next_cursor": next_cursor})


@router.get(
    "/rules/{rule_id}",
    response_model=RuleObject,
    summary="Show a rule and what it has done",
    responses=documented("rule_not_found"),
    **requires("admin"),
)
async def get_rule(rule_id: RuleId, bridge: Given, caller: Authenticated) -> Response:
    async with bridge.engine.connect() as connection:
        found = await rules.get(connection, caller.tenant, rule_id)
    if found is None:
        raise not_found("rule_not_found")
    return json_response(rule_object(found))


@router.delete(
    "/rules/{rule_id}",
    response_model=RuleObject,
    summary="Revoke a rule at once and for good",
    responses=documented("rule_not_found"),
    **requires("admin"),
)
async def revoke_rule(rule_id: RuleId, mutation: Mutating, caller: Authenticated) -> Response:
    async with mutation.begin() as connection:
        done = await rules.revoke(connection, caller.tenant, rule_id, by=caller.id)
        if done is None:
            raise not_found("rule_not_found")
        revoked, is_new = done
        if is_new:
            entry = rules.entry(caller.tenant, "rule.revoked", revoked, caller.id, "api")
            await audit.append(connection, [entry])
    return json_response(rule_object(revoked))


def too_many() -> Problem:
    """Return the problem of a tenant that has as many rules as it may."""
    return Problem("too_many_rules", f"The tenant has {RULES_MAX} live rules; revoke one first.")


def rule_object(one: RuleView) -> dict[str, Any]:
    """Return the object that the api shows for a rule."""
    rule = one.rule
    return {
        "id": rule.id,
        "effect": rule.effect,
        "tool": rule.tool,
        "kind": rule.kind,
        "session_id": rule.session_id,
        "tests": [{"argument": t.argument, t.operator: msgspec.Raw(t.value.encode())} for t in rule.tests],
        "only": None if rule.only is None else sorted(rule.only),
        "deny_message": rule.deny_message,
        "note": one.note,
        "is_live": one.is_live,
        "created_by": one.created_by,
        "created_at": one.created_at,
        "expires_at": one.expires_at,
        "revoked_at": one.revoked_at,
        "revoked_by": one.revoked_by,
        "uses": one.uses,
        "last_used_at": one.last_used_at,
    }


class _Written(msgspec.Struct):
    tests: list[dict[str, msgspec.Raw]] = []


async def _tests(request: Request, body: RuleBody) -> tuple[ArgumentTest, ...]:
    """The tests with their values as the client wrote them: numbers keep their digits."""
    try:
        written = msgspec.json.decode(await request.body(), type=_Written).tests
    except (ValueError, RecursionError) as error:
        # What read the body before is more lenient than JSON.
        raise invalid("tests", "must be JSON in UTF-8, without NaN or Infinity, not nested deeply") from error
    made = []
    for place, (test, raw) in enumerate(zip(body.tests, written, strict=True)):
        value = bytes(raw[test.operator])
        if len(value) > VALUE_BYTES_MAX or not is_comparable(value):
            where = f"tests.{place}.{test.operator}"
            raise invalid(
                where, f"must be at most {VALUE_BYTES_MAX} bytes of JSON that names no member twice"
            )
        made.append(ArgumentTest(test.argument, test.operator, value.decode()))
    return tuple(made)
