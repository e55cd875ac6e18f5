"""tools/diagnose.py: exit status, what it prints and writes, and the logs that it can and cannot read."""

import gzip
import json
import re
import subprocess
import sys

import diagnosis_logs
import numpy as np
import pytest
import tool_files
from diagnosis_logs import HEALTHY, Shape

from dflash_jax.diagnosis.curve import draw, thinned
from dflash_jax.diagnosis.reading import read_log
from dflash_jax.errors import UserError

command = tool_files.load("diagnose")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A healthy run directory."""
    folder = tmp_path_factory.mktemp("run")
    diagnosis_logs.save(diagnosis_logs.healthy(0), folder / "train_log.jsonl")
    return folder


@pytest.fixture
def faulty(tmp_path):
    lines = diagnosis_logs.healthy(0)
    lines[300]["loss"] = 40.0
    lines[300]["records"] = "<script>alert('&')</script>"
    return diagnosis_logs.save(lines, tmp_path / "log <b>&.jsonl")


def test_a_healthy_run_ends_with_status_0(run, capsys):
    assert command.main([str(run)]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\nno findings\n")
    assert sum(0x2800 < ord(letter) < 0x2900 for letter in out) > 100


def test_findings_end_with_status_1(faulty, capsys):
    assert command.main([str(faulty)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"LOSS JUMP  loss [\d.]+ at step 300 -> 40 at step 301, [\d.]+x", out)
    assert re.search(r"metrics reset +refuted +counters go on: elapsed_s", out)
    assert out.endswith("\n1 finding: loss jump 1\n")


def test_the_page_stands_alone_and_escapes_what_it_shows(faulty, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert command.main([str(faulty), "--html", str(page)]) == 1
    assert capsys.readouterr().out.endswith(f"written: {page}\n")
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;alert(&#x27;&amp;&#x27;)&lt;/script&gt;" in text
    assert "log &lt;b&gt;&amp;.jsonl" in text
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\((?!#)|<link|<!DOCTYPE svg|<\?xml""", text)
    assert text.count("<svg") == 9  # loss, accept length, accuracy, rate, gradient, two speeds, two queues
    assert text.count("</svg>") == 9
    assert '<td class="refuted">refuted</td>' in text


def test_two_logs_are_diagnosed_and_compared(run, faulty, tmp_path, capsys):
    assert command.main([str(run), str(faulty)]) == 1
    out = capsys.readouterr().out
    assert "no findings" in out
    assert "1 finding" in out
    assert re.search(r"tokens +loss A +loss B +acc A +acc B +accept_len A +accept_len B\n", out)
    assert "both are as fast" in out
    assert command.main([str(run), str(run)]) == 0
    page, few = tmp_path / "both.html", tmp_path / "few.jsonl"
    diagnosis_logs.save([{"step": step, "tokens": 10, "loss": 2.0} for step in range(1, 9)], few)
    assert command.main([str(few), str(few), "--html", str(page)]) == 0
    assert "At equal tokens" in page.read_text()
    assert page.read_text().count("<svg") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: the following arguments are required: RUN|LOG; usage: diagnose.py"),
        (["absent.jsonl"], "error: absent.jsonl does not exist; give a run directory"),
        (["empty"], "error: empty is a folder without train_log.jsonl"),
        (["text.jsonl"], "error: text.jsonl: none of its 2 lines is a JSON object with a step"),
        (["torn.jsonl.gz"], "error: torn.jsonl.gz: cannot be read ("),
        (["good.jsonl", "--html", "absent/page.html"], "error: --html: absent/page.html cannot be written"),
        (["good.jsonl", "--hmtl", "page.html"], "error: unrecognized arguments: --hmtl page.html; usage"),
    ],
)
def test_what_a_user_can_cause_is_one_line_with_status_2(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.jsonl").write_text("some words\n[1]\n")
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"step": 1}\n' * 100)[:20])
    (tmp_path / "good.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(UserError) as raised:
        command.main(arguments)
    assert f"error: {raised.value}".startswith(message)


def test_the_process_reports_errors_in_one_line_and_imports_no_jax():
    script = str(tool_files.TOOLS / "diagnose.py")
    run = "import atexit, runpy, sys; atexit.register(lambda: print('jax' in sys.modules));"
    run += "sys.argv.append('absent'); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", run, script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr == "error: absent does not exist; give a run directory or a file of JSON lines\n"


def test_logs_as_others_write_them_are_read(tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text(
        '{"step": 3, "loss": NaN, "extra": {"a": 1}, "digest": "12e999"}\n'
        '{"step": 1.0, "loss": 2.5, "acc": null, "flag": true}\n'
        '{"step": 2, "loss": "-Infinity", "depths": [1, 2]}\n'
        "\n"
        '{"step": 2, "loss": 2.25, "depths": [1, "nan", 3]}\n'
        '{"loss": 9}\n'
        '{"step": 2, "eval_loss": 1e999}\n'
        '{"step": 4, "lo'
    )
    log = read_log(file)
    assert log.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(log.columns["loss"], [2.5, 2.25, np.nan])
    np.testing.assert_array_equal(log.lists["depths"], [[np.nan] * 3, [1, np.nan, 3], [np.nan] * 3])
    assert {name: rows.tolist() for name, rows in log.not_finite.items()} == {
        "loss": [False, False, True],
        "depths": [False, True, False],
        "eval_loss": [False, True, False],
    }
    assert log.texts["digest"] == ["", "", "12e999"]
    assert (log.repeated, log.unread) == (1, 2)


def test_a_resumed_log_that_goes_back_is_put_in_order(tmp_path, capsys):
    lines = diagnosis_logs.healthy(0, Shape(resumed=(300,)))
    going_back = [*lines[:330], *lines[300:]]
    file = diagnosis_logs.save(going_back, tmp_path / "log.jsonl")
    assert command.main([str(file)]) == 0
    assert "30 steps have more than one line; the last counts" in capsys.readouterr().out


def test_short_and_odd_logs_are_read_without_a_finding(tmp_path, capsys):
    lines = diagnosis_logs.healthy(0, HEALTHY["short 20"])
    for count in (1, 2, 3, 5, 11):
        assert command.main([str(diagnosis_logs.save(lines[:count], tmp_path / "log.jsonl"))]) == 0
    for name in lines[0]:
        without = [{key: value for key, value in line.items() if key in ("step", name)} for line in lines]
        assert command.main([str(diagnosis_logs.save(without, tmp_path / "log.jsonl"))]) == 0
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 5, "loss": "nan"}) + "\n")
    assert command.main([str(tmp_path / "log.jsonl")]) == 1
    assert "loss: no finite value" in capsys.readouterr().out


def test_a_curve_goes_from_corner_to_corner():
    lines = draw(np.arange(1, 101), np.linspace(0.0, 1.0, 100), title="rise", width=10, height=3)
    assert lines[0].endswith("rise")
    assert [line.split("|")[0].strip() for line in lines[1:4]] == ["0.99", "", "0.01"]
    rows = [line.split("|")[1].ljust(10, chr(0x2800)) for line in lines[1:4]]
    filled = [[letter != chr(0x2800) for letter in row] for row in rows]
    assert filled[2][0]
    assert filled[0][-1]
    assert not filled[0][0]
    assert not filled[2][-1]
    assert lines[4].split() == ["1", "100"]


def test_thinning_keeps_the_extremes():
    values = np.sin(np.arange(10_000.0))
    values[[1234, 7777]] = 50.0, -50.0
    rows = thinned(values, 100)
    assert len(rows) <= 100
    assert {1234, 7777} <= set(rows.tolist())
