"""Configuration: what a user mistypes is named, all of it, with the key they meant."""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml

from gcore.cli import main
from gcore.config.leaves import leaves_of
from gcore.config.load import all_keys, dump_config, load_config, parse_yaml, read_tree, validate
from gcore.config.names import FORMER
from gcore.config.reference import START, reference, schema
from gcore.config.training import Training
from gcore.config.tree import Config
from gcore.types import UserError
from tests.e2e.helpers import RECIPE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def refused(path, *overrides) -> str:
    with pytest.raises(UserError) as error:
        load_config(path, overrides)
    return str(error.value)


# --- problems


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("training.lrr", "training.lr"),  # a slip in the same section
        ("run.stepz", "run.steps"),
        ("lr", "training.lr"),  # the right name in the wrong place
        ("algorithm.lr", "training.lr"),
        ("sampling.temperature", "generation.temperature"),
        ("training.warm_start.stepss", "training.warm_start.steps"),
        ("rewards.functions.0.wieght", "rewards.functions.0.weight"),
        ("generations.top_k", "generation"),
        ("training.steps", "run.steps"),  # training.eps is similar, but the name exists elsewhere
        ("training.tensor_parallel", "placement.trainer.tensor_parallel"),
    ],
)
def test_the_nearest_key_is_named(recipe, wrong, meant):
    section = wrong if wrong != "generations.top_k" else "generations"
    assert refused(recipe, f"{wrong}=3") == f"{recipe}: {section}: unknown key; did you mean {meant}?"


@pytest.mark.parametrize(("former", "answer"), FORMER.items())
def test_a_former_name_of_a_key_is_answered(recipe, former, answer):
    key, _, remark = answer.partition(" ")
    said = f"did you mean {key}?{remark and ' ' + remark}" if key in all_keys() else answer
    items = {
        "rewards.judges": "{name: a, template: b, model: {path: c}}",
        "rewards.models": "{name: a, model: {path: c}}",
    }
    section = next((section for section in items if former.startswith(section)), "")
    given = former.replace(section, f"{section}.0") if section else former
    lists = [f"{section}=[{items[section]}]"] if section else []
    assert refused(recipe, *lists, f"{given}=3") == f"{recipe}: {given}: unknown key; {said}"
    assert (key in all_keys() or answer.startswith("remove it")) and former not in all_keys()


def test_a_model_that_scores_is_not_built(recipe):
    """With random weights."""
    said = "random weights cannot score; expected path instead (objective=reward_model trains a model)"
    assert refused(recipe, "critic.model={build: {}}").endswith(f"critic.model.build: {said}")
    assert f"rewards.models.0.model.build: {said}" in refused(recipe, "rewards.models=[{name: a, model: {build: {}}}]")


def test_a_value_in_the_place_of_a_section(recipe):
    assert refused(recipe, "algorithm.importance=token") == (
        f"{recipe}: algorithm.importance: got 'token'; expected a section with keys such as level, mode, cap, floor"
    )


def test_a_key_like_no_other_gets_no_advice(recipe):
    assert refused(recipe, "qqqqqqq=1") == f"{recipe}: qqqqqqq: unknown key"


def test_all_problems_at_once(recipe):
    found = refused(recipe, "training.lrr=3", "run.stepz=3", "generation.temperature=-1", "controllers=many")
    assert found.splitlines() == [
        f"{recipe}: 4 problems",
        "  run.stepz: unknown key; did you mean run.steps?",
        "  controllers: input should be a valid integer, unable to parse string as an integer, got 'many'; "
        "or input should be 'auto', got 'many'",
        "  generation.temperature: input should be greater than or equal to 0, got -1",
        "  training.lrr: unknown key; did you mean training.lr?",
    ]


