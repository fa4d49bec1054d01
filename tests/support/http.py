"""HTTP clients that start quickly."""

from __future__ import annotations

import ssl
from typing import Any

import httpx


_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Reading all certificates of the machine takes longer than a conversation."""


def http_client(**options: Any) -> httpx.AsyncClient:
    """Makes a client for servers of the tests, which speak no TLS."""
    return httpx.AsyncClient(verify=_NO_CERTIFICATES, **options)
