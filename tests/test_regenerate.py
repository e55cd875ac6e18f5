"""The target's own answers, against transformers' greedy generation in PyTorch from the same folder."""

import json

import numpy as np
import pytest
import tiny_runs

from dflash_jax import regenerate
from dflash_jax.errors import UserError

LIMIT = 24


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """A random target that answers in ASCII letters and ends its turns now and then."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tiny_runs.save_chat_llama(tmp_path_factory.mktemp("talker"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    letters = tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz"))
    keep = torch.zeros(len(model.lm_head.weight), 1)
    keep[letters] = 1.0
    keep[tokenizer.eos_token_id] = 2.0
    with torch.no_grad():
        model.lm_head.weight *= keep
    model.save_pretrained(path)
    return path, model, tokenizer


def users(*texts):
    return [{"role": "user", "content": text} for text in texts]


def said_by_torch(model, tokenizer, messages):
    """(text, whether it ended by itself) of transformers' greedy answer."""
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    options = {"do_sample": False, "max_new_tokens": LIMIT, "eos_token_id": tokenizer.eos_token_id}
    out = model.generate(**prompt, **options, pad_token_id=0)[0, prompt["input_ids"].shape[1] :].tolist()
    ended = out[-1] == tokenizer.eos_token_id
    return tokenizer.decode(out[:-1] if ended else out), ended


def run(path, tmp_path, conversations, *more, limit=LIMIT):
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(
        "".join(json.dumps({"set": "s", "messages": messages}) + "\n" for messages in conversations)
    )
    arguments = [f"target={path}", f"prompts={prompts}", f"output={output}", f"max_new_tokens={limit}", *more]
    assert regenerate.main(arguments) == 0
    return [json.loads(line)["messages"] for line in output.read_text().splitlines()]


def test_each_turn_is_answered_as_transformers_would_after_the_turns_before(talker, tmp_path):
    path, model, tokenizer = talker
    rng = np.random.default_rng(3)
    asked = [users(*(" ".join(rng.choice(tiny_runs.WORDS, 3)) for _ in range(3))) for _ in range(10)]
    asked[0].insert(1, {"role": "assistant", "content": "an example", "weight": 0})
    dialogues = run(path, tmp_path, asked, "batch_size=4")
    turns = []
    for questions, dialogue in zip(asked, dialogues, strict=True):
        assert dialogue[: len(questions)][0] == questions[0]
        for at, message in enumerate(dialogue):
            if message["role"] == "assistant" and message.get("weight", 1):
                text, ended = said_by_torch(model, tokenizer, dialogue[:at])
                assert message["content"] == text
                assert message.get("truncated", False) is not ended
                turns.append(ended)
        if not dialogue[-1].get("truncated"):
            assert [message for message in dialogue if message["role"] == "user"] == [
                message for message in questions if message["role"] == "user"
            ]
    assert dialogues[0][1] == asked[0][1], "a given answer was changed"
    assert turns.count(True) > len(asked), "hardly a second turn was reached"
    assert turns.count(False) > 0, "no answer was cut"


def test_a_conversation_ends_at_a_cut_answer(talker, tmp_path):
    path, *_ = talker
    (dialogue,) = run(path, tmp_path, [users("alpha beta", "gamma", "delta")], limit=1)
    assert [message["role"] for message in dialogue] == ["user", "assistant"]
    assert dialogue[1]["truncated"] is True


def test_an_answered_conversation_is_refused_before_anything_is_loaded(tmp_path):
    full = [*users("hi"), {"role": "assistant", "content": "yes"}]
    with pytest.raises(UserError, match=r"conversation 2 .* is answered already"):
        run(tmp_path / "no-such-model", tmp_path, [users("hi"), full])


def test_an_existing_output_is_kept(tmp_path):
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(UserError, match="exists"):
        run(tmp_path / "no-such-model", tmp_path, [users("hi")])
    assert (tmp_path / "out.jsonl").read_text() == "mine"
