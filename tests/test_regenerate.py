"""The target's own answers, against transformers' greedy generation in PyTorch from the same folder."""

import json
import signal

import jax
import numpy as np
import pytest
import tiny_runs
from tiny_models import quick

from dflash_jax import regenerate
from dflash_jax.answering.decoding import BatchDecoder, padded_length
from dflash_jax.errors import UserError

LIMIT = 24


@pytest.fixture(autouse=True)
def quick_compilation(monkeypatch):
    monkeypatch.setattr(jax, "jit", quick)


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A random target that answers in ASCII letters and ends its turns now and then."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tiny_runs.save_chat_llama(tmp_path_factory.mktemp("talker"), num_hidden_layers=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    letters = tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    keep = torch.zeros(len(model.lm_head.weight), 1)
    keep[letters] = 1.0
    keep[tokenizer.eos_token_id] = 2.0
    with torch.no_grad():
        model.lm_head.weight *= keep
    model.save_pretrained(path)
    return path, model, tokenizer


@pytest.fixture
def decoded(monkeypatch):
    """The (conversation, turn) of every answer that is decoded."""
    asked = []
    decode = BatchDecoder.__call__

    def counted(self, batch, turn):
        asked.extend((question.index, turn) for question in batch if not question.known)
        return decode(self, batch, turn)

    monkeypatch.setattr(BatchDecoder, "__call__", counted)
    return asked


def users(*texts):
    return [{"role": "user", "content": text} for text in texts]


def several(count=10, turns=3, *, seed=3):
    """Conversations of so many open questions; the first begins with an answer that somebody else wrote."""
    rng = np.random.default_rng(seed)
    asked = [users(*(" ".join(rng.choice(tiny_runs.WORDS, 3)) for _ in range(turns))) for _ in range(count)]
    asked[0][:0] = [*users("for example"), {"role": "assistant", "content": "an example", "weight": 0}]
    return asked


def said_by_torch(model, tokenizer, messages, stop=None):
    """(text, whether it ended by itself) of transformers' greedy answer."""
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    stop = stop or [tokenizer.eos_token_id]
    options = {"do_sample": False, "max_new_tokens": LIMIT, "eos_token_id": stop}
    out = model.generate(**prompt, **options, pad_token_id=0)[0, prompt["input_ids"].shape[1] :].tolist()
    ended = out[-1] in stop
    return tokenizer.decode(out[:-1] if ended else out), ended


def command(path, folder, conversations, *more, limit=LIMIT):
    folder.mkdir(exist_ok=True)
    prompts, output = folder / "prompts.jsonl", folder / "out.jsonl"
    prompts.write_text(
        "".join(json.dumps({"set": "s", "messages": messages}) + "\n" for messages in conversations)
    )
    return [f"target={path}", f"prompts={prompts}", f"output={output}", f"max_new_tokens={limit}", *more]


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def run(path, folder, conversations, *more, limit=LIMIT):
    assert regenerate.main(command(path, folder, conversations, *more, limit=limit)) == 0
    return [line["messages"] for line in lines(folder / "out.jsonl")]


def answers(dialogues):
    return [
        (dialogue[:at], message)
        for dialogue in dialogues
        for at, message in enumerate(dialogue)
        if message["role"] == "assistant" and message.get("weight", 1)
    ]


def test_each_turn_is_answered_as_transformers_would_after_the_turns_before(talker, tmp_path):
    path, model, tokenizer = talker
    asked = several()
    dialogues = run(path, tmp_path, asked, "batch_size=4")
    turns = []
    for before, message in answers(dialogues):
        text, ended = said_by_torch(model, tokenizer, before)
        assert message["content"] == text
        assert message.get("truncated", False) is not ended
        turns.append(ended)
    for questions, dialogue in zip(asked, dialogues, strict=True):
        assert dialogue[0] == questions[0]
        if not dialogue[-1].get("truncated"):
            assert [message for message in dialogue if message["role"] == "user"] == [
                message for message in questions if message["role"] == "user"
            ]
    assert dialogues[0][1] == asked[0][1], "a given answer was changed"
    assert turns.count(True) > len(asked), "hardly a second turn was reached"
    assert turns.count(False) > 0, "no answer was cut"
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        *("out.jsonl", "out.jsonl.settings.json", "prompts.jsonl")
    ]


def test_every_token_that_the_targets_files_name_ends_an_answer(talker, tmp_path):
    path, model, tokenizer = talker
    both = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("d")]
    folder = tmp_path / "talker"
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": both}))
    found = answers(run(folder, tmp_path / "out", several(6, 1)))
    for before, message in found:
        text, ended = said_by_torch(model, tokenizer, before, both)
        assert (message["content"], message.get("truncated", False)) == (text, not ended)
        assert "d" not in text
    without = [said_by_torch(model, tokenizer, before)[0] for before, _ in found]
    assert without != [message["content"] for _, message in found]
    assert lines_of_settings(tmp_path / "out")["stop_tokens"] == sorted(both)


