from __future__ import annotations

import pytest

from app.store.keys import _ALPHABET, is_plausible
from app.store.secrets import Secrets, UnreadableSecretError

OLD, NEW = b"o" * 32, b"n" * 32
PLACE = {"column": "tools.secrets", "row": ("default", "echo")}


def test_what_is_sealed_opens_in_its_place_only() -> None:
    secrets = Secrets([NEW])
    sealed = secrets.encrypt(b"value", **PLACE)
    assert b"value" not in sealed
    assert sealed != secrets.encrypt(b"value", **PLACE)
    assert secrets.decrypt(sealed, **PLACE) == b"value"
    for column, row in (
        ("tools.headers", ("default", "echo")),
        ("tools.secrets", ("other", "echo")),
        ("tools.secrets", ("default", "other")),
        ("tools.secrets", ("default/echo",)),
    ):
        with pytest.raises(UnreadableSecretError, match="changed or moved"):
            secrets.decrypt(sealed, column=column, row=row)


def test_keys_rotate_the_first_writes_and_all_read() -> None:
    sealed = Secrets([OLD]).encrypt(b"value", **PLACE)
    both = Secrets([NEW, OLD])
    assert both.decrypt(sealed, **PLACE) == b"value"
    assert Secrets([NEW]).decrypt(both.encrypt(b"value", **PLACE), **PLACE) == b"value"
    with pytest.raises(UnreadableSecretError, match="BASCULE_SECRET_KEY does not hold"):
        Secrets([NEW]).decrypt(sealed, **PLACE)


@pytest.mark.parametrize("cut", [0, 5, 17, -1])
def test_damage_is_noticed(cut: int) -> None:
    secrets = Secrets([NEW])
    sealed = secrets.encrypt(b"value", **PLACE)
    with pytest.raises(UnreadableSecretError):
        secrets.decrypt(sealed[:cut], **PLACE)
    with pytest.raises(UnreadableSecretError):
        secrets.decrypt(sealed[:cut] + b"\0" + sealed[cut:], **PLACE)


@pytest.mark.parametrize("keys", [[], [b"short"]])
def test_wrong_keys_are_refused(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Secrets(keys)


def test_a_slip_in_a_key_needs_no_look_at_the_database() -> None:
    from app.store.keys import _checksum, _in_alphabet

    body = _in_alphabet(2**256 - 1, 43)
    assert _in_alphabet(0, 43) == "0" * 43
    key = "bsk_" + body + _checksum(body)
    assert is_plausible(key)
    for wrong in (key[:-1], key + "0", key[4:], "BSK_" + key[4:], key[:10] + "é" + key[11:]):
        assert not is_plausible(wrong)
    flipped = _ALPHABET[(_ALPHABET.index(key[10]) + 1) % 62]
    assert not is_plausible(key[:10] + flipped + key[11:])
