"""The HTTP front over an engine without a model: shapes, refusals, streams, keys, health."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from ddtree_engine.server import bind
from hypothesis import given, settings
from hypothesis import strategies as st

Serve = Callable[..., Any]
Served = Any
HI = {"messages": [{"role": "user", "content": "hi"}]}
GREEDY = {"temperature": 0, "max_new_tokens": 64}


def generate(served: Any, text: str = "is_even", **body: Any) -> Any:
    params = GREEDY | body.pop("sampling_params", {})
    response = served.post("/generate", {"text": text, "sampling_params": params} | body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: httpx.Response, status: int, param: str | None) -> str:
    """The message of a refusal, whose shape is checked."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    return str(error["message"])


# --- /generate ---


def test_generate_answers_with_text_ids_and_meta_info(serve: Serve) -> None:
    served = serve(speculative_algorithm=ddtree(), speculative_draft_model_path="d")
    reply = generate(served)
    ids = list(served.service.tokenizer.encode("is_even"))
    assert reply["text"] == "is_even"
    assert reply["output_ids"] == [*ids, 2]
    meta = reply["meta_info"]
    assert meta["prompt_tokens"] == len(ids)
    assert meta["completion_tokens"] == len(ids) + 1
    assert meta["finish_reason"] == {"type": "stop", "matched": 2}
    assert meta["spec_verify_ct"] > 0
    assert meta["spec_accept_length"] == pytest.approx(len(ids) / meta["spec_verify_ct"])
    assert meta["e2e_latency"] > 0


def ddtree() -> Any:
    from ddtree_engine.config import Algorithm

    return Algorithm.DDTREE


def test_speculation_can_be_switched_per_request(serve: Serve) -> None:
    served = serve(speculative_algorithm=ddtree(), speculative_draft_model_path="d")
    answers = {mode: generate(served, speculative=mode) for mode in ("off", "chain", "tree")}
    assert {a["text"] for a in answers.values()} == {"is_even"}
    assert answers["off"]["meta_info"]["spec_verify_ct"] == 0
    assert answers["off"]["meta_info"]["spec_accept_length"] is None
    assert answers["tree"]["meta_info"]["spec_accept_length"] > 1
    assert generate(served)["meta_info"]["speculative"] == "tree"


def test_input_ids_and_text_give_the_same_answer(plain: Served) -> None:
    served = plain
    ids = list(served.service.tokenizer.encode("is_even"))
    response = served.post("/generate", {"input_ids": ids, "sampling_params": GREEDY})
    assert response.json()["output_ids"] == generate(served)["output_ids"]


def test_a_stop_string_ends_text_and_ids_and_is_not_shown(plain: Served) -> None:
    reply = generate(plain, "def is_even(n)", sampling_params={"stop": ["_ev", "zzz"]})
    assert reply["text"] == "def is"
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "_ev"}
    assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"])


def test_length_is_named_as_the_reason(plain: Served) -> None:
    reply = generate(plain, sampling_params={"max_new_tokens": 2})
    assert len(reply["output_ids"]) == 2
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


def test_pure_scoring_gives_prompt_logprobs_and_no_token(plain: Served) -> None:
    served = plain
    ids = list(served.service.tokenizer.encode("is_even"))
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    reply = served.post("/generate", body | {"sampling_params": {"max_new_tokens": 0}}).json()
    assert reply["text"] == ""
    assert reply["output_ids"] == []
    scores = reply["meta_info"]["input_token_logprobs"]
    assert scores[0] == [None, ids[0], None]
    assert scores[1:] == [[-1.0, i, None] for i in ids[1:]]
    assert reply["meta_info"]["input_top_logprobs"][0] is None
    assert reply["meta_info"]["input_top_logprobs"][1] == [[-1.0, ids[1], None]]


