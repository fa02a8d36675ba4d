"""Prompts: tokenizer checks, datasets of three conventions, tasks, and an order that no number of readers changes."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gcore.config.base import BuildModel, Model
from gcore.config.data import Data, Dataset
from gcore.prompts.rows import answer_of, check_media, load_rows, prompt_of
from gcore.prompts.source import PromptSource, Templater, measure
from gcore.prompts.tasks import make_task
from gcore.prompts.tokenizer import build_char_tokenizer, load_tokenizer, with_padding
from gcore.types import UserError

ALPHABET = BuildModel().alphabet


@pytest.fixture(scope="module")
def tokenizer():
    return build_char_tokenizer(ALPHABET)


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


def data_for(**dataset) -> Data:
    return Data(train=Dataset(**dataset))


def write_jsonl(path: Path, rows: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_importing_the_room_imports_no_torch():
    code = (
        "import sys, gcore.prompts, gcore.rewarding; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- tokenizer


def test_char_tokenizer_is_one_token_a_character(tokenizer):
    ids = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *ALPHABET])}
    assert tokenizer.get_vocab() == ids
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "27+58="}], tokenize=False, add_generation_prompt=True
    )
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokens == [ids[c] for c in ["<bos>", "2", "7", "+", "5", "8", "="]]
    assert tokenizer.decode([ids[c] for c in "a b"] + [ids["<eos>"]], skip_special_tokens=True) == "a b"
    assert tokenizer("2é", add_special_tokens=False)["input_ids"] == [ids["2"], ids["<unk>"]]


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "qwen3_5"])  # the last two have rules of their own
def test_char_tokenizer_survives_saving(family, tokenizer, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / family)
    (folder / "config.json").write_text(json.dumps({"model_type": family}))
    again = load_tokenizer(Model(path=str(folder)))
    text = "<bos>12 + (3)=<eos>"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert again(text, add_special_tokens=False)["input_ids"] == tokens
    assert again.decode(tokens) == text
    assert again.chat_template == tokenizer.chat_template


def test_alphabet_with_a_repeated_character():
    with pytest.raises(UserError, match=r"model\.build\.alphabet.*'1' twice"):
        build_char_tokenizer("0121")


def edited(saved: Path, folder: Path, remove: str) -> str:
    """A copy of the tokenizer without one of its parts."""
    shutil.copytree(saved, folder)
    if remove == "chat_template":
        (folder / "chat_template.jinja").unlink()
    else:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != remove}))
    return str(folder)


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("eos_token", r"rewards\.judges\.0\.model\.path: .*no eos token .*rewards\.judges\.0\.model\.tokenizer"),
        ("chat_template", r"rewards\.judges\.0\.model\.path: .*no chat template .*judges\.0\.model\.chat_template"),
    ],
)
def test_incomplete_tokenizers_are_named(saved, tmp_path, remove, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(Model(path=edited(saved, tmp_path / "t", remove)), "rewards.judges.0.model", chat=True)


def test_a_tokenizer_needs_no_pad_token(saved, tmp_path):
    """Training packs, and engines know their lengths. It is exported as it came."""
    assert load_tokenizer(Model(path=edited(saved, tmp_path / "t", "pad_token"))).pad_token is None


def test_scorers_get_a_pad_token_that_never_stops_a_text(saved, tmp_path):
    model = Model(path=edited(saved, tmp_path / "t", "pad_token"))
    assert with_padding(load_tokenizer(model), model).pad_token == "<pad>"  # it is in the vocabulary
    tokenizer = load_tokenizer(model)
    (tmp_path / "t" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))  # <eos>, <pad>
    assert with_padding(tokenizer, model).pad_token == "<bos>"
    assert with_padding(load_tokenizer(Model(path=str(saved))), model).pad_token == "<pad>"  # its own
    (tmp_path / "t" / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1, 2, 3]}))
    assert with_padding(load_tokenizer(model), model).pad_token is None


# --- prompts without a chat template


@pytest.fixture
def base(saved, tmp_path):
    """The tokenizer of a base model, in the manner of Llama: bos before a text, no pad token, no template."""
    from tokenizers import processors

    tokenizer = load_tokenizer(Model(path=edited(saved, tmp_path / "base", "chat_template")))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 1)]
    )
    return tokenizer


def test_strings_go_in_as_they_are_without_a_template(base):
    templater = Templater(base, data_for(path="x"))
    messages, text, content = templater.content(TRL)
    tokens = content.tokens_P
    assert (messages, text) == (({"role": "user", "content": "1+1="},), "1+1=")
    assert base.convert_ids_to_tokens(tokens) == ["<bos>", "1", "+", "1", "="] and tokens.dtype == np.int32
    for prompt in ("<bos>1+1=", "1+1="):  # one bos, not two
        assert templater.content({"prompt": prompt})[2].tokens_P.tolist() == tokens.tolist()
    assert base.convert_ids_to_tokens(templater.demonstration(TRL).tokens_S) == ["2", "<eos>"]
    assert templater.prompt(TRL, 0, 0).columns["prompt"] == "1+1="


def test_a_prompt_is_not_ended_by_its_tokenizer(base):
    from tokenizers import processors

    special = [("<bos>", 1), ("<eos>", 2)]
    ends = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=special)
    base.backend_tokenizer.post_processor = ends
    tokens = Templater(base, data_for(path="x")).content(TRL)[2].tokens_P
    assert base.convert_ids_to_tokens(tokens) == ["<bos>", "1", "+", "1", "="]


def test_messages_and_system_prompts_need_a_template(base, tokenizer):
    with pytest.raises(UserError, match=r"data\.train: column 'prompt' holds messages: .*\(set model\.chat_template"):
        Templater(base, data_for(path="x")).content(CHAT)
    with pytest.raises(UserError, match=r"data\.system_prompt: .*no chat template .*model\.chat_template"):
        Templater(base, Data(train=Dataset(path="x"), system_prompt="add"))
    assert Templater(tokenizer, data_for(path="x")).content(TRL)[1] == "<bos>1+1="  # where there is one, it is used


def test_missing_and_broken_tokenizers(tmp_path):
    with pytest.raises(UserError, match=r"model\.path: no such folder"):
        load_tokenizer(Model(path=str(tmp_path / "none")))
    with pytest.raises(UserError, match=r"model\.tokenizer: no such folder"):
        load_tokenizer(Model(path=str(tmp_path), tokenizer=str(tmp_path / "none")))
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen2"}'
    )  # transformers would make an empty tokenizer of this
    with pytest.raises(UserError, match=r"model\.path: no tokenizer in .*model\.tokenizer"):
        load_tokenizer(Model(path=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{bad")
    with pytest.raises(UserError, match=r"model\.path: .*does not load") as caught:
        load_tokenizer(Model(path=str(tmp_path)))
    assert "\n" not in str(caught.value)


def test_chat_template_from_text_and_file(saved, tmp_path):
    text = "{% for m in messages %}<bos>{{ m['content'] }}?{% endfor %}"
    file = tmp_path / "t.jinja"
    file.write_text(text)
    for value in (text, str(file)):
        tokenizer = load_tokenizer(
            Model(path=edited(saved, tmp_path / f"t{len(value)}", "chat_template"), chat_template=value)
        )
        assert tokenizer.apply_chat_template([{"role": "user", "content": "1"}], tokenize=False) == "<bos>1?"
    with pytest.raises(UserError, match=r"model\.chat_template: no such file: gone\.jinja"):
        load_tokenizer(Model(build=BuildModel(), chat_template="gone.jinja"))
    with pytest.raises(UserError, match=r"model\.chat_template: does not render"):
        load_tokenizer(Model(build=BuildModel(), chat_template="{% for m in messages %}"))


# --- rows

TRL = {"prompt": "1+1=", "answer": "2", "level": 3}
CHAT = {"prompt": [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1="}], "solution": "2"}
VERL = {
    "data_source": "math",
    "prompt": [{"role": "user", "content": "1+1="}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 7},
}
OPENRLHF = {"input": "1+1=", "label": "2"}


@pytest.mark.parametrize("row", [TRL, CHAT, VERL, OPENRLHF], ids=["trl", "chat", "verl", "openrlhf"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "lines.json", "parquet", "folder"])
def test_conventions_in_every_format(row, kind, tmp_path):
    rows = [row, {**row, "n": None}] if "json" in kind else [row, row]
    path = str(tmp_path / f"d.{kind}")
    match kind:
        case "json":
            Path(path).write_text(json.dumps(rows, indent=1))
        case "jsonl" | "lines.json":
            write_jsonl(Path(path), rows)
        case "parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            pq.write_table(pa.Table.from_pylist(rows), path)
        case "folder":
            datasets = pytest.importorskip("datasets")

            datasets.Dataset.from_list(rows).save_to_disk(path)
    spec = Dataset(path=path)
    loaded = load_rows(spec)
    assert len(loaded) == 2
    assert loaded[0] == row
    assert prompt_of(loaded[1], spec) == (row.get("prompt") or row["input"])
    assert answer_of(loaded[1], spec) == "2"
    assert len(load_rows(Dataset(path=path, size=1))) == 1
    with pytest.raises(IndexError):
        loaded[2]


def test_null_fields_of_messages_are_left_out():
    spec = Dataset(path="x")
    messages = [{"role": "user", "content": "hi", "tool_calls": None}]
    assert prompt_of({"prompt": messages}, spec) == [{"role": "user", "content": "hi"}]


def test_columns_chosen_by_name(tmp_path):
    rows = [{"prompt": "no", "q": "yes", "meta": {"a": {"b": 5}}}]
    spec = Dataset(path=write_jsonl(tmp_path / "d.jsonl", rows), prompt_column="q", answer_column="meta.a.b")
    row = load_rows(spec)[0]
    assert (prompt_of(row, spec), answer_of(row, spec)) == ("yes", 5)
    assert answer_of({"prompt": "a"}, Dataset(path="x")) is None
    assert answer_of({"answer": 0}, Dataset(path="x")) == 0


def test_jsonl_blank_lines_and_no_last_newline(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "é"}\n\n{"prompt": "b"}')
    assert list(load_rows(Dataset(path=str(path)))) == [{"prompt": "é"}, {"prompt": "b"}]


def test_bad_datasets_are_named(tmp_path):
    def load(path, text=None, key="data.train", **keys):
        if text is not None:
            (tmp_path / path).write_text(text)
        return load_rows(Dataset(path=str(tmp_path / path), **keys), key)

    with pytest.raises(UserError, match=r"data\.train\.path: .*a\.jsonl, line 3: not JSON"):
        load("a.jsonl", '{"prompt": "1"}\n\n{"prompt": \n')
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: expected an object, got \[1\]"):
        load("a.jsonl", "[1]\n")
    with pytest.raises(
        UserError, match=r"data\.eval: no prompt column: .*got text, title \(set data\.eval\.prompt_column\)"
    ):
        load("a.jsonl", '{"title": "1", "text": "2"}\n', key="data.eval")
    with pytest.raises(UserError, match=r"data\.train: no prompt column: expected 'q', got prompt"):
        load("a.jsonl", '{"prompt": "1"}\n', prompt_column="q")
    with pytest.raises(UserError, match=r"data\.train\.answer_column: no column 'gold'; the dataset has prompt"):
        load("a.jsonl", '{"prompt": "1"}\n', answer_column="gold")
    with pytest.raises(UserError, match=r"data\.train: no rows"):
        load("a.jsonl", "\n")
    with pytest.raises(UserError, match=r"data\.train\.path: no such file"):
        load("gone.jsonl")
    with pytest.raises(UserError, match=r"ends in '\.txt'; expected \.jsonl, \.json, \.csv, \.tsv, \.parquet or"):
        load("a.txt", "prompt\n")
    with pytest.raises(UserError, match="not a readable parquet file"):
        load("a.parquet", "prompt\n")
    (tmp_path / "plain").mkdir()
    with pytest.raises(UserError, match=r"is not a dataset folder|gcore-rl\[datasets\]"):
        load("plain")


def test_splits_of_a_dataset_folder(tmp_path):
    datasets = pytest.importorskip("datasets")

    made = datasets.Dataset.from_list([{"prompt": "a"}])
    datasets.DatasetDict(train=made, test=made.map(lambda _: {"prompt": "b"})).save_to_disk(tmp_path / "both")
    datasets.DatasetDict(test=made, dev=made).save_to_disk(tmp_path / "other")
    assert load_rows(Dataset(path=str(tmp_path / "both")))[0] == {"prompt": "a"}
    assert load_rows(Dataset(path=str(tmp_path / "both" / "test")), "data.eval")[0] == {"prompt": "b"}
    assert load_rows(Dataset(path=str(tmp_path / "both"), split="test"), "data.eval")[0] == {"prompt": "b"}
    with pytest.raises(UserError, match=r"data\.train\.split: not set, and .*other has test, dev"):
        load_rows(Dataset(path=str(tmp_path / "other")))
    with pytest.raises(
        UserError, match=r"data\.eval\.split: not set, and .* has train, test"
    ):  # never train in silence
        load_rows(Dataset(path=str(tmp_path / "both")), "data.eval")
    with pytest.raises(
        UserError, match=r"data\.train\.split=dev: no such split in .*both; expected one of train, test"
    ):
        load_rows(Dataset(path=str(tmp_path / "both"), split="dev"))
    with pytest.raises(UserError, match=r"data\.train\.split=test: .*test has no splits"):
        load_rows(Dataset(path=str(tmp_path / "both" / "test"), split="test"))


def test_keys_that_would_do_nothing(tmp_path):
    file = write_jsonl(tmp_path / "d.jsonl", [TRL])
    with pytest.raises(UserError, match=r"data\.train\.split: .* is a file"):
        load_rows(Dataset(path=file, split="test"))
    with pytest.raises(UserError, match=r"data\.train\.revision=v1: .* is on this machine; expected a hub id"):
        load_rows(Dataset(path=file, revision="v1"))
    with pytest.raises(ValueError, match=r"split: only for datasets with a path; this one has a task"):
        Dataset(task="arithmetic", split="test")


def test_tables_of_text(tmp_path):
    """Values are strings as they stand, an empty one is null."""
    (tmp_path / "d.csv").write_bytes(b'\xef\xbb\xbfprompt,answer,note\r\n"1,1\n=",007,\r\n\r\n2 =,"say ""2""",x\r\n')
    found = load_rows(Dataset(path=str(tmp_path / "d.csv")))
    assert list(found) == [
        {"prompt": "1,1\n=", "answer": "007", "note": None},
        {"prompt": "2 =", "answer": 'say "2"', "note": "x"},
    ]
    assert len(load_rows(Dataset(path=str(tmp_path / "d.csv"), size=1))) == 1
    (tmp_path / "d.tsv").write_text("prompt\tanswer\n1,1=\t2\n")
    assert list(load_rows(Dataset(path=str(tmp_path / "d.tsv")))) == [{"prompt": "1,1=", "answer": "2"}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.json",
            '[\n {"prompt": "1"},\n {"prompt": }\n]',
            r"data\.train\.path: .*a\.json, line 3: not JSON: Expecting",
        ),
        ("a.json", '[{"prompt": "1"},\n\n5]', r"a\.json, line 3: expected an object, got 5"),
        ("a.json", '[{"prompt": "1"}\n{"prompt": "2"}]', r"a\.json, line 2: expected a comma or \] after an object"),
        ("a.json", '{\n "prompt": "1"\n}', r"a\.json, line 1: not JSON: .*an array of objects, or one object per line"),
        ("a.json", "[]", r"data\.train: no rows in .*a\.json"),
        ("a.csv", "prompt,answer\n1,2\n1,2,3\n", r"a\.csv, line 3: 3 values; expected 2, one per column"),
        ("a.csv", "prompt,prompt\n1,2\n", r"a\.csv, line 1: the first line names the columns, each once"),
        ("a.csv", 'prompt\n"open\n', r"a\.csv, line 2: not a table: unexpected end of data"),
        ("a.csv", "prompt\n", r"data\.train: no rows in .*a\.csv"),
        ("a.csv", "", r"data\.train: no rows in .*a\.csv"),
        ("a.tsv", "question\n\xff\n", r"a\.tsv is not UTF-8 text"),
    ],
)
def test_bad_tables_are_named_with_their_line(tmp_path, name, text, message):
    (tmp_path / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=message) as caught:
        load_rows(Dataset(path=str(tmp_path / name)))
    assert "\n" not in str(caught.value)


