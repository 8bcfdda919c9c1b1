"""Text: tokenizing, detokenising piece by piece, stop strings, chat templates."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from ddtree_engine.chat import ChatTemplate, ChatTemplateError
from ddtree_engine.text import Detokenizer, StopScanner, Tokenizer, TokenizerError
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BpeTokenizer

TEXTS = ["plain", "grün und süß", "漢字かな", "🙂🙃 emoji 👩‍👩‍👧", "tabs\tand\nlines", "\u0000null", "ends in space "]


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_and_decoding_gives_the_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 320), max_size=60))
def test_pieces_add_up_to_the_whole_for_any_tokens(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert pieces == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_no_piece_of_valid_text_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(i) for i in tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.finish() == ""


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_decoding_agrees_with_the_tokenizers_library(tokenizer: Tokenizer, tokenizer_folder: Path, text: str) -> None:
    reference = BpeTokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == reference.decode(list(ids))


def test_an_unfinished_character_reads_as_a_replacement_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, ids)) == ""
    assert detokenizer.finish() == "\ufffd" == tokenizer.decode(ids)


def test_special_tokens_are_hidden_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = (1, *tokenizer.encode("hi"), 2)
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"


def test_special_tokens_in_text_become_single_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>")[0] == 1
    assert len(tokenizer.encode("<|im_start|>")) == 1


def test_ids_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([299_999, 1 << 40]) == ""


# --- stop strings ---


def feed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    scanner, shown = StopScanner(stops), ""
    for piece in pieces:
        scanned = scanner.push(piece)
        shown += scanned.text
        if scanned.matched is not None:
            return shown, scanned.matched
    return shown + scanner.finish(), None


def test_a_stop_string_across_pieces_ends_the_text_before_it() -> None:
    assert feed(["STOP"], ["go S", "T", "OP and on"]) == ("go ", "STOP")


def test_the_stop_that_comes_first_wins() -> None:
    assert feed(["late", "early"], ["an early and a late one"]) == ("an ", "early")


def test_text_that_only_begins_like_a_stop_comes_out_in_the_end() -> None:
    assert feed(["\n\n"], ["a\n", "b\n"]) == ("a\nb\n", None)


def test_what_may_begin_a_stop_is_held_back() -> None:
    scanner = StopScanner(["</end>"])
    assert scanner.push("text</en").text == "text"
    assert scanner.push("try").text == "</entry"


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab\n", max_size=30),
    stops=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_nothing_of_a_stop_string_is_ever_shown(text: str, stops: list[str], cuts: list[int]) -> None:
    """However the text is cut, what is shown is a beginning of it and holds no stop string."""
    edges = [0, *sorted(cuts), len(text)]
    shown, matched = feed(stops, [text[a:b] for a, b in pairwise(edges)])
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    assert (matched is None) == (not any(stop in text for stop in stops))
    if matched is None:
        assert shown == text


# --- tokenizers that cannot be used ---


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read"),
        ("{", "not a tokenizer file"),
        ("[]", "not a tokenizer file"),
        ('{"model": 3}', "not a tokenizer file"),
    ],
)
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=says):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused(tmp_path: Path, tokenizer_folder: Path) -> None:
    data = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    data["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer.load(tmp_path)


# --- chat templates ---


def test_the_folders_template_renders_up_to_the_assistants_turn(tokenizer_folder: Path) -> None:
    template = ChatTemplate.load(tokenizer_folder)
    assert template.render([{"role": "user", "content": "hi"}]) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_folder_without_a_template_gets_chatml(tmp_path: Path) -> None:
    assert "<|im_start|>user\nhi" in ChatTemplate.load(tmp_path).render([{"role": "user", "content": "hi"}])


def test_a_template_file_of_its_own_wins_and_takes_arguments(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}{% if thinking %}!{% endif %}")
    template = ChatTemplate.load(tmp_path)
    assert template.render([{"role": "user", "content": "x"}], {"thinking": True, "messages": [], "self": 1}) == "x!"


def test_a_list_of_named_templates_means_its_default(tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render([]) == "D"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for m in messages %}{{ messages.append(1) }}{% endfor %}",
        "{{ raise_exception('only one turn') }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content.nothing }}",
    ],
)
def test_a_template_that_breaks_out_or_fails_is_an_error_of_its_own(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


def test_a_template_that_does_not_compile_is_named() -> None:
    with pytest.raises(ChatTemplateError, match="does not compile"):
        ChatTemplate("{% if %}")