def test_output_logprobs_come_with_every_token(plain: Served) -> None:
    reply = generate(plain, return_logprob=True, top_logprobs_num=2)
    meta = reply["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert len(meta["output_top_logprobs"]) == len(reply["output_ids"])
    assert meta["output_top_logprobs"][0][1] == [-2.0, 7, None]


def test_logprobs_can_carry_text(plain: Served) -> None:
    reply = generate(plain, return_logprob=True, return_text_in_logprobs=True)
    texts = [entry[2] for entry in reply["meta_info"]["output_token_logprobs"]]
    assert "".join(texts) == "is_even<|im_end|>"


def test_the_last_streamed_event_is_the_whole_reply(plain: Served) -> None:
    served = plain
    body = {"text": "grün 🙂 text", "sampling_params": GREEDY, "return_logprob": True}
    whole = served.post("/generate", body).json()
    events = served.events("/generate", body)
    assert len(events) > 2
    assert without_time(events[-1]) == without_time(whole)
    texts = [event["text"] for event in events]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert not any("\ufffd" in text for text in texts)


def without_time(reply: Any) -> Any:
    changing = ("e2e_latency", "id")
    return reply | {"meta_info": {k: v for k, v in reply["meta_info"].items() if k not in changing}}


# --- /v1 ---


def test_chat_answers_in_openais_shape(plain: Served) -> None:
    reply = plain.post("/v1/chat/completions", HI | {"model": "tiny", "temperature": 0}).json()
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "tiny"
    [choice] = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "user\nhi\nassistant\n"}
    assert choice["finish_reason"] == "stop"
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert "meta_info" not in choice


@pytest.mark.parametrize("text", ["plain words", "grün", "漢字🙂", "a\n\nb", "STOP or not"])
@pytest.mark.parametrize("stop", [None, ["OP"], ["\n\n", "ü"]])
def test_streamed_and_whole_replies_have_the_same_bytes(plain: Served, text: str, stop: Any) -> None:
    served = plain
    chat = {"messages": [{"role": "user", "content": text}], "stop": stop}
    whole = served.post("/v1/chat/completions", chat).json()["choices"][0]
    chunks = [event["choices"][0] for event in served.events("/v1/chat/completions", chat)]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["delta"].get("content", "") for c in chunks) == whole["message"]["content"]
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == [whole["finish_reason"]]
    completion = {"prompt": text, "stop": stop, "max_tokens": 64}
    whole = served.post("/v1/completions", completion).json()["choices"][0]
    chunks = [event["choices"][0] for event in served.events("/v1/completions", completion)]
    assert "".join(c["text"] for c in chunks) == whole["text"]
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]


def test_meta_info_comes_with_output_ids_when_asked_for(plain: Served) -> None:
    served = plain
    body = HI | {"return_meta_info": True}
    whole = served.post("/v1/chat/completions", body).json()["choices"][0]["meta_info"]
    last = served.events("/v1/chat/completions", body)[-1]["choices"][0]["meta_info"]
    assert served.service.tokenizer.decode(whole["output_ids"]) == "user\nhi\nassistant\n"
    assert without_time({"meta_info": whole}) == without_time({"meta_info": last})


def test_usage_is_streamed_last_when_asked_for(plain: Served) -> None:
    body = HI | {"stream_options": {"include_usage": True}}
    served = plain
    last = served.events("/v1/chat/completions", body)[-1]
    assert last["choices"] == []
    assert last["usage"] == served.post("/v1/chat/completions", HI).json()["usage"]


