"""The battery against servers that are not ours: what they lack is not scored by name, what they break is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ddops.prove import battery
from ddops.prove.client import EngineClient, Limits, identify
from ddops.prove.evidence import Evidence, Outcome, Verdict, VerdictKind
from ddops.prove.facts import kind_of
from ddops.prove.transport import base_of
from ddops.prove.verdicts import Policy
from ddops.prove.wire import Ask, Broken, Denied, EngineError, Gone, Hung, Malformed, Unsupported
from tests.ddops.foreign_fake import LlamaServer, PlainServer, SglangServer, VllmServer
from tests.ddops.prove_fake import FakeEngine, Lies, decode

FIB = "Write a Python function fib(n) that returns the n-th Fibonacci number, with fib(0) = 0 and fib(1) = 1."
POLICY = Policy(request_seconds=20, stall_seconds=10, seed=5)


def client(server: FakeEngine, kind: str = "", **options: Any) -> EngineClient:
    http = server.client()
    return EngineClient(http, kind or identify(http), **options)


def prove(server: FakeEngine, *only: str, kind: str = "", **options: Any) -> tuple[Verdict, dict[str, Evidence]]:
    verdict = battery.run(client(server, kind), policy=POLICY, only=only or None, **options)
    return verdict, {e.probe: e for e in verdict.evidence}


# ---- which one is it


@pytest.mark.parametrize(
    ("server", "kind"),
    [(FakeEngine(), "sglang"), (VllmServer(), "vllm"), (SglangServer(), "sglang"), (PlainServer(), "openai"),
     (LlamaServer(), "openai")],
)  # fmt: skip
def test_a_server_is_recognised_by_what_it_says_of_itself(server: FakeEngine, kind: str) -> None:
    assert identify(server.client()) == kind


def test_the_ddtree_engine_is_recognised_by_its_own_section() -> None:
    recorded = Path(__file__).parents[1] / "contract" / "fixtures" / "server_info.json"
    info = json.loads(recorded.read_text(encoding="utf-8"))["reply"]
    assert kind_of(info, None) == "ddtree"
    assert kind_of({k: v for k, v in info.items() if k != "ddtree"}, None) == "sglang"


def test_a_server_that_wants_a_key_says_so_before_anything_is_asked() -> None:
    server = VllmServer(api_key="secret")
    with pytest.raises(Denied, match="401 Unauthorized"):
        identify(server.client())
    assert identify(server.client(), api_key="secret") == "vllm"
    assert "def fib" in client(server, "vllm", api_key="secret").ask(Ask.user(FIB)).text


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://x:1/v1", "http://x:1"),
        ("http://x:1/v1/", "http://x:1"),
        ("http://x:1", "http://x:1"),
        ("https://x/llm/v1", "https://x/llm"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_an_address_may_end_in_v1(url: str, base: str) -> None:
    assert base_of(url).rstrip("/") == base


@pytest.mark.parametrize(
    "url", ["x:1", "ftp://x", "http://", "http://[x", "http://x:port", "http://u:p@x", "http://x/?a=b", ""]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"address"):
        base_of(url)


def test_paths_go_below_the_base_path() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return PlainServer().handle(
            httpx.Request(request.method, f"http://e{request.url.path.removeprefix('/llm')}", content=request.content)
        )

    http = httpx.Client(transport=httpx.MockTransport(answer), base_url=base_of("http://e/llm/v1"))
    assert "def fib" in EngineClient(http, "openai").ask(Ask.user(FIB)).text
    assert asked == ["/llm/v1/models", "/llm/v1/chat/completions"]


# ---- ids, prompts, scores: what each real one gives


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("server", [VllmServer(), SglangServer()])
def test_ids_of_prompt_and_reply_come_with_the_reply(server: FakeEngine, stream: bool) -> None:
    engine = client(server)
    reply = engine.ask(Ask.user(FIB, stream=stream))
    assert reply.ids is not None
    assert decode(list(reply.ids)) == reply.text
    assert reply.meta.prompt_ids is not None
    assert len(reply.meta.prompt_ids) == reply.meta.prompt_tokens
    assert engine.prompt_ids(reply) == reply.meta.prompt_ids
    assert reply.tokens == len(reply.ids)


@pytest.mark.parametrize("stream", [False, True])
def test_sglang_numbers_of_speculation_come_per_request(stream: bool) -> None:
    reply = client(SglangServer()).ask(Ask.user(FIB, stream=stream))
    assert reply.meta.verify_passes
    assert reply.tokens
    assert 4 < (reply.tokens - 1) / reply.meta.verify_passes < 8


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("server", [VllmServer(), SglangServer(), FakeEngine()])
def test_ids_come_with_completions_too(server: FakeEngine, stream: bool) -> None:
    ids = tuple(ord(c) for c in "<|im_start|>user\n" + FIB + "<|im_end|>\n<|im_start|>assistant\n")
    kind = server.kind if server.kind == "ddtree" else ""
    reply = client(server, kind, model="tiny").ask(Ask(ids=ids, max_tokens=400, stream=stream, openai=True))
    assert "def fib" in reply.text
    assert reply.ids is not None
    assert decode(list(reply.ids)) == reply.text


def test_an_older_sglang_gives_ids_of_whole_replies_alone() -> None:
    engine = client(SglangServer(extended=False))
    reply = engine.ask(Ask.user(FIB))
    assert reply.ids is not None
    assert decode(list(reply.ids)) == reply.text
    assert reply.meta.verify_passes
    assert len(engine.prompt_ids(reply)) == reply.meta.prompt_tokens
    assert engine.ask(Ask.user(FIB, stream=True)).ids is None
    verdict, found = prove(SglangServer(extended=False), "copy", "stream", "rescore", "acceptance")
    assert verdict.kind is VerdictKind.PASS, verdict.why
    assert found["rescore"].outcome is found["acceptance"].outcome is Outcome.PASS


@pytest.mark.parametrize("incremental", [False, True])
def test_a_native_stream_reads_the_same_whole_or_in_parts(incremental: bool) -> None:
    engine = client(SglangServer(incremental=incremental))
    ids = engine.tokenize("<|im_start|>user\n" + FIB + "<|im_end|>\n<|im_start|>assistant\n")
    reply = engine.ask(Ask(ids=ids, max_tokens=300, stream=True))
    assert reply.text == engine.ask(Ask(ids=ids, max_tokens=300)).text
    assert reply.ids is not None
    assert decode(list(reply.ids)) == reply.text
    assert "".join(c.text for c in reply.chunks) == reply.text


def test_parts_that_repeat_what_went_before_are_not_taken_for_the_whole() -> None:
    events = [("ha", [1], 1), ("haha", [2, 3], 3), ("haha", [4, 5], 5)]
    lines = [{"text": t, "output_ids": i, "meta_info": {"completion_tokens": n, "finish_reason": None}} for t, i, n in events]
    content = b"".join(b"data: " + httpx.Response(200, json=line).content + b"\n\n" for line in lines) + b"data: [DONE]\n\n"
    http = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, content=content)), base_url="http://e")
    reply = EngineClient(http, "sglang").ask(Ask(ids=(1,), stream=True))
    assert reply.text == "hahahahaha"
    assert reply.ids == (1, 2, 3, 4, 5)


@pytest.mark.parametrize("ask", [Ask.user(FIB, top_logprobs=2), Ask(text=FIB, top_logprobs=2)])
def test_scores_of_generated_tokens_are_read_where_tokens_are_named_by_id(ask: Ask) -> None:
    reply = client(VllmServer()).ask(ask)
    assert tuple(s.token for s in reply.logprobs) == reply.ids
    assert all(s.logprob == -0.1 and s.top for s in reply.logprobs)


def test_scores_that_name_no_ids_are_left_out() -> None:
    engine = client(VllmServer(), "openai")
    engine._unknown = frozenset({"return_tokens_as_token_ids"})
    assert engine.ask(Ask.user(FIB, top_logprobs=2)).logprobs == ()


def test_an_id_that_sglang_calls_0_is_scored_as_what_was_sent() -> None:
    ids = [ord(c) for c in "a`b"]
    scores = client(SglangServer()).score(ids, 1)
    assert [s.token for s in scores.tokens] == ids[1:]
    other = {"meta_info": {"input_token_logprobs": [[None, 1, None], [-1.0, 0, None], [-1.0, 0, None], [-1.0, 9, None]]}}
    http = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, json=other)), base_url="http://e")
    for kind, sent in (("sglang", [1, 2, 3, 8]), ("sglang", [1, 2, 3, 9]), ("ddtree", [1, 0, 3, 9]), ("sglang", [1] * 5)):
        with pytest.raises(Malformed, match="not the ids"):
            EngineClient(http, kind).score(sent, 1)


def test_more_alternatives_than_the_server_allows_are_not_scored() -> None:
    with pytest.raises(Unsupported, match="greater than max allowed: 20"):
        client(VllmServer()).score([1, 2, 3], 1, top=25)


# ---- facts


@pytest.mark.parametrize(
    ("server", "speculates", "cap"),
    [(VllmServer(), None, 16), (VllmServer(drafts=False), False, None), (VllmServer(log_stats=False), None, None)],
)
def test_vllm_tells_by_its_metrics_whether_it_drafts(server: FakeEngine, speculates: bool | None, cap: int | None) -> None:
    facts = client(server).facts()
    assert (facts.speculates, facts.depth_cap, facts.context_length) == (speculates, cap, 4096)


def test_sglang_tells_the_batch_that_it_chose_itself() -> None:
    facts = client(SglangServer()).facts()
    assert (facts.max_running, facts.depth_cap, facts.algorithm, facts.accept_length) == (48, 16, "DFLASH", 5.5)


# ---- the battery


def test_a_healthy_vllm_passes_with_every_token_scored() -> None:
    verdict, found = prove(VllmServer(), "copy", "answers", "isolation", "shapes", "stream", "sampled", "rescore", "acceptance")
    assert verdict.kind is VerdictKind.PASS, verdict.why
    assert found["rescore"].outcome is found["sampled"].outcome is found["stream"].outcome is Outcome.PASS
    assert found["acceptance"].values["acceptance"] == pytest.approx(6, rel=0.2)
    assert "server counters by difference" in found["acceptance"].detail


def test_a_healthy_sglang_passes_with_streams_checked_against_their_ids() -> None:
    verdict, found = prove(SglangServer(), "copy", "stream", "rescore", "acceptance")
    assert verdict.kind is VerdictKind.PASS, verdict.why
    assert found["stream"].sample > 0
    assert found["acceptance"].values["acceptance"] == pytest.approx(6, rel=0.2)


def test_a_server_that_does_not_draft_has_no_acceptance() -> None:
    _, found = prove(VllmServer(drafts=False), "copy", "acceptance")
    assert (found["acceptance"].outcome, found["acceptance"].detail) == (Outcome.NOT_SCORED, "speculation is off")


@pytest.mark.parametrize("server", [VllmServer, SglangServer])
@pytest.mark.parametrize("lie", ["garbage", "typo"])
def test_a_foreign_engine_that_lies_is_caught(server: Callable[..., FakeEngine], lie: str) -> None:
    verdict, _ = prove(server(lies=Lies(kind=lie)), "copy", "answers", "shapes", "rescore")
    assert verdict.kind is VerdictKind.CORRUPT, verdict.why


def test_a_fault_of_sampling_alone_is_caught_where_every_greedy_token_is_right() -> None:
    """As in vLLM 0.32.0 on CPU with dflash, where the drafted rows' temperature is never set."""
    verdict, found = prove(VllmServer(lies=Lies(kind="typo", only_sampled=True)), "copy", "rescore", "sampled")
    assert found["rescore"].outcome is found["copy"].outcome is Outcome.PASS
    assert found["sampled"].outcome is Outcome.FAIL
    assert verdict.kind is VerdictKind.CORRUPT


