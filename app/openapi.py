"""The OpenAPI document as YAML, without a database or a running service."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from pydantic import SecretStr

from app.main import build_bridge, create_app
from app.settings import SECRET_KEY_BYTES, Settings

_PLAIN_KEY = re.compile(r"[A-Za-z_$/][A-Za-z0-9_$/{}.-]*")
# YAML reads these as something else than text.
_NOT_PLAIN = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def document() -> dict[str, Any]:
    """Return the document that the service serves at /openapi.json."""
    settings = Settings(secret_key=SecretStr(base64.b64encode(bytes(SECRET_KEY_BYTES)).decode()))
    app = create_app(build_bridge(settings, "postgresql://nowhere"))
    return app.openapi()


def document_yaml() -> str:
    """Return the document as YAML, always in the same order; every scalar is also JSON."""
    return "\n".join(_lines(document(), "")) + "\n"


def _lines(value: Any, indent: str) -> list[str]:
    lines = []
    if isinstance(value, dict):
        for key, member in value.items():
            name = key if _PLAIN_KEY.fullmatch(key) and key.lower() not in _NOT_PLAIN else json.dumps(key)
            lines += _member(f"{indent}{name}:", member, indent)
    else:
        for member in value:
            lines += _member(f"{indent}-", member, indent)
    return lines


def _member(head: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, dict | list) and value:
        return [head, *_lines(value, indent + "  ")]
    return [f"{head} {json.dumps(value, ensure_ascii=False)}"]