# --- pictures


@pytest.mark.parametrize("column", ["image", "images", "video", "videos"])
def test_columns_of_pictures_are_refused(column, tokenizer, tmp_path):
    for value in ("cat.png", ["cat.png"], {"bytes": "AA", "path": None}):
        with pytest.raises(UserError, match=rf"data\.train: column '{column}' holds .*; expected text only"):
            load_rows(Dataset(path=write_jsonl(tmp_path / "d.jsonl", [{**TRL, column: value}])))
    mixed = [{**TRL, column: None}, {**TRL, column: []}]
    spec = Dataset(path=write_jsonl(tmp_path / "d.jsonl", [*mixed, {**TRL, column: "cat.png"}]))
    templater = Templater(tokenizer, Data(train=spec))
    assert measure(load_rows(spec)[:2], templater, 99).kept == [0, 1]  # a column without pictures is text
    with pytest.raises(UserError, match=rf"row 2: data\.train: column '{column}' holds 'cat.png'"):
        measure(load_rows(spec), templater, 99)


@pytest.mark.parametrize("kind", ["image", "image_url", "input_image", "video"])
def test_messages_with_pictures_are_refused(kind):
    parts = [{"type": "text", "text": "what is it?"}, {"type": kind, kind: "cat.png"}]
    with pytest.raises(UserError, match=rf"column 'prompt' has a message part of type '{kind}'; expected text only"):
        check_media({"prompt": [{"role": "user", "content": parts}]}, "data.train")
    check_media({"prompt": [{"role": "user", "content": parts[:1]}]}, "data.train")


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_image_features_are_refused_whatever_the_column_is_called(kind, tmp_path):
    datasets = pytest.importorskip("datasets")

    features = datasets.Features({"prompt": datasets.Value("string"), "picture": [datasets.Image()]})
    made = datasets.Dataset.from_list([{"prompt": "a", "picture": []}], features=features)
    path = str(tmp_path / f"d.{kind}")
    (made.save_to_disk if kind == "folder" else made.to_parquet)(path)
    with pytest.raises(UserError, match=r"data\.train: column 'picture' holds Image features; expected text only"):
        load_rows(Dataset(path=path))