def test_a_plain_server_passes_on_its_answers_and_says_what_nothing_can_score() -> None:
    verdict, found = prove(PlainServer(), "copy", "answers", "modes", "stream", "sampled", "rescore", "acceptance", "golden")
    assert verdict.kind is VerdictKind.PASS, verdict.why
    unscored = {name for name, e in found.items() if e.outcome is Outcome.NOT_SCORED}
    assert unscored == {"modes", "stream", "sampled", "rescore", "acceptance", "golden"}
    assert all(found[name].detail for name in unscored)
    assert set(verdict.why.split("not scored: ")[1].split(", ")) == unscored


def test_nothing_scored_is_never_a_pass() -> None:
    verdict, _ = prove(PlainServer(), "rescore", "stream")
    assert verdict.kind is VerdictKind.INCONCLUSIVE


def test_an_engine_that_ignores_the_switch_is_not_scored_by_it() -> None:
    fake = FakeEngine(Lies(ignores_mode=True))
    with pytest.raises(Unsupported, match="ignored `speculative`"):
        client(fake, "ddtree").ask(Ask.user(FIB, mode="off"))
    _, found = prove(FakeEngine(Lies(ignores_mode=True)), "modes", kind="ddtree")
    assert found["modes"].outcome is Outcome.NOT_SCORED


