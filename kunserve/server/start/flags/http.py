"""Flags of the HTTP server: where it listens, whom it lets in, and how much it takes."""

import click

from kunserve.core.config import ServerConfig
from kunserve.server.start.flags.option import FiniteRange, TextList, all_of, flags_of

_address = flags_of("Address", ServerConfig())
_tls = flags_of("TLS", ServerConfig())
_access = flags_of("Access", ServerConfig())
_limits = flags_of("Limits", ServerConfig())
_answers = flags_of("Answers", ServerConfig())

HTTP_FLAGS = all_of(
    _address("--host", help="Address to listen on."),
    _address("--port", type=click.IntRange(0, 65535), help="0 picks a free one."),
    _address(
        "--root-path",
        show_default=False,
        help="What a proxy puts before every path, for example /llm.",
    ),
    _address(
        "--api-server-count",
        type=click.IntRange(1, 64),
        help="Processes that speak HTTP and turn text into tokens and back, before one controller: "
        "for more tokens per second than one of them can write.",
    ),
    _tls("--ssl-certfile", help="Certificate in PEM; with it, https is spoken."),
    _tls("--ssl-keyfile", help="Its key [in the same file]."),
    _tls("--ssl-ca-certs", help="Who signs the certificates of clients, in PEM."),
    _tls(
        "--ssl-cert-reqs",
        type=click.IntRange(0, 2),
        help="Certificates of clients: 0 not asked for, 1 checked if they have one, 2 required.",
    ),
    _access(
        "--api-key",
        secret=True,
        help="Clients must send it as a Bearer token. In ps it is seen by all: rather use "
        "KUNSERVE_API_KEY.",
    ),
    _access(
        "--api-key-file",
        secret=True,
        help="More keys, one on a line, read anew at SIGHUP. Lines with # in front are comments.",
    ),
    _access(
        "--enable-admin",
        is_flag=True,
        help="Let POST /kunserve/drop, restore, scale, pause, resume and kill act, "
        "and /reset_prefix_cache.",
    ),
    _access(
        "--allowed-origins",
        type=TextList(),
        default=(),
        show_default=False,
        help="Whose web pages may call the API from a browser (CORS): origins with commas between "
        "them, or vLLM's JSON list. Paths below /kunserve are never open to them.",
    ),
    _access("--allowed-methods", type=TextList(), help="What those pages may send."),
    _access("--allowed-headers", type=TextList(), help="Headers that they may send."),
    _access(
        "--allow-credentials",
        is_flag=True,
        help="Let them send cookies and certificates.",
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
    _answers(
        "--enable-prompt-tokens-details",
        is_flag=True,
        help="Tell in `usage` how many tokens of the prompt were cached.",
    ),
)