@pytest.mark.parametrize("prompt", [5, [], [{"content": "x"}], ["x"], [{"role": "assistant", "content": "x"}]])
def test_prompts_that_are_none(prompt):
    with pytest.raises(UserError, match="column 'prompt'"):
        prompt_of({"prompt": prompt}, Dataset(path="x"))


# --- tasks


def test_arithmetic_splits_are_disjoint_complete_and_seeded():
    args = {"operations": ["+", "-", "*"], "min": 3, "max": 12, "eval_size": 40}
    train = make_task("arithmetic", args)
    held_out = make_task("arithmetic", {**args, "split": "eval"})
    every = {f"{a}{o}{b}=": str(eval(f"{a}{o}{b}")) for a in range(3, 13) for b in range(3, 13) for o in "+-*"}
    assert (len(train), len(held_out)) == (260, 40)
    assert {r["prompt"]: r["answer"] for r in [*train, *held_out]} == every  # 300 different prompts: nothing in both
    assert list(make_task("arithmetic", args)) == list(train)
    assert list(make_task("arithmetic", {**args, "seed": 1})) != list(train)
    assert list(make_task("arithmetic", {**args, "seed": 0})) == list(train)
    assert list(make_task("arithmetic", args, 10)) == list(train)[:10]


def test_arithmetic_too_large_to_enumerate():
    args = {"max": 10**8, "eval_size": 1000}
    train, held_out = make_task("arithmetic", args, 5000), make_task("arithmetic", {**args, "split": "eval"})
    assert (len(train), len(held_out)) == (5000, 1000)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("arithmetik", {}, r"data\.train\.task: unknown task 'arithmetik'; expected arithmetic, needle, digits, "),
        ("arithmetic", {"operation": ["+"]}, r"data\.train\.args\.operation: .*did you mean operations\?"),
        ("arithmetic", {"operations": ["/"]}, r"args\.operations: expected a list of \+, -, \*, got \['/'\]"),
        ("arithmetic", {"operations": "+-"}, r"args\.operations: expected a list"),
        ("arithmetic", {"min": 5, "max": 4}, r"args\.min: expected at most max=4, got 5"),
        ("arithmetic", {"max": 9.5}, r"args\.max: expected a whole number, got 9\.5"),
        (
            "arithmetic",
            {"max": 1, "eval_size": 4},
            r"args\.eval_size: expected less than the number of problems, 4, got 4",
        ),
        ("arithmetic", {"split": "test"}, r"args\.split: expected train or eval, got 'test'"),
        ("needle", {"length": 5}, r"args\.length: needle has no such argument; did you mean (max|min)_length\?"),
        ("needle", {"min_length": 9, "max_length": 8}, r"args\.min_length: expected 2 to max_length=8, got 9"),
        ("needle", {"size": "all"}, r"args\.size: expected a whole number, got 'all'"),
        ("needle", {"split": "test"}, r"args\.split: expected train or eval, got 'test'"),
    ],
)
def test_bad_task_arguments(name, args, message):
    with pytest.raises(UserError, match=message):
        make_task(name, args)


