"""The engine client: dialects, streams, deadlines, and what it makes of replies that are not as they should be."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddops.prove import dialects
from ddops.prove import facts as facts_of
from ddops.prove.client import EngineClient, Limits, chatml, identify
from ddops.prove.replay import ask_from, load, replay
from ddops.prove.wire import Ask, Broken, Busy, EngineError, Gone, Hung, Malformed, Unsupported
from tests.ddops.prove_fake import END, FakeEngine, Lies, decode, encode

FIB = "Write a Python function fib(n) that returns the n-th Fibonacci number, with fib(0) = 0 and fib(1) = 1."


def client(answer: Callable[[httpx.Request], httpx.Response], kind: str = "ddtree", **limits: float) -> EngineClient:
    http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://engine")
    return EngineClient(http, kind, model="m", limits=Limits(**limits) if limits else Limits())


def fixed(status: int = 200, **body: Any) -> EngineClient:
    return client(lambda _: httpx.Response(status, **body), request_seconds=1.0, stall_seconds=0.3)


# ---- asking


@pytest.mark.parametrize("kind", ["ddtree", "sglang", "vllm"])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_reply_has_text_ids_and_counts(kind: str, stream: bool) -> None:
    engine = EngineClient(FakeEngine(kind=kind).client(), kind)
    reply = engine.ask(Ask.user(FIB, stream=stream))
    assert "def fib" in reply.text
    assert reply.finish == "stop"
    assert reply.ids is not None
    assert reply.ids[-1] == END
    assert decode(list(reply.ids)) == reply.text
    assert reply.tokens == len(reply.ids)
    assert reply.meta.prompt_tokens == len(encode(chatml([("user", FIB)])))
    if stream:
        assert reply.first_token_seconds is not None
        assert "".join(c.text for c in reply.chunks) == reply.text


def test_raw_prompt_goes_to_generate_where_there_is_one() -> None:
    fake = FakeEngine()
    ids = tuple(encode(chatml([("user", FIB)])))
    reply = EngineClient(fake.client(), "ddtree").ask(Ask(ids=ids, max_tokens=400, stream=True, mode="chain"))
    assert "def fib" in reply.text
    body = fake.seen[-1]
    assert body["input_ids"] == list(ids)
    assert body["speculative"] == "chain"
    assert [c.verify_passes for c in reply.chunks] == list(range(len(reply.chunks)))


def test_a_cancelled_stream_is_cut_after_its_chunks() -> None:
    reply = EngineClient(FakeEngine().client(), "ddtree").ask(Ask.user(FIB, cancel_after_chunks=2))
    assert reply.cancelled
    assert len(reply.chunks) == 2


def test_speculation_is_switched_only_where_the_engine_can() -> None:
    with pytest.raises(Unsupported, match="cannot switch"):
        EngineClient(FakeEngine(kind="vllm").client(), "vllm").ask(Ask.user(FIB, mode="off"))


def test_an_unknown_engine_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="ollama"):
        EngineClient(httpx.Client(), "ollama")


def test_a_full_queue_is_waited_out_but_not_for_ever() -> None:
    engine = EngineClient(FakeEngine(Lies(queue_full_first=2)).client(), "ddtree")
    assert "def fib" in engine.ask(Ask.user(FIB)).text
    with pytest.raises(Busy):
        fixed(503, json={"error": {"message": "the queue is full"}}).ask(Ask.user(FIB))


# ---- what is not as it should be


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"status": 500, "text": "oops"}, Broken),
        ({"status": 503, "json": {"error": {"message": "device thread dead"}}}, Broken),
        ({"status": 400, "json": {"error": {"message": "no"}}}, Unsupported),
        ({"status": 404, "text": ""}, Unsupported),
        ({"status": 401, "json": {"error": "Unauthorized"}}, Unsupported),
        ({"text": "<html>"}, Malformed),
        ({"text": "[1]"}, Malformed),
        ({"json": {}}, Malformed),
        ({"json": {"choices": []}}, Malformed),
        ({"json": {"choices": [1]}}, Malformed),
        ({"json": {"error": {"message": "EngineCore died", "code": 500}}}, Broken),
        ({"text": "[" * 100000}, Malformed),
    ],
)
def test_bad_answers_become_named_errors(answer: dict[str, Any], error: type[EngineError]) -> None:
    with pytest.raises(error):
        fixed(**answer).ask(Ask.user(FIB))


STREAMS: dict[str, tuple[list[bytes], type[EngineError]]] = {
    "ends without its mark": ([b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'], Gone),
    "carries an error": ([b'data: {"error":{"message":"EngineCore died","code":500}}\n\n', b"data: [DONE]\n\n"], Broken),
    "is no JSON": ([b"data: {oops\n\n", b"data: [DONE]\n\n"], Malformed),
    "has a choice that is none": ([b'data: {"choices":[null]}\n\n', b"data: [DONE]\n\n"], Malformed),
    "has content that is no text": ([b'data: {"choices":[{"delta":{"content":{}}}]}\n\n', b"data: [DONE]\n\n"], Malformed),
    "is not an object": ([b"data: 3\n\n", b"data: [DONE]\n\n"], Malformed),
}


@pytest.mark.parametrize("what", STREAMS)
def test_bad_streams_become_named_errors(what: str) -> None:
    pieces, error = STREAMS[what]
    with pytest.raises(error):
        client(lambda _: httpx.Response(200, content=iter(pieces))).ask(Ask.user(FIB, stream=True))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["choices", "message", "content", "meta_info", "output_ids", "usage", "text", "finish_reason", "delta", "error",
         "completion_tokens", "spec_verify_ct", "prompt_tokens_details", "input_token_logprobs", "sglext", "logprobs", "token",
         "tokens", "token_logprobs", "top_logprobs", "prompt_token_ids", "prompt_logprobs", "data", "id", "parent", "object",
         "server_args", "internal_states", "speculative_algorithm", "status_code", "type", "owned_by",
         "x"]), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(json_values, st.booleans(), st.sampled_from(["ddtree", "sglang", "vllm", "openai"]))
def test_no_reply_makes_the_client_crash(value: Any, stream: bool, kind: str) -> None:
    data = json.dumps(value).encode()
    content = b"data: " + data + b"\n\ndata: [DONE]\n\n" if stream else data
    engine = client(lambda _: httpx.Response(200, content=content), kind)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: engine.ask(Ask.user("x", stream=stream, top_logprobs=2)), lambda: engine.score([1, 2, 3], 1), engine.facts,
        lambda: engine.tokenize("x"), lambda: identify(engine.http), lambda: EngineClient(engine.http, kind).model,
    )  # fmt: skip
    for call in calls:
        try:
            call()
        except EngineError:
            continue


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=8), st.integers(1, 9))
def test_a_stream_reads_the_same_however_it_is_cut_into_packets(pieces: list[str], size: int) -> None:
    events = [json.dumps({"choices": [{"delta": {"content": p}}]}) for p in pieces]
    data = "".join(f"data: {e}\n\n" for e in events).encode() + b"data: [DONE]\n\n"
    packets = [data[i : i + size] for i in range(0, len(data), size)]
    reply = client(lambda _: httpx.Response(200, content=iter(packets))).ask(Ask.user("x", stream=True))
    assert reply.text == "".join(pieces)


# ---- deadlines, over real sockets


class Slow:
    """A server that accepts, perhaps answers a little, and then says nothing or far too much."""

    def __init__(self, pieces: Callable[[], Iterator[bytes]]) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._pieces = pieces
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            connection.recv(65536)
            for piece in self._pieces():
                connection.sendall(piece)
        except OSError:
            pass

    def close(self) -> None:
        self._socket.close()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def silent() -> Iterator[bytes]:
    time.sleep(30)
    yield b""


def stalls() -> Iterator[bytes]:
    yield HEAD + chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
    time.sleep(30)


def trickles() -> Iterator[bytes]:
    yield HEAD
    while True:
        yield chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        time.sleep(0.05)


@pytest.mark.parametrize(("pieces", "stream"), [(silent, False), (silent, True), (stalls, True), (trickles, True)])
def test_an_engine_that_hangs_is_a_finding_and_not_a_hang(pieces: Callable[[], Iterator[bytes]], stream: bool) -> None:
    server = Slow(pieces)
    with httpx.Client(base_url=server.url) as http:
        engine = EngineClient(http, "ddtree", model="m", limits=Limits(request_seconds=1.5, stall_seconds=0.5))
        started = time.monotonic()
        with pytest.raises(Hung):
            engine.ask(Ask.user(FIB, stream=stream))
        assert time.monotonic() - started < 4
        assert not engine.healthy(timeout=0.3) or pieces is not silent
        assert not engine.answers(timeout=0.5)
    server.close()


def test_a_refused_or_cut_connection_is_gone() -> None:
    with httpx.Client(base_url="http://127.0.0.1:1") as http, pytest.raises(Gone):
        EngineClient(http, "ddtree", model="m").ask(Ask.user(FIB))
    server = Slow(lambda: iter([b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{"]))
    with httpx.Client(base_url=server.url) as http:
        engine = EngineClient(http, "ddtree", model="m", limits=Limits(request_seconds=1.0, stall_seconds=0.5))
        with pytest.raises((Gone, Hung)):
            engine.ask(Ask.user(FIB))
    server.close()


# ---- ids, scores, facts


@pytest.mark.parametrize("kind", ["ddtree", "sglang", "vllm"])
def test_prompt_and_reply_are_scored_token_by_token(kind: str) -> None:
    engine = EngineClient(FakeEngine(kind=kind).client(), kind)
    reply = engine.ask(Ask.user(FIB))
    prompt = engine.prompt_ids(reply)
    assert reply.ids is not None
    scores = engine.score((*prompt, *reply.ids), len(prompt))
    assert [s.token for s in scores.tokens] == list(reply.ids)
    assert all(s.gap is not None and s.gap < 1 for s in scores.tokens)
    wrong = list(reply.ids)
    wrong[5] = ord("@")
    assert max(s.gap or 0 for s in engine.score((*prompt, *wrong), len(prompt)).tokens) > 5


def test_a_prompt_whose_ids_do_not_add_up_is_not_scored() -> None:
    engine = EngineClient(FakeEngine().client(), "ddtree")
    reply = engine.ask(Ask.user(FIB))
    object.__setattr__(reply.meta, "prompt_tokens", 7)
    with pytest.raises(Unsupported, match="which ids"):
        engine.prompt_ids(reply)


def test_ids_are_read_beside_scores_where_there_is_no_tokenize() -> None:
    engine = EngineClient(FakeEngine(Lies(no_tokenize=True)).client(), "sglang")
    assert engine.tokenize("def f") == tuple(encode("def f"))


def test_scores_of_other_ids_are_malformed() -> None:
    body = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-1.0, 9, None]]}}
    with pytest.raises(Malformed):
        fixed(json=body).score([1, 2], 1)


@pytest.mark.parametrize(
    ("meta", "passes", "tokens"),
    [
        ({"spec_verify_ct": 4, "completion_tokens": 25}, 4, 25),
        ({"num_verify_passes": 4, "output_tokens": 25}, 4, 25),
        ({"spec_verify_ct": None, "completion_tokens": 25}, None, 25),
        ({"spec_verify_ct": True, "completion_tokens": -1}, None, None),
        ({"spec_verify_ct": "4"}, None, None),
    ],
)
def test_numbers_are_found_under_their_aliases(meta: dict[str, Any], passes: int | None, tokens: int | None) -> None:
    found = dialects.meta(meta)
    assert (found.verify_passes, found.completion_tokens) == (passes, tokens)


def test_server_facts_are_read_flat_or_nested() -> None:
    args = {"speculative_algorithm": "DDTREE", "speculative_ddtree_budget": 32, "max_running_requests": 8, "dtype": "bfloat16"}
    for raw in (args, {"server_args": args}):
        facts = facts_of.server_facts(raw | {"internal_states": [{"avg_spec_accept_length": 4.5}]})
        assert (facts.algorithm, facts.budget, facts.max_running, facts.accept_length) == ("DDTREE", 32, 8, 4.5)
    assert facts_of.server_facts({"speculative_algorithm": None}).speculates is False
    assert facts_of.server_facts({}).speculates is None
    assert facts_of.server_facts({"speculative_dflash_block_size": 16, "speculative_ddtree_budget": 8}).depth_cap == 9


def test_counters_are_read_by_difference() -> None:
    before = dialects.metrics('ddtree:verify_passes_total 10\nddtree:committed_tokens_total{m="x"} 60\n')
    after = dialects.metrics('ddtree:verify_passes_total 20\nddtree:committed_tokens_total{m="x"} 130\n# HELP x\nbad\nx NaN')
    numbers = dialects.speculation_between(before, after)
    assert numbers is not None
    assert numbers.length == 7.0
    vllm = dialects.speculation_between({}, dialects.metrics(
        'vllm:spec_decode_num_drafts_total{e="0"} 10\nvllm:spec_decode_num_accepted_tokens_total{e="0"} 35'))  # fmt: skip
    assert vllm is not None
    assert vllm.length == 4.5
    assert dialects.speculation_between(after, after) is None


def test_log_lines_give_the_middle_of_a_run() -> None:
    line = "Decode batch, #running-req: 3, accept len: {}, accept rate: 0.42, gen throughput (token/s): 301.20"
    assert dialects.acceptance_from_log([line.format(x) for x in ("1.0", "6.5", "6.7", "6.9", "2.0")]) == 6.7
    assert dialects.acceptance_from_log(["nothing here"]) is None


# ---- replay


def test_a_saved_verdict_is_replayed_and_differences_show() -> None:
    from ddops.prove import battery
    from ddops.prove.verdicts import Policy

    corrupt = FakeEngine(Lies(kind="typo"))
    policy = Policy(request_seconds=15, stall_seconds=1, seed=3)
    saved = battery.run(EngineClient(corrupt.client(), "ddtree"), policy=policy, only=["copy"]).to_json()
    again = replay(EngineClient(FakeEngine().client(), "ddtree"), load(saved))
    assert again
    assert all(r.right and not r.same for r in again if r.probe == "copy")
    same = replay(EngineClient(corrupt.client(), "ddtree"), load(saved), mode="off")
    assert all(r.right for r in same if r.probe == "copy")


def test_replay_says_when_the_engine_is_gone() -> None:
    fake = FakeEngine()
    fake.dead = True
    from ddops.prove.evidence import Evidence, Outcome

    saved = Evidence("copy", Outcome.FAIL, replay=({"label": "x", "ask": Ask.user("hi").to_dict(), "text": "a"},))
    (found,) = replay(EngineClient(fake.client(), "ddtree", model="m"), [saved])
    assert found.error.startswith("gone")


@given(st.lists(st.tuples(st.sampled_from(["user", "system"]), st.text(max_size=9)), min_size=1, max_size=3),
       st.integers(1, 99), st.sampled_from([None, "off", "tree"]), st.integers(0, 9) | st.none())  # fmt: skip
def test_a_request_survives_being_saved(messages: list[tuple[str, str]], n: int, mode: str | None, seed: int | None) -> None:
    ask = Ask(messages=tuple(messages), max_tokens=n, mode=mode, seed=seed)
    assert ask_from(json.loads(json.dumps(ask.to_dict()))) == ask


def test_an_unknown_key_of_a_saved_request_is_refused() -> None:
    with pytest.raises(ValueError, match="surprise"):
        ask_from({"surprise": 1})
