"""What a workflow's context does: which requests it sends, and how turns become one sample. The engine is scripted."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gcore.config.sandbox import SandboxSettings
from gcore.config.tree import Config
from gcore.content.text import TextModality
from gcore.content.tokens import Tokens
from gcore.controller.run_prompts import run_workflow
from gcore.generation.noise import noise_key
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.sandbox.pool import SandboxPool
from gcore.types import Completion, Prompt, Request, Rollout, Scored, UserError, WorkflowError
from gcore.workflows import context as workflow
from gcore.workflows.context import SampleContext, SharedContext, StageClock, generate_and_reward
from tests.e2e.helpers import RECIPE

TOKENIZER = build_char_tokenizer("0123456789+=?! abc")
EOS = TOKENIZER.eos_token_id
SEED, ROOM, SIBLINGS = 3, 12, 4


def tokens(text: str) -> list[int]:
    """`.` ends a turn."""
    found: list[int] = TOKENIZER(text.replace(".", "<eos>"), add_special_tokens=False)["input_ids"]
    return found


PROMPT = Prompt(
    70, 6, ({"role": "user", "content": "1+2="},), "<bos>1+2=", Tokens(np.array(tokens("<bos>1+2="), np.int32))
)


class Engine:
    """Says the next words of its script, stamped with its version; logprobs are -1, -2, ... over all it ever said."""

    def __init__(self, *script: str) -> None:
        self.script, self.asked, self.version, self.said = list(script), list[Request](), 0, 0
        self.lines: list[Any] = []

    async def generate(self, requests: Sequence[Request], **line: Any) -> list[Completion]:
        await asyncio.sleep(0)
        self.asked += requests
        self.lines.append(line)
        return [self._answer(self.script.pop(0)) for _ in requests]

    def _answer(self, text: str) -> Completion:
        words = np.array(tokens(text), np.int32)
        logprobs = -np.arange(self.said + 1, self.said + 1 + len(words)).astype(np.float32)
        self.said += len(words)
        versions = np.full(len(words), self.version, np.int32)
        return Completion(Tokens.steps(words), logprobs, versions, "stop" if text.endswith(".") else "length")


class Judge:
    """Implements protocols.Rewarder, and remembers."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def reward(self, group: Sequence[Rollout]) -> list[Scored]:
        return [Scored(r, float(r.sibling)) for r in group]

    async def score(self, name: str, group: Sequence[Rollout]) -> list[float | None]:
        self.heard.append((name, [r.sibling for r in group]))
        return [0.5 for _ in group]

    async def ask(self, judge: str, messages: Any, key: tuple[object, ...], **params: Any) -> str:
        self.heard.append((judge, list(messages), key, params))
        return "well done"


def make_shared(
    engine: Any, *, greedy: bool = False, judge: Any = None, tokenizer: Any = TOKENIZER, **generation: Any
) -> SharedContext:
    tree = copy.deepcopy(RECIPE)
    tree["generation"] = {"max_response_length": ROOM, "temperature": 0.7, "top_p": 0.9, "top_k": 5, **generation}
    config = Config.model_validate(tree)
    assert (config.run.seed, config.sampling.samples_per_prompt) == (SEED, SIBLINGS)
    modality = TextModality(config.generation, tokenizer, (EOS,))
    return SharedContext(config, engine, judge or Judge(), modality, greedy=greedy)


def context(engine: Any, **options: Any) -> Any:
    return SampleContext(make_shared(engine, **options))


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, 60))


def asked(request: Request) -> tuple[list[int], int, int, float, int]:
    params = request.params
    return request.content.tokens_T.tolist(), request.noise_key, request.position, params.temperature, params.max_tokens


def key(sibling: int) -> int:
    return noise_key(SEED, 70, sibling)


# --- sandboxes


def test_sandboxes_are_those_of_the_recipe():
    class Box:
        alive, stopped = True, False

        async def put(self, folder: str) -> None:
            self.folder = folder

        async def stop(self) -> None:
            self.stopped = True

    class Kind:
        async def start(self) -> Any:
            return Box()

    shared = make_shared(Engine())

    async def main() -> None:
        shared.sandboxes = SandboxPool(SandboxSettings(), Kind())  # type: ignore[arg-type]
        async with SampleContext(shared).sandbox("folder") as box:
            assert (box.folder, box.stopped) == ("folder", False)  # type: ignore[attr-defined]
        assert box.stopped  # type: ignore[attr-defined]
        shared.sandboxes = None
        with pytest.raises(UserError, match=r"ctx\.sandbox: the recipe has none; expected the section `sandbox: "):
            async with SampleContext(shared).sandbox():
                pass

    run(main())


