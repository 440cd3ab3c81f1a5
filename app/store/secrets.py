"""Secrets at rest: AES-GCM, bound to the place they are stored in, under keys that can be rotated."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
from collections.abc import Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_KEY_ID_BYTES: Final = 4
_FORMAT: Final = b"\x01"
HEAD_BYTES: Final = len(_FORMAT) + _KEY_ID_BYTES
"""What names the format and the key, at the front of a sealed value."""
_OPENING_BYTES: Final = HEAD_BYTES + _NONCE_BYTES


class UnreadableSecretError(Exception):
    """A stored secret cannot be decrypted: its key is not set, or the row was tampered with.

    The message is a sentence for operators. `missing_key_id` names the key that is not set.
    """

    def __init__(self, message: str, missing_key_id: str | None = None) -> None:
        super().__init__(message)
        self.missing_key_id = missing_key_id


class Secrets:
    """Encrypts and decrypts values of columns. The first key writes; every key reads.

    A sealed value names its key by id, and only opens in the column and row that it was sealed for.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"at least one key of {KEY_BYTES} bytes is needed")
        self._ciphers = {_key_id(key): AESGCM(key) for key in keys}
        self._signers = {
            _key_id(key).hex(): hmac.digest(key, b"bascule callback tokens", "sha256") for key in keys
        }
        self._writer = _key_id(keys[0])

    @property
    def key_id(self) -> str:
        """Names the key that writes."""
        return self._writer.hex()

    def mac(self, text: str, key_id: str) -> str | None:
        """Authenticate a text, in base64url: under a key derived from the named one, None if that is gone."""
        signer = self._signers.get(key_id)
        if signer is None:
            return None
        return base64.urlsafe_b64encode(hmac.digest(signer, text.encode(), "sha256")).decode().rstrip("=")

    @property
    def key_ids(self) -> tuple[str, ...]:
        """The ids of the keys, in hexadecimal; the first one writes."""
        return tuple(key_id.hex() for key_id in self._ciphers)

    def is_current(self, sealed: bytes) -> bool:
        """Whether the first key encrypted it."""
        return key_id_of(sealed) == self._writer.hex()

    def encrypt(self, plain: bytes, *, column: str, row: Sequence[str]) -> bytes:
        """Seal a value for a column (`table.column`) and the primary key of its row."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._ciphers[self._writer].encrypt(nonce, plain, _place(column, row))
        return _FORMAT + self._writer + nonce + sealed

    def decrypt(self, sealed: bytes, *, column: str, row: Sequence[str]) -> bytes:
        """Open what `encrypt` sealed for the same place.

        Raises:
            UnreadableSecretError: the key is missing from BASCULE_SECRET_KEY, or the value is not from there.
        """
        where = f"{column} of {'/'.join(row)}"
        if key_id_of(sealed) is None or len(sealed) < _OPENING_BYTES:
            raise UnreadableSecretError(
                f"{where} is not in a known format; was it written by a later version?"
            )
        key_id = sealed[len(_FORMAT) : HEAD_BYTES]
        cipher = self._ciphers.get(key_id)
        if cipher is None:
            raise UnreadableSecretError(
                f"{where} was encrypted with key {key_id.hex()}, which BASCULE_SECRET_KEY does not hold;"
                " append that key after the current one",
                key_id.hex(),
            )
        try:
            return cipher.decrypt(
                sealed[HEAD_BYTES:_OPENING_BYTES], sealed[_OPENING_BYTES:], _place(column, row)
            )
        except InvalidTag as error:
            raise UnreadableSecretError(f"{where} was changed or moved outside the service") from error


def key_id_of(sealed: bytes) -> str | None:
    """Return the id of the key that encrypted a value, in hexadecimal; None if it is in no known format."""
    is_known = len(sealed) >= HEAD_BYTES and sealed.startswith(_FORMAT)
    return sealed[len(_FORMAT) : HEAD_BYTES].hex() if is_known else None


def _key_id(key: bytes) -> bytes:
    return hashlib.sha256(b"bascule secret key id\0" + key).digest()[:_KEY_ID_BYTES]


def _place(column: str, row: Sequence[str]) -> bytes:
    return json.dumps([column, *row]).encode()
