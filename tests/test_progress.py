"""The display shows the watched figures, seldom enough for a file and always on a terminal."""

import io
import itertools

import pytest

from dflash_jax.monitor import progress
from dflash_jax.monitor.progress import Answering, Decoded, Loading, Preparing, Progress, describe

LINE = {
    "step": 120,
    "epoch": 0.5213,
    "epochs": 6,
    "loss": 3.2149,
    "accept_len": 1.4181,
    "drafter_tok_s": 12345.0,
    "eta_s": 331.2,
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    """Seconds that stand still until a test moves them."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_plain_line_names_all_figures(capsys):
    with Progress(2000, start=0) as display:
        display.show(LINE)
    assert capsys.readouterr().err == (
        "step 120/2000  epoch 0.52/6  loss 3.21  accept 1.42  12.3 ktok/s  eta 5:31\n"
    )


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ({}, ""),
        ({"loss": "nan", "accept_len": 1}, "loss nan  accept 1.00"),
        ({"drafter_tok_s": 850.4}, "850 tok/s"),
        ({"drafter_tok_s": 2.5e6}, "2.5 Mtok/s"),
        ({"eta_s": 9.4}, "eta 0:09"),
        ({"eta_s": 3599.6}, "eta 1:00:00"),
        ({"eta_s": 86400.0}, "eta 1d 0:00:00"),
        ({"eta_s": 2 * 86400 + 3 * 3600 + 4 * 60 + 5}, "eta 2d 3:04:05"),
        ({"eta_s": "inf"}, "eta -"),
    ],
)
def test_figures_are_short_and_missing_ones_left_out(line, text):
    assert describe(line) == text


def test_plain_lines_come_every_interval_and_first_and_last(capsys, clock):
    with Progress(10, start=3, interval_s=15) as display:
        for step, seconds in zip(range(4, 11), itertools.count(0, 7), strict=False):
            clock[0] = 100.0 + seconds
            display.show({"step": step})
    # 7 s a step from step 4: 21 s later is step 7, again 21 s later is step 10, the last.
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["4/10", "7/10", "10/10"]


def test_a_run_that_stops_early_still_shows_its_last_step(capsys, clock):
    with Progress(10, start=0) as display:
        for step in (1, 2, 3):
            display.show({"step": step})
    assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == ["1/10", "3/10"]


def test_nothing_is_shown_of_a_run_without_steps(capsys):
    with Progress(10, start=10):
        pass
    assert capsys.readouterr().err == ""


def test_a_note_is_a_line_of_its_own(capsys):
    with Progress(10, start=0) as display:
        display.note("saved step 5")
    assert capsys.readouterr().err == "saved step 5\n"


def test_a_terminal_gets_a_bar_that_starts_where_the_run_resumes(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress(200, start=100) as display:
        assert "step 100/200" in terminal.getvalue()
        display.note("resumed at step 100")
        display.show({**LINE, "step": 101})
    assert "\rresumed at step 100\n" in terminal.getvalue()
    last = terminal.getvalue().rstrip("\n").split("\r")[-1]
    assert "step 101/200" in last
    assert "epoch 0.52/6  loss 3.21  accept 1.42  12.3 ktok/s  eta 5:31" in last


def test_a_loaded_target_is_one_plain_line_at_the_end(capsys, clock):
    with Loading("tiny", 2_500_000_000) as loading:
        loading.add(1_000_000_000)
        clock[0] += 3.21
        loading.add(1_500_000_000)
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "loaded tiny: 2.50 GB in 3.2 s\n"


def test_nothing_is_said_to_be_loaded_that_was_not(capsys):
    with pytest.raises(OSError, match="gone"), Loading("tiny", 2_500_000_000):
        raise OSError("gone")
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_over_the_bytes(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Loading("tiny", 2_500_000_000) as loading:
        assert "loading tiny  0.00B/2.50GB" in terminal.getvalue()
        loading.add(1_000_000_000)
        loading.add(1_500_000_000)
    last = terminal.getvalue().rstrip("\n").split("\r")[-1]
    assert "loading tiny  2.50GB/2.50GB" in last
    assert "100%" in last


def test_tokenised_bytes_are_a_plain_line_every_interval(capsys, clock):
    with Preparing(4_000_000_000, interval_s=10) as preparing:
        for seconds, done_bytes, tokens in (
            (5, 1e9, 7),
            (9, 5e8, 1e7),
            (12, 5e8, 1e7),
            (15, 1e9, 2e7),
            (25, 1e9, 2e7),
        ):
            clock[0] = 100.0 + seconds
            preparing.add(int(done_bytes), int(tokens))
    # The first billion came from an earlier run; from second 5 to 12 it was one billion and 20 million tokens.
    assert capsys.readouterr().err == (
        "tokenised 2.00GB/4.00GB  50%  2.9 Mtok/s  eta 0:14\ntokenised 4.00GB/4.00GB  100%  3.0 Mtok/s  eta 0:00\n"
    )


def test_the_first_tokenised_bytes_tell_no_speed(capsys, clock):
    with Preparing(1000, interval_s=10) as preparing:
        clock[0] += 11
        preparing.add(500, 3)
    assert capsys.readouterr().err == "tokenised 500B/1.00kB  50%  eta -\n"


def test_a_terminal_gets_a_bar_over_the_tokenised_bytes(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Preparing(2_000_000) as preparing:
        for _ in range(2):
            clock[0] += 2
            preparing.add(1_000_000, 1000)
    last = terminal.getvalue().rstrip("\n").split("\r")[-1]
    assert "tokenised  2.00MB/2.00MB" in last
    assert "500 tok/s  eta 0:00" in last


def test_answers_are_a_plain_line_every_interval_and_one_at_the_end(capsys, clock):
    with Answering(5, 12, done=1, settled=4, interval_s=10) as answering:
        clock[0] += 5
        answering.add(conversations=0, answers=1, tokens=300)
        clock[0] += 15
        answering.add(conversations=1, answers=1, tokens=100)
        clock[0] += 5
        answering.add(conversations=1, answers=3, tokens=100)
    # What an earlier run did counts for the share that is done, not for the speed.
    assert capsys.readouterr().err.splitlines() == [
        "answered 6/12  conversations 2/5  20 tok/s  eta 1:00",
        "answered 9/12  conversations 3/5  20 tok/s  eta 0:15",
    ]


def test_a_terminal_gets_a_bar_over_the_answers(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Answering(2, 4, done=0, settled=1) as answering:
        assert "answered 1/4" in terminal.getvalue()
        clock[0] += 2
        answering.add(conversations=2, answers=3, tokens=4000)
    last = terminal.getvalue().rstrip("\n").split("\r")[-1]
    assert "answered 4/4" in last
    assert "conversations 2/2  2.0 ktok/s  eta 0:00" in last


def test_decoded_prompts_are_a_plain_line_every_interval(capsys, clock):
    with Decoded(4, interval_s=10) as decoded:
        for seconds in (5, 15, 2, 2):
            clock[0] += seconds
            decoded.add()
    assert capsys.readouterr().err == "decoded 2/4 prompts  eta 0:20\n"


def test_a_terminal_gets_a_bar_over_the_decoded_prompts(monkeypatch, clock):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Decoded(2) as decoded:
        clock[0] += 3
        decoded.add()
        decoded.add()
    assert "decoded 2/2 prompts" in terminal.getvalue().rstrip("\n").split("\r")[-1]