# --- generate


def test_generate_asks_for_siblings_with_noise_of_their_own():
    engine = Engine("3.", "12.", "3", "", "7.", "8.")
    ctx = context(engine)
    group = run(ctx.generate(PROMPT))
    assert [asked(r) for r in engine.asked] == [
        (PROMPT.content.tokens_P.tolist(), key(s), 0, 0.7, ROOM) for s in range(SIBLINGS)
    ]
    params = engine.asked[0].params
    assert (params.top_p, params.top_k, params.stop_tokens) == (0.9, 5, (EOS,))
    assert [r.sibling for r in group] == [0, 1, 2, 3] and all(r.prompt is PROMPT for r in group)
    assert [r.text for r in group] == ["3", "12", "3", ""] and [r.finish for r in group][:3] == [
        "stop",
        "stop",
        "length",
    ]
    second = group[1]
    assert second.content.tokens_S.tolist() == tokens("12.") and second.logprobs_S.tolist() == [-3, -4, -5]
    assert (second.mask_S.tolist(), second.versions_S.tolist(), second.temperature) == ([True] * 3, [0] * 3, 0.7)
    kinds = (second.content.tokens_S.dtype, second.logprobs_S.dtype, second.mask_S.dtype, second.versions_S.dtype)
    assert kinds == (np.int32, np.float32, np.bool_, np.int32)

    more = run(ctx.generate(PROMPT, 2, temperature=1.5, max_tokens=3, top_k=0))  # siblings of those before
    assert [r.sibling for r in more] == [4, 5]
    assert [asked(r) for r in engine.asked[4:]] == [
        (PROMPT.content.tokens_P.tolist(), key(s), 0, 1.5, 3) for s in (4, 5)
    ]
    assert engine.asked[4].params.top_k == 0 and engine.asked[4].params.top_p == 0.9
    assert [r.temperature for r in more] == [1.5, 1.5]


def test_what_the_engine_said_is_never_tokenised_again():
    """Tokens that no text gives: special ones in the middle."""
    odd = np.array([EOS, 3, 1, *tokens("4"), EOS], np.int32)

    class Odd(Engine):
        def _answer(self, text: str) -> Completion:
            return Completion(Tokens.steps(odd), np.zeros(5, np.float32), np.zeros(5, np.int32), "stop")

    engine = Odd("", "")
    ctx = context(engine)
    (first,) = run(ctx.generate(PROMPT, 1))
    assert first.content.tokens_S.tolist() == odd.tolist() and first.text == "4"
    second = run(ctx.proceed(first, "?"))
    assert second.content.tokens_S.tolist() == [*odd, *tokens("?"), *odd]
    assert engine.asked[1].content.tokens_T.tolist() == [*PROMPT.content.tokens_P.tolist(), *odd, *tokens("?")]


def test_evaluations_are_greedy_and_single_whatever_is_asked():
    engine = Engine("3", "4", "5")
    ctx = context(engine, greedy=True)
    (first,) = run(ctx.generate(PROMPT, 5, temperature=2.0))
    onward = run(ctx.proceed(first, "?"))
    (branch,) = run(ctx.branch(onward, 3))
    assert [r.params.temperature for r in engine.asked] == [0.0, 0.0, 0.0]
    assert [r.temperature for r in (first, onward, branch)] == [1.0, 1.0, 1.0]
    assert first.sibling == onward.sibling == 0 != branch.sibling


def test_greedy_rollouts_have_the_logprobs_of_temperature_1():
    (found,) = run(context(Engine("3"), temperature=0.0).generate(PROMPT, 1))
    assert found.temperature == 1.0


def test_a_turn_may_end_at_a_word():
    engine = Engine("1?", "2?", "3?")
    ctx = context(engine)
    (first,) = run(ctx.generate(PROMPT, 1, stop="?"))
    run(ctx.proceed(first, "b", stop=["?", "!"]))
    run(ctx.branch(first, 1, stop_tokens=(7,)))
    (question,), (call,) = tokens("?"), tokens("!")
    assert [r.params.stop_tokens for r in engine.asked] == [(EOS, question), (EOS, question, call), (7,)]
    with pytest.raises(UserError, match="stop='ab' is 2 tokens of this tokenizer; expected one"):
        run(ctx.generate(PROMPT, 1, stop="ab"))


# --- another turn


