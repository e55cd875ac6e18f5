"""Loss masks token by token against hand-written pieces, with a tokenizer of single characters."""

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dflash_jax.data.chat import encode_conversation, encode_prompt
from dflash_jax.errors import UserError

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
# Like templates that strip the reasoning of all answers but the last.
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
)
LAST_TURN_ONLY = "{% for m in messages[-1:] %}" + TURN + "{% endfor %}" + PROMPT
SPECIAL = ("<|im_end|>", "<|im_start|>", "<think>")


def character_tokenizer(template, *, eos="<|im_end|>"):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def spelled(tokenizer, pieces):
    """Token ids and mask of (text, trained) pieces; a piece is one special token or plain letters."""
    tokens, mask = [], []
    for text, trained in pieces:
        letters = [text] if text in SPECIAL else [letter.replace("\n", "Ċ") for letter in text]
        tokens += [tokenizer.get_vocab()[letter] for letter in letters]
        mask += [trained] * len(letters)
    return tokens, mask


def chat(*contents, **last):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    messages[-1] |= last
    return messages


def check(encoded, tokenizer, pieces):
    tokens, mask = spelled(tokenizer, pieces)
    assert encoded.tokens.dtype == np.int32
    assert encoded.loss_mask.dtype == bool
    assert encoded.tokens.tolist() == tokens
    assert encoded.loss_mask.tolist() == mask


USER = (("<|im_start|>", False), ("user\nhi", False), ("<|im_end|>", False), ("\n", False))
HEADER = (("<|im_start|>", False), ("assistant\n", False))


def test_every_answer_is_trained_with_its_end_of_turn_token():
    tokenizer = character_tokenizer(CHATML)
    messages = [{"role": "system", "content": "s"}, *chat("hi", "yes", "hi", "no")]
    expected = [("<|im_start|>", False), ("system\ns", False), ("<|im_end|>", False), ("\n", False)]
    for answer in ("yes", "no"):
        expected += [*USER, *HEADER, (answer, True), ("<|im_end|>", True), ("\n", False)]
    check(encode_conversation(tokenizer, messages), tokenizer, expected)


def test_truncated_answer_leaves_its_end_of_turn_token_untrained():
    tokenizer = character_tokenizer(CHATML)
    expected = [*USER, *HEADER, ("yes", True), ("<|im_end|>", False), ("\n", False)]
    check(encode_conversation(tokenizer, chat("hi", "yes", truncated=True)), tokenizer, expected)


def test_an_answer_of_weight_zero_is_context_only():
    tokenizer = character_tokenizer(CHATML)
    example, asked = chat("hi", "yes"), chat("hi", "no")
    example[1]["weight"] = 0
    expected = [*USER, *HEADER, ("yes", False), ("<|im_end|>", False), ("\n", False)]
    expected += [*USER, *HEADER, ("no", True), ("<|im_end|>", True), ("\n", False)]
    check(encode_conversation(tokenizer, [*example, *asked]), tokenizer, expected)


def test_training_stops_at_the_first_end_of_turn_token():
    tokenizer = character_tokenizer(CHATML)
    end = ("<|im_end|>", True)
    expected = [*USER, *HEADER, ("a", True), end, ("b", False), ("<|im_end|>", False), ("\n", False)]
    check(encode_conversation(tokenizer, chat("hi", "a<|im_end|>b")), tokenizer, expected)


def test_conversation_without_an_answer_trains_nothing():
    tokenizer = character_tokenizer(CHATML)
    check(encode_conversation(tokenizer, chat("hi")), tokenizer, USER)


def test_prompt_ends_with_the_header_of_the_answer():
    tokenizer = character_tokenizer(CHATML)
    prompt = encode_prompt(tokenizer, chat("hi"))
    assert prompt.dtype == np.int32
    assert prompt.tolist() == spelled(tokenizer, [*USER, *HEADER])[0]


def test_template_that_rewrites_earlier_answers_is_refused_unless_there_are_none():
    tokenizer = character_tokenizer(REWRITING)
    with pytest.raises(UserError, match=r"messages\[1\].* rewrites history.*'<think>yes.*it is 'yes"):
        encode_conversation(tokenizer, chat("hi", "yes", "hi", "no"))
    expected = [*USER, *HEADER, ("<think>", True), ("yes", True), ("<|im_end|>", True), ("\n", False)]
    check(encode_conversation(tokenizer, chat("hi", "yes")), tokenizer, expected)


def test_template_that_drops_earlier_turns_is_refused():
    with pytest.raises(UserError, match="rewrites history"):
        encode_conversation(character_tokenizer(LAST_TURN_ONLY), chat("hi", "yes"))


@pytest.mark.parametrize(
    ("template", "eos", "message"),
    [
        (None, "<|im_end|>", "no chat template"),
        (CHATML, "<think>", r"messages\[1\]: .*closes an answer without eos_token \('<think>'\)"),
        ("{{ raise_exception('no users') }}", "<|im_end|>", r"refuses .*\['user', 'assistant'\]: no users"),
    ],
)
def test_faults_of_the_template(template, eos, message):
    with pytest.raises(UserError, match=message):
        encode_conversation(character_tokenizer(template, eos=eos), chat("hi", "yes"))


def test_conversation_that_begins_with_an_answer_is_refused():
    with pytest.raises(UserError, match="begins with an assistant"):
        encode_conversation(character_tokenizer(CHATML), [{"role": "assistant", "content": "x"}])
