"""Webhook signatures: one vector of the platform, and what is refused."""

from __future__ import annotations

import pytest

from app.core.signatures import TOLERANCE_S, key_of, signature, signer

KEY = key_of("whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
OTHER = key_of("whsec_" + "A" * 43 + "=")
AT = 1793282405
ID = "whe_011CZkZH22B96iPBriX2rzSf"
BODY = (
    b'{"type":"event","id":"whe_011CZkZH22B96iPBriX2rzSf","created_at":"2026-10-29T14:00:04.950000Z","data":'
    b'{"type":"session.status_idled","id":"sesn_011CZkZAtmR3yMPDzynEDxu7","organization_id":'
    b'"8a1f0c52-6f0e-4d0c-9c5b-1f5b7b3f2a10","workspace_id":"wrkspc_011CZkZaBF1tNoB5wlCeusgy"}}'
)
SIGNATURE = "v1,iWTgbHXekfuimUxiR1shR5z+wTuQUh8zb+CllO+Yqug="
HEADERS = {"webhook-id": ID, "webhook-timestamp": str(AT), "webhook-signature": SIGNATURE}


def test_the_platforms_vector_is_reproduced() -> None:
    assert signature(KEY, ID, AT, BODY) == SIGNATURE


@pytest.mark.parametrize("off_s", [0, TOLERANCE_S, -TOLERANCE_S])
def test_a_signed_message_names_its_key(off_s: int) -> None:
    assert signer([OTHER, KEY], HEADERS, BODY, now=AT + off_s) == 1


def test_one_good_entry_among_others_is_enough() -> None:
    headers = HEADERS | {"webhook-signature": f"v1,AAAA v1a,xx {SIGNATURE}"}
    assert signer([KEY], headers, BODY, now=AT) == 0


@pytest.mark.parametrize(
    "change",
    [
        {"webhook-signature": ""},
        {"webhook-signature": SIGNATURE.replace("v1,", "v2,")},
        {"webhook-signature": "ü"},
        {"webhook-id": ""},
        {"webhook-id": "whe_another"},
        {"webhook-id": "x" * 257},
        {"webhook-timestamp": ""},
        {"webhook-timestamp": "soon"},
        {"webhook-timestamp": "-1"},
        {"webhook-timestamp": "٣"},
        {"webhook-timestamp": str(AT + 1)},
    ],
)
def test_anything_else_is_signed_by_nobody(change: dict[str, str]) -> None:
    assert signer([KEY], HEADERS | change, BODY, now=AT) is None


@pytest.mark.parametrize("off_s", [TOLERANCE_S + 1, -TOLERANCE_S - 1])
def test_an_old_message_is_refused(off_s: int) -> None:
    assert signer([KEY], HEADERS, BODY, now=AT + off_s) is None


def test_every_byte_of_the_body_counts() -> None:
    assert signer([KEY], HEADERS, BODY + b" ", now=AT) is None


def test_without_a_key_nothing_is_signed() -> None:
    assert signer([], HEADERS, BODY, now=AT) is None


@pytest.mark.parametrize("text", ["", "whsec_", "whsec_AAAA", "whsec_not base64", "AAECAwQFBgcICQoLDA0ODw=="])
def test_a_key_has_its_prefix_and_its_length(text: str) -> None:
    with pytest.raises(ValueError, match="whsec_"):
        key_of(text)