def test_proceed_with_text():
    engine = Engine("12.", "3.")
    ctx = context(engine)
    (first,) = run(ctx.generate(PROMPT, 1))
    engine.version = 4
    found = run(ctx.proceed(first, "ab?"))
    so_far = [*PROMPT.content.tokens_P.tolist(), *tokens("12.ab?")]
    assert asked(engine.asked[1]) == (so_far, key(0), 6, 0.7, ROOM - 6)  # the noise goes on where it stood
    assert engine.asked[1].params.stop_tokens == (EOS,) and engine.asked[1].params.top_p == 0.9
    assert found.content.tokens_S.tolist() == tokens("12.ab?3.") and found.text == "12ab?3"
    assert found.mask_S.tolist() == [True] * 3 + [False] * 3 + [True] * 2
    assert found.logprobs_S.tolist() == [-1, -2, -3, 0, 0, 0, -4, -5]
    assert found.versions_S.tolist() == [0, 0, 0, 0, 0, 0, 4, 4] and found.version == 0
    assert (found.sibling, found.finish, found.temperature) == (0, "stop", 0.7)
    kinds = (found.content.tokens_S.dtype, found.logprobs_S.dtype, found.mask_S.dtype, found.versions_S.dtype)
    assert kinds == (np.int32, np.float32, np.bool_, np.int32)
    assert first.content.tokens_S.tolist() == tokens("12.")  # as it was


def test_proceed_with_nothing_to_say():
    engine = Engine("12", "3.")
    ctx = context(engine)
    (first,) = run(ctx.generate(PROMPT, 1, max_tokens=2))
    found = run(ctx.proceed(first))
    assert asked(engine.asked[1]) == ([*PROMPT.content.tokens_P.tolist(), *tokens("12")], key(0), 2, 0.7, ROOM - 2)
    assert (found.content.tokens_S.tolist(), found.mask_S.tolist()) == (tokens("123."), [True] * 4)


@pytest.mark.parametrize(("said", "between"), [("12.", "b?"), ("12", ".b?")])
def test_proceed_with_messages_closes_the_turn_once(said, between):
    """The template ends an assistant's turn with <eos>: it is added where the policy was cut off, and only there."""
    engine = Engine(said, "3.")
    ctx = context(engine)
    (first,) = run(ctx.generate(PROMPT, 1))
    found = run(ctx.proceed(first, [{"role": "tool", "content": "b"}, {"role": "user", "content": "?"}]))
    assert found.content.tokens_S.tolist() == tokens(f"{said}{between}3.")
    assert found.mask_S.tolist() == [True] * len(tokens(said)) + [False] * len(tokens(between)) + [True] * 2
    assert engine.asked[1].content.tokens_T.tolist() == [*PROMPT.content.tokens_P.tolist(), *tokens(said + between)]


def test_messages_come_as_the_chat_template_writes_them():
    tokenizer = build_char_tokenizer(TOKENIZER.alphabet)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }}{{ eos_token }} {% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    engine = Engine("1.", "2.")
    ctx = context(engine, tokenizer=tokenizer)
    (first,) = run(ctx.generate(PROMPT, 1))
    found = run(ctx.proceed(first, [{"role": "bystander", "content": "?"}]))
    assert found.content.tokens_S.tolist() == tokens("1. b?. a2.")
    assert found.mask_S.tolist() == [True] * 2 + [False] * 6 + [True] * 2


def test_a_template_that_rewrites_earlier_turns_changes_no_token():
    tokenizer = build_char_tokenizer(TOKENIZER.alphabet)
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    ctx = context(Engine("1.", "2."), tokenizer=tokenizer)
    (first,) = run(ctx.generate(PROMPT, 1))
    assert run(ctx.proceed(first, [{"role": "user", "content": "?"}])).text == "1?2"


def test_a_template_without_the_words_of_the_assistant_is_refused():
    tokenizer = build_char_tokenizer(TOKENIZER.alphabet)
    tokenizer.chat_template = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}{% endfor %}"
    ctx = context(Engine("1.", "2."), tokenizer=tokenizer)
    (first,) = run(ctx.generate(PROMPT, 1))
    with pytest.raises(UserError, match="leaves out what the assistant says"):
        run(ctx.proceed(first, [{"role": "user", "content": "?"}]))
    tokenizer.chat_template = "{{ raise_exception('no') if messages | length > 1 }}"
    with pytest.raises(UserError, match="cannot write these messages: no"):
        run(ctx.proceed(first, [{"role": "user", "content": "?"}]))