def test_missing_sections_are_named(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("run: {steps: 1}\n")
    assert refused(path).splitlines() == [
        f"{path}: 2 problems",
        "  model: not set; expected a value (this key is required)",
        "  data: not set; expected a value (this key is required)",
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.path=x"], "model: set exactly one of model.path"),
        (["model.build.heads=3"], "heads=3 must divide hidden_size=32"),
        (["data.train.path=x"], "data.train: set exactly one of path"),
        (["algorithm.mini_batches=13"], "algorithm.mini_batches=13 exceeds sampling.prompts_per_step=12"),
        (["sampling.samples_per_prompt=1"], "sampling.samples_per_prompt must be at least 2, got 1"),
        (["runtime=local", "placement.trainer.ranks=2"], "got placement.trainer.ranks=2"),
        (["training.max_tokens_per_gpu=19"], "= 20 exceeds training.max_tokens_per_gpu=19"),
        (["training.context_parallel=3"], "context_parallel=3; expected a power of two"),
        (["generation.max_response_length=13"], "= 25 exceeds model.build.max_length=24"),
        (["rewards.accuracy=speed"], "rewards.accuracy: got 'speed'; expected one of ['exact']"),
    ],
)
def test_contradictions(recipe, overrides, words):
    assert words in refused(recipe, *overrides)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "not valid YAML"),
        ("- 1", "got list; expected keys and values at the top level"),
        ("", "got an empty file"),
    ],
)
def test_files_that_are_no_recipe(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    assert words in refused(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert str(path) in refused(path)


def test_no_such_file(tmp_path):
    assert "no such recipe" in refused(tmp_path / "none.yaml")
    assert "got a folder; expected a recipe" in refused(tmp_path)


@pytest.mark.parametrize(
    ("command", "file", "words"),
    [
        ("train", "scenarios/drift-64.yaml", "got a file for `gcore simulate`; expected one for `gcore train`"),
        ("simulate", "recipes/dpo.yaml", "got a file for `gcore train`; expected one for `gcore simulate`"),
        ("simulate", "none.yaml", "no such scenario; expected a YAML file (see scenarios/)"),
        ("eval", "runs/none", "no such run or recipe; expected runs/NAME, runs/NAME/step_N or a YAML file"),
        ("eval", "scenarios/drift-64.yaml", "got a file for `gcore simulate`; expected one for `gcore train`"),
    ],
)
def test_a_file_of_another_command(capsys, command, file, words):
    path = ROOT / file
    assert main([command, str(path)]) == 2
    assert capsys.readouterr().err == f"gcore: {path}: {words}\n"


def test_a_wrong_override_of_a_right_file(capsys):
    path = ROOT / "recipes" / "dpo.yaml"
    assert main(["train", str(path), "run.stepz=3"]) == 2
    assert capsys.readouterr().err == f"gcore: {path}: run.stepz: unknown key; did you mean run.steps?\n"


def test_only_the_file_is_required(capsys):
    with pytest.raises(SystemExit):
        main(["train"])
    assert capsys.readouterr().err.endswith("the following arguments are required: recipe\n")


# --- overrides


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("training.lr=1e-5", lambda c: c.training.lr, 1e-5),
        ("training.lr=5E-4", lambda c: c.training.lr, 5e-4),
        ("training.lr=.5e-3", lambda c: c.training.lr, 5e-4),
        ("training.lr=2.", lambda c: c.training.lr, 2.0),
        ("training.warm_start.lr=1e-2", lambda c: c.training.warm_start.lr, 1e-2),
        ("training.warm_start=null", lambda c: c.training.warm_start, None),
        ("training.warm_start=", lambda c: c.training.warm_start, None),
        ("checkpoint.every=7", lambda c: c.checkpoint.every, 7),  # a section that the file lacks
        ("rewards.functions.0.weight=2", lambda c: c.rewards.functions[0].weight, 2.0),
        ("rewards.functions.0={name: a, path: 'x:y'}", lambda c: c.rewards.functions[0].name, "a"),
        ("training.betas=[0.8, 0.9]", lambda c: c.training.betas, (0.8, 0.9)),
        ("run.name=a=b", lambda c: c.run.name, "a=b"),
        ("data.shuffle=false", lambda c: c.data.shuffle, False),
        ("data.train.args.max=5", lambda c: c.data.train.args["max"], 5),
    ],
)
def test_overrides(recipe, override, get, value):
    assert get(load_config(recipe, [override])) == value


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("training.lr=1e38", r"training: lr=1e\+38; expected a number of at most 1e\+30"),
        (
            "rewards.functions.0.weight=-1e99",
            r"rewards.functions.0: weight=-1e\+99; expected a number of at most 1e\+30",
        ),
        ("run.hang_s=1e12", r"run.hang_s: input should be less than or equal to 1000000000, got 1000000000000"),
    ],
)
def test_numbers_that_overflow_are_refused(recipe, given, message):
    """PyTorch raises an error without the name of the key, and clocks do."""
    assert re.search(message, refused(recipe, given))


