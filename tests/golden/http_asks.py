"""What clients ask of a front, good and bad: sheets of requests to one server each."""

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kunserve.core.config import ChatConfig, ServerConfig
from kunserve.core.errors import MAX_QUEUED_REQS, Overloaded
from kunserve.server.http.limits import FrontLimits
from tests.unit.server.tiny_tokenizer import ids, tiny_tokenizer

Fields: TypeAlias = dict[str, Any]
EOS = tiny_tokenizer().convert_tokens_to_ids("<|end|>")
USER = {"role": "user", "content": "hi"}
JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Ask:
    """One HTTP request."""

    title: str
    path: str
    body: Any = None
    """JSON, or bytes as they are; None asks with GET."""
    engine: Fields = field(default_factory=dict)
    """Fields of the echo engine, for this request."""
    headers: dict[str, str] = field(default_factory=dict)
    method: str | None = None
    is_stepwise: bool = False
    """Of a stream: the next token comes when the last one has arrived here."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """Requests to one server, in order."""

    asks: tuple[Ask, ...]
    server: ServerConfig | None = None
    chat: ChatConfig | None = None
    limits: FrontLimits | None = None
    keeps_engine: bool = False
    """What one request does to the engine's state is there for the next one."""


def says(text: str) -> Fields:
    """An engine that answers with this text, and then ends."""
    return {"script": lambda _: [*ids(text), EOS, *[EOS] * 200], "eos_token_id": EOS}


def _completion(title: str, engine: Fields | None = None, **fields: Any) -> Ask:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, **fields}
    return Ask(title, "/v1/completions", body, engine or {})


def _chat(title: str, engine: Fields | None = None, **fields: Any) -> Ask:
    body = {"model": "tiny", "messages": [USER], "max_tokens": 4, **fields}
    return Ask(title, "/v1/chat/completions", body, engine or {})


def _response(title: str, engine: Fields | None = None, **fields: Any) -> Ask:
    return Ask(title, "/v1/responses", {"input": "hi", **fields}, engine or {})


def _message(title: str, engine: Fields | None = None, **fields: Any) -> Ask:
    return Ask(title, "/v1/messages", {"max_tokens": 9, "messages": [USER], **fields}, engine or {})


_FULL = {"refusal": lambda _: Overloaded("The queue is full.", limit=MAX_QUEUED_REQS)}
_STEPS = {"stream": True, "stream_options": {"include_usage": True}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "thing"}}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'

