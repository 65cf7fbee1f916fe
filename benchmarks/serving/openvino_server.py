"""OpenVINO GenAI behind OpenAI's streaming completions, so that it can be measured like a server.

    DIR/openvino/bin/python -m benchmarks.serving.openvino_server MODEL --port PORT [--threads 2]

Runs in an environment that has openvino-genai and not this project: nothing of ours is imported.
One thread steps the engine (continuous batching, greedy); each request's thread writes its events.
A prompt is a list of token ids. It knows only what ``benchmarks.serving.peers`` asks for.
"""

import argparse
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CACHE_GB = 2
MAX_BATCHED_TOKENS = 2048
MAX_SEQS = 64
REQUEST_S = 300.0
"""The longest wait for a token."""


class Engine:
    """The pipeline and the thread that steps it while anything runs."""

    def __init__(self, model: str, threads: int) -> None:
        import openvino_genai

        self._genai: Any = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        scheduler.max_num_seqs = MAX_SEQS
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = True
        device = {"INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": True}
        self._pipeline: Any = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", device
        )
        self._asked: queue.Queue[tuple[list[int], int, queue.Queue[int]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt: list[int], max_tokens: int) -> queue.Queue[int]:
        """Begin a request; its tokens come to the queue as they are made."""
        tokens: queue.Queue[int] = queue.Queue()
        self._asked.put((prompt, max_tokens, tokens))
        return tokens

    def _run(self) -> None:
        running: list[tuple[Any, queue.Queue[int]]] = []
        number = 0
        while True:
            while not self._asked.empty() or not running:
                prompt, max_tokens, tokens = self._asked.get()
                number += 1
                running.append((self._begin(number, prompt, max_tokens), tokens))
            self._pipeline.step()
            for handle, tokens in running:
                while handle.can_read():
                    for output in handle.read().values():
                        for token in output.generated_ids:
                            tokens.put(token)
            going_on = self._genai.GenerationStatus.RUNNING
            running = [one for one in running if one[0].get_status() == going_on]

    def _begin(self, number: int, prompt: list[int], max_tokens: int) -> Any:
        import numpy as np
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return self._pipeline.add_request(number, ids, config)


class Handler(BaseHTTPRequestHandler):
    """Health, models, and streaming completions."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a line per request would cost what is measured."""

    def do_GET(self) -> None:
        """``/health`` and ``/v1/models``."""
        self._json({"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        """``/v1/completions`` with a prompt of token ids, streamed."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, count = asked["prompt"], asked["max_tokens"]
        tokens = self.engine.submit(prompt, count)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for place in range(count):
            token = tokens.get(timeout=REQUEST_S)
            reason = "length" if place + 1 == count else None
            choice = {"index": 0, "text": f" {token}", "finish_reason": reason}
            self._event({"object": "text_completion", "choices": [choice]})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        usage["total_tokens"] = len(prompt) + count
        self._event({"object": "text_completion", "choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, body: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(body).encode() + b"\n\n")

    def _json(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of an exported model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    Handler.engine = Engine(options.model, options.threads)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
