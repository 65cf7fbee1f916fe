"""Keeps foreign web pages away from a server whose admin endpoints want no key.

A browser lets any page send a simple POST to any address, and a page can give its own name an
address on this machine (DNS rebinding). It cannot choose ``Origin`` or ``Host``, and it may send
JSON only after a preflight, which this server refuses for every path below ``/kunserve``, whatever
``--allowed-origins`` says (``middleware``).
"""

import ipaddress
from collections.abc import Mapping

from kunserve.server.http.errors import Forbidden

JSON = "application/json"


def is_loopback(name: str) -> bool:
    """Whether a host name or address means this machine only."""
    name = name.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def check_host(host: str | None) -> None:
    """Raise Forbidden for a Host header that names another machine; none is no browser's."""
    if host is not None and not is_loopback(_without_port(host)):
        raise Forbidden(
            "This server is bound to the loopback address and answers requests for it only; "
            "start it with --api-key to use it under another name."
        )


def check_origin(headers: Mapping[str, str]) -> None:
    """Raise Forbidden for a request that a browser says is a foreign web page's."""
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != headers.get("host"):
        raise Forbidden("Requests from other web sites are refused.")
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise Forbidden("Requests from other web sites are refused.")


def check_page(headers: Mapping[str, str]) -> None:
    """Raise Forbidden for a write request that a foreign web page could have made."""
    check_origin(headers)
    if headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise Forbidden(
            f"Without --api-key, admin requests need `content-type: {JSON}` "
            "(for example: curl --json '{}' ...)."
        )


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0]
    return host.rpartition(":")[0] or host
