"""Generative judges: what they are shown, how they are read, and that silence is never a zero."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from gcore.config.base import Model
from gcore.config.judges import ServedJudge
from gcore.content.tokens import Tokens
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.rewarding.judge import JudgeSource, pairs
from gcore.rewarding.judge_backend import EngineBackend
from gcore.rewarding.rewarder import WeightedRewarder
from gcore.types import Completion, RewardError, UserError
from tests.unit.test_rewarding import group_of

ALPHABET = "0123456789+-=?.:<>/ abcdefghijklmnopqrstuvwxyzABESY"
TOKENIZER = build_char_tokenizer(ALPHABET)
STOPS = (2, 9)
POINTWISE = "{{ prompt }} {{ response }} good?"
PAIRWISE = "{{ prompt }} A: {{ response_a }} B: {{ response_b }}"


class Script:
    """An engine that says `script(text of the prompt, key)`; keeps what it was asked."""

    def __init__(self, script, finish="stop"):
        self.script, self.finish = script, finish
        self.keys: list[tuple] = []
        self.texts: list[str] = []
        self.params = []

    async def __call__(self, question, params, key) -> Completion:
        assert question.tokens_P.dtype == np.int32 and not question.num_steps
        text = TOKENIZER.decode(question.tokens_P)
        self.keys.append(key)
        self.texts.append(text)
        self.params.append(params)
        await asyncio.sleep(random.random() / 1000)  # answers arrive in any order
        tokens = np.asarray(TOKENIZER(self.script(text, key), add_special_tokens=False)["input_ids"] + [2], np.int32)
        zeros = np.zeros(len(tokens), np.float32)
        return Completion(Tokens.steps(tokens), zeros, zeros.astype(np.int32), self.finish)


def judge_of(script, key="rewards.judges.0", **spec) -> tuple[JudgeSource, Script]:
    engine = script if isinstance(script, Script) else Script(script)
    mode = spec.get("mode", "pointwise")
    defaults = {"name": "wise", "model": Model(path="x"), "template": POINTWISE if mode == "pointwise" else PAIRWISE}
    judge = ServedJudge(**{**defaults, **spec})
    return JudgeSource(judge, EngineBackend(judge, TOKENIZER, STOPS, engine, key), key), engine


def answer(source: JudgeSource, group):
    return asyncio.run(source.answer(group))


# --- what the judge is shown


def test_the_rendered_prompt_and_the_parameters():
    source, engine = judge_of(
        lambda text, key: "7",
        template="{{ prompt }} {{ response }} {{ answer }}{{ level + 1 }} {{ messages[0].role }}",
        temperature=0.5,
        top_p=0.9,
        max_response_length=5,
    )
    assert answer(source, group_of("2", prompt="1+1=", answer="two", level=4)).values == [7.0]
    assert engine.texts == ["<bos>1+1= 2 two5 user"]
    params = engine.params[0]
    assert (params.max_tokens, params.temperature, params.top_p, params.stop_tokens) == (5, 0.5, 0.9, STOPS)
    assert source.counts == {"verdicts": 1}


def test_messages_are_joined_and_the_system_prompt_comes_first():
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}]}]
    source, engine = judge_of(lambda text, key: "7", template="{{ prompt | replace('\n', '/') }} {{ response }}")
    answer(source, group_of("2", prompt=messages))
    answer(source, group_of("3", messages=({"role": "user", "content": "by hand"},)))
    source, second = judge_of(lambda text, key: "7", system_prompt="be fair: ")
    answer(source, group_of("2", prompt="1+1="))
    assert engine.texts == ["<bos>s/u 2", "<bos>by hand 3"]
    assert second.texts == ["<bos>be fair: 1+1= 2 good?"]


def test_columns_stand_below_our_own_names():
    source, engine = judge_of(lambda text, key: "7")
    answer(source, group_of("2", prompt="1+1=", response="column"))
    assert engine.texts == ["<bos>1+1= 2 good?"]


def test_the_chat_template_alone_writes_special_tokens():
    class Tokenizer:
        all_special_tokens = ("<bos>",)
        decode = staticmethod(TOKENIZER.decode)

        def apply_chat_template(self, messages, **options):
            assert options == {"tokenize": False, "add_generation_prompt": True}
            return "[" + messages[0]["content"] + "]"

        def __call__(self, text, add_special_tokens=True):
            assert not add_special_tokens
            return {"input_ids": [ord(c) for c in text]}

    source, engine = judge_of(lambda text, key: "7")
    source.backend.ask = lambda question, *rest: (
        seen.append(question.tokens_P.tolist()) or engine(Tokens(np.int32([4])), *rest)
    )
    source.backend.tokenizer, seen = Tokenizer(), []
    answer(source, group_of("2", prompt="1"))
    assert seen == [[ord(c) for c in "[1 2 good?]"]]


def test_a_template_in_a_file(tmp_path):
    file = tmp_path / "judge.txt"
    file.write_text("is {{ response }} right?\n")
    source, engine = judge_of(lambda text, key: "7", template=str(file))
    source.check(["prompt"])
    answer(source, group_of("2"))
    assert engine.texts == ["<bos>is 2 right?"]


def test_a_response_is_data():
    """Neither Jinja nor special tokens in a response mean anything; characters without a token are <unk>."""
    source, engine = judge_of(lambda text, key: "7", template="{{ response }}?")
    answer(source, group_of("<eos>yes<eos>", "{{ prompt }}", "é"))
    assert engine.texts[0] == "<bos>< eos>yes< eos>?"
    assert 2 not in TOKENIZER("< eos>yes< eos>?", add_special_tokens=False)["input_ids"]
    assert engine.texts[1:] == ["<bos><unk><unk> prompt <unk><unk>?", "<bos><unk>?"]


def test_an_over_long_prompt_fails_without_a_call():
    source, engine = judge_of(lambda text, key: "7", max_prompt_length=12, template="{{ response }}")
    assert answer(source, group_of("x" * 11)).values == [7.0]
    with pytest.raises(
        RewardError,
        match=r"reward 'wise', prompt 70: the judge's prompt has 13 tokens; expected at most 12 "
        r"\(key: rewards\.judges\.0\.max_prompt_length\)",
    ):
        answer(source, group_of("x", "x" * 12))
    assert len(engine.keys) == 1


def test_a_row_the_template_cannot_show():
    source, engine = judge_of(lambda text, key: "7", template="{{ response }} {{ answer }}")
    with pytest.raises(RewardError, match=r"prompt 70: rewards\.judges\.0\.template does not render: .*answer"):
        answer(source, group_of("2"))
    source, _ = judge_of(lambda text, key: "7", template="{{ response }} {{ 1 / level }}")
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        answer(source, group_of("2", level=0))
    assert engine.keys == []


# --- reading verdicts


def read(text, **spec):
    """The verdict, or None when it cannot be read."""
    source, _ = judge_of(lambda prompt, key: text, attempts=1, **spec)
    source.check(["prompt", "answer"])
    try:
        return answer(source, group_of("2")).values[0]
    except RewardError:
        assert source.counts["unparsed"] == 1
        return None


def test_the_last_number_counts():
    assert read("not 3 but -7.5.") == -7.5
    assert read("no idea") is None


@pytest.mark.parametrize(
    ("text", "expected"), [("i say YES", 1.0), ("no. yes", 1.0), ("yes. no", 0.0), ("maybe", None), ("n/a", None)]
)
def test_words_and_what_they_are_worth(text, expected):
    assert read(text, verdict="(?i)(yes|no|maybe)", values={"Yes": 1, "no": 0}) == expected


@pytest.mark.parametrize(
    ("text", "verdict", "expected"),
    [
        ("score: 3 ", "score:(.*)", 3.0),
        ("score: three", "score:(.*)", None),
        ("score: nan", "score:(.*)", None),
        ("score: inf", "score:(.*)", None),
        ("1 or none", r"(?:(\d)|none)", None),  # the last match has no group
        ("1-2", r"(?P<first>\d)-(\d)", 1.0),
    ],
)
def test_regular_expressions(text, verdict, expected):
    assert read(text, verdict=verdict) == expected


def strict(text):
    return {"none": None, "nan": float("nan"), "text": "3", "array": np.float32(0.5), "two": 2}[text]


async def later(text):
    return 1.0


def test_functions():
    path = f"{__name__}:strict"
    assert [read(text, verdict=path) for text in ("array", "two")] == [0.5, 2.0]
    assert [read(text, verdict=path) for text in ("none", "nan", "text", "absent")] == [None] * 4


def test_a_function_that_raises_is_counted_and_named():
    source, _ = judge_of(lambda prompt, key: "absent", verdict=f"{__name__}:strict", attempts=2)
    with pytest.raises(RewardError, match=r"last answer was 'absent': .*:strict raised KeyError\('absent'\)"):
        answer(source, group_of("2"))
    assert source.counts == {"verdicts": 2, "unparsed": 2, "verdict_errors": 2}
    source, _ = judge_of(lambda prompt, key: "none", verdict=f"{__name__}:strict", attempts=2)
    with pytest.raises(RewardError, match="last answer was 'none': parsed as None; expected a finite number"):
        answer(source, group_of("2"))
    assert source.counts == {"verdicts": 2, "unparsed": 2}


# --- asking again


def test_never_in_format():
    source, engine = judge_of(lambda text, key: "x" * 200 + "the end", attempts=3)
    with pytest.raises(RewardError) as caught:
        answer(source, group_of("2"))
    assert str(caught.value) == (
        "reward 'wise', prompt 70: no verdict on sibling 0 could be parsed in 3 attempts; the judge's last answer was "
        f"'...{'x' * 93}the end': no match of (-?\\d+(?:\\.\\d+)?) (see rewards.judges.0: verdict, template)"
    )
    assert source.counts == {"verdicts": 3, "unparsed": 3}
    assert engine.keys == [("wise", 70, 0, 0, 0), ("wise", 70, 0, 0, 1), ("wise", 70, 0, 0, 2)]


def test_in_format_at_the_third_try():
    """One verdict is asked for again; those that were read are not."""
    source, engine = judge_of(lambda text, key: "5" if key[2] == 0 or key[-1] == 2 else "hm", attempts=3)
    assert answer(source, group_of("2", "3")).values == [5.0, 5.0]
    assert source.counts == {"verdicts": 4, "unparsed": 2}
    assert sorted(engine.keys) == [("wise", 70, 0, 0, 0), *(("wise", 70, 1, 0, turn) for turn in range(3))]


def test_one_sibling_without_a_verdict_fails_the_group():
    source, _ = judge_of(lambda text, key: "5" if key[2] == 0 else "hm", attempts=2)
    with pytest.raises(
        RewardError, match=r"no verdict on sibling 1 could be parsed in 2 attempts; .*last answer was 'hm'"
    ):
        answer(source, group_of("2", "3"))


def test_the_blend_does_not_ask_again():
    source, engine = judge_of(lambda text, key: "hm", attempts=2, weight=0.5)
    blend = WeightedRewarder([source], backoff_s=0)
    with pytest.raises(RewardError):
        asyncio.run(blend.reward(group_of("2")))
    assert blend.take_counts() == {"verdicts": 2, "unparsed": 2}
    assert len(engine.keys) == 2


def test_another_attempt_draws_other_noise():
    source, engine = judge_of(lambda text, key: "hm", attempts=4)
    with pytest.raises(RewardError):
        answer(source, group_of("2"))
    assert [key[-1] for key in engine.keys] == [0, 1, 2, 3]


def test_a_failing_engine_is_no_reward_error():
    async def broken(tokens, params, key):
        raise ConnectionError("engine-0 is gone")

    source, _ = judge_of(lambda text, key: "1")
    source.backend.ask = broken
    with pytest.raises(ConnectionError, match="engine-0 is gone"):
        answer(source, group_of("2", "3"))


def test_half_a_verdict_is_none():
    source, engine = judge_of(Script(lambda text, key: "1", finish="abort"))
    with pytest.raises(RewardError, match="judge 'wise': the request was aborted"):
        answer(source, group_of("2"))
    assert len(engine.keys) == 1
    assert read("1") == 1.0
    source, _ = judge_of(Script(lambda text, key: "1", finish="length"))
    assert answer(source, group_of("2")).values == [1.0]  # one token is all some verdicts have


# --- repeats


def test_repeats_are_averaged_and_their_spread_logged():
    said = {(0, 0): "1", (0, 1): "2", (0, 2): "6", (1, 0): "4", (1, 1): "4", (1, 2): "4"}
    source, engine = judge_of(lambda text, key: said[key[2:4]], repeats=3)
    result = answer(source, group_of("2", "3"))
    assert result.values == [3.0, 4.0]
    assert result.extras == [{"spread": pytest.approx((14 / 3) ** 0.5)}, {"spread": 0.0}]
    assert len(set(engine.keys)) == 6
    assert source.counts == {"verdicts": 6}


def test_one_readable_repeat_is_enough():
    """Sibling 0: its second repeat alone can be read, at the second try."""
    source, _ = judge_of(lambda text, key: "8" if key[3:] == (1, 1) else "hm", repeats=3, attempts=2)
    result = answer(source, group_of("2"))
    assert (result.values, result.extras) == ([8.0], [{}])
    assert source.counts == {"verdicts": 6, "unparsed": 5}
    source, _ = judge_of(lambda text, key: "hm", repeats=3, attempts=2)
    with pytest.raises(RewardError, match="could be parsed in 2 attempts for each of 3 verdicts;"):
        answer(source, group_of("2"))


def test_no_extras_without_repeats():
    source, _ = judge_of(lambda text, key: "8")
    assert answer(source, group_of("2")).extras == []


def test_two_judges_have_noise_of_their_own():
    first, one = judge_of(lambda text, key: "1", name="first", repeats=2)
    second, two = judge_of(lambda text, key: "3", name="second", repeats=2, weight=0.5)
    scored = asyncio.run(WeightedRewarder([first, second]).reward(group_of("2", "3")))
    assert [s.reward for s in scored] == [2.5, 2.5]
    assert scored[0].parts == {"first": 1.0, "first/spread": 0.0, "second": 3.0, "second/spread": 0.0}
    assert len(set(one.keys) | set(two.keys)) == 8


# --- pairs


@pytest.mark.parametrize(
    ("num", "opponents", "expected"),
    [
        (2, 1, [(0, 1)]),
        (2, 9, [(0, 1)]),
        (3, 1, [(0, 1), (1, 2), (0, 2)]),
        (4, 1, [(0, 1), (1, 2), (2, 3), (0, 3)]),
        (4, 2, [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2), (1, 3)]),
    ],
)
def test_pairs(num, opponents, expected):
    assert pairs(num, opponents) == expected


def test_everyone_meets_everyone():
    for num in range(2, 9):
        met = pairs(num, num - 1)
        assert len(met) == len(set(met)) == num * (num - 1) // 2
        for opponents in range(1, num):
            seen = Counter(place for pair in pairs(num, opponents) for place in pair)
            assert len(set(seen.values())) == 1 and seen[0] == min(2 * opponents, num - 1)


def pairwise(script, **spec):
    return judge_of(script, **{"mode": "pairwise", "verdict": "([AB])", "values": {"A": 1, "B": 0}, **spec})


def better(text, key):
    """Says which response is the greater number."""
    first, second = text.split("A: ")[1].split(" B: ")
    return "A" if int(first) > int(second) else "B"


def test_pairs_in_both_orders():
    source, engine = pairwise(better)
    assert answer(source, group_of("3", "5", prompt="max")).values == [0.0, 1.0]
    assert sorted(engine.texts) == ["<bos>max A: 3 B: 5", "<bos>max A: 5 B: 3"]
    assert sorted(engine.keys) == [("wise", 70, 0, 1, 0, 0), ("wise", 70, 1, 0, 0, 0)]
    assert source.counts == {"verdicts": 2}


@pytest.mark.parametrize("always", ["A", "B"])
def test_a_judge_who_prefers_a_place_says_nothing(always):
    for num, opponents in ((2, 1), (3, 1), (4, 3), (5, 2)):
        source, _ = pairwise(lambda text, key: always, opponents=opponents)
        assert answer(source, group_of(*"x" * num)).values == [0.5] * num


def test_a_tournament():
    source, engine = pairwise(better, opponents=3)
    assert answer(source, group_of("4", "7", "1", "9")).values == [1 / 3, 2 / 3, 0.0, 1.0]
    assert len(set(engine.keys)) == len(engine.keys) == 12
    source, _ = pairwise(better, opponents=1)  # a circle: 4-7, 7-1, 1-9, 9-4
    assert answer(source, group_of("4", "7", "1", "9")).values == [0.0, 1.0, 0.0, 1.0]


def test_pairwise_numbers_are_shared_out():
    source, _ = judge_of(lambda text, key: "0.75" if key[2:4] == (0, 1) else "0.5", mode="pairwise")
    assert answer(source, group_of("a", "b")).values == [0.625, 0.375]
    source, _ = judge_of(lambda text, key: "7", mode="pairwise", attempts=1)
    with pytest.raises(RewardError, match=r"parsed as 7\.0; expected a number between 0 and 1"):
        answer(source, group_of("a", "b"))


def test_pairwise_repeats():
    said = {(0, 1): "AAB", (1, 0): "BBB"}
    source, engine = pairwise(lambda text, key: said[key[2:4]][key[4]], repeats=3)
    result = answer(source, group_of("a", "b"))
    assert result.values == pytest.approx([(2 / 3 + 1) / 2, (1 / 3 + 0) / 2])
    assert result.extras == [{"spread": pytest.approx(2**0.5 / 3 / 2)}] * 2
    assert len(set(engine.keys)) == 6


def test_a_pair_heard_in_one_order_does_not_count():
    """Of 0-1 one order cannot be read: both are left out; the other pairs decide."""
    source, _ = pairwise(lambda text, key: "hm" if key[2:4] == (1, 0) else better(text, key), attempts=2)
    assert answer(source, group_of("1", "2", "3")).values == [0.0, 0.0, 1.0]
    assert source.counts == {"verdicts": 7, "unparsed": 2}
    source, _ = pairwise(lambda text, key: "hm" if key[2:4] == (1, 0) else "A", attempts=2)
    with pytest.raises(
        RewardError, match=r"no verdict on sibling 0 could be parsed in 2 attempts for each of 2 verdicts; .*'hm'"
    ):
        answer(source, group_of("1", "2"))


def test_a_single_sibling_has_nothing_to_compare_with():
    source, engine = pairwise(better)
    assert answer(source, group_of("3")).values == [None]
    assert engine.keys == []


def test_noise_is_named_by_siblings_not_by_places():
    source, engine = pairwise(better)
    group = group_of("3", "5")
    answer(source, [replace(group[0], sibling=6), replace(group[1], sibling=4)])
    assert sorted(engine.keys) == [("wise", 70, 4, 6, 0, 0), ("wise", 70, 6, 4, 0, 0)]


# --- results and timing


def test_rewards_do_not_depend_on_who_answers_first():
    def script(text, key):
        return ("0.1", "0.2", "0.7", "hm")[hash(key[1:]) % 4]  # of numbers: the same in every process

    for mode in ("pointwise", "pairwise"):
        results = set()
        for _ in range(5):
            source, _ = judge_of(script, mode=mode, repeats=3, opponents=2, attempts=5)
            result = answer(source, group_of(*"abcdef"))
            results.add((tuple(result.values), str(result.extras), str(sorted(source.counts.items()))))
        assert len(results) == 1


def test_all_verdicts_are_asked_for_at_once():
    source, engine = judge_of(lambda text, key: "1", repeats=2)
    together = asyncio.Barrier(6)

    async def waits(tokens, params, key):
        async with asyncio.timeout(5):
            await together.wait()
        return await engine(tokens, params, key)

    source.backend.ask = waits
    assert answer(source, group_of("a", "b", "c")).values == [1.0] * 3


# --- for workflows


def test_say():
    source, engine = judge_of(lambda text, key: "hm, 4", max_prompt_length=8)
    messages = [{"role": "user", "content": "why?"}]
    said = asyncio.run(source.ask(messages, (70, 1), max_tokens=3, temperature=0.0))
    assert said == "hm 4"  # special tokens are left out, <unk> for the comma among them
    assert engine.texts == ["<bos>why?"]
    assert engine.keys == [("wise", "say", 70, 1)]
    params = engine.params[0]
    assert (params.max_tokens, params.temperature, params.stop_tokens) == (3, 0.0, STOPS)
    assert source.counts == {}
    with pytest.raises(RewardError, match="judge 'wise': the judge's prompt has 9 tokens; expected at most 8"):
        asyncio.run(source.ask([{"role": "user", "content": "why? why"}], (70, 2)))


# --- before the run


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"template": "{{ response"}, r"template: not a valid Jinja template: line 1: unexpected end of template"),
        (
            {"template": "{{ response | shout }}"},
            r"template: not a valid Jinja template: line 1: No filter named 'shout'",
        ),
        ({"template": "gone.jinja"}, r"template: no such file: gone\.jinja"),
        (
            {"template": "{{ response }} {{ anser }}"},
            "unknown name anser; expected names among answer, messages, prompt, r",
        ),
        ({"template": "{{ response_a }} {{ response_b }}"}, r"unknown name response_a, response_b; .*pointwise"),
        ({"template": "{{ response }}", "mode": "pairwise"}, r"unknown name response; .*mode: pairwise"),
        ({"template": "{{ prompt }}"}, r"template: expected \{\{ response \}\} in it"),
        ({"template": "{{ response_a }}", "mode": "pairwise"}, r"expected \{\{ response_b \}\} in it"),
        ({"template": "{{ response }} Q\n{% if answer %}é{% endif %}"}, r"template: no token for .* '\\nQé' "),
        ({"system_prompt": "Q"}, r"system_prompt: no token for the characters 'Q' .*rewards\.judges\.3\.model\.build"),
        ({"verdict": "(yes"}, r"verdict: '\(yes' is not a regular expression: missing \)"),
        ({"verdict": r"score: \d"}, r"verdict: got 'score: .*expected a regular expression with a group"),
        ({"verdict": "(?:a|b)"}, "expected a regular expression with a group"),
        ({"verdict": "nowhere:f"}, r"verdict: nowhere does not import"),
        ({"verdict": f"{__name__}:stricter"}, r"no 'stricter'; did you mean strict\?"),
        ({"verdict": f"{__name__}:later"}, "is async"),
        ({"verdict": f"{__name__}:strict", "values": {"a": 1}}, r"values: expected none, because the function"),
        ({"verdict": "(yes|no)"}, r"values: not set, but '\(yes\|no\)' matches words"),
        ({"verdict": r"(?i)\((?:the )*(?P<who>[AB])", "mode": "pairwise", "template": PAIRWISE}, "values: not set"),
        ({"values": {"Yes": 1, "yes": 0}}, r"values: got Yes, yes; expected each word once"),
        ({"values": {"A": 2}, "mode": "pairwise", "template": PAIRWISE}, r"values\.A: got 2\.0; expected .*0 and 1"),
    ],
)
def test_check_refuses(spec, message):
    with pytest.raises(UserError, match=rf"rewards\.judges\.3.*{message}"):
        judge_of(lambda text, key: "1", key="rewards.judges.3", **spec)[0].check(["prompt", "answer"])


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"template": "{% set n = 2 %}{% for i in range(n) %}{{ response }}{{ loop.index }}{% endfor %}{{ answer }}"},
        {"template": PAIRWISE, "mode": "pairwise"},
        {"verdict": r"\(([AB])\)", "values": {"A": 1, "B": 0}},
        {"verdict": "score: (.*)"},
        {"verdict": r"(one|2)"},
        {"values": {"A": 2}},
    ],
)
def test_check_passes(spec):
    source, _ = judge_of(lambda text, key: "1", **spec)
    source.check(["prompt", "answer"])


def test_a_chat_template_without_system_messages(monkeypatch):
    monkeypatch.setattr(
        TOKENIZER,
        "chat_template",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ bos_token }}",
    )
    judge_of(lambda text, key: "1")[0].check(["prompt"])
    with pytest.raises(UserError, match=r"roles \['system', 'user'\]: no system role .*judges\.0\.system_prompt"):
        judge_of(lambda text, key: "1", system_prompt="s")[0].check(["prompt"])


# --- what it said is kept beside the sample


def test_the_texts_of_verdicts_are_handed_over():
    source, _ = judge_of(lambda text, key: f"good {key[-2]}. 7", repeats=2)
    assert answer(source, group_of("2", "3")).notes == [["good 0. 7", "good 1. 7"]] * 2
    source, _ = judge_of(lambda text, key: "so long " * 600 + "7", max_response_length=9000)
    (note,) = answer(source, group_of("2")).notes[0]
    assert note.startswith("... ") and note.endswith("so long 7") and len(note) == 4004
    scored = asyncio.run(WeightedRewarder([source]).reward(group_of("2")))
    assert scored[0].notes == {"wise": [note]} and scored[0].reward == 7.0


def test_of_a_pair_the_note_says_which_of_the_two_it_was():
    source, _ = judge_of(
        lambda text, key: "AB"[text.index("9") > text.index("8")], mode="pairwise", verdict="([AB])",
        values={"A": 1, "B": 0},
    )  # fmt: skip
    found = answer(source, group_of("8", "9"))
    assert found.notes == [
        ["[first, against sibling 1] B", "[second, against sibling 1] A"],
        ["[second, against sibling 0] B", "[first, against sibling 0] A"],
    ]