def lines_of_settings(folder):
    return json.loads((folder / "out.jsonl.settings.json").read_text())


def test_a_conversation_ends_at_a_cut_answer(talker, tmp_path):
    path, *_ = talker
    (dialogue,) = run(path, tmp_path, [users("alpha beta", "gamma", "delta")], limit=1)
    assert [message["role"] for message in dialogue] == ["user", "assistant"]
    assert dialogue[1]["truncated"] is True
    assert lines_of_settings(tmp_path)["counts"] == {
        "conversations": 1,
        "answers": 1,
        "truncated": 1,
        "answer_tokens": 1,
        "other_prompts": 0,
        "failed": 0,
    }


SAMPLED = ("temperature=0.5", "top_p=0.95", "top_k=3", "seed=4")


@pytest.mark.parametrize("how", [(), SAMPLED], ids=["greedy", "sampled"])
def test_answers_do_not_depend_on_batches_or_devices(talker, tmp_path, how):
    path, *_ = talker
    asked = several(7, 1)
    asked[3] = asked[4]
    one = run(path, tmp_path / "one", asked, "batch_size=32", *how)
    assert run(path, tmp_path / "small", asked, "batch_size=3", *how) == one
    assert run(path, tmp_path / "mesh", asked, "batch_size=4", "mesh=cpu8", *how) == one
    assert (one[3] == one[4]) is not bool(how), "equal prompts, sampled, must differ; greedy, they must not"
    assert lines_of_settings(tmp_path / "mesh")["mesh"] == "cpu8"


def test_another_seed_gives_other_answers(talker, tmp_path):
    path, *_ = talker
    asked = several(3, 1)
    found = [run(path, tmp_path / seed, asked, "temperature=1", f"seed={seed}") for seed in "12"]
    assert found[0] != found[1]
    settings = lines_of_settings(tmp_path / "2")
    assert (settings["temperature"], settings["seed"], settings["top_p"]) == (1.0, 2, 1.0)


class Killed(BaseException):
    """Ends a run as abruptly as a signal."""


def killed_after(monkeypatch, batches):
    """The next run ends when that many batches were decoded, and this one is not written down."""
    decode, count = BatchDecoder.__call__, iter(range(1000))

    def failing(self, batch, turn):
        found = decode(self, batch, turn)
        if next(count) == batches:
            raise Killed
        return found

    monkeypatch.setattr(BatchDecoder, "__call__", failing)


def test_after_a_kill_the_same_command_continues(talker, tmp_path, monkeypatch, decoded):
    path, *_ = talker
    asked = several(5, 2)
    whole = run(path, tmp_path / "whole", asked, "batch_size=2", *SAMPLED, limit=8)
    needed = sorted(decoded)
    assert len(needed) == len(set(needed)) == len(answers(whole))
    decoded.clear()
    arguments = command(path, tmp_path / "killed", asked, "batch_size=2", *SAMPLED, limit=8)
    partial = tmp_path / "killed" / "out.jsonl.partial"
    for batches, torn in ((0, 0), (1, 10), (2, 1)):
        with monkeypatch.context() as patch:
            killed_after(patch, batches)
            with pytest.raises(Killed):
                regenerate.main(arguments)
        content = partial.read_bytes()
        partial.write_bytes(content[: len(content) - torn])
        kept = partial.read_bytes().count(b"\n") - 1
        assert len(decoded) - kept <= 2 + bool(torn), "more was lost than the batch that nobody wrote down"
        del decoded[kept:]
    assert regenerate.main(arguments) == 0
    assert (tmp_path / "killed" / "out.jsonl").read_text() == (tmp_path / "whole" / "out.jsonl").read_text()
    assert sorted(decoded) == needed
    assert not partial.exists()
    settings = [lines_of_settings(tmp_path / name) for name in ("whole", "killed")]
    assert settings[0].pop("prompt_files") != settings[1].pop("prompt_files")
    assert settings[0] == settings[1]


def test_a_signal_lets_the_batch_end_and_the_command_continues(talker, tmp_path, monkeypatch, decoded, capsys):
    path, *_ = talker
    asked = several(5, 1)
    arguments = command(path, tmp_path, asked, "batch_size=2")
    decode = BatchDecoder.__call__

    def signalled(self, batch, turn):
        signal.raise_signal(signal.SIGTERM)
        return decode(self, batch, turn)

    with monkeypatch.context() as patch:
        patch.setattr(BatchDecoder, "__call__", signalled)
        assert regenerate.main(arguments) == 1
    assert "stopped by SIGTERM with 2 answers; the same command continues" in capsys.readouterr().out
    assert not (tmp_path / "out.jsonl").exists()
    assert regenerate.main(arguments) == 0
    assert "continuing with 2 answers" in capsys.readouterr().out
    assert sorted(decoded) == [(index, 0) for index in range(5)]
    assert len(lines(tmp_path / "out.jsonl")) == 5