def test_chat_logprobs_list_every_token_with_bytes(plain: Served) -> None:
    body = HI | {"logprobs": True, "top_logprobs": 2, "return_meta_info": True}
    choice = plain.post("/v1/chat/completions", body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == choice["meta_info"]["completion_tokens"]
    assert b"".join(bytes(c["bytes"]) for c in content[:-1]).decode() == choice["message"]["content"]
    assert content[0]["top_logprobs"][0]["logprob"] == -0.5


def test_streamed_logprobs_are_those_of_the_whole(plain: Served) -> None:
    served = plain
    body = HI | {"logprobs": True, "top_logprobs": 1}
    whole = served.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    chunks = [event["choices"][0] for event in served.events("/v1/chat/completions", body)]
    assert [entry for c in chunks if c.get("logprobs") for entry in c["logprobs"]["content"]] == whole


def test_completion_logprobs_have_offsets_into_the_text(plain: Served) -> None:
    body = {"prompt": "is_even", "max_tokens": 3, "logprobs": 1}
    choice = plain.post("/v1/completions", body).json()["choices"][0]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == choice["text"]
    for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


def test_a_prompt_may_be_token_ids_or_a_list_of_one_text(plain: Served) -> None:
    served = plain
    ids = list(served.service.tokenizer.encode("is_even"))
    answers = [
        served.post("/v1/completions", {"prompt": prompt, "max_tokens": 64}).json()["choices"][0]["text"]
        for prompt in ("is_even", ids, ["is_even"])
    ]
    assert answers == ["is_even"] * 3


def test_content_may_come_in_text_parts(plain: Served) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    reply = plain.post("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}]}).json()
    assert reply["choices"][0]["message"]["content"] == "user\nhi\nassistant\n"


# --- refusals ---

NEUTRAL = {
    "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "user": "me", "logit_bias": {}, "tools": [],
    "response_format": {"type": "text"}, "stop": None, "seed": None, "logprobs": None, "tool_choice": "none",
    "parallel_tool_calls": True, "store": False, "metadata": {"a": "b"}, "min_p": 0, "repetition_penalty": 1.0,
    "service_tier": "auto", "model": "tiny", "stream": False, "stream_options": None, "max_tokens": None, "top_k": -1,
}  # fmt: skip


def test_values_that_change_nothing_are_taken(plain: Served) -> None:
    response = plain.post("/v1/chat/completions", HI | NEUTRAL)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        ("/v1/chat/completions", {"n": 2}, "n"),
        ("/v1/chat/completions", {"n": True}, "n"),
        ("/v1/chat/completions", {"presence_penalty": 0.5}, "presence_penalty"),
        ("/v1/chat/completions", {"logit_bias": {"5": 1}}, "logit_bias"),
        ("/v1/chat/completions", {"tools": [{"type": "function"}]}, "tools"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {"wibble": 1}, "wibble"),
        ("/v1/chat/completions", {"wibble": None}, "wibble"),
        ("/v1/chat/completions", {"temperature": -1}, "temperature"),
        ("/v1/chat/completions", {"temperature": "0"}, "temperature"),
        ("/v1/chat/completions", {"top_p": 0}, "top_p"),
        ("/v1/chat/completions", {"top_p": 1.5}, "top_p"),
        ("/v1/chat/completions", {"top_k": -2}, "top_k"),
        ("/v1/chat/completions", {"stop": [""]}, "stop"),
        ("/v1/chat/completions", {"stop": ["x"] * 17}, "stop"),
        ("/v1/chat/completions", {"max_tokens": -1}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": True}, "max_tokens"),
        ("/v1/chat/completions", {"speculative": "always"}, "speculative"),
        ("/v1/chat/completions", {"stream_options": {"include_usage": True}}, None),
        ("/v1/chat/completions", {"top_logprobs": 3}, None),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "audio": 1}]}, "messages[0].audio"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/completions", {"echo": True}, "echo"),
        ("/v1/completions", {"best_of": 3}, "best_of"),
        ("/generate", {"sampling_params": {"regex": "a+"}}, "sampling_params.regex"),
        ("/generate", {"sampling_params": {"wibble": 1}}, "sampling_params.wibble"),
        ("/generate", {"sampling_params": {"max_new_tokens": 1.5}}, "sampling_params.max_new_tokens"),
        ("/generate", {"sampling_params": {"n": 3}}, "sampling_params.n"),
        ("/generate", {"image_data": "x"}, "image_data"),
        ("/generate", {"input_ids": [1]}, None),
        ("/generate", {"top_logprobs_num": 21}, "top_logprobs_num"),
        ("/tokenize", {"prompts": "x"}, "prompts"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)  # fmt: skip
def test_what_is_unknown_or_unsupported_is_refused_by_name(plain: Served, path: str, extra: Any, param: Any) -> None:
    base: dict[str, Any] = {
        "/v1/chat/completions": HI,
        "/v1/completions": {"prompt": "x"},
        "/generate": {"text": "x"},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {},
    }[path]
    message = refused(plain.post(path, base | extra), 400, param)
    assert "pydantic" not in message.lower()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", rb'{"text": "a \ud800 b"}'),
        ("/generate", rb'{"text": "x", "sampling_params": {"stop": "\uDC00"}}'),
        ("/v1/chat/completions", rb'{"messages": [{"role": "user", "content": "\ud83d"}]}'),
        ("/v1/chat/completions", rb'{"messages": [], "\udfff": 1}'),
        ("/tokenize", rb'{"prompt": "\ud800"}'),
    ],
)
def test_half_a_surrogate_pair_is_refused(plain: Served, path: str, body: bytes) -> None:
    with plain.client as client:
        assert "surrogate" in refused(client.post(path, content=body), 400, None)