# ---- habits of servers nobody has seen


@pytest.mark.parametrize(
    "habits",
    [{"strict": True}, {"no_usage": True}, {"no_done": True}, {"comments": True}, {"renamed": True}, {"parts": True},
     {"crlf": True}, {"strict": True, "renamed": True}, {"strict": True, "detail": True, "no_done": True},
     {"limited_first": 2}],
    ids="+".join,
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_is_read_whatever_the_servers_habits(habits: dict[str, Any], stream: bool) -> None:
    reply = client(PlainServer(**habits)).ask(Ask.user(FIB, stream=stream))
    assert "def fib" in reply.text
    assert reply.finish == "stop"
    if stream:
        assert "".join(c.text for c in reply.chunks) == reply.text


def test_fields_that_were_refused_are_not_sent_again() -> None:
    server = PlainServer(strict=True, renamed=True)
    engine = client(server)
    for _ in range(3):
        engine.ask(Ask.user(FIB))
    assert len(server.seen) == 3
    assert all("return_token_ids" not in body and "max_completion_tokens" in body for body in server.seen)


def test_a_refusal_that_is_not_about_our_fields_stays_a_refusal() -> None:
    calls: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(400, json={"error": {"message": "This model's maximum context length is 16 tokens."}})

    http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://e")
    engine = EngineClient(http, "openai", model="m")
    with pytest.raises(Unsupported, match="maximum context length"):
        engine.ask(Ask.user(FIB))
    assert len(calls) == 2
    assert engine._unknown == frozenset()


@pytest.mark.parametrize("how", ["data", "event", "line"])
def test_an_error_in_mid_stream_counts_against_the_server(how: str) -> None:
    with pytest.raises(Broken, match="device lost"):
        client(PlainServer(fails_in_stream=how)).ask(Ask.user(FIB, stream=True))


def test_a_stream_in_one_piece_is_named() -> None:
    with pytest.raises(Unsupported, match="in one piece"):
        client(PlainServer(one_piece=True)).ask(Ask.user(FIB, stream=True))


def test_keep_alive_alone_is_silence() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=_comments(), headers={"content-type": "text/event-stream"})

    http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://e")
    with pytest.raises(Hung, match="keep-alive"):
        EngineClient(http, "openai", model="m", limits=Limits(5.0, 0.3)).ask(Ask.user(FIB, stream=True))