@pytest.mark.parametrize("number", [".inf", "-.inf", ".nan", "1e999"])
@pytest.mark.parametrize(
    "key", ["training.lr", "algorithm.entropy_coef", "rewards.functions.0.weight", "rewards.timeout_s", "run.hang_s"]
)
def test_numbers_are_finite(recipe, key, number):
    assert re.fullmatch(
        rf"{recipe}: {key}: input should be a finite number, got (-?inf|nan)", refused(recipe, f"{key}={number}")
    )


def test_numbers_in_arguments_and_unions_are_finite(recipe):
    assert refused(recipe, "data.train.args.deep=[1.0, {a: .nan}]") == (
        f"{recipe}: data.train.args: deep.1.a is nan; expected a finite number"
    )
    assert refused(recipe, "evaluation.temperature=.inf") == (
        f"{recipe}: evaluation.temperature: input should be a finite number, got inf; "
        "or input should be 'auto', got inf"
    )
    with pytest.raises(ValueError, match="finite number"):
        Training(lr=float("inf"))


@pytest.mark.parametrize("seed", [-5, 2**63])
def test_a_seed_that_torch_does_not_take(recipe, seed):
    assert refused(recipe, f"run.seed={seed}").startswith(f"{recipe}: run.seed: input should be ")


def test_a_run_has_something_to_train(recipe):
    """0 steps are only the warm start, as in `gcore sft`."""
    assert load_config(recipe, ["run.steps=0"]).run.steps == 0
    for override in ("training.warm_start=null", "training.warm_start.steps=0"):
        assert refused(recipe, "run.steps=0", override) == (
            f"{recipe}: run.steps=0 without training.warm_start: nothing is trained; expected at least 1 step"
        )


def test_the_last_override_wins(recipe):
    assert load_config(recipe, ["run.steps=1", "run.steps=2"]).run.steps == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.lr", "expected key=value"),
        ("=3", "expected key=value"),
        ("training.lr=[", "the value is not valid YAML"),
        ("training.lr.x=1", "training.lr is a value, not a section"),
        ("rewards.functions.3.name=a", "expected an index below 1, got '3'"),
        ("rewards.functions.first.name=a", "expected an index below 1, got 'first'"),
        ("rewards.functions.1=a", "expected an index below 1, got '1'"),
        ("rewards.functions.0.name.x=1", "rewards.functions.0.name is a value, not a section"),
        ("data.train.args.operations.0.x=1", "data.train.args.operations.0 is a value, not a section"),
        ("data.train.args.operations.0.x.y=1", "data.train.args.operations.0 is a value, not a section"),
    ],
)
def test_overrides_that_cannot_be(recipe, override, words):
    assert words in refused(recipe, override)


def test_numbers_in_files_are_numbers(tmp_path):
    path = tmp_path / "recipe.yaml"
    tree = copy.deepcopy(RECIPE)
    del tree["training"]
    path.write_text(yaml.safe_dump(tree) + "training: {lr: 1e-6, eps: 1E-8, weight_decay: 0.1}\n")
    training = load_config(path).training
    assert (training.lr, training.eps, training.weight_decay) == (1e-6, 1e-8, 0.1)


