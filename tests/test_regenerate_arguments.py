"""Bad arguments of `regenerate`: each is told in one error, before weights are loaded or anything is written."""

import json

import pytest
import tiny_runs

from dflash_jax import regenerate
from dflash_jax.errors import UserError


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_runs.save_chat_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=1)


def users(*texts):
    return [{"role": "user", "content": text} for text in texts]


def run(path, folder, conversations, *more):
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return regenerate.main([f"target={path}", f"prompts={prompts}", f"output={folder / 'out.jsonl'}", *more])


def test_an_answered_conversation_is_refused_before_anything_is_loaded(tmp_path):
    full = [*users("hi"), {"role": "assistant", "content": "yes"}]
    with pytest.raises(UserError, match=r"conversation 2 .* is answered already"):
        run(tmp_path / "no-such-model", tmp_path, [users("hi"), full])


def test_an_existing_output_is_kept(tmp_path):
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(UserError, match="exists"):
        run(tmp_path / "no-such-model", tmp_path, [users("hi")])
    assert (tmp_path / "out.jsonl").read_text() == "mine"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("top_p=0.9",), r"top_p: found 0\.9, but temperature=0"),
        (("top_k=5",), "top_k: found 5, but temperature=0"),
        (("model=x",), "model: found 'x', but it names a model of a server"),
        (("seed=99999999999999999999",), r"seed: found 9{20}, allowed: 0 to 4294967295"),
        (("mesh=nowhere",), "mesh: nothing named 'nowhere'"),
        (("template.tokenize=true",), r"template\.tokenize is not an argument of a chat template"),
    ],
)
def test_bad_arguments_fail_before_anything_is_loaded(target, tmp_path, monkeypatch, changed, said):
    monkeypatch.setattr(regenerate.TargetFiles, "load", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(UserError, match=said):
        run(target, tmp_path, [users("hi")], *changed)
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_a_name_of_another_kind_of_file_and_a_missing_target_are_refused(tmp_path):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "hi"}\n')
    with pytest.raises(UserError, match=r"ends in \.jsonl"):
        regenerate.main(["target=x", f"prompts={prompts}", f"output={tmp_path / 'out.jsonl.gz'}"])
    with pytest.raises(UserError, match=r"^prompts: absent\.jsonl: no such file"):
        regenerate.main(["target=x", "prompts=absent.jsonl", f"output={tmp_path / 'out.jsonl'}"])
    with pytest.raises(UserError, match="target: a value is required without server="):
        regenerate.main([f"prompts={prompts}", f"output={tmp_path / 'out.jsonl'}"])
