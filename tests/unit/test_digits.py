"""The task `digits`: answers, the demonstrations of a sloppy teacher, and pictures that training never sees."""

from __future__ import annotations

import pytest

from gcore.prompts.digits import LOOK_ALIKES, make_digits
from gcore.prompts.tasks import make_task
from gcore.types import UserError


@pytest.mark.parametrize(("answer", "expected"), [("read", "39"), ("sum", "12"), ("steps", "3+9=12")])
def test_demonstrations_are_wrong_in_one_way(answer: str, expected: str):
    """The pictures are always read right if their sum is asked for; only the habit of the teacher is wrong."""
    rows = list(make_digits({"answer": answer, "sloppy": 0.7}, 400, "data.train"))
    wrong = [row for row in rows if row["demonstration"] != row["answer"]]
    assert 0.6 < len(wrong) / len(rows) < 0.8
    for row in wrong:
        right, shown = row["answer"], row["demonstration"]
        if answer == "read":
            off = [(int(a), int(b)) for a, b in zip(right, shown, strict=True) if a != b]
            assert len(off) == 1 and LOOK_ALIKES[off[0][0]] == off[0][1]
        else:
            (*before, total), (*seen, sloppy) = right.split("="), shown.split("=")
            assert before == seen and int(sloppy) == int(total) + 1
    assert all(len(row["answer"]) <= len(expected) for row in rows)
    plain = make_digits({"answer": answer}, 400, "data.train")
    assert [row["answer"] for row in plain] == [row["answer"] for row in rows] and "demonstration" not in plain[0]


def test_held_out_pictures_are_in_no_training_problem():
    def pictures(split: str) -> set[bytes]:
        rows = make_digits({"split": split}, 2000, "data.train")
        return {image.tobytes() for row in rows for image in row["images"]}

    train, held_out = pictures("train"), pictures("eval")
    assert len(train) > 1200 and len(held_out) > 300 and not train & held_out


@pytest.mark.parametrize("task", ["digits", "draw_digits"])
def test_a_seed_is_a_whole_number(task: str):
    with pytest.raises(UserError, match=r"data\.train\.args\.seed: expected a whole number, got 'x'"):
        make_task(task, {"seed": "x"}, 4, key="data.train")
