"""Loss masks token by token against hand-written pieces, with a tokenizer of single characters."""

import numpy as np
import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dflash_jax.chat.chat import Chat
from dflash_jax.errors import UserError
from dflash_jax.sources.conversations import Conversation
from dflash_jax.sources.unused import UnusedRow

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
# Like templates that strip the reasoning of all answers but those after the last question.
REWRITING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index > ns.last %}<think>{{ m.reasoning_content or 't' }}</think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
)
LAST_TURN_ONLY = "{% for m in messages[-1:] %}" + TURN + "{% endfor %}" + PROMPT
WITHOUT_CONTENT = CHATML.replace("{{ m.content }}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}")
PLAIN = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SPECIAL = ("<|im_end|>", "<|im_start|>", "<think>", "</think>", "<|call|>")


def character_tokenizer(template, *, eos="<|im_end|>", merges=(), **parts):
    """Every byte is a token, but for SPECIAL and what `merges` joins; no piece ends at a white space."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    vocab = {letter: id for id, letter in enumerate(letters)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(core, name, part)
    core.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def chat_of(template, *, stop_tokens=(), arguments=None, **tokenizer):
    return Chat(character_tokenizer(template, **tokenizer), stop_tokens=stop_tokens, arguments=arguments)


def spelled(tokenizer, pieces):
    """Token ids and mask of (text, trained) pieces; a piece is one special token or plain letters."""
    tokens, mask = [], []
    for text, trained in pieces:
        letters = [text] if text in SPECIAL else [letter.replace("\n", "Ċ").replace(" ", "Ġ") for letter in text]
        tokens += [tokenizer.get_vocab()[letter] for letter in letters]
        mask += [trained] * len(letters)
    return tokens, mask


def conversation(*contents, **last):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    messages[-1] |= last
    return Conversation(tuple(messages))


def check(chat, answers, *records):
    assert len(answers.records) == len(records)
    for encoded, pieces in zip(answers.records, records, strict=True):
        tokens, mask = spelled(chat.tokenizer, pieces)
        assert encoded.tokens.dtype == np.int32
        assert encoded.loss_mask.dtype == bool
        assert encoded.tokens.tolist() == tokens
        assert encoded.loss_mask.tolist() == mask


def refused(chat, row, reason, *, match, **how):
    with pytest.raises(UnusedRow, match=match) as caught:
        chat.encode(row, **how)
    assert caught.value.reason == reason
    assert "\n" not in caught.value.detail


USER = (("<|im_start|>", False), ("user\nhi", False), ("<|im_end|>", False), ("\n", False))
HEADER = (("<|im_start|>", False), ("assistant\n", False))
CLOSED = (("<|im_end|>", True), ("\n", False))
CALL = {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}


def answered(text, *, trained=True):
    return [*USER, *HEADER, (text, trained), ("<|im_end|>", trained), ("\n", False)]


def test_every_answer_is_trained_with_its_end_of_turn_token():
    chat = chat_of(CHATML)
    system = {"role": "system", "content": "s"}
    row = Conversation((system, *conversation("hi", "yes", "hi", "no").messages))
    start = [("<|im_start|>", False), ("system\ns", False), ("<|im_end|>", False), ("\n", False)]
    answers = chat.encode(row)
    check(chat, answers, [*start, *answered("yes"), *answered("no")])
    assert (answers.split, answers.cut, answers.notes) == (False, False, ())


def test_truncated_answer_leaves_its_end_of_turn_token_untrained():
    chat = chat_of(CHATML)
    expected = [*USER, *HEADER, ("yes", True), ("<|im_end|>", False), ("\n", False)]
    check(chat, chat.encode(conversation("hi", "yes", truncated=True)), expected)


def test_an_answer_of_weight_zero_is_context_only():
    chat = chat_of(CHATML)
    row = Conversation(conversation("hi", "yes", weight=0).messages + conversation("hi", "no", weight=1).messages)
    check(chat, chat.encode(row), [*answered("yes", trained=False), *answered("no")])


def test_training_stops_at_the_first_end_of_turn_token():
    chat = chat_of(CHATML)
    expected = [
        *USER,
        *HEADER,
        ("a", True),
        ("<|im_end|>", True),
        ("b", False),
        ("<|im_end|>", False),
        ("\n", False),
    ]
    check(chat, chat.encode(conversation("hi", "a<|im_end|>b")), expected)


def test_what_follows_the_last_trained_answer_is_left_out():
    chat = chat_of(CHATML)
    check(chat, chat.encode(conversation("hi", "yes", "hi")), answered("yes"))
    check(chat, chat.encode(conversation("hi", "yes", "hi", "no", weight=0)), answered("yes"))


def test_any_stop_token_ends_an_answer():
    template = CHATML.replace("<|im_end|>", "{{ '<|call|>' if m.tool_calls else '<|im_end|>' }}")
    row = conversation("hi", "call f", **CALL)
    refused(
        chat_of(template), row, "unverified", match=r"messages\[1\]: .*no token that ends one \('<\|im_end\|>'\)"
    )
    tokenizer = character_tokenizer(template)
    chat = Chat(tokenizer, stop_tokens=[tokenizer.convert_tokens_to_ids("<|call|>")])
    check(chat, chat.encode(row), [*USER, *HEADER, ("call f", True), ("<|call|>", True), ("\n", False)])


def test_a_stop_token_that_the_next_message_holds_ends_no_answer():
    row = conversation("hi", "yes", "<|im_end|>", "no<|im_end|>")
    refused(chat_of(PLAIN), row, "unverified", match=r"messages\[1\]: the chat template closes the answer with no")


def test_prompt_ends_with_the_header_of_the_answer():
    chat = chat_of(CHATML)
    prompt = chat.prompt(conversation("hi").messages)
    assert prompt.dtype == np.int32
    assert prompt.tolist() == spelled(chat.tokenizer, [*USER, *HEADER])[0]


THOUGHT = (("<think>", True), ("t", True), ("</think>", True))


def test_a_template_that_rewrites_earlier_answers_makes_several_records():
    chat = chat_of(REWRITING)
    last = [*USER, *HEADER, *THOUGHT, ("no", True), *CLOSED]
    answers = chat.encode(conversation("hi", "yes", "hi", "no"))
    check(
        chat, answers, [*USER, *HEADER, *THOUGHT, ("yes", True), *CLOSED], [*answered("yes", trained=False), *last]
    )
    assert answers.split
    only = chat.encode(conversation("hi", "yes", "hi", "no"), last_turn_only=True)
    check(chat, only, [*answered("yes", trained=False), *last])
    assert not only.split


def test_answers_that_see_each_other_unchanged_share_a_record():
    messages = conversation("hi", "a").messages + conversation("hi", "b").messages[1:]
    row = Conversation(messages + conversation("hi", "c").messages)
    chat = chat_of(REWRITING)
    first = [*USER, *HEADER, *THOUGHT, ("a", True), *CLOSED, *HEADER, *THOUGHT, ("b", True), *CLOSED]
    second = [*answered("a", trained=False), *HEADER, ("b", False), ("<|im_end|>", False), ("\n", False)]
    check(chat, chat.encode(row), first, [*second, *USER, *HEADER, *THOUGHT, ("c", True), *CLOSED])


# The thoughts before a call are gone once there is an answer, though the target saw them when it wrote the answer.
DROPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and (add_generation_prompt or not messages[-1].final) %}"
    "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
)


def test_an_answer_follows_the_prompt_that_the_target_saw():
    call = {"role": "assistant", "content": "c", "reasoning_content": "t"}
    result = {"role": "tool", "content": "r"}
    messages = (*conversation("hi").messages, call, result)
    seen = [*USER, *HEADER, *THOUGHT, ("c", True), *CLOSED]
    seen += [("<|im_start|>", False), ("tool\nr", False), ("<|im_end|>", False), ("\n", False)]
    chat = chat_of(DROPPING)
    row = Conversation((*messages, {"role": "assistant", "content": "yes", "final": True}))
    check(chat, chat.encode(row), [*seen, *HEADER, ("yes", True), *CLOSED])
    # The turn before it stands there twice.
    row = Conversation((*messages, call, result, {"role": "assistant", "content": "yes", "final": True}))
    refused(
        chat, row, "unverified", match=r"messages\[5\]: its prompt goes on with '<think>t.* renders 'c<\|im_end"
    )


def test_a_template_that_drops_earlier_turns_or_the_answer_is_refused():
    refused(
        chat_of(LAST_TURN_ONLY), conversation("hi", "yes"), "unverified", match=r"its prompt goes on with 'user"
    )
    refused(
        chat_of(WITHOUT_CONTENT), conversation("hi", "yes"), "unverified", match="leaves out the answer's text"
    )
    refused(
        chat_of(CHATML), conversation("hi", "", **CALL), "unverified", match="leaves out the answer's tool calls"
    )
    trimming = chat_of(CHATML.replace("{{ m.content }}", "{{ m.content | trim | replace('\n\n', '\n') }}"))
    check(trimming, trimming.encode(conversation("hi", " yes\n\nno ")), answered("yes\nno"))


def test_tokens_that_lie_on_both_sides_of_an_answers_beginning_are_refused():
    chat = chat_of(CHATML, merges=[("Ċ", "Ċ")])
    check(chat, chat.encode(conversation("hi", "yes")), answered("yes"))
    match = r"prompt end with 'n' 't' '\\n'; with the answer they are 'n' 't' '\\n\\n' 'y'"
    refused(chat, conversation("hi", "\nyes"), "unverified", match=match)


TRIMMED = {"post_processor": processors.ByteLevel(trim_offsets=True)}


def test_offsets_that_leave_out_white_space_hide_no_such_token():
    for template in (CHATML, PLAIN.replace(":", "\n")):
        chat = chat_of(template, merges=[("Ċ", "Ġ")], **TRIMMED)
        refused(
            chat, conversation("hi", " yes<|im_end|>"), "unverified", match=r"with the answer they are .*'\\n '"
        )
    chat = chat_of(CHATML, merges=[("Ġ", "y")], **TRIMMED)
    tokens, mask = spelled(chat.tokenizer, answered("#es"))
    tokens[tokens.index(chat.tokenizer.convert_tokens_to_ids("#"))] = chat.tokenizer.convert_tokens_to_ids("Ġy")
    (encoded,) = chat.encode(conversation("hi", " yes")).records
    assert (encoded.tokens.tolist(), encoded.loss_mask.tolist()) == (tokens, mask)


@pytest.mark.parametrize(
    ("added", "parts"),
    [
        (AddedToken("~", normalized=True, special=False), {"normalizer": normalizers.NFC()}),
        (AddedToken("~", single_word=True, special=False), {}),
        (AddedToken("<|im", special=False), {}),
        (AddedToken("<|im_start|>assistant", special=False, single_word=True), {}),
        (AddedToken("~", lstrip=True, rstrip=True, special=False), TRIMMED),
    ],
    ids=["normalised", "single word", "beginning of another", "longer than another", "stripping"],
)
def test_however_added_tokens_are_matched_what_comes_before_the_answer_is_the_prompt(added, parts):
    tokenizer = character_tokenizer(CHATML, **parts)
    tokenizer.add_tokens([added])
    chat = Chat(tokenizer, stop_tokens=())
    # A stripping token at the beginning of an answer would swallow the end of its header.
    begin = "a ~" if added.lstrip else "~ "
    row = conversation(
        "e\u0301 ~ <|im_start|>assistant", begin + "e\u0301<|im", "a~b<|im_start|>assistants", "yes ~"
    )
    (encoded,) = chat.encode(row, max_length=1000).records
    trained = np.zeros(len(encoded.tokens), bool)
    for turn in (1, 3):
        before = chat.prompt(row.messages[:turn])
        assert encoded.tokens[: len(before)].tolist() == before.tolist()
        after = tokenizer(tokenizer.apply_chat_template(row.messages[: turn + 1], tokenize=False))["input_ids"]
        trained[len(before) : len(after) - 1] = True
    assert encoded.tokens.tolist() == after
    assert encoded.loss_mask.tolist() == trained.tolist()


def test_a_long_conversation_is_cut_after_the_last_answer_that_fits():
    chat = chat_of(CHATML)
    row = conversation("hi", "yes", "hi", "no")
    lengths = [len(spelled(chat.tokenizer, answered("yes") + more)[0]) for more in ([], answered("no"))]
    assert lengths == [26, 51]
    for limit, cut in ((51, False), (50, True), (26, True)):
        answers = chat.encode(row, max_length=limit)
        check(chat, answers, answered("yes") + ([] if cut else answered("no")))
        assert answers.cut == cut
    refused(chat, row, "too long", max_length=25, match="no answer of two tokens ends within 25 of 51 or more")
    refused(chat, row, "too long", max_length=50, too_long="drop", match="or cut what is too long")
    refused(chat, row, "too long", max_length=50, last_turn_only=True, match="within 50 of 51 or more")


def test_of_several_records_only_those_that_are_too_long_go():
    chat = chat_of(REWRITING)
    row = Conversation(
        (*conversation("hi", "yes", reasoning_content="t" * 30).messages, *conversation("hi", "no").messages)
    )
    for too_long in ("cut", "drop"):
        answers = chat.encode(row, max_length=54, too_long=too_long)
        check(chat, answers, [*answered("yes", trained=False), *USER, *HEADER, *THOUGHT, ("no", True), *CLOSED])
        assert answers.split
        assert answers.cut


def tokenised_by(chat, monkeypatch):
    """The texts that the chat's tokenizer gets from now on."""
    texts, ids = [], chat._vocabulary.ids
    for name in ("ids", "ids_of_short"):
        monkeypatch.setattr(chat._vocabulary, name, lambda text: texts.append(text) or ids(text))
    return texts


