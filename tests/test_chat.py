"""Supervised tokens decode to exactly what the assistant says and the token that ends its turn, for every template."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from swathe.chat import ChatEncoder, TextEncoder, describe_tokenizer, load_tokenizer
from swathe.chat.messages import normalize
from swathe.errors import ConfigError, ModelError

SPECIAL = [
    "<|bos|>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|end_header|>", "<|eot|>", "</s>",
]  # fmt: skip

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|bos|>{% for m in messages %}<|header|>{{ m.role }}<|end_header|>\n\n{{ m.content | trim }}<|eot|>"
    "{% endfor %}{% if add_generation_prompt %}<|header|>assistant<|end_header|>\n\n{% endif %}"
)
MISTRAL = (
    "<|bos|>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|bos|>{% endif %}"
)
"""Without a generation prompt it writes a token that begins like one."""
HARMONY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.thinking %}<|header|>analysis<|end_header|>{{ m.thinking }}<|eot|>"
    "<|im_start|>assistant{% endif %}<|header|>final<|end_header|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
"""As gpt-oss: thinking and answer have a head each, and only the first is the prompt's."""
GENERATION = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
QWEN3 = """\
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- if m.role != 'assistant' -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- else -%}
{%- set content = m.content -%}{%- set thinking = m.reasoning_content or '' -%}
{%- if '</think>' in content -%}
{%- set thinking = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last and (loop.last or thinking) -%}
{{ '<|im_start|>assistant\n<think>\n' + thinking.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else -%}{{ '<|im_start|>assistant\n' + content }}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{%- if content or not loop.first -%}{{ '\n' }}{%- endif -%}{%- set call = call.function or call -%}
{{ '<tool_call>\n' + call.name + ' ' + (call.arguments or {}) | tojson + '\n</tool_call>' }}{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}
{%- if open_thinking -%}{{ '<think>\n' }}{%- endif -%}{%- endif -%}
"""


@pytest.fixture(scope="module")
def tokenizer():
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["the assistant says hello to the user and thinks"] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|bos|>", eos_token="<|im_end|>"
    )


def encoder(tokenizer, template, **kwargs):
    tokenizer.chat_template = template
    return ChatEncoder(tokenizer, kwargs)


def supervised(tokenizer, sample):
    """The decoded runs of supervised tokens."""
    assert not isinstance(sample, str), sample
    runs, last = [], -2
    for place in np.flatnonzero(sample.loss_mask):
        if place != last + 1:
            runs.append([])
        runs[-1].append(int(sample.input_ids[place]))
        last = place
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


def chat(*contents, first="user"):
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]


TALK = chat("the user", "hello über 日本 😀", "and", "bye\n")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["hello über 日本 😀<|im_end|>", "bye\n<|im_end|>"]),
        (GENERATION, ["hello über 日本 😀<|im_end|>", "bye\n<|im_end|>"]),
        (LLAMA3, ["hello über 日本 😀<|eot|>", "bye<|eot|>"]),
        (QWEN3, ["hello über 日本 😀<|im_end|>", "<think>\n\n</think>\n\nbye\n<|im_end|>"]),
    ],
)
def test_supervised_tokens_are_the_assistants_turns(tokenizer, template, expected):
    (sample,) = encoder(tokenizer, template)([TALK])
    assert supervised(tokenizer, sample) == expected


def test_a_template_without_generation_prompt_supervises_content_and_end(tokenizer):
    (sample,) = encoder(tokenizer, MISTRAL)([TALK])
    assert [text.lstrip() for text in supervised(tokenizer, sample)] == [
        "hello über 日本 😀</s>", "bye\n</s>",
    ]  # fmt: skip


def test_ids_are_those_of_the_rendered_text(tokenizer):
    (sample,) = encoder(tokenizer, LLAMA3)([TALK])
    assert sample.input_ids.tolist() == tokenizer.apply_chat_template(TALK)["input_ids"]
    assert sample.input_ids[0] == tokenizer.bos_token_id
    assert sample.input_ids[1] != tokenizer.bos_token_id
    assert sample.input_ids.dtype == np.int32