def test_needle_rows():
    args = {"min_length": 4, "max_length": 64}
    train, held_out = make_task("needle", args, 300), make_task("needle", {**args, "split": "eval", "size": 50})
    assert (len(train), len(held_out)) == (300, 50)
    for row in [*train, *held_out]:
        hay, end = row["prompt"][:-1], row["prompt"][-1]
        assert end == "?" and [c for c in hay if c.isdigit()] == [row["answer"]]
        assert set(hay) - {row["answer"]} <= set("abcdefgh")
    lengths = [len(row["prompt"]) for row in train]
    assert min(lengths) == 4 and 60 <= max(lengths) <= 64 and 12 < np.median(lengths) < 20  # log-uniform
    assert {row["answer"] for row in train} == set("0123456789")
    where = [row["prompt"].index(row["answer"]) / (len(row["prompt"]) - 2) for row in train]
    assert min(where) == 0 and max(where) == 1 and 0.4 < np.mean(where) < 0.6
    assert list(make_task("needle", args, 300)) == list(train) != list(make_task("needle", {**args, "seed": 1}, 300))
    assert train[0] != held_out[0] and len(make_task("needle", {})[0]["prompt"]) > 32


def test_reasoning_gym_rows():
    pytest.importorskip("reasoning_gym")
    train = make_task("reasoning_gym/chain_sum", {"seed": 4}, size=3)
    assert len(train) == 3
    assert list(train) == list(make_task("reasoning_gym/chain_sum", {"seed": 4}, size=3))
    assert list(train) != list(make_task("reasoning_gym/chain_sum", {}, size=3))
    assert set(train[0]) == {"prompt", "answer", "task", "task_args", "entry_json"}
    entry = json.loads(train[0]["entry_json"])
    assert (entry["question"], entry["answer"]) == (train[0]["prompt"], train[0]["answer"])
    assert entry["metadata"]["difficulty"]["num_terms"] == {
        "$tuple": [2, 6]
    }  # JSON has no tuples; scorers compare them
    held_out = make_task("reasoning_gym/chain_sum", {"seed": 4, "split": "eval"}, size=3)
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}


