"""OpenVINO GenAI's continuous batching behind `/v1/completions`, to be measured as servers are.

    ENVIRONMENT/bin/python openvino_server.py MODEL_FOLDER --port 8101 --threads 2

It runs in an environment of its own that has `openvino-genai`, so it needs nothing else, and knows
no more of HTTP than our client asks for: a prompt of token ids, greedy, streamed.
"""

import argparse
import asyncio
import json
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import openvino
import openvino_genai

KV_GIB = 2
MOST_TOKENS = 2048
"""Of a step."""
MOST_REQUESTS = 64
Told: TypeAlias = Callable[[int], None]
HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: %s\r\n\r\n"


class Engine:
    """The pipeline, and a thread that steps it."""

    def __init__(self, folder: str, threads: int) -> None:
        settings = openvino_genai.SchedulerConfig()
        settings.cache_size = KV_GIB
        settings.max_num_batched_tokens = MOST_TOKENS
        settings.max_num_seqs = MOST_REQUESTS
        settings.enable_prefix_caching = False
        settings.dynamic_split_fuse = True
        properties = {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": True}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            folder, settings, "CPU", properties
        )
        self._asked: queue.Queue[tuple[list[int], int, Told]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, token_ids: list[int], num_tokens: int, told: Told) -> None:
        """``told`` is called with the number of tokens of each step, and with 0 at the end."""
        self._asked.put((token_ids, num_tokens, told))

    def _run(self) -> None:
        running: list[tuple[Any, Told]] = []
        number = 0
        while True:
            while not running or not self._asked.empty():
                token_ids, num_tokens, told = self._asked.get()
                how = openvino_genai.GenerationConfig()
                how.max_new_tokens = how.min_new_tokens = num_tokens
                how.ignore_eos, how.do_sample = True, False
                prompt = openvino.Tensor(np.array([token_ids], dtype=np.int64))
                running.append((self._pipeline.add_request(number, prompt, how), told))
                number += 1
            self._pipeline.step()
            for handle, told in running:
                if handle.can_read():
                    told(sum(len(one.generated_ids) for one in handle.read().values()))
            runs = openvino_genai.GenerationStatus.RUNNING
            ended = [told for handle, told in running if handle.get_status() != runs]
            running = [one for one in running if one[1] not in ended]
            for told in ended:
                told(0)


class Server:
    """Enough of HTTP for our client."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request of one connection."""
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (int(line[15:]) for line in head.split("\r\n")
                 if line.lower().startswith("content-length:")),
                0,
            )  # fmt: skip
            body = await reader.readexactly(length)
            if head.startswith("GET"):
                writer.write(HEAD % b"application/json")
                writer.write(json.dumps({"object": "list", "data": [{"id": "m"}]}).encode())
            else:
                await self._complete(json.loads(body), writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _complete(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[int] = asyncio.Queue()

        def told(number: int) -> None:
            loop.call_soon_threadsafe(steps.put_nowait, number)

        prompt, num_tokens = asked["prompt"], asked["max_tokens"]
        self._engine.ask(prompt, num_tokens, told)
        writer.write(HEAD % b"text/event-stream")
        count = 0
        while number := await steps.get():
            for _ in range(number):
                count += 1
                end = '"length"' if count == num_tokens else "null"
                writer.write(
                    b'data: {"choices": [{"index": 0, "text": " x", "finish_reason": %s}]}\n\n'
                    % end.encode()
                )
            await writer.drain()
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        writer.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        writer.write(b"data: [DONE]\n\n")


async def serve(engine: Engine, port: int) -> None:
    """Until it is ended."""
    server = await asyncio.start_server(Server(engine).answer, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


def main() -> None:
    """Load, then serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="the model as `optimum-cli export openvino` writes it")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    asyncio.run(serve(Engine(options.folder, options.threads), options.port))


if __name__ == "__main__":
    main()