def test_a_whole_surrogate_pair_is_a_character(plain: Served) -> None:
    with plain.client as client:
        reply = client.post("/generate", content=rb'{"text": "\ud83d\ude42", "sampling_params": {"temperature": 0}}')
    assert reply.json()["text"] == "🙂"


def test_numbers_of_any_size_are_answered(plain: Served) -> None:
    huge = 10**40
    for path, body in (
        ("/generate", {"input_ids": [huge]}),
        ("/generate", {"text": "x", "sampling_params": {"stop_token_ids": [huge]}}),
        ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": huge}}),
        ("/generate", {"text": "x", "sampling_params": {"top_k": huge, "sampling_seed": -huge}}),
        ("/v1/chat/completions", HI | {"seed": huge}),
        ("/detokenize", {"tokens": [huge]}),
    ):
        assert plain.post(path, body).status_code in (200, 400), path


def test_a_body_that_does_not_arrive_is_given_up(plain: Served, monkeypatch: Any) -> None:
    from ddtree_engine import web

    monkeypatch.setattr(web, "BODY_TIMEOUT_S", 0.2)
    host, port = plain.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        assert sock.recv(200).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b'{"text": NaN}', b"[" * 100_000, b"\xff\xfe", b'{"a":1}{'])
def test_a_body_that_is_no_json_object_is_refused(plain: Served, body: bytes) -> None:
    with plain.client as client:
        refused(client.post("/generate", content=body), 400, None)