# --- dump


def test_dump_reads_back_the_same(recipe, tmp_path):
    config = load_config(recipe, ["training.lr=1e-5"])
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(config))
    assert load_config(again) == config


def test_secrets_are_redacted(recipe):
    secrets = ["api_key=hush", "HF_TOKEN=hush", "db_password=hush", "tokens=[hush, hush]"]
    dumped = dump_config(
        load_config(
            recipe,
            [f"rewards.functions.0.args.{secret}" for secret in secrets]
            + ["rewards.functions.0.args.url=http://judge", "data.train.args.inner.client_secret=hush"],
        )
    )
    assert "hush" not in dumped
    args = yaml.safe_load(dumped)["rewards"]["functions"][0]["args"]
    assert args == {
        "api_key": "<redacted>",
        "HF_TOKEN": "<redacted>",
        "db_password": "<redacted>",
        "tokens": ["<redacted>", "<redacted>"],
        "url": "http://judge",
    }


def test_numbers_and_the_tokenizer_are_no_secrets(recipe):
    asked = [
        f"rewards.functions.0.args.{one}" for one in ("max_completion_tokens=9", "stop_tokens=hush", "pin_token=9")
    ]
    tree = yaml.safe_load(dump_config(load_config(recipe, ["model.tokenizer=folder", *asked])))
    args = tree["rewards"]["functions"][0]["args"]
    assert args == {"max_completion_tokens": 9, "stop_tokens": "<redacted>", "pin_token": "<redacted>"}
    assert tree["model"]["tokenizer"] == "folder" and tree["training"]["max_tokens_per_gpu"] == 16384


# --- what ships


RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_recipes_parse(path):
    assert load_config(path).run.steps > 0


def test_the_page_of_keys_opens_with_25_of_them():
    assert len(list(leaves_of({**read_tree(ROOT / START), "observe": {"eval_every": 1, "trackers": ""}}))) == 25
    assert (ROOT / START).read_text() in reference()


def test_there_are_recipes():
    assert RECIPES


@pytest.mark.parametrize("path", [*RECIPES, ROOT / "examples" / "number_game.yaml"], ids=lambda p: p.name)
def test_editors_check_recipes_by_the_schema(path):
    """The first line names the schema, and the recipe is valid by it; a key that does not exist is not."""
    jsonschema = pytest.importorskip("jsonschema")
    name = path.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    checks = jsonschema.Draft202012Validator(json.loads((path.parent / name).read_text()))
    tree = read_tree(path)
    assert list(checks.iter_errors(tree)) == []
    for section, wrong in ((tree, "modle"), (tree.setdefault("training", {}), "lrr"), (tree["model"], "buidl")):
        section[wrong] = 1
        assert [error.message for error in checks.iter_errors(tree)] == [
            f"Additional properties are not allowed ({wrong!r} was unexpected)"
        ]
        del section[wrong]


@pytest.mark.parametrize(
    ("judge", "is_valid"),
    [
        ({"model": {"path": "x"}, "template": "{{ response }}", "replicas": 2}, True),
        ({"url": "http://h/v1", "template": "{{ response }}", "retries": 2}, True),
        ({"model": {"path": "x"}, "mode": "teacher"}, True),
        ({"model": {"path": "x"}, "template": "{{ response }}", "retries": 2}, False),
        ({"url": "http://h/v1", "template": "{{ response }}", "replicas": 2}, False),
        ({"model": {"path": "x"}, "mode": "teacher", "template": "{{ response }}"}, False),
        ({"model": {"path": "x"}}, False),
    ],
)
def test_the_schema_knows_the_kinds_of_judges(judge, is_valid):
    """As the configuration does."""
    jsonschema = pytest.importorskip("jsonschema")
    tree = {**copy.deepcopy(RECIPE), "rewards": {"judges": [{"name": "wise", **judge}]}}
    tree["data"]["max_prompt_length"] = 8
    checks = jsonschema.Draft202012Validator(json.loads(schema()))
    assert checks.is_valid(tree) == is_valid
    if is_valid:
        validate(tree, "test", Config)
    else:
        with pytest.raises(UserError):
            validate(tree, "test", Config)