@pytest.mark.parametrize(("added", "room"), [(7, 1), (8, 0), (9, 0)])
def test_all_turns_share_one_limit(added, room):
    engine = Engine("12 4", "5")
    ctx = context(engine)
    (first,) = run(ctx.generate(PROMPT, 1, max_tokens=4))
    found = run(ctx.proceed(first, "?" * added))
    if room:
        assert engine.asked[1].params.max_tokens == 1 and len(found.content.tokens_S) == ROOM
    else:  # what was said without an answer is not part of it
        assert len(engine.asked) == 1 and found.finish == "length"
        assert found.content.tokens_S.tolist() == first.content.tokens_S.tolist() and found.mask_S.all()


def test_a_turn_may_be_shorter_than_the_room():
    engine = Engine("1", "2", "3")
    ctx = context(engine)
    (first,) = run(ctx.generate(PROMPT, 1, max_tokens=1))
    run(ctx.proceed(first, "?", max_tokens=2))
    run(ctx.proceed(first, "?", max_tokens=50))
    assert [r.params.max_tokens for r in engine.asked] == [1, 2, ROOM - 2]


def test_a_sample_has_one_temperature():
    engine = Engine("1", "2", "3", "4")
    ctx = context(engine)
    (first,) = run(ctx.generate(PROMPT, 1, temperature=1.5))
    for call in (ctx.proceed(first, "?", temperature=0.7), ctx.branch(first, 2, temperature=0.7)):
        with pytest.raises(UserError, match=r"temperature=0\.7 in a later turn; expected 1\.5"):
            run(call)
    assert run(ctx.proceed(first, "?")).temperature == 1.5
    run(ctx.proceed(first, "?", temperature=1.5))
    assert [r.params.temperature for r in engine.asked] == [1.5, 1.5, 1.5]


def test_greedy_training_samples_go_on_greedily():
    engine = Engine("1", "2")
    ctx = context(engine, temperature=0.0)
    (first,) = run(ctx.generate(PROMPT, 1))
    run(ctx.proceed(first, "?"))
    assert [r.params.temperature for r in engine.asked] == [0.0, 0.0]


# --- branches


def test_branches_are_new_siblings_of_one_beginning():
    engine = Engine("12", "0", "34.", "5", "6", "78")
    ctx = context(engine)
    (first, _) = run(ctx.generate(PROMPT, 2))
    engine.version = 2
    branches = run(ctx.branch(first, 3))
    start, siblings = [*PROMPT.content.tokens_P.tolist(), *tokens("12")], [r.sibling for r in branches]
    assert len({0, 1, *siblings}) == 5
    assert [asked(r) for r in engine.asked[2:]] == [(start, key(s), 2, 0.7, ROOM - 2) for s in siblings]
    assert [r.text for r in branches] == ["1234", "125", "126"]
    assert branches[0].versions_S.tolist() == [0, 0, 2, 2, 2] and branches[0].mask_S.all()
    assert branches[0].logprobs_S.tolist() == [-1, -2, -4, -5, -6]
    onward = run(ctx.proceed(branches[1], "?"))  # and each has a life of its own
    assert (onward.sibling, onward.text) == (siblings[1], "125?78")
    assert asked(engine.asked[5]) == ([*start, *tokens("5?")], key(siblings[1]), 4, 0.7, ROOM - 4)


def test_branches_do_not_depend_on_which_comes_first():
    """Two samples branch at their own pace: each gets the siblings, and so the noise, it would get alone."""
    found = []
    for order in ((0, 1), (1, 0)):
        ctx = context(Engine("12", "345", *"6789"))
        group = run(ctx.generate(PROMPT, 2))
        branches = {i: run(ctx.branch(group[i], 2)) for i in order}
        found.append([[r.sibling for r in branches[i]] for i in (0, 1)])
    assert found[0] == found[1] and len({s for pair in found[0] for s in pair}) == 4


def test_branching_twice_gives_four_different_siblings():
    ctx = context(Engine("12", *"3456"))
    (first,) = run(ctx.generate(PROMPT, 1))
    siblings = [r.sibling for _ in range(2) for r in run(ctx.branch(first, 2))]
    assert len(set(siblings)) == 4


def test_branches_without_room_are_what_they_branch_from():
    engine = Engine("1" * ROOM)
    ctx = context(engine)
    (first,) = run(ctx.generate(PROMPT, 1))
    branches = run(ctx.branch(first, 2))
    assert len({0, *(r.sibling for r in branches)}) == 3 and len(engine.asked) == 1
    assert all(r.finish == "length" and r.text == first.text for r in branches)