def test_thinking_that_the_template_takes_out_of_earlier_turns_is_not_looked_for(tokenizer):
    talk = chat(
        "q1", "<think>\nlong thoughts\n</think>\n\nanswer one", "q2", "<think>\nmore\n</think>\n\nanswer two"
    )  # fmt: skip
    (sample,) = encoder(tokenizer, QWEN3)([talk])
    text = tokenizer.decode(sample.input_ids)
    assert "long thoughts" not in text
    assert "more" in text
    assert supervised(tokenizer, sample) == [
        "answer one<|im_end|>", "<think>\nmore\n</think>\n\nanswer two<|im_end|>",
    ]  # fmt: skip


def test_a_prefix_difference_would_have_been_wrong_for_this_template(tokenizer):
    """The negative control: earlier turns render differently once another turn follows."""
    talk = chat("q1", "<think>\na\n</think>\n\nb", "q2", "c")
    tokenizer.chat_template = QWEN3
    short = tokenizer.apply_chat_template(talk[:2], tokenize=False)
    assert not tokenizer.apply_chat_template(talk, tokenize=False).startswith(short)


def test_thinking_in_its_own_field_is_followed_too(tokenizer):
    talk = chat("q1", "one", "q2", "two")
    talk[1]["reasoning_content"] = "early"
    talk[3]["reasoning_content"] = "late"
    (sample,) = encoder(tokenizer, QWEN3)([talk])
    assert supervised(tokenizer, sample) == [
        "one<|im_end|>", "<think>\nlate\n</think>\n\ntwo<|im_end|>",
    ]  # fmt: skip


def test_a_generation_prompt_that_opens_the_thinking_is_no_answer(tokenizer):
    talk = chat("q1", "one", "q2", "<think>\nwhy\n</think>\n\ntwo")
    (sample,) = encoder(tokenizer, QWEN3, open_thinking=True)([talk])
    assert supervised(tokenizer, sample) == [
        "one<|im_end|>", "why\n</think>\n\ntwo<|im_end|>",
    ]  # fmt: skip


def test_tool_calls_between_content_and_end_are_the_assistants_words(tokenizer):
    talk = chat("q", "let me see", "and", "done")
    talk[1]["tool_calls"] = [{"name": "search"}]
    (sample,) = encoder(tokenizer, QWEN3)([talk])
    assert supervised(tokenizer, sample)[0] == (
        "let me see\n<tool_call>\nsearch {}\n</tool_call><|im_end|>"
    )


@pytest.mark.parametrize("content", [None, "", "\n"])
@pytest.mark.parametrize("thinking", [None, "why"])
def test_calls_without_content_are_supervised_alone(tokenizer, content, thinking):
    """Qwen's templates write a line end between content and call, and none where there is no content."""
    call = {"type": "function", "function": {"name": "search", "arguments": {"a": 1}}}
    talk = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": content, "tool_calls": [call, {"name": "add"}]}
        | ({"reasoning_content": thinking} if thinking else {}),
        {"role": "tool", "content": "a"},
        {"role": "assistant", "content": "done"},
    ]
    (sample,) = encoder(tokenizer, QWEN3)([talk])
    called, said = supervised(tokenizer, sample)
    assert called == (
        ("<think>\nwhy\n</think>\n\n" if thinking else "")
        + (content if content and not thinking else "")
        + ("\n" if content else "")
        + '<tool_call>\nsearch {"a": 1}\n</tool_call>\n<tool_call>\nadd {}\n</tool_call><|im_end|>'
    )
    assert said.endswith("done<|im_end|>")


def test_an_empty_list_of_calls_is_no_call(tokenizer):
    """Llama 3.1 takes the field for a call, and Mistral's templates begin one."""
    asks = "{% for m in messages %}{% if 'tool_calls' in m %}{{ raise_exception('a call') }}{% endif %}{% endfor %}"
    talk = chat("q", "hello")
    talk[1]["tool_calls"] = []
    (sample,) = encoder(tokenizer, asks + CHATML)([talk])
    assert supervised(tokenizer, sample) == ["hello<|im_end|>"]


@pytest.mark.parametrize("template", [PHI3, MISTRAL])
def test_calls_that_a_template_does_not_write_are_no_empty_answers(tokenizer, template):
    talk = chat("q", "", "and", "done")
    talk[1]["tool_calls"] = [{"name": "search"}]
    (sample,) = encoder(tokenizer, template)([talk])
    assert "message 1" in sample