def test_reasoning_gym_refusals(monkeypatch):
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=r"no task 'chain_sums'; did you mean chain_sum\?"):
        make_task("reasoning_gym/chain_sums", {})
    with pytest.raises(UserError, match=r"args\.min_term: .*did you mean min_terms\?"):
        make_task("reasoning_gym/chain_sum", {"min_term": 2})
    with pytest.raises(UserError, match=r"args: reasoning_gym/chain_sum rejects"):
        make_task("reasoning_gym/chain_sum", {"min_terms": -2})
    with pytest.raises(UserError, match=r"runs the model's answer as Python code.*data\.eval\.args\.allow_eval=true"):
        make_task("reasoning_gym/countdown", {}, key="data.eval")
    assert len(make_task("reasoning_gym/countdown", {"allow_eval": True}, 2)) == 2
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install 'gcore-rl\[reasoning-gym\]'"):
        make_task("reasoning_gym/chain_sum", {})


# --- templater, measure, source


def test_render_text_and_tokens_agree(tokenizer):
    data = Data(train=Dataset(path="x"), system_prompt="sum: ")
    messages, text, content = Templater(tokenizer, data).content(TRL)
    tokens = content.tokens_P
    assert messages == ({"role": "system", "content": "sum: "}, {"role": "user", "content": "1+1="})
    assert text == "<bos>sum: 1+1="
    assert tokens.dtype == np.int32
    assert tokenizer.decode(tokens) == text
    assert len(tokens) == 10  # one bos, from the template alone
    assert Templater(tokenizer, data).messages(CHAT) == tuple(CHAT["prompt"])  # messages get no system prompt


