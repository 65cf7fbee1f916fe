"""Settings of what speaks HTTP: where, with whom, how chats are read, and what is logged."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from kunserve.core.config.flag import Flag
from kunserve.core.errors import ConfigError

_chat = partial(Flag, "Chat")
_address = partial(Flag, "Address")
_tls = partial(Flag, "TLS")
_access = partial(Flag, "Access")
_limits = partial(Flag, "Limits")
_logs = partial(Flag, "Logs and traces")


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """How conversations become prompts, and what the text of answers means."""

    chat_template: Annotated[str | None, _chat()] = None
    """File of a Jinja template, or the name of one that is shipped (chatml_tools) [the model's
    own]."""
    default_chat_template_kwargs: Annotated[str | None, _chat(is_json=True)] = None
    """Variables for the template where a request does not set them, as JSON, for example
    {"enable_thinking": false}."""
    enable_auto_tool_choice: Annotated[bool, _chat(can_negate=True)] = False
    """Let the model decide whether it calls tools; with --tool-call-parser."""
    tool_call_parser: Annotated[str | None, _chat()] = None
    """How the model writes calls of tools.

    By vLLM's names.
    """
    exclude_tools_when_tool_choice_none: Annotated[bool, _chat(can_negate=True)] = False
    """Do not tell the model of tools where tool_choice is "none"."""
    reasoning_parser: Annotated[str | None, _chat()] = None
    """How the model marks what it thinks before it answers.

    None: all that it says is content.
    """

    def __post_init__(self) -> None:
        """Calls that nobody could read are a mistake."""
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "--enable-auto-tool-choice requires --tool-call-parser: how the model writes calls"
            )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP front."""

    host: Annotated[str, _address()] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, _address(least=0, most=65535)] = 8000
    """0 picks a free one."""
    root_path: Annotated[str, _address()] = ""
    """What a proxy puts before every path, for example /llm."""
    api_server_count: Annotated[int, _address(least=1, most=64)] = 1
    """Processes that speak HTTP and turn text into tokens and back, before one controller: for more
    tokens per second than one of them can write."""
    ssl_certfile: Annotated[str | None, _tls()] = None
    """Certificate in PEM; with it, https is spoken."""
    ssl_keyfile: Annotated[str | None, _tls()] = None
    """Its key [in the same file]."""
    ssl_ca_certs: Annotated[str | None, _tls()] = None
    """Who signs the certificates of clients, in PEM."""
    ssl_cert_reqs: Annotated[int, _tls(least=0, most=2)] = 0
    """Certificates of clients: 0 not asked for, 1 checked if they have one, 2 required.

    As ``ssl.VerifyMode``.
    """
    api_key: Annotated[str | None, _access(is_secret=True)] = None
    """Clients must send it as a Bearer token. In ps it is seen by all: rather use
    KUNSERVE_API_KEY."""
    api_key_file: Annotated[str | None, _access(is_secret=True)] = None
    """More keys, one on a line, read anew at SIGHUP. Lines with # in front are comments."""
    enable_admin: Annotated[bool, _access()] = False
    """Let POST /kunserve/drop, restore, scale, pause, resume and kill act, and
    /reset_prefix_cache."""
    allowed_origins: Annotated[tuple[str, ...], _access()] = ()
    """Whose web pages may call the API from a browser (CORS): origins with commas between them, or
    vLLM's JSON list. Paths below /kunserve are never open to them.

    ``*`` is everybody's.
    """
    allowed_methods: Annotated[tuple[str, ...], _access()] = ("*",)
    """What those pages may send."""
    allowed_headers: Annotated[tuple[str, ...], _access()] = ("*",)
    """Headers that they may send."""
    allow_credentials: Annotated[bool, _access()] = False
    """Let them send cookies and certificates."""
    max_num_queued_reqs: Annotated[int | None, _limits(least=1)] = None
    """Waiting requests beyond which new ones get 503 [no limit]."""
    max_num_queued_tokens: Annotated[int | None, _limits(least=1)] = None
    """Waiting prompt tokens beyond which new requests get 503 [no limit]."""
    max_connections: Annotated[int, _limits(least=1)] = 4096
    """Connections served at once."""
    request_timeout_s: Annotated[float | None, _limits("--request-timeout", above=0)] = None
    """Seconds after which a request that has not ended ends with an error [no limit].

    Without one, a request that no instance can take ends after ``cluster.start_timeout_s``.
    """
    shutdown_timeout_s: Annotated[float, _limits("--shutdown-timeout", least=0)] = 30.0
    """Seconds that SIGTERM waits for requests under way."""
    enable_prompt_tokens_details: Annotated[bool, Flag("Answers")] = False
    """Tell in `usage` how many tokens of the prompt were cached."""

    def __post_init__(self) -> None:
        """A key that nobody could send, or that everybody sends, is a mistake."""
        if self.api_key is not None and (not self.api_key or self.api_key != self.api_key.strip()):
            raise ConfigError("the API key must not be empty, nor begin or end with a space")
        if self.root_path and not self.root_path.startswith("/"):
            raise ConfigError(f"the root path must begin with a slash: /{self.root_path}")
        for origin in self.allowed_origins:
            scheme, mark, rest = origin.partition("://")
            if origin not in ("*", "null") and not (scheme and mark and rest and "/" not in rest):
                raise ConfigError(
                    f"{origin!r} is no origin; write for example https://chat.example.org, "
                    "without a slash at the end"
                )
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("TLS needs a certificate: give --ssl-certfile too")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError("clients' certificates are checked against --ssl-ca-certs: give it")

    @property
    def wants_key(self) -> bool:
        """Whether clients need a key."""
        return self.api_key is not None or self.api_key_file is not None

    @property
    def has_open_admin(self) -> bool:
        """Whether the write endpoints answer without a key."""
        return self.enable_admin and not self.wants_key


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is written to standard error, by the front and by every instance. Traces, too."""

    log_level: Annotated[Literal["debug", "info", "warning", "error"], _logs()] = "info"
    """Least important lines that are written."""
    log_format: Annotated[Literal["text", "json"], _logs()] = "text"
    """json writes one object per line, with fields."""
    enable_log_requests: Annotated[bool, _logs(can_negate=True)] = False
    """A line when a request arrives, and one when it has ended, with its times."""
    max_log_len: Annotated[int | None, _logs(least=1)] = None
    """So many characters of each prompt are in those lines [none]."""
    uvicorn_log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug", "trace"], _logs()
    ] = "warning"
    """The same for the HTTP library."""
    uvicorn_access_log: Annotated[
        bool, _logs("--enable-uvicorn-access-log/--disable-uvicorn-access-log")
    ] = False
    """A line for every HTTP request."""
    kv_events_endpoint: Annotated[str | None, _logs()] = None
    """Publish what prefix caches have in vLLM's ZMQ format, for prefix-aware routers: like
    tcp://*:5557, where instance n has port 5557 + n [not]."""
    otlp_traces_endpoint: Annotated[str | None, _logs()] = None
    """Send requests and transitions as OpenTelemetry spans to this collector, for example
    http://localhost:4318/v1/traces. Needs the extra otel: pip install
    'kunserve[otel]'."""

    def __post_init__(self) -> None:
        """No flag is ignored, and spans are sent by HTTP, not by gRPC."""
        if self.max_log_len is not None and not self.enable_log_requests:
            raise ConfigError(
                "--max-log-len is about lines that are not written: give --enable-log-requests too"
            )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"traces are sent by HTTP; write http://localhost:4318/v1/traces, not {endpoint}"
            )
