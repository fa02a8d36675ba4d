"""Answers of a dataset: formats of rows, tokens of multi-turn conversations and which of them count in the loss."""

import asyncio
import json

import numpy as np
import pytest

from gcore.config.data import Data, Dataset
from gcore.config.preference import OBJECTIVES
from gcore.content.answers import answer_steps
from gcore.content.tokens import Tokens
from gcore.prompts.answers import demonstration_row, load_answered, pair_row
from gcore.prompts.source import Templater
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.types import Prompt, UserError
from gcore.workflows.context import stored_answers

SPEC = Dataset(path="x.jsonl")
# as ChatML: a header and an end for every turn; `;` takes the place of the newline after <|im_end|>
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def tokenizer():
    made = build_char_tokenizer("0123456789+=:;aus?!")
    made.chat_template = CHAT
    return made


def turns(*contents: str):
    """user, assistant, user, assistant, ..."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def said(tokenizer, tokens, mask):
    """The text of the steps, those that count in brackets."""
    text, inside = "", False
    for token, counts in zip(tokens, mask, strict=True):
        if counts != inside:
            text += "[" if counts else "]"
            inside = counts
        text += tokenizer.convert_ids_to_tokens(int(token))
    return text + ("]" if inside else "")


def test_a_role_that_the_template_rejects(tokenizer):
    tokenizer.chat_template = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + CHAT
    row = {"prompt": turns("1+1=?"), "answers": [[{"role": "tool", "content": "2"}, *turns("", "2")[1:]]]}
    with pytest.raises(UserError, match=r"data\.train: the chat template rejects messages of roles \['user', 'tool'\]"):
        Templater(tokenizer, Data(train=SPEC)).answers(row)


def test_only_the_turns_of_the_assistant_count(tokenizer):
    prompt, answer = turns("1+1=?"), turns("", "2", "3+3=?", "6!")[1:]
    steps, mask = answer_steps(tokenizer, (2,), prompt, answer)
    assert said(tokenizer, steps.tokens_S, mask) == "[2<eos>];u:3+3=?;a:[6!<eos>]"
    rendered = tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
    start = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    whole = start + "".join(tokenizer.convert_ids_to_tokens(steps.tokens_S.tolist()))
    assert rendered == whole + ";"  # all but what the template adds after the last turn


def test_a_string_ends_with_eos(tokenizer):
    steps, mask = answer_steps(tokenizer, (2,), turns("1+1=?"), "2")
    assert said(tokenizer, steps.tokens_S, mask) == "[2<eos>]"


def test_a_template_without_an_end_of_turn_gets_eos(tokenizer):
    tokenizer.chat_template = CHAT.replace("{{ eos_token }}", "")
    steps, mask = answer_steps(tokenizer, (2,), turns("1+1=?"), turns("", "2")[1:])
    assert said(tokenizer, steps.tokens_S, mask) == "[2;<eos>]"


def test_an_empty_turn_of_a_template_without_marks_is_eos(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    steps, mask = answer_steps(tokenizer, (2,), turns("1+1=?"), turns("", "")[1:])
    assert said(tokenizer, steps.tokens_S, mask) == "[<eos>]"


def test_a_template_that_changes_earlier_turns_is_refused(tokenizer):
    tokenizer.chat_template = CHAT.replace("m['content']", "m['content'] if loop.last or m['role'] == 'user' else '?'")
    with pytest.raises(UserError, match="changes earlier turns"):
        answer_steps(tokenizer, (2,), turns("1+1=?"), turns("", "2", "3?", "3")[1:])


def test_demonstrations():
    conversation = turns("1+1=", "2", "2+2=", "4")
    for row, prompt, answer in (
        ({"messages": conversation}, conversation[:1], conversation[1:]),
        ({"prompt": "1+1=", "completion": "2"}, "1+1=", "2"),
        ({"prompt": turns("1+1="), "completion": turns("", "2")[1:]}, turns("1+1="), turns("", "2")[1:]),
        ({"question": "1+1=", "answer": 2}, "1+1=", "2"),
        ({"prompt": "1+1=", "answer": "2", "demonstration": "3"}, "1+1=", "3"),
    ):
        found = demonstration_row(row, SPEC, "data.train")
        assert (found["prompt"], found["answers"]) == (prompt, [answer]), row
    for row, words in (
        ({"prompt": "1+1="}, "no answer to demonstrate"),
        ({"text": "1"}, "no prompt; the row has text"),
        (
            {"messages": turns("", "2")[1:]},
            "starts with a message of 'assistant'",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            demonstration_row(row, SPEC, "data.train")


def test_pairs():
    good, bad = turns("1+1=", "2"), turns("1+1=", "3")
    longer = turns("0+1=", "1", "1+1=", "2"), turns("0+1=", "1", "1+1=", "3")
    for row, prompt, answers in (
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "1+1=", ["2", "3"]),
        ({"prompt": turns("1+1="), "chosen": good[1:], "rejected": bad[1:]}, turns("1+1="), [good[1:], bad[1:]]),
        ({"chosen": good, "rejected": bad}, turns("1+1="), [good[1:], bad[1:]]),
        ({"chosen": longer[0], "rejected": longer[1]}, longer[0][:3], [longer[0][3:], longer[1][3:]]),
        ({"prompt": "1+1=", "chosen": good, "rejected": bad}, "1+1=", [good[1:], bad[1:]]),
    ):
        found = pair_row(row, SPEC, "data.train")
        assert (found["prompt"], found["answers"]) == (prompt, answers), row
    with pytest.raises(ValueError, match="no prompt for the answer in column 'chosen'"):
        pair_row({"chosen": "2", "rejected": "3"}, SPEC, "data.train")


@pytest.mark.parametrize("whole", [True, False])
def test_the_system_prompt_is_before_every_prompt_that_is_a_string(tokenizer, whole):
    """Also if the answers are messages, as in UltraFeedback."""
    good, bad = ([*turns("1+1=")[: int(whole)], {"role": "assistant", "content": answer}] for answer in ("2", "3"))
    row = pair_row({"prompt": "1+1=", "chosen": good, "rejected": bad}, SPEC, "data.train")
    templater = Templater(tokenizer, Data(train=SPEC, system_prompt="0"), stops=(2,))
    assert [message["role"] for message in templater.messages(row)] == ["system", "user"]
    assert templater.prompt(row, 0, 0).text == "<bos>s:0;u:1+1=;a:"
    assert [said(tokenizer, steps.tokens_S, mask) for steps, mask in templater.answers(row)] == [
        "[2<eos>]",
        "[3<eos>]",
    ]


def test_a_bad_row_is_named(tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n{"prompt": "1+1=", "chosen": "2"}\n')
    rows = load_answered(Dataset(path=str(file)), OBJECTIVES["dpo"], "data.train")
    assert rows[0]["answers"] == ["2", "3"]
    with pytest.raises(UserError, match=r"data\.train: row 1: column 'rejected' is not there; the row has "):
        rows[1]


def test_a_column_label_is_a_label_only_for_kto(tmp_path):
    """Preference datasets often have a column of this name, with another meaning."""

    class Given:
        async def given(self, prompt, answers):
            return list(answers)

    def rewards(objective, row):
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row) + "\n")
        columns = load_answered(Dataset(path=str(file)), OBJECTIVES[objective], "data.train")[0]
        prompt = Prompt(0, 0, (), "", Tokens(np.ones(1, np.int32)), columns)
        return [scored.reward for scored in asyncio.run(stored_answers(Given(), prompt))]

    pair = {"prompt": "1+1=", "chosen": "2", "rejected": "3", "label": "helpful"}
    assert rewards("dpo", pair) == [1.0, 0.0]
    assert rewards("kto", {"prompt": "1+1=", "completion": "3", "label": False}) == [0.0, -1.0]


def test_a_label_is_not_the_answer(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1+1=", "response": "2", "label": true}\n')
    with pytest.raises(UserError, match="no answer to demonstrate"):
        load_answered(Dataset(path=str(file)), OBJECTIVES["kto"], "data.train")
    file.write_text('{"prompt": "1+1=", "label": "2"}\n')  # a reference answer
    assert load_answered(Dataset(path=str(file)), OBJECTIVES["sft"], "data.train")[0]["answers"] == ["2"]


def test_masks_are_booleans(tokenizer):
    _, mask = answer_steps(tokenizer, (2,), turns("1"), turns("", "2", "3", "4")[1:])
    assert mask.dtype == np.bool_