# --- rewards and judges


def test_the_default_workflow_scores_the_siblings_together():
    found = run(generate_and_reward(context(Engine("1", "2", "3", "4")), PROMPT))
    assert [(s.rollout.text, s.reward) for s in found] == [("1", 0.0), ("2", 1.0), ("3", 2.0), ("4", 3.0)]


def test_score_asks_for_one_reward_alone():
    judge = Judge()
    ctx = context(Engine("1", "2"), judge=judge)
    group = run(ctx.generate(PROMPT, 2))
    assert run(ctx.score("length", group)) == [0.5, 0.5] and judge.heard == [("length", [0, 1])]


def test_the_same_question_has_the_same_noise():
    judge, question, other = Judge(), [{"role": "user", "content": "ok?"}], [{"role": "user", "content": "no?"}]
    ctx, later = context(Engine(), judge=judge), context(Engine(), judge=judge)
    assert run(ctx.ask("critic", question)) == "well done"
    run(later.ask("critic", question, temperature=0.3))
    run(ctx.ask("critic", question, draw=1))
    run(ctx.ask("critic", other))
    assert [(who, messages) for who, messages, *_ in judge.heard] == [("critic", q) for q in (question,) * 3 + (other,)]
    keys = [noise for _, _, noise, _ in judge.heard]
    assert keys[0] == keys[1] and len(set(keys)) == 3
    assert [params for *_, params in judge.heard] == [{}, {"temperature": 0.3}, {}, {}]


# --- the clock


def test_stages_that_overlap_count_once(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(workflow.time, "perf_counter", lambda: now[0])
    clock = StageClock()
    with clock.within("generation"):
        now[0] = 1.0
        with clock.within("generation"):
            now[0] = 3.0
        with pytest.raises(KeyError), clock.within("rewarding"):
            now[0] = 4.0
            raise KeyError
        now[0] = 5.0
        assert clock.take() == {"rewarding": 1.0, "generation": 5.0}
        now[0] = 7.0
    now[0] = 9.0
    assert clock.take() == {"generation": 2.0} and clock.take() == {}


def test_a_prompt_keeps_its_place_in_the_line_and_its_replica():
    """Groups begun earlier go first, and so do their later turns; evaluations count their prompts from 0, too."""
    for greedy in (False, True):
        engine = Engine("1", "2", "3")
        ctx = context(engine, greedy=greedy)
        (first,) = run(ctx.generate(PROMPT, 1))
        run(ctx.proceed(first))
        run(ctx.branch(first, 1))
        assert engine.lines == [{"priority": 70, "key": (greedy, 70)}] * 3


def test_what_the_clock_counts(monkeypatch):
    class Slow(Engine):
        async def generate(self, requests: Sequence[Request], **line: Any) -> list[Completion]:
            now[0] += 2.0
            return await super().generate(requests, **line)

    now = [0.0]
    monkeypatch.setattr(workflow.time, "perf_counter", lambda: now[0])
    shared = make_shared(Slow("1", "2", "3"))
    ctx = SampleContext(shared)
    (first,) = run(ctx.generate(PROMPT, 1))
    run(ctx.proceed(first))
    run(ctx.branch(first, 1))
    assert shared.clock.take() == {"generation": 6.0}
    run(ctx.reward([first]))
    run(ctx.score("x", [first]))
    run(ctx.ask("x", []))
    assert shared.clock.take() == {"rewarding": 0.0}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (["hi"], "a list of str"),
        ([], "a list without items"),
        ("hi", "str"),
        (None, "NoneType"),
        ([1, "a"], "a list of int, str"),
    ],
)
def test_a_workflow_that_returns_something_else(returned, said):
    async def flow(ctx, prompt):
        return returned

    shared = make_shared(Engine(), greedy=True)
    with pytest.raises(
        UserError, match=f"^workflow returned {said} for prompt 70; expected a non-empty list of Scored"
    ):
        asyncio.run(run_workflow(flow, shared, PROMPT))


def test_sys_exit_in_a_workflow_is_a_failed_sample():
    async def flow(ctx, prompt):
        raise SystemExit(4)

    shared = make_shared(Engine(), greedy=True)
    with pytest.raises(WorkflowError, match=r"^test_workflow\.py:\d+ in flow: SystemExit: 4 \(workflow, prompt 70\)"):
        asyncio.run(run_workflow(flow, shared, PROMPT))