def _comments() -> Any:
    import time

    for _ in range(100):
        time.sleep(0.05)
        yield b": keep-alive\n\n"


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ({"choices": [{"message": {"content": "a"}, "finish_reason": "abort"}]}, Broken),
        ({"text": "a", "meta_info": {"finish_reason": {"type": "abort", "message": "KV cache is full"}}}, Broken),
        (
            {"text": "a", "meta_info": {"finish_reason": {"type": "abort", "message": "too long", "status_code": 400}}},
            Unsupported,
        ),
        ({"object": "error", "message": "too long", "code": 400}, Unsupported),
        ({"error": {"message": "too long", "code": 400}}, Unsupported),
        ({"error": {"message": "worker died", "code": 500}}, Broken),
        ({"error": "worker died"}, Broken),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_given_up_is_no_text_to_judge(reply: dict[str, Any], error: type[EngineError], stream: bool) -> None:
    body = httpx.Response(200, json=reply).content
    content = b"data: " + body + b"\n\ndata: [DONE]\n\n" if stream else body
    http = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, content=content)), base_url="http://e")
    with pytest.raises(error):
        EngineClient(http, "sglang", model="m").ask(Ask.user(FIB, stream=stream))


def test_a_stream_cut_before_its_finish_is_gone_without_done() -> None:
    content = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":null}]}'
    http = httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(200, content=content)), base_url="http://e")
    with pytest.raises(Gone):
        EngineClient(http, "openai", model="m").ask(Ask.user(FIB, stream=True))


