"""The settings: environment variables, checked one by one and against each other before anything starts.

`docs/settings.md` documents each. The environment is an argument: nothing here depends on the process.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
)

from app.core.signatures import key_of

PREFIX: Final = "BASCULE_"
UNPREFIXED: Final = frozenset(
    {
        "anthropic_api_key",
        "anthropic_webhook_signing_key",
        "otel_exporter_otlp_endpoint",
        "otel_exporter_otlp_traces_endpoint",
        "otel_exporter_otlp_protocol",
        "otel_sdk_disabled",
    }
)
"""Settings whose variable has no prefix, because other software names it so."""
SWEEP_S_MIN: Final = 10
SWEEP_S_MAX: Final = 86_400
FOREIGN_PREFIXES: Final = ("BASCULE_TEST_",)
FOREIGN_VARIABLES: Final = frozenset({"BASCULE_URL", "BASCULE_KEY"})
"""Variables of ours that are no settings of the service: of the tests, and of the commands that ask it."""

SECRET_KEY_FILE: Final = "secret.key"  # noqa: S105 - a name, no secret
ADMIN_KEY_FILE: Final = "admin.key"
"""Where `data_dir` keeps the keys that were generated for the embedded database."""

SECRET_KEY_BYTES: Final = 32
ADMIN_KEY_CHARS_MIN: Final = 16

PUBLIC_API_HOST: Final = "api.anthropic.com"
PUBLIC_API_REQUESTS_PER_MIN: Final = 600
"""What the public API allows an organisation for most session operations."""
REQUESTS_PER_MIN_MIN: Final = 10
REQUESTS_PER_MIN_MAX: Final = 1_000_000
PER_MIN: Final = Field(ge=0, le=REQUESTS_PER_MIN_MAX)
"""Of a limit that 0 lifts."""

RETENTION_DAYS_MAX: Final = 36_500

_HOST: Final = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(:\d+)?")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class SettingsError(Exception):
    """The environment does not make a service; each line of the message names a variable and the remedy."""


def _database_url(value: SecretStr) -> SecretStr:
    scheme = value.get_secret_value().partition("://")[0]
    if scheme not in ("postgresql", "postgres"):
        raise ValueError("must be a postgresql:// URL; leave out any driver name")
    try:
        hosts = urlsplit(value.get_secret_value()).netloc.rpartition("@")[2].split(",")
    except ValueError:
        hosts = [":"]
    if not all(_HOST.fullmatch(host) for host in hosts):
        raise ValueError(
            "must be postgresql://user:password@host:port/database;"
            " write / as %2F, # as %23, ? as %3F, [ as %5B and @ as %40 in a password"
        )
    return value


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must be an http:// or https:// URL with a host")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("must have no credentials, query or fragment")
    return value.rstrip("/")


def _networks(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        return tuple(ipaddress.ip_network(part.strip()) for part in value.split(",") if part.strip())
    except ValueError as error:
        raise ValueError(
            f"must be address ranges such as 10.0.0.0/8, separated by commas: {error}"
        ) from error


def _secret_keys(value: SecretStr) -> SecretStr:
    secret_keys(value)
    return value


def _signing_keys(value: SecretStr) -> SecretStr:
    signing_keys(value)
    return value


def _sweep_s(value: int) -> int:
    if value != 0 and not SWEEP_S_MIN <= value <= SWEEP_S_MAX:
        raise ValueError(f"must be {SWEEP_S_MIN} to {SWEEP_S_MAX} seconds, or 0 for never")
    return value


def _admin_key(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if len(text) < ADMIN_KEY_CHARS_MIN or not (text.isascii() and text.isprintable()) or " " in text:
        raise ValueError(f"must be at least {ADMIN_KEY_CHARS_MIN} visible ASCII characters without spaces")
    return value


def _header_value(value: SecretStr) -> SecretStr:
    text = value.get_secret_value()
    if not (text.isascii() and text.isprintable()) or " " in text:
        raise ValueError("must be visible ASCII characters without spaces or line ends")
    return value


def _requests_per_min(value: int) -> int:
    if value != 0 and not REQUESTS_PER_MIN_MIN <= value <= REQUESTS_PER_MIN_MAX:
        raise ValueError(f"must be {REQUESTS_PER_MIN_MIN} to {REQUESTS_PER_MIN_MAX}, or 0 for no limit")
    return value


DatabaseUrl = Annotated[SecretStr, AfterValidator(_database_url)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]


class Settings(BaseModel):
    """How the service runs. Secrets never show in `repr`; an empty variable counts as unset."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    database_url: DatabaseUrl | None = None
    database_direct_url: DatabaseUrl | None = None
    database_connections_max: Annotated[int, Field(ge=2, le=200)] = 10
    data_dir: Path = Path(".bascule")
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    public_url: HttpUrl | None = None
    upstream_url: HttpUrl = "https://api.anthropic.com"
    upstream_requests_per_min: Annotated[int, AfterValidator(_requests_per_min)] | None = None
    anthropic_api_key: Annotated[SecretStr, AfterValidator(_header_value)] | None = None
    anthropic_webhook_signing_key: Annotated[SecretStr, AfterValidator(_signing_keys)] | None = None
    sessions_sweep_s: Annotated[int, AfterValidator(_sweep_s)] = 300
    secret_key: Annotated[SecretStr, AfterValidator(_secret_keys)] | None = None
    admin_key: Annotated[SecretStr, AfterValidator(_admin_key)] | None = None
    key_requests_per_min: Annotated[int, PER_MIN] = 6000
    address_failures_per_min: Annotated[int, PER_MIN] = 60
    webhook_allow: Annotated[tuple[Network, ...], BeforeValidator(_networks)] = ()
    tenant_deliveries_max: Annotated[int, Field(ge=1, le=10_000)] = 100
    retention_sessions_days: Annotated[int, Field(ge=0, le=RETENTION_DAYS_MAX)] = 90
    retention_deliveries_days: Annotated[int, Field(ge=0, le=RETENTION_DAYS_MAX)] = 30
    migrate: bool = False
    log_format: Literal["json", "text"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otel_exporter_otlp_endpoint: HttpUrl | None = None
    otel_exporter_otlp_traces_endpoint: HttpUrl | None = None
    otel_exporter_otlp_protocol: Literal["http/protobuf"] = "http/protobuf"
    otel_sdk_disabled: bool = False

    @property
    def is_embedded(self) -> bool:
        """Whether the service keeps a PostgreSQL of its own in `data_dir`."""
        return self.database_url is None

    @property
    def base_url(self) -> str:
        """Where webhooks reach the service, without a slash at the end."""
        if self.public_url is not None:
            return self.public_url
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host  # noqa: S104 - compared only
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def traces_url(self) -> str | None:
        """Where spans go; None if nothing is traced."""
        base = self.otel_exporter_otlp_endpoint
        url = self.otel_exporter_otlp_traces_endpoint or (base and f"{base}/v1/traces")
        return None if self.otel_sdk_disabled else url

    @property
    def upstream_limit_per_min(self) -> int:
        """How many requests a minute may go upstream with one credential; 0 means any number."""
        return self.limit_per_min(self.upstream_url)

    def limit_per_min(self, upstream_url: str) -> int:
        """As `upstream_limit_per_min`, of a credential that goes to this URL."""
        if self.upstream_requests_per_min is not None:
            return self.upstream_requests_per_min
        is_public = urlsplit(upstream_url).hostname == PUBLIC_API_HOST
        return PUBLIC_API_REQUESTS_PER_MIN if is_public else 0

    @property
    def is_behind_pooler(self) -> bool:
        """Whether `database_url` may lead through a pooler that shares connections between transactions."""
        return self.database_direct_url is not None


def variable(field: str) -> str:
    """Return the name of the environment variable of a setting."""
    return field.upper() if field in UNPREFIXED else PREFIX + field.upper()


def read_settings(environ: Mapping[str, str]) -> Settings:
    """Read and check the settings.

    Raises:
        SettingsError: a value is wrong, or two do not go together.
    """
    fields = {variable(name): name for name in Settings.model_fields}
    given: dict[str, Any] = {
        fields[name]: value for name, value in environ.items() if name in fields and value
    }
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        raise SettingsError("\n".join(_sentences(error))) from None
    if lines := list(_disagreements(settings)):
        raise SettingsError("\n".join(lines))
    return settings


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return variables that look like settings and are none: most often a slip of the pen."""
    known = {variable(name) for name in Settings.model_fields}
    return sorted(
        name
        for name in environ
        if name.startswith(PREFIX)
        and name not in known | FOREIGN_VARIABLES
        and not name.startswith(FOREIGN_PREFIXES)
    )


def signing_keys(value: SecretStr) -> tuple[bytes, ...]:
    """Return the keys in `anthropic_webhook_signing_key`.

    Raises:
        ValueError: one of them is not `whsec_` and base64.
    """
    return tuple(key_of(part.strip()) for part in value.get_secret_value().split(","))


def secret_keys(value: SecretStr) -> tuple[bytes, ...]:
    """Return the keys in `secret_key`; the first one writes.

    Raises:
        ValueError: one of them is not base64 of 32 bytes.
    """
    keys = []
    for part in value.get_secret_value().split(","):
        try:
            key = base64.b64decode(part.strip(), validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) != SECRET_KEY_BYTES:
            raise ValueError(
                f"must be base64 of {SECRET_KEY_BYTES} bytes, several separated by commas;"
                f" make one with: openssl rand -base64 {SECRET_KEY_BYTES}"
            )
        keys.append(key)
    return tuple(keys)


def _sentences(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        field = str(item["loc"][0])
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{variable(field)}: {message}")
    return lines


def _disagreements(settings: Settings) -> list[str]:
    lines = []
    if settings.database_url is None:
        if settings.database_direct_url is not None:
            lines.append(
                "BASCULE_DATABASE_DIRECT_URL is set without BASCULE_DATABASE_URL;"
                " set both, or neither for the embedded database"
            )
        return lines
    if settings.secret_key is None:
        lines.append(
            "BASCULE_SECRET_KEY is required with BASCULE_DATABASE_URL, because every replica must share it;"
            f" make one with: openssl rand -base64 {SECRET_KEY_BYTES}"
        )
    if settings.admin_key is None:
        lines.append(
            "BASCULE_ADMIN_KEY is required with BASCULE_DATABASE_URL, because nobody could create a key"
            " without it; make one with: openssl rand -hex 32"
        )
    return lines
