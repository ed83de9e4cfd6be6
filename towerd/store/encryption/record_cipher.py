"""RecordCipher: encrypts records of one size in place of each other (AES-256-XTS, the number of a record its tweak),
with a key that only this process has and that ends with it."""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import XTS

Records = npt.NDArray[np.uint8]
RECORD_BYTES_MIN = 16
_KEY_BYTES = 64


class RecordCipher:
    """For records of at least `RECORD_BYTES_MIN` bytes. Thread-safe."""

    def __init__(self) -> None:
        self._algorithm = AES(secrets.token_bytes(_KEY_BYTES))

    def encrypted(self, records: Records, first: int) -> Records:
        """uint8[n, row_bytes], the records with numbers from `first` on."""
        found = [
            self._cipher(first + i).encryptor().update(record.data)
            for i, record in enumerate(np.ascontiguousarray(records))
        ]
        return np.frombuffer(b"".join(found), np.uint8).reshape(records.shape)

    def decrypt(self, records: Records, numbers: npt.NDArray[np.int64]) -> None:
        """Decrypt uint8[n, row_bytes] in place. numbers: int64[n]"""
        for number, record in zip(numbers.tolist(), records, strict=True):
            plain = self._cipher(number).decryptor().update(record.data)
            record[:] = np.frombuffer(plain, np.uint8)

    def _cipher(self, number: int) -> Cipher[XTS]:
        return Cipher(self._algorithm, XTS(number.to_bytes(16, "little")))
