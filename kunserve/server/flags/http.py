"""Flags of the HTTP server: where it listens, whom it lets in, and how much it takes."""

import click

from kunserve.core.config import ServerConfig
from kunserve.server.flags.option import FiniteRange, all_of, flags_of

_address = flags_of("Address", ServerConfig())
_access = flags_of("Access", ServerConfig())
_limits = flags_of("Limits", ServerConfig())

HTTP_FLAGS = all_of(
    _address("--host", help="Address to listen on."),
    _address("--port", type=click.IntRange(0, 65535), help="0 picks a free one."),
    _access("--api-key", secret=True, help="Clients must send it as a Bearer token."),
    _access(
        "--enable-admin",
        is_flag=True,
        help="Let POST /kunserve/drop, restore, pause, resume and kill act.",
    ),
    _limits(
        "--max-num-queued-reqs",
        type=click.IntRange(min=1),
        help="Waiting requests beyond which new ones get 503 [no limit].",
    ),
    _limits(
        "--max-num-queued-tokens",
        type=click.IntRange(min=1),
        help="Waiting prompt tokens beyond which new requests get 503 [no limit].",
    ),
    _limits("--max-connections", type=click.IntRange(min=1), help="Connections served at once."),
    _limits(
        "--request-timeout",
        "request_timeout_s",
        type=FiniteRange(min=0, min_open=True),
        help="Seconds after which a request that has not ended ends with an error [no limit].",
    ),
    _limits(
        "--shutdown-timeout",
        "shutdown_timeout_s",
        type=FiniteRange(min=0),
        help="Seconds that SIGTERM waits for requests under way.",
    ),
)
