"""A server whose model says what it is told: ``python -m tests.clients.parrot_server``.

The last user message is the answer from ``SAY `` on. After the result of a tool the answer quotes
it. It prints its port, and ends when its standard input does.
"""

import re
import sys

from kunserve.core.config import ChatConfig
from kunserve.core.request import Request
from tests.unit.server.echo_engine import EchoEngine
from tests.unit.server.live_server import live_server
from tests.unit.server.tiny_tokenizer import ids, tiny_tokenizer

EOS = tiny_tokenizer().convert_tokens_to_ids("<|end|>")
CHAT = ChatConfig(
    enable_auto_tool_choice=True, tool_call_parser="hermes", reasoning_parser="deepseek_r1"
)


def parrot(request: Request) -> list[int]:
    """What the conversation says that the answer is."""
    prompt = tiny_tokenizer().decode(request.prompt_token_ids)
    turns = re.findall(r"<\|start\|>(\w+)\n(.*?)<\|end\|>", prompt, flags=re.DOTALL)
    role, content = next(turn for turn in reversed(turns) if turn[0] in ("user", "tool"))
    said = f"</think>It says {content}." if role == "tool" else content.partition("SAY ")[2]
    tokens = [*ids(said), EOS]
    return tokens + [EOS] * (request.sampling.max_tokens - len(tokens))


def main() -> None:
    """Serve until nobody wants it."""
    engine = EchoEngine(max_model_len=8000, eos_token_id=EOS, script=parrot, per_tick=3)
    with live_server(engine, chat=CHAT) as server:
        print(server.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