def test_a_run_that_was_killed_before_it_wrote_its_output_loads_nothing(talker, tmp_path, monkeypatch):
    path, *_ = talker
    arguments = command(path, tmp_path, several(2, 1))
    with monkeypatch.context() as patch:
        patch.setattr(regenerate, "write_output", lambda *_, **__: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            regenerate.main(arguments)
    monkeypatch.setattr(regenerate.TargetFiles, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    assert regenerate.main(arguments) == 0
    assert len(answers([line["messages"] for line in lines(tmp_path / "out.jsonl")])) == 2


def test_a_run_of_other_settings_is_not_continued(talker, tmp_path, monkeypatch):
    path, *_ = talker
    asked = several(2, 1)
    with monkeypatch.context() as patch:
        killed_after(patch, 0)
        with pytest.raises(Killed):
            regenerate.main(command(path, tmp_path, asked))
    for more, limit, said in (
        (("temperature=1",), LIMIT, r"temperature=0\.0, now 1\.0"),
        ((), 25, "max_new_tokens=24, now 25"),
        (("dtype=bfloat16",), LIMIT, "dtype=float32, now bfloat16"),
        (("template.thinking=true",), LIMIT, "template="),
    ):
        with pytest.raises(UserError, match=said):
            regenerate.main(command(path, tmp_path, asked, *more, limit=limit))
    with pytest.raises(UserError, match="begun with prompts_digest="):
        regenerate.main(command(path, tmp_path, asked[1:]))
    assert regenerate.main(command(path, tmp_path, asked, "batch_size=1")) == 0


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_tools_reasoning_and_sets_go_through(talker, tmp_path):
    path, *_ = talker
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    given = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "what is it"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "42"},
    ]
    line = {"set": "with tools", "messages": given, "tools": TOOLS}
    prompts, output = tmp_path / "prompts.json", tmp_path / "deep" / "out.jsonl"
    prompts.write_text(json.dumps([line]))
    assert regenerate.main([f"target={path}", f"prompts={prompts}", f"output={output}"]) == 0
    (found,) = lines(output)
    assert found | {"messages": found["messages"][:4]} == line
    assert [message["role"] for message in found["messages"][4:]] == ["assistant"]


REFUSING = tiny_runs.CHAT.replace(
    "{% for m in messages %}",
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('never') }}{% endif %}",
)


def test_what_the_template_refuses_is_told_and_can_be_given_again(talker, tmp_path):
    path, *_ = talker
    folder = tmp_path / "talker"
    folder.mkdir()
    for file in path.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for file in folder.glob("chat_template*"):
        file.write_text(REFUSING)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    if "chat_template" in tokenizer:
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer | {"chat_template": REFUSING}))
    asked = [users("no"), users("one"), users("two", "no"), users("three")]
    with pytest.raises(UserError, match=r"none of the first conversations can be asked; template: .*never"):
        regenerate.main(command(folder, tmp_path, [users("no"), users("no")]))
    dialogues = run(folder, tmp_path, asked)
    failed = lines(tmp_path / "out.jsonl.failed.jsonl")
    # The second question of the third conversation is not reached where the first answer was cut.
    two = dialogues[1][0]["content"] == "two"
    assert [dialogue[0]["content"] for dialogue in dialogues] == ["one", *(["two"] if two else []), "three"]
    assert [line["index"] for line in failed] == ([0] if two else [0, 2])
    assert "never" in failed[0]["reason"]
    assert failed[0]["messages"] == asked[0]
    assert lines_of_settings(tmp_path)["counts"]["failed"] == len(failed)
    again = tmp_path / "again.jsonl"
    arguments = [f"target={path}", f"prompts={tmp_path / 'out.jsonl.failed.jsonl'}", f"output={again}"]
    assert regenerate.main(arguments) == 0
    assert len(lines(again)) == len(failed)


def test_prompts_of_several_files_are_answered_in_their_order(talker, tmp_path):
    path, *_ = talker
    for name in "ba":
        rows = [{"prompt": f"{name} {number}"} for number in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "other.jsonl").write_text(json.dumps({"prompt": "first"}) + "\n")
    output = tmp_path / "out" / "x.jsonl"
    prompts = f"{tmp_path / 'other.jsonl'},{tmp_path / '[ab].jsonl'}"
    assert regenerate.main([f"target={path}", f"prompts={prompts}", f"output={output}"]) == 0
    assert [line["messages"][0]["content"] for line in lines(output)] == ["first", "a 0", "a 1", "b 0", "b 1"]


def test_few_lengths_are_compiled_and_at_most_half_is_padding():
    found = {length: padded_length(length) for length in range(1, 20_000)}
    assert sorted(set(found.values()))[:9] == [128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096]
    assert all(length <= room and room <= max(128, 2 * length - 2) for length, room in found.items())
    assert all(padded_length(room) == room for room in found.values())