def test_demonstration_is_answer_and_eos(tokenizer):
    tokens = Templater(tokenizer, data_for(path="x")).demonstration({"prompt": "9+3=", "answer": 12}).tokens_S
    assert tokens.dtype == np.int32
    assert tokenizer.convert_ids_to_tokens(tokens) == ["1", "2", "<eos>"]
    with pytest.raises(UserError, match=r"data\.train\.answer_column"):
        Templater(tokenizer, data_for(path="x")).demonstration({"prompt": "9+3="})


@pytest.mark.parametrize(("demonstration", "said"), [(None, "12"), ("13", "13"), (0, "0"), ("", "")])
def test_a_null_demonstration_is_the_answer(tokenizer, demonstration, said):
    row = {"prompt": "9+3=", "answer": 12, "demonstration": demonstration}
    tokens = Templater(tokenizer, data_for(path="x")).demonstration(row).tokens_S
    assert tokenizer.convert_ids_to_tokens(tokens) == [*said, "<eos>"]


def test_characters_without_a_token(tokenizer):
    with pytest.raises(
        UserError, match=r"row 1: data\.train: no token for the characters 'QZ' .*model\.build\.alphabet"
    ):
        measure([{"prompt": "1"}, {"prompt": "ZQ1"}], Templater(tokenizer, data_for(path="x")), 9)