def test_a_redirect_is_named() -> None:
    answer = httpx.Response(307, headers={"location": "https://e/v1/chat/completions"})
    http = httpx.Client(transport=httpx.MockTransport(lambda _: answer), base_url="http://e")
    with pytest.raises(Unsupported, match="redirects to https://e"):
        EngineClient(http, "openai", model="m").ask(Ask.user(FIB))


@pytest.mark.parametrize("models", [(), ("a", "b")])
def test_which_model_is_meant_is_asked_and_not_guessed(models: tuple[str, ...]) -> None:
    with pytest.raises(Unsupported, match="say which one is meant"):
        client(PlainServer(models=models), "openai").ask(Ask.user(FIB))
    assert "def fib" in client(PlainServer(models=models), "openai", model="a").ask(Ask.user(FIB)).text


def test_a_model_list_that_fails_is_no_engine_that_fails() -> None:
    server = PlainServer(list_fails=True)
    assert identify(server.client()) == "openai"
    with pytest.raises(Unsupported, match=r"cannot list its models.*say which one is meant"):
        client(server).ask(Ask.user(FIB))
    verdict = battery.run(client(server, model="tiny"), policy=POLICY, only=("answers",))
    assert verdict.kind is VerdictKind.PASS, verdict.why


def test_adapters_are_not_the_model() -> None:
    assert client(VllmServer()).model == "tiny"


def test_a_server_without_health_is_alive_by_its_model_list() -> None:
    assert client(PlainServer(), "openai").healthy()
    assert not client(PlainServer(models=()), "openai").healthy()
    assert not client(PlainServer(), "vllm").healthy()  # vLLM has /health: without it, it is not that


def test_llama_tokenizes_by_another_name_and_its_guessed_prompt_must_add_up() -> None:
    engine = client(LlamaServer())
    assert decode(list(engine.tokenize("def f"))) == "def f"
    assert engine.detokenize([100, 101]) == "de"
    reply = engine.ask(Ask.user(FIB))
    assert len(engine.prompt_ids(reply)) == reply.meta.prompt_tokens
    uncounted = client(LlamaServer(no_usage=True))
    with pytest.raises(Unsupported, match="which ids"):
        uncounted.prompt_ids(uncounted.ask(Ask.user(FIB)))
    with pytest.raises(Unsupported, match="prompt_logprobs"):
        engine.score([1, 2, 3], 1)
