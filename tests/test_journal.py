"""The journal of an unfinished run: what a kill leaves of it, and what it refuses to continue."""

import json

import pytest

from dflash_jax.answering.journal import Answer, Journal
from dflash_jax.errors import UserError

SETTINGS = {"temperature": 0.5, "template": {"a": 1}, "stop_tokens": (1, 2)}


def answer(index, turn, text, **more):
    return Answer(index, turn, {"role": "assistant", "content": text}, **more)


ANSWERS = [
    answer(4, 0, "vier", tokens=3),
    answer(0, 0, "älter\n", tokens=0),
    answer(4, 1, "noch"),
    answer(2, 0, ""),
]


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "out.jsonl.partial"
    with Journal(file, settings=SETTINGS) as journal:
        journal.add(ANSWERS[:3])
        journal.add(ANSWERS[3:])
        assert len(journal) == 4
        assert journal.messages(4) == [ANSWERS[0].message, ANSWERS[2].message]
    return file


def held(file):
    with Journal(file, settings=SETTINGS) as journal:
        return [list(journal.recorded(index)) for index in range(6)]


def test_a_continued_journal_has_every_answer(file):
    before = file.read_bytes()
    assert held(file) == [[ANSWERS[1]], [], [ANSWERS[3]], [], [ANSWERS[0], ANSWERS[2]], []]
    assert file.read_bytes() == before
    assert len(before.splitlines()) == 1 + len(ANSWERS)


def test_wherever_a_kill_cuts_the_file_whole_lines_stay_and_the_rest_goes(file):
    whole = file.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(0, len(whole), 3):
        file.write_bytes(whole[:size])
        kept = sum(end <= size for end in ends[1:])
        with Journal(file, settings=SETTINGS) as journal:
            assert len(journal) == kept
            assert file.read_bytes() == whole[: max(ends[: kept + 1])]
            journal.add(ANSWERS[kept:])
        assert file.read_bytes() == whole


def refusal(file, settings, match):
    with pytest.raises(UserError, match=match) as refused, Journal(file, settings=settings):
        pass
    return str(refused.value)


def test_other_settings_are_refused_by_name(file):
    warmer = SETTINGS | {"temperature": 0.7}
    assert "template" not in refusal(file, warmer, r"begun with temperature=0\.5, now 0\.7; repeat")
    other = {"temperature": 0.5, "stop_tokens": (1, 2), "dtype": "float32"}
    refusal(file, other, r"begun with template=.*'a': 1.*, now None, dtype=None, now float32;")
    assert len(held(file)) == 6


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"index": 1, "message": {}}', json.dumps({"index": 4, "turn": 1, "message": {}})]
)
def test_a_damaged_line_is_named(file, line):
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, line, lines[-1]]) + "\n")
    refusal(file, SETTINGS, "partial, line 6, is damaged")


def test_another_file_is_no_journal(tmp_path):
    file = tmp_path / "x.partial"
    file.write_text('{"messages": []}\n')
    refusal(file, SETTINGS, "line 1, is damaged")


def test_two_processes_do_not_write_to_one_journal(file):
    with Journal(file, settings=SETTINGS):
        refusal(file, SETTINGS, "another process")
    assert len(held(file)) == 6


def test_a_removed_journal_is_gone(file):
    with Journal(file, settings=SETTINGS) as journal:
        journal.remove()
    assert not file.exists()