FIELDS = [
    "text",
    "input_ids",
    "sampling_params",
    "messages",
    "prompt",
    "stop",
    "max_tokens",
    "n",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "temperature",
    "seed",
    "tokens",
    "speculative",
    "chat_template_kwargs",
]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_body_makes_the_server_fail(plain: Served, data: st.DataObject) -> None:
    """Whatever is sent is answered, refused or not: never a 5xx, never a hung connection."""
    scalars = st.none() | st.booleans() | st.integers(-5, 400) | st.floats(-2, 2) | st.text(max_size=6)
    values = st.recursive(scalars, lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=4), c, max_size=3))
    body = data.draw(st.dictionaries(st.sampled_from(FIELDS), values, max_size=5))
    path = data.draw(st.sampled_from(["/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]))
    response = plain.post(path, body)
    assert response.status_code in (200, 400, 404), (path, body, response.text)


def test_over_long_prompts_are_refused_with_the_numbers(plain: Served) -> None:
    served = plain
    ids = [10] * 256
    message = refused(served.post("/generate", {"input_ids": ids}), 400, "input_ids")
    assert "256" in message
    body = {"input_ids": ids[:200], "sampling_params": {"max_new_tokens": 57}}
    message = refused(served.post("/generate", body), 400, "sampling_params.max_new_tokens")
    assert all(number in message for number in ("200", "57", "257", "256", "56"))
    chat = {"messages": [{"role": "user", "content": "x" * 5000}]}
    assert "256" in refused(served.post("/v1/chat/completions", chat), 400, "messages")


def test_the_longest_request_that_fits_is_taken(plain: Served) -> None:
    served = plain
    body = {"input_ids": [10] * 200, "sampling_params": {"max_new_tokens": 56}}
    assert served.post("/generate", body).status_code == 200
    scoring = {"input_ids": [10] * 256, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    assert served.post("/generate", scoring).status_code == 200


def test_an_empty_prompt_is_refused(plain: Served) -> None:
    served = plain
    refused(served.post("/generate", {"text": ""}), 400, "text")
    refused(served.post("/v1/completions", {"prompt": ""}), 400, "prompt")


def test_ids_outside_the_vocabulary_are_refused(plain: Served) -> None:
    assert "vocabulary" in refused(plain.post("/generate", {"input_ids": [300]}), 400, "input_ids")


def test_another_models_name_is_not_found(plain: Served) -> None:
    served = plain
    assert "'tiny'" in refused(served.post("/v1/chat/completions", HI | {"model": "gpt-5"}), 404, "model")
    assert served.get("/v1/models/tiny").json()["id"] == "tiny"
    refused(served.get("/v1/models/other"), 404, "model")


def test_a_template_that_refuses_the_messages_is_a_400(serve: Serve, tokenizer_folder: Path, tmp_path: Path) -> None:
    for file in tokenizer_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system turn, please') }}")
    message = refused(serve(folder=tmp_path).post("/v1/chat/completions", HI), 400, "messages")
    assert "no system turn" in message


def test_template_arguments_cannot_replace_the_messages(plain: Served) -> None:
    served = plain
    body = HI | {"chat_template_kwargs": {"messages": [], "self": 1, "add_generation_prompt": False}}
    reply = served.post("/v1/chat/completions", body)
    assert reply.json()["choices"][0]["message"]["content"] == "user\nhi\n"


def test_a_huge_body_is_refused(plain: Served) -> None:
    with plain.client as client:
        refused(client.post("/generate", content=b" " * (9 << 20)), 413, None)


def test_unknown_paths_and_methods_are_answered_in_json(plain: Served) -> None:
    served = plain
    assert "/nowhere" in refused(served.get("/nowhere"), 404, None)
    assert "GET" in refused(served.get("/generate"), 405, None)


# --- tokenize, flush ---


def test_tokenize_and_detokenize_are_inverse(plain: Served) -> None:
    served = plain
    for key in ("prompt", "text"):
        tokens = served.post("/tokenize", {key: "grün 🙂"}).json()
        assert tokens["count"] == len(tokens["tokens"])
        back = served.post("/detokenize", {"tokens": tokens["tokens"]}).json()
        assert back == {"prompt": "grün 🙂", "text": "grün 🙂"}


def test_the_cache_can_be_flushed_by_get_and_post(serve: Serve) -> None:
    served = serve()
    before = served.engine.flushes
    assert served.get("/flush_cache").json()["success"] is True
    assert served.post("/flush_cache", {}).json()["success"] is True
    assert served.engine.flushes == before + 2


# --- health and death ---


def test_health_is_503_while_starting_and_200_after(serve: Serve, wait_until: Any) -> None:
    gate = threading.Event()
    served = serve(load_gate=gate, wait=False)
    response = served.get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "starting"}
    for path in ("/health_generate", "/v1/models", "/server_info"):
        assert served.get(path).status_code == 503
    assert served.post("/generate", {"text": "x"}).json()["error"]["code"] == "starting"
    gate.set()
    wait_until(lambda: served.get("/health").status_code == 200)
    assert served.get("/health_generate").json()["tokens"] == 1


def test_when_the_device_thread_dies_waiting_requests_get_503(serve: Serve, wait_until: Any) -> None:
    def die() -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")

    served = serve(engine={"on_step": die})
    response = served.post("/generate", {"text": "x"})
    assert response.status_code == 503
    assert "CUBLAS_STATUS_EXECUTION_FAILED" in response.json()["error"]["message"]
    health = served.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "dead"
    assert served.post("/generate", {"text": "x"}).json()["error"]["code"] == "engine_dead"


def test_a_death_in_the_middle_of_a_stream_ends_it_with_an_error(serve: Serve) -> None:
    steps = iter(range(100))

    def die_later() -> None:
        if next(steps) == 3:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    served = serve(engine={"on_step": die_later})
    with served.client as client, client.stream("POST", "/generate", json={"text": "is_even is", "stream": True}) as r:
        lines = [line.removeprefix("data: ") for line in r.iter_lines() if line]
    assert json.loads(lines[0])["output_ids"]
    assert "illegal memory access" in json.loads(lines[-1])["error"]["message"]


def test_a_full_queue_is_a_503_that_says_when_to_come_back(serve: Serve, monkeypatch: Any) -> None:
    from ddtree_engine import worker

    monkeypatch.setattr(worker, "queue_limit", lambda running: 0)
    response = serve().post("/generate", {"text": "x"})
    assert "queue is full" in refused(response, 503, None)
    assert response.headers["retry-after"] == "1"


# --- clients that leave ---


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_cancels_its_request(serve: Serve, wait_until: Any, stream: bool) -> None:
    endless = {"answer": lambda r: [20] * 100_000, "on_step": lambda: time.sleep(0.005), "context_length": 200_000}
    served = serve(engine=endless)
    host, port = served.url.removeprefix("http://").split(":")
    body = json.dumps({"text": "x", "stream": stream, "sampling_params": {"max_new_tokens": 100_000}}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(head + body)
        wait_until(lambda: served.engine.busy)
        if stream:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
    wait_until(lambda: not served.engine.busy)
    assert served.service.worker.in_flight == 0


# --- API keys ---


def test_with_keys_everything_but_health_and_metrics_asks_for_one(serve: Serve) -> None:
    served = serve(keys=(b"secret-1", b"secret-2"))
    assert served.get("/health").status_code == 200
    assert served.get("/metrics").status_code == 200
    for path in ("/server_info", "/v1/models", "/health_generate", "/flush_cache", "/nowhere", "/health/"):
        response = served.get(path)
        assert response.status_code == 401, path
        assert "secret" not in response.text
    for header in ("Bearer wrong", "secret-1", "Basic secret-1", "Bearer", "Bearer secret-", "Bearer secret-11"):
        assert served.get("/v1/models", headers={"Authorization": header}).status_code == 401, header
    for header in ("Bearer secret-1", "bearer secret-2"):
        assert served.get("/v1/models", headers={"Authorization": header}).status_code == 200, header
    info = served.get("/server_info", headers={"Authorization": "Bearer secret-1"})
    assert "secret-1" not in info.text


# --- what the server says about itself ---


def test_server_info_reports_launch_arguments_and_what_was_loaded(serve: Serve) -> None:
    served = serve(max_running_requests=7)
    info = served.get("/server_info").json()
    assert info == served.get("/get_server_info").json()
    assert info["max_running_requests"] == 7
    assert info["served_model_name"] == "tiny"
    assert info["internal_states"][0]["avg_spec_accept_length"] is None
    assert info["ddtree"]["build"].startswith("sha256:")
    assert info["ddtree"]["faults"] == []


def test_the_acceptance_of_the_server_is_that_of_its_speculating_requests(serve: Serve) -> None:
    served = serve(speculative_algorithm=ddtree(), speculative_draft_model_path="d")
    metas = [generate(served, text)["meta_info"] for text in ("is_even", "def is_even(n): return")]
    generate(served, "is_even of course", speculative="off")
    state = served.get("/server_info").json()["internal_states"][0]
    passes = sum(m["spec_verify_ct"] for m in metas)
    committed = sum(m["completion_tokens"] - 1 for m in metas)
    assert state["spec_verify_passes"] == passes
    assert state["avg_spec_accept_length"] == pytest.approx(committed / passes)


def test_metrics_are_off_unless_enabled(serve: Serve) -> None:
    served = serve(enable_metrics=False)
    assert "--enable-metrics" in refused(served.get("/metrics"), 404, None)


# --- faults that live in the front ---


def test_ready_500_is_healthy_and_fails_every_generation(serve: Serve) -> None:
    served = serve(enable_fault_injection=True, faults=("ready-500",))
    assert served.get("/health").status_code == 200
    assert served.get("/health_generate").status_code == 500
    for path, body in (("/generate", {"text": "x"}), ("/v1/chat/completions", HI)):
        assert served.post(path, body).status_code == 500
        assert served.post(path, body | {"stream": True}).status_code == 500
    assert served.get("/server_info").json()["ddtree"]["faults"] == ["ready-500"]


def test_stream_drop_loses_words_in_streams_only(serve: Serve) -> None:
    served = serve(enable_fault_injection=True, faults=("stream-drop,rate=0.5",))
    text = "def is_even(n): return n % 2 == 0 and so on"
    body = {"prompt": text, "max_tokens": 100, "return_meta_info": True}
    whole = served.post("/v1/completions", body).json()["choices"][0]
    chunks = [event["choices"][0] for event in served.events("/v1/completions", body)]
    streamed = "".join(c["text"] for c in chunks)
    assert whole["text"] == text
    assert len(streamed) < len(text)
    assert served.service.tokenizer.decode(chunks[-1]["meta_info"]["output_ids"]) == text


def test_replies_do_not_wait_for_the_clients_acknowledgement() -> None:
    """Head and body leave as two segments: with Nagle's algorithm the second waits for a delayed acknowledgement."""
    with bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
