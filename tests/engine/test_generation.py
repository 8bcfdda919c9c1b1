"""Sampling defaults of a model, and the reply as it grows."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from ddtree_engine.config import ConfigError
from ddtree_engine.generation import SamplingDefaults
from ddtree_engine.reply import Reply
from ddtree_engine.requests import Finish, Update
from ddtree_engine.text import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st


def defaults(folder: Path, config: object) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return SamplingDefaults.load(folder)


def test_a_model_is_greedy_unless_it_says_that_it_samples(tmp_path: Path) -> None:
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults(0.0, 1.0, -1)
    assert defaults(tmp_path, {"temperature": 0.6}) == SamplingDefaults(0.0, 1.0, -1)
    assert defaults(tmp_path, {"do_sample": False, "temperature": 0.6}).temperature == 0.0


def test_a_model_that_samples_brings_its_own_values(tmp_path: Path) -> None:
    published = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults(tmp_path, published) == SamplingDefaults(0.6, 0.95, 20)
    assert defaults(tmp_path, {"do_sample": True}) == SamplingDefaults(1.0, 1.0, -1)


@pytest.mark.parametrize("config", ["{", [1], {"do_sample": True, "temperature": "hot"}, {"do_sample": True, "top_p": []}])
def test_a_file_that_is_not_understood_is_named(tmp_path: Path, config: object) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        defaults(tmp_path, config)


def update(tokens: tuple[int, ...], passes: int, finish: Finish | None = None) -> Update:
    matched = tokens[-1] if finish is Finish.STOP else None
    return Update("r", tokens, finish, matched, passes, 0)


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(alphabet="abü漢🙂 \n", min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 90), max_size=8),
    stop=st.none() | st.text(alphabet="abü漢🙂 \n", min_size=1, max_size=3),
)
def test_a_reply_does_not_depend_on_how_its_tokens_arrive(
    tokenizer: Tokenizer, text: str, cuts: list[int], stop: str | None
) -> None:
    tokens = (*tokenizer.encode(text), 2)
    stops = [stop] if stop else []
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    pieces = [tokens[a:b] for a, b in pairwise(edges)]
    whole, grown = Reply(tokenizer, stops), Reply(tokenizer, stops)
    whole.push(update(tokens, 1, Finish.STOP))
    shown = ""
    for i, piece in enumerate(pieces):
        shown += grown.push(update(piece, i + 1, Finish.STOP if i == len(pieces) - 1 else None)).text
        if grown.finish is not None:
            break
    assert shown == grown.text == whole.text
    assert grown.output_ids == whole.output_ids
    assert grown.finish == whole.finish
    assert stop is None or stop not in shown
    assert shown == (text.split(stop)[0] if stop else text)


def test_nothing_is_taken_after_a_stop_string(tokenizer: Tokenizer) -> None:
    reply = Reply(tokenizer, ["ab"])
    reply.push(update(tokenizer.encode("xab"), 1))
    assert reply.push(update(tokenizer.encode("more"), 2, Finish.LENGTH)).text == ""
    assert reply.text == "x"
    assert reply.verify_passes == 1


def test_the_accept_length_leaves_the_prompts_own_token_out(tokenizer: Tokenizer) -> None:
    reply = Reply(tokenizer)
    reply.push(update((9,), 0))
    assert reply.accept_length is None
    reply.push(update((9, 9, 9), 1))
    reply.push(update((9,), 2, Finish.LENGTH))
    assert reply.accept_length == 2.0
