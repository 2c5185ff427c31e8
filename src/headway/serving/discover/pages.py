"""Fetches pages of a running engine over HTTP."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import msgspec

from headway.core.errors import HeadwayError
from headway.serving.discover.probe import Fetch

MOST_BYTES = 16 << 20
"""Maximum number of bytes of a page."""


def fetcher(url: str, api_key: str | None, timeout_s: float) -> Fetch:
    """Fetches pages of the engine at `url`. A page that fails counts as missing, except the list of models:
    HeadwayError."""

    def fetch(path: str, body: Any = None) -> bytes | None:
        try:
            with urllib.request.urlopen(request(url + path, api_key, body), timeout=timeout_s) as answer:
                return bytes(answer.read(MOST_BYTES))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (401, 403) and path == "/v1/models":
                raise HeadwayError(f"{url}: refuses the key ({error.code}); give --api-key") from None
            return None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            if path == "/v1/models":
                raise HeadwayError(f"{url}: gives no answer: {reason}") from None
            return None

    return fetch


def request(url: str, api_key: str | None, body: Any = None) -> urllib.request.Request:
    """A GET request, or a POST request with a JSON body."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    data = None
    if body is not None:
        headers["Content-Type"], data = "application/json", msgspec.json.encode(body)
    return urllib.request.Request(url, data, headers)