def test_a_monster_is_neither_tokenised_nor_rendered_to_its_end(monkeypatch):
    chat = chat_of(CHATML)
    texts, renders = tokenised_by(chat, monkeypatch), []
    render = chat.tokenizer.apply_chat_template
    monkeypatch.setattr(
        chat.tokenizer, "apply_chat_template", lambda *a, **k: renders.append(1) or render(*a, **k)
    )
    row = conversation(*("hi", "yes") * 100, "hi", "x" * 100_000)
    answers = chat.encode(row, max_length=60)
    check(chat, answers, [*answered("yes"), *answered("yes")])
    assert answers.cut
    assert max(map(len, texts)) <= 61 * len("<|im_start|>")
    assert len(renders) < 10
    refused(chat, row, "too long", max_length=60, too_long="drop", match="within 60 of")


def test_only_the_header_of_an_answer_is_tokenised_again(monkeypatch):
    chat = chat_of(CHATML)
    texts = tokenised_by(chat, monkeypatch)
    chat.encode(conversation("hi", "yes", "hi", "no"))
    assert texts[1:] == ["<|im_start|>assistant\n"] * 2


def test_truncation_and_padding_that_a_tokenizer_asks_for_are_off():
    tokenizer = character_tokenizer(CHATML)
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=100)
    chat = Chat(tokenizer, stop_tokens=())
    check(chat, chat.encode(conversation("hi", "yes")), answered("yes"))


