"""The HTTP front: routes, health, and what the server says about itself.

Generating endpoints live in api_native.py and api_openai.py; starting and stopping in server.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ddtree_engine import __version__, api_native, api_openai
from ddtree_engine.build import build_digest
from ddtree_engine.generation import Service
from ddtree_engine.metrics import CONTENT_TYPE
from ddtree_engine.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    parse,
)
from ddtree_engine.tickets import NotReady
from ddtree_engine.web import (
    ApiKeyGuard,
    ClientGone,
    error_body,
    error_response,
    read_body,
    stream_events,
    unless_gone,
)
from ddtree_engine.worker import State

HEALTH_GENERATE_TIMEOUT_S = 20.0  # SGLang's
_CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is for the access log

Handler = Callable[[HttpRequest], Awaitable[Response]]


def make_app(service: Service, keys: Sequence[bytes] = ()) -> Starlette:
    """The application. With `keys`, all but /health and /metrics ask for one of them."""
    api = _Api(service)
    routes = [
        Route("/health", _answering(api.health)),
        Route("/health_generate", _answering(api.health_generate)),
        Route("/server_info", _answering(api.server_info)),
        Route("/get_server_info", _answering(api.server_info)),
        Route("/get_model_info", _answering(api.model_info)),
        Route("/model_info", _answering(api.model_info)),
        Route("/v1/models", _answering(api.models)),
        Route("/v1/models/{name:path}", _answering(api.model)),
        Route("/metrics", _answering(api.metrics)),
        Route("/generate", _answering(api.generate), methods=["POST"]),
        Route("/v1/completions", _answering(api.completions), methods=["POST"]),
        Route("/v1/chat/completions", _answering(api.chat), methods=["POST"]),
        Route("/tokenize", _answering(api.tokenize), methods=["POST"]),
        Route("/detokenize", _answering(api.detokenize), methods=["POST"]),
        Route("/flush_cache", _answering(api.flush_cache), methods=["GET", "POST"]),
    ]
    middleware = [Middleware(ApiKeyGuard, keys=keys)] if keys else []
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _http_error})


def server_info(service: Service) -> dict[str, Any]:
    """Launch arguments as they were resolved, and what was loaded. Raises NotReady before that is known."""
    engine = service.worker.engine
    if engine is None:
        raise NotReady("starting")
    config = dataclasses.asdict(engine.config)
    faults = list(config.pop("faults"))
    info = dataclasses.asdict(engine.info)
    totals = service.meter.totals
    return config | {
        "served_model_name": service.model_name,
        "speculative_algorithm": str(engine.config.speculative_algorithm),
        "version": __version__,
        "status": str(service.worker.state),
        "max_total_num_tokens": engine.info.kv_capacity_tokens,
        "internal_states": [
            {
                "avg_spec_accept_length": totals.accept_length,
                "spec_verify_passes": totals.verify_passes,
                "spec_committed_tokens": totals.committed_tokens,
                "num_in_flight": service.worker.in_flight,
            }
        ],
        "ddtree": info
        | {
            "build": build_digest(),
            "faults": faults,
            "default_sampling": dataclasses.asdict(service.defaults),
        },
    }


class _Api:
    """One method per route."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, request: HttpRequest) -> Response:
        state = self._service.worker.state
        if state is State.READY:
            return JSONResponse({"status": "ok"})
        death = self._service.worker.death
        return JSONResponse({"status": str(state)} | ({"reason": death.reason} if death else {}), status_code=503)

    async def health_generate(self, request: HttpRequest) -> Response:
        """One real token. Like SGLang's, it proves that generating works and not that the answer is right."""
        params = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        body = parse(GenerateBody, json.dumps({"input_ids": [0], "sampling_params": params}).encode())
        try:
            async with asyncio.timeout(HEALTH_GENERATE_TIMEOUT_S):
                reply = await unless_gone(request, api_native.whole(body, self._service))
        except TimeoutError:
            message = f"no token within {HEALTH_GENERATE_TIMEOUT_S:.0f} s"
            return JSONResponse(error_body(message, kind="service_unavailable", code=503), status_code=503)
        return JSONResponse({"status": "ok", "tokens": len(reply["output_ids"])})

    async def server_info(self, request: HttpRequest) -> Response:
        return JSONResponse(server_info(self._service))

    async def model_info(self, request: HttpRequest) -> Response:
        config = self._service.config
        return JSONResponse(
            {
                "model_path": config.model_path,
                "tokenizer_path": config.model_path,
                "is_generation": True,
                "served_model_name": self._service.model_name,
                "preferred_sampling_params": dataclasses.asdict(self._service.defaults),
                "max_model_len": self._service.context_length,
            }
        )

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: HttpRequest) -> Response:
        self._service.check_model(request.path_params["name"])
        return JSONResponse(self._model_card())

    async def metrics(self, request: HttpRequest) -> Response:
        if not self._service.config.enable_metrics:
            raise HTTPException(404, "metrics are off; start the engine with --enable-metrics")
        return Response(self._service.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def generate(self, request: HttpRequest) -> Response:
        body = parse(GenerateBody, await read_body(request))
        if body.stream:
            return await unless_gone(request, stream_events(api_native.events(body, self._service)))
        return JSONResponse(await unless_gone(request, api_native.whole(body, self._service)))

    async def completions(self, request: HttpRequest) -> Response:
        return await self._openai(request, parse(CompletionBody, await read_body(request)))

    async def chat(self, request: HttpRequest) -> Response:
        return await self._openai(request, parse(ChatBody, await read_body(request)))

    async def tokenize(self, request: HttpRequest) -> Response:
        body = parse(TokenizeBody, await read_body(request))
        self._service.check_model(body.model)
        tokens = self._service.tokenizer.encode(body.prompt if body.prompt is not None else body.text or "")
        answer = {"tokens": list(tokens), "count": len(tokens), "max_model_len": self._service.context_length}
        return JSONResponse(answer)

    async def detokenize(self, request: HttpRequest) -> Response:
        body = parse(DetokenizeBody, await read_body(request))
        self._service.check_model(body.model)
        text = self._service.tokenizer.decode(body.tokens, skip_special=body.skip_special_tokens)
        return JSONResponse({"prompt": text, "text": text})

    async def flush_cache(self, request: HttpRequest) -> Response:
        await self._service.worker.flush()
        return JSONResponse({"success": True, "message": "the prefix cache is empty"})

    async def _openai(self, request: HttpRequest, body: CompletionBody | ChatBody) -> Response:
        if body.stream:
            return await unless_gone(request, stream_events(api_openai.events(body, self._service)))
        return JSONResponse(await unless_gone(request, api_openai.whole(body, self._service)))

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._service.model_name,
            "object": "model",
            "created": self._service.started_at,
            "owned_by": "ddtree-engine",
            "root": self._service.config.model_path,
            "max_model_len": self._service.context_length,
        }


def _answering(handler: Handler) -> Handler:
    """`handler`, with whatever it raises turned into an answer."""

    async def answer(request: HttpRequest) -> Response:
        try:
            return await handler(request)
        except HTTPException:
            raise
        except ClientGone:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        except Exception as exc:
            return error_response(exc)

    return answer


async def _http_error(request: HttpRequest, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    detail = exc.detail
    if exc.status_code == 404 and detail == "Not Found":
        detail = f"there is no {request.method} {request.url.path} here"
    elif exc.status_code == 405:
        detail = f"{request.url.path} does not answer {request.method}"
    body = error_body(detail, kind="invalid_request_error", code=exc.status_code)
    return JSONResponse(body, status_code=exc.status_code, headers=exc.headers)
