"""Servers that are not ours, as fakes: the model of prove_fake behind the wire of vLLM, SGLang, llama.cpp and of proxies.

The bodies are those of real ones: vLLM 0.32.0 as it answered, SGLang 0.5.23 and llama.cpp's server as their sources say.
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from tests.ddops.prove_fake import FakeEngine, decode, encode, sse

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DONE = b"data: [DONE]\n\n"


class Asked(threading.local):
    """The request that this thread answers: a wave is answered by several at once."""

    def __init__(self) -> None:
        self.body: dict[str, Any] = {}


def refused(status: int, message: str, **more: Any) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "type": "BadRequestError", "code": status, **more}})


@dataclass
class VllmServer(FakeEngine):
    """vLLM: ids with return_token_ids, scores with prompt_logprobs, unknown fields ignored, numbers only in /metrics."""

    kind: str = "vllm"
    asked: Asked = field(default_factory=Asked)
    drafts: bool = True
    draft_tokens: int = 15
    api_key: str = ""
    log_stats: bool = True

    def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if self.api_key and path.startswith("/v1/") and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return httpx.Response(401, json={"error": "Unauthorized"})
        body = json.loads(request.content or b"{}") if request.method == "POST" else {}
        if path == "/v1/models":
            card = {"id": "tiny", "object": "model", "owned_by": "vllm", "parent": None, "max_model_len": 4096}
            return httpx.Response(200, json={"object": "list", "data": [card, card | {"id": "lora-a", "parent": "tiny"}]})
        if path == "/tokenize":
            ids = encode(self._prompt_text(body))
            return httpx.Response(200, json={"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None})
        if path == "/detokenize":
            return httpx.Response(200, json={"prompt": decode(body["tokens"])})
        if path not in ("/health", "/metrics", CHAT, COMPLETIONS):
            return httpx.Response(404, json={"detail": "Not Found"})
        if body and body["model"] != "tiny":
            return refused(404, f"The model `{body['model']}` does not exist. Valid aliases: tiny.", param="model")
        if body.get("prompt_logprobs", 0) > 20:
            return refused(
                400, f"Requested prompt logprobs of {body['prompt_logprobs']}, which is greater than max allowed: 20"
            )
        return super().handle(request)

    def _metrics(self) -> str:
        if not self.log_stats:
            return "# HELP process_start_time_seconds Start time\nprocess_start_time_seconds 1.0\n"
        label = '{engine="0",model_name="tiny"}'
        text = f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{label} 0.0\n"
        if not self.drafts:
            return text
        accepted = self._committed - self._passes
        return text + "".join(
            [
                f"vllm:spec_decode_num_drafts_total{label} {self._passes}\n",
                f"vllm:spec_decode_num_drafts_created{label} 1.7959812216417875e+09\n",
                f"vllm:spec_decode_num_accepted_tokens_total{label} {accepted}\n",
                *(
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="tiny",position="{i}"}} 1.0\n'
                    for i in range(self.draft_tokens)
                ),
            ]
        )

    def _answer(self, body: dict[str, Any], params: dict[str, Any], limit: int, native: bool, endless: bool) -> httpx.Response:
        self.asked.body = body
        return super()._answer(body, params, limit, native, endless)

    def _openai(self, text: str, ids: list[int], meta: dict[str, Any], finish: str) -> dict[str, Any]:
        body, chat = self.asked.body, "messages" in self.asked.body
        told = bool(body.get("return_token_ids"))
        prompt = self._prompt_ids(body) if told else None
        choice: dict[str, Any] = {"index": 0, "logprobs": self._logprobs(body, ids), "finish_reason": finish}
        choice |= {"stop_reason": None, "token_ids": ids if told else None}
        if chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None, "reasoning": None}
        else:
            choice |= {"text": text, "prompt_logprobs": None, "prompt_token_ids": prompt}
        usage = {"prompt_tokens": meta["prompt_tokens"], "total_tokens": 0, "completion_tokens": len(ids)}
        raw = {"id": "cmpl-1", "model": "tiny", "choices": [choice], "usage": usage | {"prompt_tokens_details": None}}
        return raw | ({"prompt_logprobs": None, "prompt_token_ids": prompt} if chat else {})

    def _logprobs(self, body: dict[str, Any], ids: list[int]) -> dict[str, Any] | None:
        if not body.get("logprobs"):
            return None
        as_ids = body.get("return_tokens_as_token_ids")
        names = [f"token_id:{i}" if as_ids else decode([i]) for i in ids]
        if "messages" in body:
            rows = [{"token": n, "logprob": -0.1, "bytes": [], "top_logprobs": [{"token": n, "logprob": -0.1}]} for n in names]
            return {"content": rows}
        return {
            "text_offset": [],
            "tokens": names,
            "token_logprobs": [-0.1] * len(ids),
            "top_logprobs": [{n: -0.1} for n in names],
        }

    def _events(
        self, ids: list[int], meta: dict[str, Any], passes: int, native: bool, wrong: str | None, endless: bool
    ) -> Iterator[bytes]:
        body, step = self.asked.body, 5
        told = bool(body.get("return_token_ids"))
        head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "tiny"}
        first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield sse(
            head | {"choices": [first], "prompt_token_ids": self._prompt_ids(body) if told else None, "prompt_text": None}
        )
        for at in range(0, len(ids), step):
            new, last = ids[at : at + step], at + step >= len(ids)
            choice = {"index": 0, "delta": {"content": decode(new)}, "logprobs": None}
            choice |= {"finish_reason": meta["finish_reason"]["type"] if last else None, "token_ids": new if told else None}
            yield sse(head | {"choices": [choice]})
        if (body.get("stream_options") or {}).get("include_usage"):
            yield sse(head | {"choices": [], "usage": {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": len(ids)}})
        yield DONE


@dataclass
class SglangServer(FakeEngine):
    """SGLang: ids of a chat only in `sglext`, meta_info refused on a stream, numbers of speculation per request."""

    kind: str = "sglang"
    asked: Asked = field(default_factory=Asked)
    algorithm: str = "DFLASH"
    incremental: bool = False  # --incremental-streaming-output
    extended: bool = True  # False: a version before `sglext`
    last_id: int = ord("`")  # of the vocabulary: scored as it is, and called 0

    def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = json.loads(request.content or b"{}") if request.method == "POST" else {}
        if path == "/v1/models":
            card = {"id": "tiny", "object": "model", "owned_by": "sglang", "root": "tiny", "max_model_len": 4096}
            return httpx.Response(200, json={"object": "list", "data": [card]})
        if path == "/tokenize":
            ids = encode(self._prompt_text(body))
            return httpx.Response(200, json={"tokens": ids, "count": len(ids), "max_model_len": 4096})
        if path == CHAT and body.get("stream"):
            for name in ("return_prompt_token_ids", "return_token_ids", "return_meta_info"):
                if body.get(name):
                    return self._bad(f"{name} is not supported with streaming. Please set stream=false when using {name}=true.")
        self.asked.body = body
        return super().handle(request)

    @staticmethod
    def _bad(message: str) -> httpx.Response:
        return httpx.Response(
            400, json={"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
        )

    def _info(self) -> dict[str, Any]:
        return {
            "model_path": "/m", "served_model_name": "tiny", "tp_size": 1, "speculative_algorithm": self.algorithm,
            "speculative_num_draft_tokens": 16, "speculative_dflash_block_size": None, "max_running_requests": None,
            "dtype": "auto", "version": "0.5.23", "launch_command": "python -m sglang.launch_server",
            "internal_states": [{"effective_max_running_requests_per_dp": 48, "avg_spec_accept_length": 5.5}],
        }  # fmt: skip

    def _metrics(self) -> str:
        return (
            f'sglang:spec_verify_calls_total{{model_name="tiny"}} {self._passes}\n'
            f'sglang:generation_tokens_total{{is_streaming="true"}} {self._committed + self._count}\n'
            f'sglang:num_requests_total{{is_streaming="true"}} {self._count}\n'
        )

    def _meta(self, prompt: str, ids: list[int], passes: int, finish: str) -> dict[str, Any]:
        return {
            "id": "r1", "prompt_tokens": len(encode(prompt)), "completion_tokens": len(ids), "cached_tokens": 0,
            "finish_reason": {"type": finish, "matched": 2}, "spec_accept_rate": 0.4, "spec_verify_ct": passes,
            "spec_accept_length": len(ids) / passes, "spec_num_correct_drafts": len(ids) - 1 - passes,
            "spec_num_proposed_drafts": 15 * passes,
        }  # fmt: skip

    def _score(self, body: dict[str, Any], native: bool) -> httpx.Response:
        answer = super()._score(body, native)
        raw = answer.json()
        for pair in raw.get("meta_info", {}).get("input_token_logprobs", ()):
            pair[1] = 0 if pair[1] == self.last_id else pair[1]
        return httpx.Response(answer.status_code, json=raw)

    def _sglext(self, ids: list[int], meta: dict[str, Any]) -> dict[str, Any]:
        body, found = self.asked.body if self.extended and "messages" in self.asked.body else {}, {}
        if body.get("return_output_ids_in_sglext"):
            found["output_ids"] = [ids]
        if body.get("return_input_ids_in_sglext"):
            found["input_ids"] = self._prompt_ids(body)
        if body.get("return_spec_tokens_details"):
            found["spec_tokens_details"] = {k: v for k, v in meta.items() if k.startswith("spec_")}
        return found

    def _openai(self, text: str, ids: list[int], meta: dict[str, Any], finish: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "reasoning_content": None}
        told = meta if self.asked.body.get("return_meta_info") else None
        choice = {"index": 0, "message": message, "finish_reason": finish, "matched_stop": 2, "meta_info": told}
        chat = "messages" in self.asked.body
        if self.asked.body.get("return_token_ids"):
            choice["response_token_ids" if chat else "token_ids"] = ids
            choice["prompt_token_ids"] = self._prompt_ids(self.asked.body)
        if not chat:
            choice["text"] = choice.pop("message")["content"]
        usage = {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": len(ids), "prompt_tokens_details": None}
        return {"id": "r1", "model": "tiny", "choices": [choice], "usage": usage, "sglext": self._sglext(ids, meta) or None}

    def _events(
        self, ids: list[int], meta: dict[str, Any], passes: int, native: bool, wrong: str | None, endless: bool
    ) -> Iterator[bytes]:
        step, chat = 5, "messages" in self.asked.body
        if chat:
            yield sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for number, at in enumerate(range(0, len(ids), step)):
            new = ids[at : at + step]
            shown = new if self.incremental or not native else ids[: at + step]
            counted = meta | {"completion_tokens": min(len(ids), at + step), "spec_verify_ct": number}
            if native:
                done = {"finish_reason": meta["finish_reason"] if at + step >= len(ids) else None}
                yield sse({"text": decode(shown), "output_ids": shown, "meta_info": counted | done})
            elif chat:
                yield sse({"choices": [{"index": 0, "delta": {"content": decode(new)}, "finish_reason": None}]})
            else:
                told = new if self.asked.body.get("return_token_ids") else None
                prompt = self._prompt_ids(self.asked.body) if told and at == 0 else None
                choice = {"index": 0, "text": decode(new), "finish_reason": None, "token_ids": told}
                yield sse({"choices": [choice | {"prompt_token_ids": prompt}]})
        if not native:
            last = {"delta": {}} if chat else {"text": ""}
            yield sse({"choices": [{"index": 0, "finish_reason": meta["finish_reason"]["type"]} | last]})
            if found := self._sglext(ids, meta):
                yield sse({"choices": [], "model": "tiny", "sglext": found})
            if (self.asked.body.get("stream_options") or {}).get("include_usage"):
                yield sse({"choices": [], "usage": {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": len(ids)}})
        yield DONE


@dataclass
class PlainServer(FakeEngine):
    """A server or proxy with OpenAI's chat and nothing more; each switch is a habit of one that exists."""

    kind: str = "plain"
    asked: Asked = field(default_factory=Asked)
    strict: bool = False  # 400 on a field that OpenAI does not have
    no_usage: bool = False
    no_done: bool = False  # the stream ends without [DONE]
    comments: bool = False  # ": keep-alive" between events
    parts: bool = False  # content as a list of text parts
    renamed: bool = False  # max_tokens is refused, max_completion_tokens taken
    one_piece: bool = False  # `stream` is not looked at
    fails_in_stream: str = ""  # "data", "event" or "line": how it says so
    models: tuple[str, ...] = ("tiny",)
    list_fails: bool = False  # /v1/models answers 500, as a server does that cannot list what it was given by path
    detail: bool = False  # errors as FastAPI writes them: {"detail": ...}, 422
    no_health: bool = True
    crlf: bool = False
    limited_first: int = 0  # the first n requests answer 429

    _FIELDS = frozenset(
        {"model", "messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "stream", "stream_options", "seed"}
    )

    def handle(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models" and self.list_fails:
            return httpx.Response(500, text="Internal Server Error")
        if path == "/v1/models" and self.models:
            return httpx.Response(200, json={"object": "list", "data": [{"id": m, "object": "model"} for m in self.models]})
        if path == "/health" and not self.no_health:
            return httpx.Response(200, json={"status": "ok"})
        if path != CHAT:
            return httpx.Response(404, text="404 page not found")
        body = json.loads(request.content)
        unknown = sorted(body.keys() - self._FIELDS)
        if self.strict and unknown and self.detail:
            return httpx.Response(422, json={"detail": f"Unexpected fields in the request: {set(unknown)}"})
        if self.strict and unknown:
            return refused(400, f"Unrecognized request argument supplied: {unknown[0]}")
        if self.renamed and "max_tokens" in body:
            return refused(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", param="max_tokens")
        if self.limited_first > 0:
            self.limited_first -= 1
            return refused(429, "Rate limit reached")
        self.asked.body = body | {"stream": body.get("stream") and not self.one_piece}
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        self.seen.append(body)
        return self._answer(self.asked.body, body, limit, False, False)

    def _openai(self, text: str, ids: list[int], meta: dict[str, Any], finish: str) -> dict[str, Any]:
        content = [{"type": "text", "text": text}] if self.parts else text
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish}
        usage = {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": len(ids)}
        return {"choices": [choice]} | ({} if self.no_usage else {"usage": usage})

    def _events(
        self, ids: list[int], meta: dict[str, Any], passes: int, native: bool, wrong: str | None, endless: bool
    ) -> Iterator[bytes]:
        for event in self._plain_events(ids, meta):
            yield event.replace(b"\n", b"\r\n") if self.crlf else event

    def _plain_events(self, ids: list[int], meta: dict[str, Any]) -> Iterator[bytes]:
        yield sse({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}, "finish_reason": None}]})
        for number, at in enumerate(range(0, len(ids), 4)):
            if self.comments:
                yield b": keep-alive\n\n"
            if self.fails_in_stream and number == 2:
                yield self._failure()
                return
            last = at + 4 >= len(ids)
            choice = {"index": 0, "delta": {"content": decode(ids[at : at + 4])}}
            yield sse({"choices": [choice | {"finish_reason": meta["finish_reason"]["type"] if last else None}]})
        if not self.no_usage and (self.asked.body.get("stream_options") or {}).get("include_usage"):
            yield sse({"choices": [], "usage": {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": len(ids)}})
        if not self.no_done:
            yield DONE

    def _failure(self) -> bytes:
        said = json.dumps({"error": {"message": "device lost", "code": 500}}).encode()
        ways = {"data": b"data: " + said, "event": b"event: error\ndata: " + said, "line": b"error: " + said}
        return ways[self.fails_in_stream] + b"\n\n"


@dataclass
class LlamaServer(PlainServer):
    """llama.cpp's server: /tokenize takes `content`, log-probabilities name tokens by id, prompts are not scored."""

    no_health: bool = False

    def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content or b"{}") if request.method == "POST" else {}
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": encode(body.get("content", ""))})
        if request.url.path == "/detokenize":
            return httpx.Response(200, json={"content": decode(body["tokens"])})
        if request.url.path == COMPLETIONS:
            return httpx.Response(200, json={"choices": [{"index": 0, "text": "x", "finish_reason": "length"}], "usage": {}})
        return super().handle(request)


@contextmanager
def served(engine: FakeEngine, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The fake behind a real socket."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(b"")

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers.get("content-length", 0))))

        def _answer(self, content: bytes) -> None:
            request = httpx.Request(self.command, f"http://e{self.path}", headers=dict(self.headers), content=content)
            reply = engine.handle(request)
            data = reply.read()
            self.send_response(reply.status_code)
            self.send_header("content-length", str(len(data)))
            self.send_header("content-type", reply.headers.get("content-type", "text/event-stream"))
            if "location" in reply.headers:
                self.send_header("location", reply.headers["location"])
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