THOUGHT = "<think>\nwhy\n</think>\n\nhello"


@pytest.mark.parametrize(
    ("template", "end"), [(PHI3, "<|im_end|>"), (MISTRAL, "</s>"), (CHATML, "<|im_end|>")]
)
def test_thinking_that_a_template_leaves_where_it_is_is_supervised(tokenizer, template, end):
    (sample,) = encoder(tokenizer, template)([chat("q", THOUGHT, "and", "bye")])
    assert [text.lstrip() for text in supervised(tokenizer, sample)] == [THOUGHT + end, "bye" + end]


def test_a_turn_of_two_parts_begins_with_the_first(tokenizer):
    talk = chat("q", "hello")
    talk[1]["thinking"] = "why"
    (sample,) = encoder(tokenizer, HARMONY)([talk])
    assert supervised(tokenizer, sample) == [
        (
            "<|header|>analysis<|end_header|>why<|eot|><|im_start|>assistant"
            "<|header|>final<|end_header|>hello<|im_end|>"
        )
    ]


@pytest.mark.parametrize(
    "question",
    [
        "a",
        "assistant",
        "\n",
        "<|im_start|>assistant\n",
        "<|im_end|>",
        "hello",
        "swathe0turn000001a",
    ],
)
def test_what_the_user_quotes_does_not_move_the_mask(tokenizer, question):
    talk = chat(question, "hello", question, "a")
    for template in (CHATML, QWEN3):
        (sample,) = encoder(tokenizer, template)([talk])
        joined = "".join(supervised(tokenizer, sample)).replace("<think>\n\n</think>\n\n", "")
        assert joined == "hello<|im_end|>a<|im_end|>"


def test_empty_and_blank_answers_keep_only_their_end(tokenizer):
    (sample,) = encoder(tokenizer, CHATML)([chat("q", "", "q", "  ")])
    assert supervised(tokenizer, sample) == ["<|im_end|>", "  <|im_end|>"]


def test_a_conversation_without_assistant_supervises_nothing(tokenizer):
    for template in (CHATML, GENERATION):
        (sample,) = encoder(tokenizer, template)([[{"role": "user", "content": "x"}]])
        assert sample.loss_mask.tolist() == [0] * len(sample.input_ids)


def test_two_assistant_messages_in_a_row_are_both_supervised(tokenizer):
    talk = [*chat("q", "one"), {"role": "assistant", "content": "two"}]
    (sample,) = encoder(tokenizer, CHATML)([talk])
    assert supervised(tokenizer, sample) == ["one<|im_end|>", "two<|im_end|>"]


def test_a_template_that_rewrites_the_answer_rejects_the_row(tokenizer):
    upper = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
    (found,) = encoder(tokenizer, upper)([chat("q", "hello")])
    assert found == "message 1: the template changes the assistant's text, so its place is not sure"


def test_a_template_that_looks_into_the_answer_is_matched_or_rejected(tokenizer):
    nosy = CHATML.replace(
        "{{ m.content }}", "{% if 'x' in m.content %}<x>{% endif %}{{ m.content }}"
    )
    good, bad = encoder(tokenizer, nosy)([chat("q", "plain"), chat("q", "with x")])
    assert supervised(tokenizer, good) == ["plain<|im_end|>"]
    assert "its place is not sure" in bad


def test_template_errors_hurt_only_their_row(tokenizer):
    talks = [TALK, chat("hi", "ho", first="assistant"), TALK]
    first, bad, last = encoder(tokenizer, MISTRAL)(talks)
    assert bad == "chat template: roles must alternate"
    np.testing.assert_array_equal(first.input_ids, last.input_ids)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "no messages"),
        ("hello", "no messages"),
        (["hello"], "message 0: no object with role and content"),
        ([{"content": "x"}], "message 0: no role"),
        ([{"role": "user", "content": None}], "message 0: user without text content"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "message 0: user without text content",
        ),
        ([{"from": "alien", "value": "x"}], "message 0: unknown speaker 'alien'"),
        (chat("q", "\ud800"), "text is not Unicode (character 51)"),
    ],
)
def test_conversations_that_are_none_say_why(tokenizer, value, reason):
    assert encoder(tokenizer, CHATML)([value]) == [reason]


