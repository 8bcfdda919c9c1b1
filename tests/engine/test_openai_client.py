"""The `openai` package talks to the engine as it would to OpenAI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from ddtree_engine.config import Algorithm

Serve = Callable[..., Any]
MESSAGES: Any = [{"role": "user", "content": "say grün 🙂"}]
ANSWER = "user\nsay grün 🙂\nassistant\n"


@pytest.fixture
def client(serve: Serve) -> Iterator[openai.OpenAI]:
    served = serve(keys=(b"key-1",), speculative_algorithm=Algorithm.DDTREE, speculative_draft_model_path="d")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="key-1", max_retries=0, timeout=20) as client:
        yield client


def test_chat_and_its_stream_agree(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, seed=1)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == ANSWER
    assert chunks[-1].usage == whole.usage


def test_the_streaming_helper_assembles_the_same_message(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == ANSWER


def test_logprobs_and_extras_arrive(client: openai.OpenAI) -> None:
    extra = {"return_meta_info": True, "speculative": "chain", "top_k": 1}
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1, max_completion_tokens=5, extra_body=extra
    )
    [choice] = reply.choices
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    assert len(choice.logprobs.content or []) == 5
    meta: Any = choice.model_extra["meta_info"] if choice.model_extra else None
    assert meta["speculative"] == "chain"
    assert len(meta["output_ids"]) == 5


def test_completions_and_models_work(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    whole = client.completions.create(model="tiny", prompt="is_even", max_tokens=64, stop=["n"])
    assert whole.choices[0].text == "is_eve"
    stream = client.completions.create(model="tiny", prompt="is_even", max_tokens=64, stop=["n"], stream=True)
    assert "".join(c.choices[0].text for c in stream) == "is_eve"


def test_refusals_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=2)
    assert caught.value.param == "n"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