def test_a_conversation_that_teaches_nothing_is_not_used():
    chat = chat_of(CHATML)
    refused(chat, conversation("hi"), "no answer", match="no assistant message")
    refused(chat, conversation("hi", "yes", weight=0), "no answer", match="weight 1")
    refused(chat, conversation("hi", ""), "no anchor", match="no two trained tokens")
    refused(chat, conversation("hi", "y", truncated=True), "no anchor", match="no two trained tokens")
    # Beside another answer an empty one is trained as the target gave it.
    check(chat, chat.encode(conversation("hi", "", "hi", "no")), [*answered(""), *answered("no")])


def test_notes_name_reasoning_that_is_lost_or_made_up():
    lost = chat_of(CHATML).encode(conversation("hi", "yes", reasoning_content="because"))
    assert lost.notes == ("reasoning left out",)
    kept = chat_of(REWRITING).encode(conversation("hi", "yes", reasoning_content="because"))
    assert kept.notes == ()
    blank = chat_of(REWRITING.replace("or 't'", "or '\n\n'"))
    assert blank.encode(conversation("hi", "yes")).notes == ("empty reasoning trained",)
    assert blank.encode(conversation("hi", "yes", reasoning_content="t")).notes == ()
    written = chat_of(CHATML).encode(conversation("hi", "<think>\n\n</think>\n\nyes"))
    assert written.notes == ()


