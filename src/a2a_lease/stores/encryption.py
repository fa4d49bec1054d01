"""Keeping what a user said unreadable in the database."""

from __future__ import annotations

from typing import TYPE_CHECKING

from a2a_lease.errors import LeaseConfigurationError, LeaseError


if TYPE_CHECKING:
    from cryptography.fernet import Fernet


class Cipher:
    """Encrypts with Fernet, as the SDK's push config store does."""

    def __init__(self, key: str | bytes) -> None:
        """Takes the key.

        Args:
            key: 32 bytes in URL-safe base64; `Fernet.generate_key()` makes
                one.

        Raises:
            LeaseConfigurationError: The key is none, or the package that
                encrypts is missing; the message says what to do.
        """
        try:
            from cryptography.fernet import Fernet
        except ImportError as error:
            raise LeaseConfigurationError(
                'encryption_key= needs the package cryptography: '
                'pip install "a2a-lease[encryption]"'
            ) from error
        try:
            self._fernet: Fernet = Fernet(key)
        except ValueError as error:
            raise LeaseConfigurationError(
                f'encryption_key is not a Fernet key ({error}). Make one with '
                f'cryptography.fernet.Fernet.generate_key(), keep it secret, '
                f'and give all replicas the same.'
            ) from error

    def encrypt(self, data: bytes) -> bytes:
        """Encrypts."""
        return self._fernet.encrypt(data)

    def decrypt(self, data: bytes) -> bytes:
        """Decrypts.

        Raises:
            LeaseError: The data was not encrypted with this key.
        """
        from cryptography.fernet import InvalidToken

        try:
            return self._fernet.decrypt(data)
        except InvalidToken as error:
            raise LeaseError(
                'What is stored of a turn was not encrypted with this '
                'encryption_key. Give all replicas the same.'
            ) from error
