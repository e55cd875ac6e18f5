"""The command `prepare`: what it prints, what it refuses before any work, and its benchmark."""

import json
import pathlib
import re
import subprocess
import sys

import pytest
import tiny_runs
import tool_files

from dflash_jax import prepare
from dflash_jax.data.records import Records
from dflash_jax.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    tiny_runs.save_tokenizer(path)
    return path


def chat_line(asked, said):
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return json.dumps({"messages": turns})


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(["{", chat_line("hi", "yes"), '{"messages": []}', "[", chat_line("hi", "no")]))
    return file


def run(target, source, *more):
    return prepare.main([f"target={target}", f"input={source}", *more])


def test_the_report_tells_what_became_of_the_rows(tmp_path, target, source, capsys):
    output = tmp_path / "data"
    assert run(target, source, f"output={output}", "workers=1") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "1 files, 0.0 MB, 1 workers"
    tokens = sum(len(f"?user\nhi?\n?assistant\n{text}?\n") for text in ("yes", "no"))
    assert said[1:5] == [
        "rows      5",
        "records   2",
        f"tokens    {tokens}, of which {100 * 7 / tokens:.1f} % are trained",
        f"lengths   mean {tokens / 2}, p50 {tokens // 2}, p90 {tokens // 2 + 1}, p99 {tokens // 2 + 1}, "
        f"max {tokens // 2 + 1}",
    ]
    assert said[5] == "not used  1 rows, bad message (a message that no chat template could render)"
    assert said[6].startswith(f"          such as {source}:3: messages is an empty list")
    assert said[7].startswith("not used  2 rows, not JSON (")
    assert said[8].startswith(f"          such as {source}:1: ")
    assert said[9:] == [
        f"          all of them in {output}/unused.jsonl",
        f"written: {output}",
        f"next: python -m dflash_jax.train recipe=... data.train={output}",
    ]
    before = {file.name: file.stat().st_mtime_ns for file in output.iterdir()}
    assert run(target, source, f"output={output}") == 0
    again = capsys.readouterr().out.splitlines()
    assert again[1:10] == said[1:10]
    assert again[10] == f"there already, from the same data: {output}"
    assert {file.name: file.stat().st_mtime_ns for file in output.iterdir()} == before
    with pytest.raises(UserError, match=r"data holds other records: max_length \(then 8192, now 30\) changed"):
        run(target, source, f"output={output}", "max_length=30")


def test_options_reach_the_records(tmp_path, target, capsys):
    file = tmp_path / "a.jsonl"
    turns = [*json.loads(chat_line("hi", "yes"))["messages"], *json.loads(chat_line("hi", "x" * 50))["messages"]]
    file.write_text(json.dumps({"messages": turns}))
    whole = len("?user\nhi?\n?assistant\nyes?\n?user\nhi?\n?assistant\n?\n") + 50
    trained = {}
    for name, options in {
        "all": [],
        "last": ["last_turn_only=true"],
        "cut": ["max_length=60"],
        "kept": [f"max_length={whole}", "too_long=drop"],
    }.items():
        run(target, file, f"output={tmp_path / name}", "workers=1", *options)
        trained[name] = int(Records.open(tmp_path / name)[0].loss_mask.sum())
    assert trained == {"all": 4 + 51, "last": 51, "cut": 4, "kept": 4 + 51}
    assert "cut       1 conversations where an answer ends, for max_length" in capsys.readouterr().out
    with pytest.raises(UserError, match="can be used: 1 too long"):
        run(target, file, f"output={tmp_path / 'drop'}", "max_length=60", "too_long=drop")


def test_template_arguments_reach_the_template(tmp_path, target, source, capsys):
    tokenizer_config = json.loads((target / "tokenizer_config.json").read_text())
    named = tmp_path / "named"
    tiny_runs.save_tokenizer(named)
    template = "{{ greeting }}" + tiny_runs.CHAT
    (named / "chat_template.jinja").write_text(template)
    (named / "tokenizer_config.json").write_text(json.dumps(tokenizer_config | {"chat_template": template}))
    run(named, source, "inspect=1", "template.greeting=Hello")
    assert "Hello<|im_start|>user\nhi" in capsys.readouterr().out


def test_inspect_prints_conversations_and_writes_nothing(tmp_path, target, source, capsys):
    assert run(target, source, "inspect=1") == 0
    said = capsys.readouterr().out
    assert f"--- {source}:1  not used, not JSON: " in said
    header = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tokens = len("?user\nhi?\n?assistant\nyes?\n")
    assert f"--- {source}:2  {tokens} tokens, 4 trained\n{header}«yes<|im_end|>»\n" in said
    assert "«no" not in said
    assert run(target, source, "inspect=9") == 0
    assert "«no<|im_end|>»" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [source]


def test_what_cannot_go_well_is_refused_before_any_work(tmp_path, target, source):
    with pytest.raises(UserError, match="output: name the folder to write, or say inspect=N"):
        run(target, source)
    with pytest.raises(UserError, match=r"output: \S*a.jsonl is a file; name a folder"):
        run(target, source, f"output={source}")
    with pytest.raises(UserError, match="workers: found 0, allowed: at least 1"):
        run(target, source, "output=x", "workers=0")
    with pytest.raises(UserError, match=r"^input: .*no such file"):
        run(target, tmp_path / "b.jsonl", "output=x")
    with pytest.raises(UserError, match=r"is neither a folder nor a \.gguf file"):
        run(tmp_path / "none", source, "output=x")
    assert list(tmp_path.iterdir()) == [source]


def test_an_interrupted_run_says_where_it_continues(tmp_path, target, source, capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "prepare_records", interrupted)
    assert run(target, source, f"output={tmp_path / 'data'}") == 130
    assert f"the same command continues in {tmp_path / 'data'}.partial" in capsys.readouterr().err


def test_help_names_every_key():
    command = [sys.executable, "-m", "dflash_jax.prepare", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith("usage: python -m dflash_jax.prepare")
    for key in ("target", "input", "output", "template", "max_length", "too_long", "workers", "inspect"):
        assert f"\n{key}=" in said


def test_the_command_which_each_worker_imports_is_light():
    heavy = "{'jax', 'transformers', 'pyarrow', 'torch'}"
    code = f"import sys, dflash_jax.prepare; print(*sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "\n"


def test_the_benchmark_compares_with_the_tokenizer_alone(tmp_path, target, capsys):
    bench = tool_files.load("bench_prepare")
    file = tiny_runs.write_conversations(tmp_path / "a.jsonl", 7, seed=1)
    assert bench.main([f"target={target}", f"input={file}", "rows=20", "workers=1"]) == 0
    alone, small, large, difference = capsys.readouterr().out.splitlines()
    cost = r"-?[\d,]+ ktok/s, -?[\d.]+ core-seconds a million tokens"
    ratio = r"-?[\d.]+ of the tokenizer alone"
    memory = r"peak memory \d\d+ MB, each worker 0 MB"
    assert re.fullmatch(rf"tokenizer alone, \d+ cores: {cost}", alone)
    for line, rows in ((small, 20), (large, 80)):
        name = rf"prepare, 1 workers, {rows} rows in [\d.]+ s, start included"
        assert re.fullmatch(rf"{name}: {cost}; {ratio}; {memory}", line)
    assert re.fullmatch(rf"without the start \(their difference\): {cost}; {ratio}", difference)