def test_faults_of_the_template():
    row = conversation("hi", "yes")
    with pytest.raises(UserError, match="no chat template"):
        chat_of(None)
    with pytest.raises(UserError, match=r"template\.tokenize is not an argument"):
        chat_of(CHATML, arguments={"tokenize": True})
    raising = chat_of("{{ raise_exception('no users') }}")
    refused(raising, row, "template", match=r"refuses .*\['user', 'assistant'\]: no users")
    refused(
        chat_of("{{ messages[0].content + 1 }}"), row, "template", match=r"\['user', 'assistant'\]: can only conc"
    )
    refused(chat_of(CHATML, eos="<think>"), row, "unverified", match=r"no token that ends one \('<think>'\)")
    begins = Conversation(({"role": "assistant", "content": "x"},))
    refused(chat_of(CHATML), begins, "template", match="begins with an assistant")


def test_arguments_and_tools_reach_the_template_but_our_own_keys_do_not():
    template = "{{ shout }}{{ tools[0].name if tools }}{{ messages[-1].weight }}" + CHATML
    chat = chat_of(template, arguments={"shout": "hey"})
    tools = ({"name": "f"},)
    row = conversation("hi", "yes", weight=1)
    check(chat, chat.encode(Conversation(row.messages, tools=tools)), [("heyf", False), *answered("yes")])
    prompt = spelled(chat.tokenizer, [("heyf", False), *USER, *HEADER])[0]
    assert chat.prompt(row.messages[:1], tools).tolist() == prompt


def test_digests_tell_templates_arguments_and_tokenizers_apart():
    chats = [chat_of(CHATML), chat_of(PLAIN), chat_of(CHATML, arguments={"a": 1})]
    chats += [chat_of(CHATML, merges=[("a", "b")])]
    assert len({chat.template_digest for chat in chats}) == 3
    assert len({chat.tokenizer_digest for chat in chats}) == 2
    assert chat_of(CHATML).tokenizer_digest == chats[0].tokenizer_digest
    assert chats[0].vocab == 256 + len(SPECIAL)