def test_other_forms_of_conversations_are_understood():
    plain = chat("q", "a")
    sharegpt = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a", "weight": None}]
    parts = [
        {"role": "user", "content": [{"type": "text", "text": "q"}], "tool_calls": None},
        {"role": "assistant", "content": "a"},
    ]
    columns = {"role": ["user", "assistant"], "content": ["q", "a"]}
    assert (
        normalize(sharegpt) == normalize(parts) == normalize(columns) == normalize(plain) == plain
    )


def test_many_conversations_are_encoded_like_one_at_a_time(tokenizer):
    rng = np.random.default_rng(0)
    words = ["hello", "the", "user", "<think>", "über\n", "日本", "a", "", "\t"]
    talks = [
        chat(*(" ".join(rng.choice(words, rng.integers(1, 9))) for _ in range(rng.integers(2, 7))))
        for _ in range(600)
    ]
    for template in (CHATML, LLAMA3, QWEN3):
        encode = encoder(tokenizer, template)
        together = encode(talks)
        for talk, sample in zip(talks, together, strict=True):
            says = [m["content"] for m in talk if m["role"] == "assistant"]
            text = "".join(supervised(tokenizer, sample)).replace("<think>\n\n</think>\n\n", "")
            plain = [t.strip() for t in says] if template is LLAMA3 else says
            end = "<|eot|>" if template is LLAMA3 else "<|im_end|>"
            # A final turn of Qwen3 loses its leading line ends; nothing else may differ.
            assert text.replace("\n", "") == "".join(t + end for t in plain).replace("\n", "")
            (alone,) = encode([talk])
            np.testing.assert_array_equal(alone.input_ids, sample.input_ids)
            np.testing.assert_array_equal(alone.loss_mask, sample.loss_mask)


def test_texts_are_supervised_whole(tokenizer):
    good, bad, none = TextEncoder(tokenizer)(["hello", "\udfff", 3])
    assert tokenizer.decode(good.input_ids) == "hello"
    assert good.loss_mask.tolist() == [1] * len(good.input_ids)
    assert (bad, none) == ("text is not Unicode (character 0)", "no text")
    assert TextEncoder(tokenizer)([""])[0].input_ids.shape == (0,)


@pytest.mark.parametrize(
    "odd",
    [
        "a\x00b",
        "\ufeffx",
        "a\u2028b\x85",
        "e\u0301\u202e",
        "\U0001f468\u200d\U0001f469",
        "\uffff\U0010ffff",
    ],
)
def test_odd_unicode_is_tokenized_and_masked_character_by_character(tokenizer, odd):
    (text,) = TextEncoder(tokenizer)([odd])
    assert tokenizer.decode(text.input_ids) == odd
    (sample,) = encoder(tokenizer, CHATML)([chat(odd, odd)])
    assert supervised(tokenizer, sample) == [f"{odd}<|im_end|>"]


def test_a_template_that_writes_the_date_is_reported(tokenizer):
    dated = "{{ strftime_now('%d') if not date_string else date_string }}" + CHATML
    assert "today's date" in encoder(tokenizer, dated).warnings[0]
    assert encoder(tokenizer, dated, date_string="1").warnings == []
    # As gpt-oss: nothing that could be given takes the date's place.
    (said,) = encoder(tokenizer, "{{ strftime_now('%d') }}" + CHATML, date_string="1").warnings
    assert "a copy of the model's folder" in said
    assert encoder(tokenizer, CHATML).warnings == []


def test_a_tokenizer_is_loaded_from_its_folder_and_named_by_its_files(tokenizer, tmp_path):
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(tmp_path / "a")
    loaded = load_tokenizer(tmp_path / "a")
    spec = describe_tokenizer(tmp_path / "a", CHATML, {"x": 1})
    assert spec == describe_tokenizer(tmp_path / "a", CHATML, {"x": 1})
    assert spec.chat_template_kwargs == {"x": 1}
    loaded.chat_template = LLAMA3
    loaded.save_pretrained(tmp_path / "c")
    other = describe_tokenizer(tmp_path / "c", LLAMA3)
    assert other.sha256 != spec.sha256
    assert other.chat_template_sha256 != spec.chat_template_sha256
    loaded.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        ChatEncoder(loaded)
    (tmp_path / "b").mkdir()
    with pytest.raises(ModelError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path / "b")