COMPLETIONS = (
    _completion("a completion"),
    _completion("two prompts, two answers each", prompt=["hello", "world"], n=2),
    _completion("tokens as a prompt, and the tokens told", prompt=[5, 6], return_token_ids=True),
    _completion("the prompt repeated, with probabilities", prompt="fox", echo=True, logprobs=2),
    _completion("a prompt's probabilities", prompt="fox", prompt_logprobs=1, max_tokens=1),
    _completion("a stop string", says("the quick brown fox"), stop=["brown"], max_tokens=30),
    _completion("the model's end", says("fox"), max_tokens=30),
    _completion("a prompt that was in the cache", {"num_cached": 1}),
    Ask(
        "a stream, token by token",
        "/v1/completions",
        {"prompt": "hello", "max_tokens": 3, **_STEPS},
        is_stepwise=True,
    ),
    _completion("a stream of two answers, with probabilities", n=2, stream=True, logprobs=1),
    _completion("a stream that fails", {"fail_after": 2, "per_tick": 1}, stream=True),
    _completion("an engine that fails", {"fail_after": 2}),
    _completion("a full queue", _FULL),
    _completion("a server that drains", {"admitting": False}),
    _completion("another model", model="gpt-4"),
    _completion("no prompt", prompt=None),
    _completion("a prompt that is too long", prompt=[5] * 600),
    _completion("a token that is none", prompt=[400]),
    _completion("more than fits behind the prompt", max_tokens=600),
    _completion("a temperature in words", temperature="0"),
    _completion("a number out of range", top_p=1.5),
    _completion("a field that is not supported", suffix="x"),
    _completion("too many answers", n=129),
    _completion("a form that is none", response_format={"type": "xml"}),
    Ask("no JSON", "/v1/completions", b'{"prompt": '),
    Ask("a list", "/v1/completions", b"[]"),
    Ask("the wrong method", "/v1/completions"),
)
CHAT = (
    _chat("a chat"),
    _chat("two answers with probabilities", n=2, logprobs=True, top_logprobs=2, max_tokens=2),
    Ask(
        "a stream, token by token",
        "/v1/chat/completions",
        {"messages": [USER], "max_tokens": 3, **_STEPS},
        {"script": lambda _: ids("hello world, hello")},
        is_stepwise=True,
    ),
    _chat("a stream of two answers", n=2, stream=True),
    _chat(
        "an answer that goes on",
        messages=[USER, {"role": "assistant", "content": "Well"}],
        add_generation_prompt=False,
        continue_final_message=True,
        echo=True,
    ),
    _chat(
        "a call that is forced",
        says('{"city": "Paris"}'),
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=40,
    ),
    _chat("a schema", says('{"a": 1}'), max_tokens=40, response_format=SCHEMA),
    _chat("a schema that is none", response_format=BAD_SCHEMA),
    _chat("no messages", messages=[]),
    _chat("a role that the template refuses", messages=[{"role": "judge", "content": "x"}]),
    _chat("a picture", messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
    _chat("tools without a parser", tools=[WEATHER], tool_choice="auto"),
    _chat("the older functions", functions=[{"name": "f"}]),
    Ask("no messages at all", "/v1/chat/completions", {"model": "tiny"}),
)
TOOLS = (
    _chat("a call", says(CALL), tools=[WEATHER], max_tokens=100),
    _chat("a call in a stream", says(CALL), tools=[WEATHER], max_tokens=100, stream=True),
    _chat("words instead", says("Paris!"), tools=[WEATHER], max_tokens=100),
    _chat("a thought", says("<think>hello</think>Paris!"), max_tokens=100),
    _chat("a thought in a stream", says("<think>hello</think>Paris!"), max_tokens=99, stream=True),
)
RESPONSES = (
    _response("a response", max_output_tokens=4),
    _response("an end by itself, with instructions", says("fox"), instructions="Be brief."),
    _response("a stream", says("hello world"), stream=True),
    _response("a memory", previous_response_id="resp_1"),
    _response("a tool of servers", tools=[{"type": "web_search"}]),
    _response(
        "a call that is forced",
        says('[{"name": "f", "parameters": {}}]'),
        tools=[{"type": "function", "name": "f"}],
        tool_choice="required",
        stream=True,
    ),
    Ask("no input", "/v1/responses", {}),
)
MESSAGES = (
    _message("a message", says("fox"), system="Be brief."),
    _message("a stream", says("hello world"), stream=True),
    _message("no length", max_tokens=None),
    Ask("its tokens", "/v1/messages/count_tokens", {"messages": [USER]}),
)
SYSTEM = (
    Ask("the timeline", "/kunserve/timeline"),
    Ask("the timeline since nonsense", "/kunserve/timeline?since=x"),
    Ask("the state", "/kunserve/state"),
    Ask("the models", "/v1/models"),
    Ask("a model", "/v1/models/tiny"),
    Ask("a model that is not there", "/v1/models/gpt-4"),
    Ask("the load", "/load"),
    Ask("the version", "/version"),
    Ask("text to tokens", "/tokenize", {"prompt": "hello", "return_token_strs": True}),
    Ask("a conversation to tokens", "/tokenize", {"messages": [USER]}),
    Ask("both to tokens", "/tokenize", {"messages": [USER], "prompt": "hello"}),
    Ask("tokens to text", "/detokenize", {"tokens": ids("hello")}),
    Ask("no tokens to text", "/detokenize", {"tokens": [-1]}),
    Ask("the tokenizer", "/tokenizer_info"),
    Ask("health", "/health"),
    Ask("health without some instances", "/health", engine={"wholeness": None}),
    Ask("health of nobody", "/health", engine={"healthy": False}),
    Ask("ready", "/health/ready"),
    Ask("stuck", "/readyz", engine={"progressing": False}),
    Ask("alive", "/livez"),
    Ask("a ping", "/ping", {}),
    Ask("the root", "/"),
    Ask("the page", "/dashboard"),
    Ask("the page with a slash", "/dashboard/"),
    Ask("a file that the page has not", "/dashboard/x.js"),
    Ask("an endpoint of others", "/v1/embeddings", {"input": "x"}),
    Ask("a path that nearly is one", "/completions", {"prompt": "x"}),
    Ask("a path that is none", "/nothing"),
    Ask("drops are off", "/kunserve/drop", {}),
    Ask("an id of our own", "/nothing/either", headers={"x-request-id": "not fit"}),
)
ADMIN = (
    Ask("drop", "/kunserve/drop", {"bytes": 100}),
    Ask("the state after a drop", "/kunserve/state"),
    Ask("a second drop", "/kunserve/drop", {}),
    Ask("a drop of nothing", "/kunserve/drop", {"bytes": 0}),
    Ask("a field that is none", "/kunserve/restore", {"bytes": 1}),
    Ask("restore", "/kunserve/restore", b"", headers=JSON),
    Ask("scale", "/kunserve/scale", {"num_instances": 3}),
    Ask("too many instances", "/kunserve/scale", {"num_instances": 5}),
    Ask("no instances", "/kunserve/scale", {"num_instances": 0}),
    Ask("kill", "/kunserve/kill", {"instance_id": 1}),
    Ask("kill the dead", "/kunserve/kill", {"instance_id": 1}),
    Ask("pause", "/kunserve/pause", {}),
    Ask("pause again", "/kunserve/pause", {}),
    Ask("resume", "/kunserve/resume", {}),
    Ask("pause answers", "/pause", b""),
    Ask("is it paused", "/is_paused"),
    Ask("ask a paused server", "/v1/completions", {"prompt": "x"}),
    Ask("resume answers", "/resume", b""),
    Ask("freeze answers", "/pause?mode=keep", b""),
    Ask("abort all", "/abort_requests", {}),
    Ask("does it sleep", "/is_sleeping"),
    Ask("forget prefixes", "/reset_prefix_cache", b""),
    Ask("forget more", "/reset_prefix_cache?reset_external=true", b""),
    Ask("a page of others", "/kunserve/drop", {}, headers={"origin": "https://evil.example"}),
    Ask("another host", "/kunserve/drop", {}, headers={"host": "evil.example"}),
    Ask("a form", "/kunserve/drop", b"bytes=1", headers={"content-type": "text/plain"}),
)
KEYS = (
    Ask("no key", "/v1/models"),
    Ask("a wrong key", "/v1/models", headers={"authorization": "Bearer guessed"}),
    Ask("the key", "/v1/models", headers={"authorization": "Bearer secret"}),
    Ask("what needs none", "/health"),
    Ask(
        "a page that may ask",
        "/v1/models",
        headers={"authorization": "Bearer secret", "origin": "https://chat.example"},
    ),
    Ask(
        "a page asks whether it may",
        "/v1/completions",
        headers={
            "origin": "https://chat.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        },
        method="OPTIONS",
    ),
    Ask("under the proxy's prefix", "/llm/health"),
)
LIMITS = (
    Ask("a body that is too large", "/v1/completions", b'{"prompt": "' + b"x" * 5000 + b'"}'),
    Ask("more values than may be", "/v1/completions", {"prompt": [1] * 1100}),
    _completion("as many answers as may be", n=2, max_tokens=1),
    _completion("one more", n=3),
    _completion("what was cached", {"num_cached": 2}, prompt=[5, 6, 7]),
    _chat("what was cached of a chat", {"num_cached": 7}),
)

SHEETS = {
    "completions": Sheet(COMPLETIONS),
    "chat": Sheet(CHAT),
    "tools": Sheet(
        TOOLS,
        chat=ChatConfig(
            enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="qwen3"
        ),
    ),
    "responses": Sheet(RESPONSES),
    "messages": Sheet(MESSAGES),
    "system": Sheet(SYSTEM),
    "admin": Sheet(ADMIN, ServerConfig(enable_admin=True), keeps_engine=True),
    "keys": Sheet(
        KEYS,
        ServerConfig(api_key="secret", allowed_origins=("https://chat.example",), root_path="/llm"),
    ),
    "limits": Sheet(
        LIMITS,
        ServerConfig(enable_prompt_tokens_details=True),
        limits=FrontLimits(max_body_bytes=4000, max_body_values=64, max_choices=2),
    ),
}