def test_the_schema_is_up_to_date(capsys):
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == (ROOT / "recipes" / "schema.json").read_text(), "run `make docs`"


def test_recipes_have_names(capsys, tmp_path, monkeypatch):
    assert main(["recipes"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed.keys() == {path.stem for path in RECIPES} and all(len(title) > 20 for title in listed.values())
    monkeypatch.chdir(tmp_path)
    assert load_config("quickstart") == load_config(ROOT / "recipes" / "quickstart.yaml")
    assert main(["recipes", "quickstart"]) == 0
    assert capsys.readouterr().out == (ROOT / "recipes" / "quickstart.yaml").read_text()
    assert main(["recipes", "quickstrat"]) == 2
    assert "no such recipe; expected one of agent, audio" in capsys.readouterr().err
    assert main(["train", "quickstrat"]) == 2 and "did you mean quickstart?" in capsys.readouterr().err
    (tmp_path / "quickstart").write_text("run: {stepz: 1}")  # the user's file of this name is first
    assert "run.stepz: unknown key" in refused("quickstart")


def test_a_recipe_that_needs_an_example_says_so(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "reward_model", "--dry-run"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("gcore: data.train.path: no such file or folder: runs/pairs/train.jsonl")
    first_command = "python examples/pairs.py runs/pairs && gcore train recipes/reward_model.yaml"
    assert second == f"(reward_model needs: {first_command}; `gcore recipes --copy .` copies the examples)"
    assert main(["train", "quickstart", "run.stepz=1"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1  # a slip of the user


def test_reference_names_every_key():
    text = reference().replace("[].", ".")
    repeated = re.findall(r"^\| `(\S+)\*` .* as in `(\S+)\*`\. \|$", text, re.M)
    assert ("critic.model.", "model.") in repeated and ("data.eval.", "data.train.") in repeated
    for key in all_keys():
        parent = any(other.startswith(key + ".") for other in all_keys())
        named = next((other + key.removeprefix(here) for here, other in repeated if key.startswith(here)), key)
        assert parent or f"`{named}`" in text, key


def test_reference_is_up_to_date():
    path = ROOT / "docs" / "configuration.md"
    if not path.exists():
        pytest.skip("docs/configuration.md is not here; `make docs` writes it")
    assert path.read_text() == reference(), "run `make docs`"


# --- names and keys that mislead


@pytest.mark.parametrize("name", ["../../etc", "/etc", "a/b", "a\\b", "..", ".", "' '", "''"])
def test_a_run_has_a_plain_name(recipe, name):
    """`run.dir/run.name` must stay in run.dir, and must not be run.dir."""
    shown = repr(name.strip("'"))
    expected = f"run.name: got {shown}; expected a folder name without / or \\ (its parent folder is run.dir)"
    assert refused(recipe, f"run.name={name}") == f"{recipe}: {expected}"


def test_a_key_that_is_given_twice_is_refused_with_both_lines(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("run: {name: x}\ntraining:\n  lr: 1\n  eps: 1\n  lr: 2\nrewards:\n  http: [{name: a, name: b}]\n")
    assert refused(path) == (
        f"{path}: not valid YAML: training.lr is set twice, in lines 3 and 5; "
        "rewards.http.0.name is set twice, in lines 7 and 7"
    )


def test_a_merged_key_may_be_given_again():
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, x: 3}\nd: *b\n"
    found = parse_yaml(text)
    assert found["b"] == found["d"] == {"x": 2, "y": 1} and found["c"] == {"x": 3, "y": 1}