def test_all_rows_are_checked_when_they_are_measured(tokenizer):
    """The checks before the start look at 200 rows."""
    templater = Templater(tokenizer, data_for(path="x"))
    rows = [{"prompt": "1", "answer": 2}] * 3
    with pytest.raises(UserError, match=r"row 3: data\.train: column answer is nan; expected a finite number"):
        measure([*rows, {"prompt": "1", "answer": float("nan")}], templater, 9)
    seen = list[set[str]]()
    measure(
        [*rows, {"prompt": "1"}, {"prompt": "2"}], templater, 9, check_columns=lambda names: seen.append(set(names))
    )
    assert seen == [{"prompt", "answer"}, {"prompt"}]


def test_an_empty_prompt_may_have_a_picture():
    spec = Dataset(path="x")
    for prompt in ("", [{"role": "user", "content": ""}]):
        assert prompt_of({"prompt": prompt, "image": b"png"}, spec) == prompt
        with pytest.raises(UserError, match="holds an empty prompt"):
            prompt_of({"prompt": prompt}, spec)


def test_template_that_refuses_a_role(tokenizer):
    strict = build_char_tokenizer(ALPHABET)
    strict.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(UserError, match=r"rejects messages .*no system role \(change model\.chat_template"):
        Templater(strict, data_for(path="x")).content(TRL)


