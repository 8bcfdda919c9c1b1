"""Who runs next: first come first served, decoding never waits for a prompt."""

from __future__ import annotations

from ddtree_engine.scheduler import Chunk, Limits, Running, Waiting, admit, plan
from hypothesis import given
from hypothesis import strategies as st

LIMITS = Limits(max_running=4, chunk=100)


def test_oldest_waiting_requests_are_admitted_while_there_is_room() -> None:
    waiting = [Waiting(i) for i in "abcdef"]
    assert admit(waiting, 1, LIMITS) == ("a", "b", "c")
    assert admit(waiting, 4, LIMITS) == ()
    assert admit([], 0, LIMITS) == ()


def test_prompts_share_one_chunk_a_round_oldest_first() -> None:
    running = [Running("a", 0), Running("b", 70), Running("c", 70), Running("d", 5)]
    assert plan(running, LIMITS).decode == ("a",)
    assert plan(running, LIMITS).chunks == (Chunk("b", 70), Chunk("c", 30))


def test_nothing_to_run_is_an_empty_plan() -> None:
    assert plan([], LIMITS).empty
    assert not plan([Running("a", 3)], LIMITS).empty


@given(st.lists(st.integers(0, 300), max_size=8), st.integers(1, 200))
def test_every_request_gets_done_and_no_round_exceeds_its_chunk(left: list[int], chunk: int) -> None:
    limits = Limits(8, chunk)
    todo = {str(i): n for i, n in enumerate(left)}
    for _ in range(sum(left) + 1):
        now = plan([Running(i, n) for i, n in todo.items()], limits)
        assert sum(c.tokens for c in now.chunks) <= chunk
        assert set(now.decode) == {i for i, n in todo.items() if n == 0}
        for c in now.chunks:
            assert 0 < c.tokens <= todo[c.id]
            todo[c.id] -= c.tokens
    assert not any(todo.values())
