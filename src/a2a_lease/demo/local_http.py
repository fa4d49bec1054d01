"""HTTP clients for servers on this machine, which speak no TLS."""

from __future__ import annotations

import ssl
from typing import Any

import httpx


_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Reading all certificates of a machine takes longer than all else here."""


def local_client(**options: Any) -> httpx.AsyncClient:
    """Makes a client that is ready at once."""
    return httpx.AsyncClient(verify=_NO_CERTIFICATES, **options)