def rows_of_lengths(lengths):
    return [{"prompt": "1" * n, "answer": str(n)} for n in lengths]


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 50])
def test_parts_of_a_measure_make_the_whole_and_the_same_order(tokenizer, parts):
    rows = rows_of_lengths(np.random.default_rng(0).integers(1, 12, 40).tolist())
    templater = Templater(tokenizer, data_for(path="x"))
    whole = measure(rows, templater, 8)
    assert whole.kept == [i for i, r in enumerate(rows) if len(r["prompt"]) + 1 <= 8]
    assert whole.too_long == [i for i in range(40) if i not in whole.kept]
    measured = [measure(rows, templater, 8, part, parts) for part in reversed(range(parts))]
    kept = [i for m in measured for i in m.kept]
    assert sorted(kept) == whole.kept
    assert sorted(i for m in measured for i in m.too_long) == whole.too_long
    one, many = PromptSource(rows, whole.kept, templater, 5), PromptSource(rows, kept, templater, 5)
    assert [one.row(c) for c in range(90)] == [many.row(c) for c in range(90)]


def test_epochs_visit_every_kept_row_once_in_a_seeded_order(tokenizer):
    rows = rows_of_lengths(range(1, 21))
    templater = Templater(tokenizer, data_for(path="x"))
    kept = [i for i in range(20) if i != 4]
    source = PromptSource(rows, kept, templater, seed=3)
    assert len(source) == 19
    epochs = [[source.row(19 * e + i) for i in range(19)] for e in range(4)]
    assert all(sorted(epoch) == kept for epoch in epochs)
    assert len({tuple(e) for e in epochs}) == 4
    assert [source.row(c) for c in (0, 75, 20, 57, 0)] == [  # any access pattern, over the cache's two epochs
        epochs[0][0], epochs[3][18], epochs[1][1], epochs[3][0], epochs[0][0],
    ]  # fmt: skip
    assert [PromptSource(rows, kept, templater, seed=4).row(c) for c in range(19)] != epochs[0]
    assert [PromptSource(rows, kept, templater, -1).row(c) for c in range(3)]  # any integer is a seed
    in_order = PromptSource(rows, kept, templater, seed=3, shuffle=False)
    assert [in_order.row(c) for c in range(38)] == kept * 2


def test_order_is_pinned(tokenizer):
    """A resumed run depends on it: this list may not change between releases."""
    source = PromptSource(rows_of_lengths([1] * 8), range(8), Templater(tokenizer, data_for(path="x")), seed=0)
    assert [source.row(c) for c in range(16)] == [0, 2, 1, 5, 4, 3, 6, 7, 5, 3, 7, 2, 4, 1, 0, 6]


def test_prompts_carry_columns_and_answer(tokenizer):
    data = data_for(path="x")
    source = PromptSource([VERL], [0], Templater(tokenizer, data), seed=0)
    prompt = source.at(6)
    assert (prompt.id, prompt.row, prompt.text) == (6, 0, "<bos>1+1=")
    assert prompt.columns == {**VERL, "answer": "2"}
    assert tokenizer.convert_ids_to_tokens(source.demonstration(6).tokens_S) == ["2", "<eos>"]
    asked = PromptSource([{"question": "1", "label": "2", "level": 3}], [0], Templater(tokenizer, data), seed=0).at(0)
    assert asked.columns == {"prompt": "1", "label": "2", "level": 3, "answer": "2"}
    bare = PromptSource([{"prompt": "1"}], [0], Templater(tokenizer, data), seed=0).at(0)
    assert "answer" not in bare.columns
