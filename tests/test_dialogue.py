"""Which turns want an answer, by examples, and conversations with answers put in."""

import pytest

from dflash_jax.answering.dialogue import compact, ends, expanded, open_turn, open_turns, with_answers

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer"}


def said(roles, *, start=0):
    return [{"role": ROLES[role], "content": f"{role}{index}"} for index, role in enumerate(roles, start=start)]


@pytest.mark.parametrize(
    ("roles", "first", "count"),
    [
        ("u", 0, 1),
        ("su", 1, 1),
        ("ua", None, 0),
        ("uau", 2, 1),
        ("uuu", 0, 3),
        ("uauu", 2, 2),
        ("uat", 2, 1),
        ("uatt", 3, 1),
        ("uata", None, 0),
        ("uatu", 2, 2),
        ("us", None, 0),
    ],
)
def test_turns_that_want_an_answer(roles, first, count):
    assert open_turn(said(roles)) == first
    assert open_turns(said(roles)) == count


def test_answers_go_behind_the_turns_that_want_them():
    answers = [{"role": "assistant", "content": f"answer {number}"} for number in range(2)]
    asked = said("suauu")
    assert [message["content"] for message in with_answers(asked, answers)] == [
        *("s0", "u1", "a2", "u3", "answer 0", "u4", "answer 1")
    ]
    assert with_answers(asked, []) == asked


@pytest.mark.parametrize("extra", [{"truncated": True}, {"tool_calls": [{"function": {"name": "f"}}]}])
def test_nothing_follows_an_answer_that_nobody_can_go_on_from(extra):
    answer = {"role": "assistant", "content": "so", **extra}
    assert ends(answer)
    assert not ends({"role": "assistant", "content": "so", "truncated": False})
    dialogue = with_answers(said("uuu"), [answer])
    assert dialogue == [*said("u"), answer]
    assert open_turn(dialogue) is None


def test_reasoning_is_stored_once_and_read_under_every_name():
    stored = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    read = stored | {"reasoning": "hm", "thinking": "hm"}
    assert expanded(stored) == read
    assert compact(read) == stored
    plain = said("a")[0]
    assert compact(plain) == plain == expanded(plain)
