from __future__ import annotations

import base64
import re
import stat
from ipaddress import ip_network
from pathlib import Path

import pytest

from app.serve import with_stored_keys
from app.settings import (
    ADMIN_KEY_FILE,
    SECRET_KEY_FILE,
    Settings,
    SettingsError,
    read_settings,
    secret_keys,
    unknown_variables,
    variable,
)

SETTINGS = Path(__file__).parents[2] / "docs" / "settings.md"
KEY = base64.b64encode(bytes(32)).decode()
EXTERNAL = {
    "BASCULE_DATABASE_URL": "postgresql://db.example/bascule",
    "BASCULE_SECRET_KEY": KEY,
    "BASCULE_ADMIN_KEY": "0123456789abcdef",
}


def test_nothing_set_means_an_embedded_database() -> None:
    settings = read_settings({"PATH": "/bin", "BASCULE_DATABASE_URL": ""})
    assert settings.is_embedded
    assert (settings.port, str(settings.data_dir), settings.host) == (8080, ".bascule", "127.0.0.1")


@pytest.mark.parametrize(
    "hosts",
    [
        "",
        "h",
        "h:1",
        "[::1]:1",
        "u:p@h1:1,h2:2",
        "u:p%2F@h1,[::1]",
        "u:%5B%40@/",
        "/db?host=/run/x",
        "/db?port=1",
    ],
)
def test_a_database_url_is_what_libpq_reads(hosts: str) -> None:
    read_settings(EXTERNAL | {"BASCULE_DATABASE_URL": f"postgresql://{hosts}"})


def test_everything_can_be_set() -> None:
    settings = read_settings(
        EXTERNAL
        | {
            "BASCULE_DATABASE_DIRECT_URL": "postgres://direct.example/bascule",
            "BASCULE_SECRET_KEY": f"{base64.b64encode(b'k' * 32).decode()}, {KEY}",
            "BASCULE_WEBHOOK_ALLOW": "127.0.0.0/8, fd00::/8",
            "BASCULE_UPSTREAM_URL": "http://127.0.0.1:9000/",
            "BASCULE_MIGRATE": "1",
            "BASCULE_PORT": "0",
            "ANTHROPIC_API_KEY": "sk-ant-x",
        }
    )
    assert settings.is_behind_pooler
    assert settings.secret_key is not None
    assert secret_keys(settings.secret_key) == (b"k" * 32, bytes(32))
    assert settings.webhook_allow == (ip_network("127.0.0.0/8"), ip_network("fd00::/8"))
    assert settings.upstream_url == "http://127.0.0.1:9000"
    assert (settings.migrate, settings.port) == (True, 0)


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}, "http://collector:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://traces.example/in"}, "https://traces.example/in"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_the_standard_variables_say_where_traces_go(environ: dict[str, str], url: str | None) -> None:
    assert url == read_settings(environ).traces_url


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"BASCULE_SECRET_KEY": ""}, "openssl rand -base64 32"),
        ({"BASCULE_ADMIN_KEY": ""}, "openssl rand -hex 32"),
        ({"BASCULE_SECRET_KEY": "c2hvcnQ="}, "BASCULE_SECRET_KEY"),
        ({"BASCULE_SECRET_KEY": KEY + ",nonsense"}, "BASCULE_SECRET_KEY"),
        ({"BASCULE_ADMIN_KEY": "short-secret"}, "BASCULE_ADMIN_KEY"),
        ({"BASCULE_DATABASE_URL": "postgresql+asyncpg://x/y"}, "BASCULE_DATABASE_URL"),
        ({"BASCULE_DATABASE_URL": "", "BASCULE_DATABASE_DIRECT_URL": "postgresql://x/y"}, "set both"),
        ({"BASCULE_PORT": "65536"}, "BASCULE_PORT"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http/protobuf"),
        ({"BASCULE_WEBHOOK_ALLOW": "10.0.0.1/8"}, "BASCULE_WEBHOOK_ALLOW"),
        ({"BASCULE_UPSTREAM_URL": "ftp://x"}, "BASCULE_UPSTREAM_URL"),
        ({"BASCULE_PUBLIC_URL": "https://user:pw@x"}, "BASCULE_PUBLIC_URL"),
        ({"BASCULE_LOG_FORMAT": "xml"}, "BASCULE_LOG_FORMAT"),
        ({"BASCULE_DATABASE_CONNECTIONS_MAX": "1"}, "BASCULE_DATABASE_CONNECTIONS_MAX"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(changes: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        read_settings(EXTERNAL | changes)
    assert named in str(caught.value)
    for value in ("short-secret", "user:pw", "nonsense"):
        assert value not in str(caught.value)


def test_secrets_are_not_in_the_repr() -> None:
    settings = read_settings(EXTERNAL | {"ANTHROPIC_API_KEY": "sk-ant-hidden"})
    for secret in (KEY, "0123456789abcdef", "sk-ant-hidden", "db.example"):
        assert secret not in repr(settings)


def test_a_slip_of_the_pen_is_noticed() -> None:
    environ = {"BASCULE_DATABSE_URL": "x", "BASCULE_PORT": "1", "BASCULE_TEST_DATABASE_URL": "x", "HOME": "/"}
    assert unknown_variables(environ) == ["BASCULE_DATABSE_URL"]


def test_every_setting_is_documented_once() -> None:
    documented = re.findall(r"^\| `([A-Z_]+)` \|", SETTINGS.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(documented) == sorted(variable(name) for name in Settings.model_fields)


def test_generated_keys_are_kept_and_private(tmp_path: Path) -> None:
    first = with_stored_keys(Settings(data_dir=tmp_path))
    again = with_stored_keys(Settings(data_dir=tmp_path))
    assert first.secret_key == again.secret_key
    assert first.admin_key == again.admin_key
    assert first.secret_key is not None
    assert len(secret_keys(first.secret_key)[0]) == 32
    for name in (SECRET_KEY_FILE, ADMIN_KEY_FILE):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
