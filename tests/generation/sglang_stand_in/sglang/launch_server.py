"""A server that keeps the contract of SGLang 0.5.23 as far as the trainer uses it, and really samples, with a
small Hugging Face model on a CPU.

Read in its sources: the arguments (`srt/arg_groups/fields/*.py`), the endpoints
(`srt/entrypoints/http_server.py`), their fields (`srt/managers/io_struct.py`,
`srt/sampling/sampling_params.py`), the answers and the lengths (`srt/managers/tokenizer_manager.py`,
`scheduler.py`, `tp_worker.py`), the key (`srt/utils/auth.py`, `srt/utils/server_args_config_parser.py`), and
what a log-probability is (`srt/layers/sampler.py`). What is misuse there
ends this process, as it ends SGLang's scheduler.

$STAND_IN names a JSON file with what goes wrong; it is read again at every request:
  dies_at_start, slow (seconds until healthy), hollow (no model: always token 5), pace (seconds a token),
  hangs, dies (a path whose requests hang or end the server), cuts (tokens after which a response is cut)
It also gets the processes of this server, in `pids`, next to it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

NOTES = Path(os.environ.get("STAND_IN", "faults.json"))
GREEDY = 1e-6


def faults() -> dict[str, Any]:
    return json.loads(NOTES.read_text())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model-path", "host", "load-format", "dtype", "device"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("port", "random-seed", "context-length", "max-running-requests"):
        parser.add_argument(f"--{name}", required=True, type=int)
    parser.add_argument("--base-gpu-id", type=int, default=0)
    parser.add_argument("--mem-fraction-static", type=float, required=True)
    for name in ("decode", "prefill"):
        choices = ["full", "breakable", "disabled"]
        parser.add_argument(f"--cuda-graph-backend-{name}", choices=choices, default="full")
    for name in ("skip-tokenizer-init", "disable-radix-cache", "enable-memory-saver"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--enable-deterministic-inference", action="store_true")
    parser.add_argument("--config", required=True, type=Path)
    given = parser.parse_args()
    assert given.config.suffix == ".yaml" and given.config.stat().st_mode & 0o777 == 0o600
    given.api_key = yaml.safe_load(given.config.read_text())["api-key"]
    assert given.host == "127.0.0.1" and given.load_format == "dummy"
    return given


def is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1")


class Refused(ValueError):
    """Answered with status 400."""


class Request:
    def __init__(self, body: dict[str, Any]):
        known = {"rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len"}
        assert set(body) <= known, set(body) - known
        self.rid: str = body["rid"]
        self.ids: list[int] = list(body["input_ids"])
        self.prompt = len(self.ids)
        self.params: dict[str, Any] = body["sampling_params"]
        known = {
            *("max_new_tokens", "temperature", "top_p", "top_k", "stop_token_ids"),
            *("ignore_eos", "sampling_seed", "stop", "skip_special_tokens"),
        }
        assert set(self.params) <= known, set(self.params) - known
        if self.params["top_k"] != -1 and self.params["top_k"] < 1:
            raise Refused(f"top_k must be -1 (disable) or at least 1, got {self.params['top_k']}.")
        self.greedy = self.params["temperature"] < GREEDY
        self.log_probs: list[float] = []
        self.aborted = False


class Server:
    """The scheduler and its model."""

    def __init__(self, given: argparse.Namespace):
        self.given, self.model, self.tokenizer = given, None, None
        self.lock = threading.Lock()
        self.slots = threading.Semaphore(given.max_running_requests)
        self.requests: dict[str, Request] = {}
        self.released = False
        self.healthy_at = time.monotonic() + faults().get("slow", 0)
        if faults().get("hollow"):
            return
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(1)
        torch.manual_seed(given.random_seed)
        config = AutoConfig.from_pretrained(given.model_path)
        assert config.eos_token_id is None and not hasattr(config, "attention_chunk_size")
        longest = config.max_position_embeddings
        if given.context_length > longest and not is_set("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"):
            raise ValueError(f"User-specified context_length is greater than the derived ({longest}).")
        if not given.skip_tokenizer_init:
            from transformers import AutoTokenizer

            self.tokenizer = AutoTokenizer.from_pretrained(given.model_path)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, given.dtype)).eval()

    def generate(self, request: Request) -> dict[str, Any]:
        context, most = self.given.context_length, request.params["max_new_tokens"]
        if request.prompt + most > context:
            total = request.prompt + most
            raise Refused(
                "Requested token count exceeds the model's maximum context length of"
                f" {context} tokens. You requested a total of {total} tokens: {request.prompt} tokens from"
                f" the input messages and {most} tokens for the completion."
            )
        most = min(most, context - 1 - request.prompt - 1, faults().get("cuts", most))
        self.requests[request.rid] = request
        try:
            with self.slots:
                reason = self.sample(request, most)
        finally:
            del self.requests[request.rid]
        count = len(request.ids) - request.prompt
        tokens = request.ids[request.prompt :]
        numbers = [None if math.isnan(value) else value for value in request.log_probs]
        return {
            "output_ids": tokens,
            "meta_info": {
                "id": request.rid,
                "finish_reason": reason,
                "prompt_tokens": request.prompt,
                "completion_tokens": count,
                "input_token_logprobs": [],
                "output_token_logprobs": [[*pair, None] for pair in zip(numbers, tokens, strict=True)],
            },
        }

    def sample(self, request: Request, most: int) -> dict[str, Any]:
        stops = set(request.params.get("stop_token_ids") or ())
        while len(request.ids) < request.prompt + most:
            if request.aborted:
                return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
            time.sleep(faults().get("pace", 0))
            with self.lock:
                if self.released:
                    die("RuntimeError: CUDA error: an illegal memory access was encountered")
                token, log_prob = self.token(request)
            request.ids.append(token)
            request.log_probs.append(log_prob)
            if token in stops and not request.params.get("ignore_eos"):
                return {"type": "stop", "matched": token}
            if self.tokenizer is not None and token == self.tokenizer.eos_token_id:
                return {"type": "stop", "matched": token}
            if matched := self.stop_string(request):
                return {"type": "stop", "matched": matched}
        return {"type": "length", "length": most}

    def stop_string(self, request: Request) -> str | None:
        """Looks at the last tokens alone, one more than the longest stop string has."""
        strings = request.params.get("stop") or []
        if not strings:
            return None
        lengths = [len(self.tokenizer.encode(one, add_special_tokens=False)) for one in strings]
        tail = self.tokenizer.decode(request.ids[request.prompt :][-max(lengths) - 1 :])
        return next((one for one in strings if one in tail), None)

    def token(self, request: Request) -> tuple[int, float]:
        """The next one and its log-probability: of the scaled logits, before top-k and top-p; where
        $SGLANG_RETURN_ORIGINAL_LOGPROB is set, of the logits."""
        if self.model is None:
            return 5, -1.0
        import torch

        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([request.ids])).logits[0, -1].float()
        if bool(logits.isnan().any()):
            return 0, math.nan
        scaled = logits if request.greedy else logits / request.params["temperature"]
        original = is_set("SGLANG_RETURN_ORIGINAL_LOGPROB")
        log_probs = (logits if original else scaled).log_softmax(-1)
        probs, order = scaled.softmax(-1).sort(descending=True)
        before = probs.cumsum(-1) - probs
        kept = before <= request.params["top_p"]
        if request.params["top_k"] != -1:
            kept[request.params["top_k"] :] = False
        if request.greedy:
            place = 0
        elif self.given.enable_deterministic_inference:
            seed = hash((request.params["sampling_seed"], len(request.ids)))
            own = torch.Generator().manual_seed(seed)
            place = int(torch.multinomial(probs * kept, 1, generator=own))
        else:
            place = int(torch.multinomial(probs * kept, 1))
        return int(order[place]), float(log_probs[order[place]])

    def abort(self, body: dict[str, Any]) -> None:
        """All requests whose name begins so; of a name that is not known, nothing."""
        rid, everything = body.get("rid") or "", body.get("abort_all", False)
        if not everything and rid not in self.requests:
            return
        for request in list(self.requests.values()):
            if everything or request.rid.startswith(rid):
                request.aborted = True

    def release(self) -> None:
        import torch

        if self.requests:
            die("AssertionError: release_memory_occupation should be called only when server is idle.")
        if self.released:
            die("AssertionError: already released")
        self.released = True
        for parameter in self.model.parameters():
            parameter.data.fill_(torch.nan)

    def resume(self) -> None:
        if not self.released:
            die("KeyError: 'kv_cache'")
        self.released = False

    def load(self, body: dict[str, Any]) -> dict[str, Any]:
        from safetensors.torch import load_file

        if self.released:
            die("RuntimeError: CUDA error: an illegal memory access was encountered")
        if body["load_format"] != "safetensors":
            return {"success": False, "message": f"Failed to get model loader: {body['load_format']}."}
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            return {"success": False, "message": "Failed to get weights iterator: no files."}
        own = self.model.state_dict()
        for file in files:
            for name, tensor in load_file(file).items():
                own[name].copy_(tensor)
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


def die(why: str) -> None:
    print(f"Scheduler hit an exception: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health"
            if server.released:
                die("a health check generates a token, and there is no memory")
            stuck = "hangs" in faults() or time.monotonic() < server.healthy_at
            self.answer(503 if stuck else 200, None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.headers["Authorization"] != f"Bearer {server.given.api_key}":
                self.answer(401, {"error": "Unauthorized"})
                return
            asked = urlsplit(self.path)
            if faults().get("dies") == asked.path:
                die("out of memory")
            while faults().get("hangs") == asked.path:
                time.sleep(0.05)
            try:
                self.route(asked.path, parse_qs(asked.query), body)
            except Refused as error:
                self.answer(400, {"error": {"message": str(error)}})

        def route(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> None:
            if path == "/generate":
                self.answer(200, server.generate(Request(body)))
            elif path == "/abort_request":
                self.answer(200, None)
                server.abort(body)
            elif path == "/flush_cache":
                deadline = time.monotonic() + float(query.get("timeout", ["0"])[0])
                while server.requests and time.monotonic() < deadline:
                    time.sleep(0.01)
                self.answer(400 if server.requests else 200, "Cache flushed.\n")
            elif path == "/release_memory_occupation":
                server.release()
                self.answer(200, {})
            elif path == "/resume_memory_occupation":
                server.resume()
                self.answer(200, {})
            elif path == "/update_weights_from_disk":
                answer = server.load(body)
                self.answer(200 if answer["success"] else 400, answer)
            else:
                self.answer(404, {"detail": "Not Found"})

        def answer(self, status: int, content: Any) -> None:
            text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
            self.send_response(status)
            if isinstance(content, dict):
                self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, form: str, *args: Any) -> None:
            """No line for every request."""

    return Handler


class Listener(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


def main() -> None:
    given = parse()
    scheduler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    NOTES.with_name("pids").write_text(f"{os.getpid()} {scheduler.pid}")
    print("Load weight begin.", flush=True)
    if faults().get("dies_at_start"):
        raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static.")
    listener = Listener((given.host, given.port), handler(Server(given)))
    listener.serve_forever()


if __name__ == "__main__":
    main()
