"""Before the run: what is wrong is told in one line, without torch where it can be, and before anything starts."""

from __future__ import annotations

import copy
import http.server
import json
import math
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

from gcore.cli import main
from gcore.config.load import load_config
from gcore.content.tokens import Tokens
from gcore.driver.start import starting_statuses
from gcore.launch import preflight as checks
from gcore.launch.dry_run import answers, shortened
from gcore.launch.footprint import check_sizes, num_parameters, parts
from gcore.launch.machines import Machine
from gcore.launch.plan import make_plan
from gcore.launch.preflight import preflight, sample_of
from gcore.prompts.tokenizer import build_char_tokenizer
from gcore.types import Prompt, UserError
from tests.e2e.helpers import RECIPE, environment

HEAVY = ("torch", "transformers", "ray")
REWARDS = """
import time
def right(completions, answer): return [float(c == a) for c, a in zip(completions, answer)]
def fails(completions, answer): return [float(a["nope"]) for a in answer]
def leaks(completions, api_key): raise ValueError(f"the server said: {api_key} is a bad key")
def hangs(completions): time.sleep(1000)
class Bonus:
    def __init__(self, scale): self.scale = scale
    def __call__(self, completions): return [self.scale * len(c) for c in completions]
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A recipe whose data are a file, in a folder of its own."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rewards.py").write_text(REWARDS)
    recipe = copy.deepcopy(RECIPE)
    recipe["run"]["dir"] = str(tmp_path / "runs")
    recipe["data"] = {"train": {"path": str(tmp_path / "rows.jsonl")}, "max_prompt_length": 12}
    recipe["rewards"] = {"functions": [{"name": "right", "path": f"{tmp_path}/rewards.py:right"}]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def write_rows(path: Path, rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(place: Path) -> list[dict]:
    return [json.loads(line) for line in (place / "rows.jsonl").read_text().splitlines()]


def functions(place: Path, *names: str, **more) -> str:
    specs = [{"name": n.lower(), "path": f"{place}/rewards.py:{n}", **more} for n in names]
    return f"rewards.functions={json.dumps(specs)}"


def refused(capsys, place: Path, *overrides: str) -> str:
    """The one line that `gcore train` ends with."""
    assert main(["train", str(place / "recipe.yaml"), *overrides]) == 2
    said = capsys.readouterr()
    assert "starting" not in said.out
    assert said.err.startswith("gcore: ") and len(said.err.splitlines()) == 1, said.err
    return said.err.removeprefix("gcore: ").strip()


def shown(capsys, place: Path, *overrides: str, code: int = 0) -> str:
    assert main(["train", str(place / "recipe.yaml"), "--dry-run", *overrides]) == code
    return capsys.readouterr().out


# --- without torch


NO_FILE = "data.train.path: no such file or folder: none.jsonl"
TENSOR_3 = "placement.trainer={tensor_parallel: 3, ranks: 3}"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "usage: gcore"),
        (["train", "--help"], 0, "usage: gcore train"),
        (["doctor"], 0, "training    fsdp       ready"),
        (["train", "RECIPE", "data.train.path=none.jsonl"], 2, NO_FILE),
        (["train", "RECIPE", "data.train.path=none.jsonl", "--dry-run"], 2, NO_FILE),
        (["sft", "RECIPE", "data.train.path=none.jsonl"], 2, NO_FILE),
        (["train", "RECIPE", "data.train.path=PLACE/empty.jsonl"], 2, "no rows in"),
        (["train", "RECIPE", "data.train.path=PLACE/broken.jsonl"], 2, "line 1: not JSON"),
        (["train", "RECIPE", "data.train.path=PLACE/null.jsonl"], 2, "row 1 has no prompt"),
        (["train", "RECIPE", "run.resume=PLACE/none"], 2, "no complete checkpoint there"),
        (["train", "RECIPE", "run.dir=/dev/null/runs"], 2, "cannot write to it"),
        (["train", "RECIPE", "training.device=cuda"], 2, "training.device=cuda: "),
        (["train", "RECIPE", "model={path: PLACE/none}"], 2, "no such folder"),
        (["train", "RECIPE", "workflow=none.py:f"], 2, "workflow: no such file: none.py"),
        (["train", "RECIPE", "rewards.functions.0.path=none.py:f"], 2, "none.py in the current folder, /"),
        (["train", "RECIPE", "rewards.functions.0.path=PLACE/rewards.py:fail"], 2, "did you mean fails?"),
        (["train", "RECIPE", "placement.trainer.ranks=100000"], 2, "lower placement.trainer.ranks=100000"),
        (["train", "RECIPE", 'rewards.http=[{name: s, url: "http://127.0.0.1:1/"}]'], 2, "no server answers"),
        (["train", "RM", "data.train.path=none.jsonl"], 2, NO_FILE),
        (["train", "RECIPE", TENSOR_3], 2, "tensor_parallel=3 must divide the 2 attention heads of model"),
        (["export", "PLACE/none", "PLACE/out"], 2, "no such folder; expected runs/NAME or runs/NAME/step_N"),
        (["export", "PLACE", "PLACE/out"], 2, "no complete checkpoint there"),
    ],
)
def test_what_needs_no_torch_does_not_import_it(place, arguments, code, said):
    """In a process of its own: at the moment of the error none of the heavy packages is there."""
    (place / "empty.jsonl").write_text("")
    (place / "broken.jsonl").write_text("{\n")
    write_rows(place / "null.jsonl", [{"prompt": "1+1=", "answer": "2"}, {"prompt": None, "answer": "2"}])
    places = {"RECIPE": f"{place}/recipe.yaml", "RM": "recipes/reward_model.yaml"}
    words = [places.get(word, word.replace("PLACE", str(place))) for word in arguments]
    program = (
        "import sys\nfrom gcore.cli import main\n"
        f"try: code = main({words!r})\nexcept SystemExit as end: code = end.code\n"
        f"print('rc', code, [name for name in {HEAVY} if name in sys.modules])\n"
    )
    root = Path(__file__).parents[2]
    env = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, cwd=root)
    assert done.stdout.splitlines()[-1:] == [f"rc {code} []"], done.stdout + done.stderr
    assert said in done.stdout + done.stderr


def test_light_checks_come_before_heavy_ones(place, monkeypatch):
    """All that is light has been looked at when the first heavy package is imported."""
    monkeypatch.setattr(checks, "heavy_checks", lambda *args: pytest.fail("too early"))
    config = load_config(place / "recipe.yaml", ["run.resume=none"])
    with pytest.raises(UserError, match=r"run\.resume=none"):
        preflight(config, make_plan(config, Machine(2, 0)))


# --- found before anything starts


def test_unknown_lora_targets(place, capsys):
    assert refused(capsys, place, "model.lora={targets: [q_proj, foo]}") == (
        "model.lora.targets: no linear layer named foo; expected some of "
        "['down_proj', 'gate_proj', 'k_proj', 'o_proj', 'q_proj', 'up_proj', 'v_proj']"
    )


def test_unknown_lora_targets_of_a_folder(place, capsys):
    from transformers import LlamaConfig

    build_char_tokenizer("0123456789+=").save_pretrained(place / "model")
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaConfig(vocab_size=16, **sizes).save_pretrained(place / "model")
    (place / "model" / "model.safetensors").write_bytes(safetensors())  # other weights: they are not read
    model = f"model={{path: {place}/model, lora: {{targets: [foo]}}}}"
    assert refused(capsys, place, model).startswith("model.lora.targets: no linear layer named foo; expected")


def test_a_gpu_that_is_not_there(place, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (
        refused(capsys, place, "training.device=cuda")
        == "training.device=cuda: CUDA_VISIBLE_DEVICES hides all GPUs; use training.device=cpu (or auto)"
    )


def test_a_server_that_is_there_whatever_it_says(place, capsys):
    """A POST alone is what it answers well: a GET gets 501 from it, which is an answer."""

    class Scores(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps({"rewards": [float(len(text)) for text in asked["completions"]]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Scores) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/score"
        out = shown(capsys, place, f'rewards.http=[{{name: length, url: "{url}"}}]')
        server.shutdown()
    assert "length       1           2           1" in out


def test_a_server_that_is_not_there(place, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/score"
        said = refused(capsys, place, f'rewards.http=[{{name: server, url: "{url}?key=s3cr3t"}}]')
    assert (
        said.startswith(f"rewards.http.0.url: no server answers at {url}: ClientConnectorError")
        and "s3cr3t" not in said
    )


def test_a_reward_that_needs_a_column_that_is_not_there(place, capsys):
    write_rows(place / "rows.jsonl", [{"prompt": "1+1="}])
    assert "right needs answer; the dataset has prompt" in refused(capsys, place)


def test_a_column_that_one_row_has_not(place, capsys):
    rows = rows_of(place)
    del rows[7]["answer"]
    write_rows(place / "rows.jsonl", rows)
    said = "data.train: row 7: rewards.functions: right needs answer; the dataset has prompt "
    assert refused(capsys, place, "--dry-run", "training.warm_start=null").startswith(said)


# --- weights


def safetensors(num_bytes: int = 8) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(num_bytes)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "model.path=FOLDER: no weights there; expected files *.safetensors"),
        ({"model.safetensors": safetensors()[:-3]}, "model.safetensors is no complete safetensors file: 73 bytes, in"),
        (
            {"model.safetensors": b""},
            "model.path: FOLDER/model.safetensors is no complete safetensors file: 0 bytes, header too small",
        ),
        ({"model.safetensors": bytes([255] * 99)}, "is no complete safetensors file: 99 bytes, header too large"),
        (
            {"model.safetensors": safetensors().replace(b"w", b"\xff")},
            ": 76 bytes, invalid UTF-8 in header",
        ),
        (
            {"model.safetensors": safetensors().replace(b"data_off", b"data_of_")},
            "invalid JSON in header: missing field",
        ),
        (
            {
                "a.safetensors": safetensors(),
                "model.safetensors.index.json": b'{"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}',
            },
            "model.path=FOLDER: no file b.safetensors, which model.safetensors.index.json names",
        ),
        ({"a.safetensors": b"", "model.safetensors.index.json": b"{}"}, "index.json cannot be read: KeyError"),
    ],
)
def test_a_model_without_its_weights(place, capsys, files, said):
    folder = place / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 999}))
    for name, content in files.items():
        (folder / name).write_bytes(content)
    assert said.replace("FOLDER", str(folder)) in refused(capsys, place, "--dry-run", f"model={{path: {folder}}}")
    judge = {"name": "judge", "model": {"path": str(folder)}, "template": "{{ response }}", "max_prompt_length": 9}
    said = said.replace("model.path", "rewards.judges.0.model.path").replace("FOLDER", str(folder))
    assert said in refused(capsys, place, "--dry-run", f"rewards={json.dumps({'judges': [judge]})}")


# --- rows


def test_the_sample_reaches_from_the_first_row_to_the_last():
    assert sample_of(3, 5) == (0, 1, 2)
    assert sample_of(9, 3) == (0, 4, 8)
    assert len(sample_of(10**6)) == 200 and sample_of(10**6)[-1] == 10**6 - 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt": None}, "data.train: row 7 has no prompt: its column 'prompt' is empty (null)"),
        ({"prompt": 5}, "data.train: row 7: column 'prompt' holds 5; expected a string or messages"),
        ({"prompt": "a+b="}, "data.train: row 7: no token for the characters 'ab'"),
        ({"answer": None}, "data.train: row 7: no answer to demonstrate in this row"),
        ({"answer": math.nan}, "data.train: row 7: column answer is nan; expected a finite number"),
        ({"more": {"a": [1, -math.inf]}}, "data.train: row 7: column more.a.1 is -inf; expected a finite number"),
        ({"prompt": " "}, "data.train: row 7: column 'prompt' holds an empty prompt; expected text"),
        ({"prompt": [{"role": "user", "content": ""}]}, "data.train: row 7: column 'prompt' holds an empty prompt"),
    ],
)
def test_a_row_that_is_wrong_is_named(place, capsys, change, said):
    rows = rows_of(place)
    rows[7] |= change
    write_rows(place / "rows.jsonl", rows)
    assert refused(capsys, place, "--dry-run").startswith(said)


def test_prompts_that_are_too_long_are_counted(place, capsys):
    rows = rows_of(place)
    for row in rows[:20]:
        row["prompt"] = "1+1+1+1+1+1+1="
    write_rows(place / "rows.jsonl", rows)
    assert (
        "data.train   25 rows, all checked: the longest prompt has 15 tokens; 20 are over data.max_prompt_length=12 "
        "and will be dropped (rows 0, 1, 2, 3, 4, ...)\n"
    ) in shown(capsys, place)
    assert refused(capsys, place, "data.max_prompt_length=3") == (
        "data.train: all 25 prompts are longer than data.max_prompt_length=3 (the longest has 15 tokens)"
    )


# --- the dry run


def test_what_a_dry_run_shows(place, capsys):
    rules = [
        {"name": "right", "path": f"{place}/rewards.py:right", "weight": 0.5},
        {"name": "bonus", "path": f"{place}/rewards.py:Bonus", "args": {"scale": 3}},
    ]
    out = shown(capsys, place, f"rewards.functions={json.dumps(rules)}")
    assert out[out.index("data.train") :] == (
        "data.train   25 rows, all checked: the longest prompt has 5 tokens, none is over data.max_prompt_length=12\n"
        "\n"
        "prompt       row 0 as the model reads it, 5 tokens\n"
        "             │ <bos>0+0=\n"
        "\n"
        "answers      made-up    42\n"
        "             reference  0\n"
        "\n"
        "rewards      reward  weight     made-up   reference\n"
        "             right      0.5           0           1\n"
        "             bonus        1           6           3\n"
        "             the reference answer gets 3.5 and the made-up one 6: a reference answer usually gets more\n"
        "             (is the answer column the right one, in the format that the rewards expect?)\n"
    )
    assert "the reference answer gets 1 and the made-up one 0: as expected\n" in shown(capsys, place)


def test_whether_siblings_share_their_prompt(place, capsys):
    key = "training.share_prefixes"
    assert f"saves 10% of an update or more ({key}=auto): with" in shown(capsys, place)
    assert f"computed once for siblings in every update ({key}=true)" in shown(capsys, place, f"{key}=true")
    assert f"every sample has its own: {key}=false" in shown(capsys, place, f"{key}=false")
    alone = ("sampling.samples_per_prompt=1", "algorithm.adv_estimator=reinforce_pp")
    assert "one answer per prompt: nothing to share" in shown(capsys, place, *alone)
    assert f"warning: {key}=true: no effect with one answer per prompt" in shown(capsys, place, *alone, f"{key}=true")
    several = ("placement.trainer.ranks=2", "training.context_parallel=2")
    assert "every sample has its own: training.context_parallel=2" in shown(capsys, place, *several)
    said = f"{key}=true: training.context_parallel=2; expected auto or false"
    assert refused(capsys, place, "--dry-run", *several, f"{key}=true").startswith(said)


def test_a_reward_that_fails_with_a_secret_in_its_message(place, capsys):
    leaking = functions(place, "leaks", args={"api_key": "planted-key-1"})
    assert main(["train", str(place / "recipe.yaml"), "--dry-run", leaking]) == 2
    said = capsys.readouterr()
    assert "planted" not in said.out + said.err and "<redacted> is a bad key" in said.out
    assert (
        said.err
        == "gcore: reward 'leaks' fails on row 0: raised ValueError('the server said: <redacted> is a bad key')\n"
    )


@pytest.mark.parametrize("runtime", ["ray", "local"])
def test_a_reward_that_fails_on_the_first_row(place, capsys, runtime):
    arguments = ["--dry-run", functions(place, "fails", "right"), f"runtime={runtime}"]
    assert main(["train", str(place / "recipe.yaml"), *arguments]) == 2
    said = capsys.readouterr()
    assert "fails        1      FAILED\n             right        1           0           1\n" in said.out
    assert 'float(a["nope"])' in said.out  # the line that raised
    assert (
        said.err
        == "gcore: reward 'fails' fails on row 0: raised TypeError(\"string indices must be integers, not 'str'\")\n"
    )


def test_a_reward_that_hangs_is_killed_at_its_time_out(place, capsys):
    arguments = ["--dry-run", functions(place, "hangs", timeout_s=0.2)]
    assert main(["train", str(place / "recipe.yaml"), *arguments]) == 2
    assert (
        capsys.readouterr().err
        == "gcore: reward 'hangs' fails on row 0: no answer within 0.2 s; its worker was killed\n"
    )


def test_judges_show_what_they_read_and_are_not_called(place, capsys):
    judge = {
        "name": "wise",
        "model": {"build": {"alphabet": "0123456789+=?", "max_length": 64}},
        "template": "{{ prompt }}{{ response }}?",
        "max_prompt_length": 32,
        "max_response_length": 8,
    }
    pair = {**judge, "name": "pair", "mode": "pairwise", "template": "{{ response_a }}={{ response_b }}"}
    out = shown(capsys, place, f"rewards.judges={json.dumps([judge, pair])}")
    assert "wise         1  not called: a judge that the run serves\n" in out
    assert "judge        prompt of wise for the made-up answer\n             │ <bos>0+0=42?\n" in out
    assert "judge        prompt of pair for the two answers\n             │ <bos>42=0\n" in out
    assert main(["train", str(place / "recipe.yaml"), "--dry-run", f"rewards.judges={json.dumps([judge])}",
                 "rewards.judges.0.max_prompt_length=4"]) == 2  # fmt: skip
    assert (
        "gcore: reward 'wise' fails on row 0: the judge's prompt has 8 tokens; expected at most 4"
        in capsys.readouterr().err
    )


def test_a_made_up_answer_is_one_that_the_policy_could_give():
    def made_up(alphabet, limit, answer=None):
        prompt = Prompt(0, 0, (), "", Tokens(None), {} if answer is None else {"answer": answer})
        return [rollout.text for rollout in answers(prompt, build_char_tokenizer(alphabet), limit)]

    assert made_up("0123456789", 5, 13) == ["42", "13"]
    assert made_up("0123456789", 1, {"not": "text"}) == ["7"]
    assert made_up("0123456789", 5, "42") == ["7", "42"]
    assert made_up("abc", 5) == ["c"]


def test_long_texts_keep_their_head_and_their_tail():
    lines = shortened("\n".join(map(str, range(100)))).split("\n")
    assert lines == [*map(str, range(14)), "... 80 lines ...", *map(str, range(94, 100))]
    text = shortened("a" * 5000 + "b" * 5000)
    assert text == "a" * 900 + " ... 8,700 characters ... " + "b" * 400
    assert shortened("short\ntext") == "short\ntext"


# --- sizes


def sizes(place, *overrides, machine=None):
    machine = machine or Machine(2, 0, memory_mb=24_000, free_mb=24_000)
    config = load_config(place / "recipe.yaml", overrides)
    plan = make_plan(config, machine)
    return check_sizes(parts(config, plan), machine)


def test_processes_that_exceed_the_memory_are_refused(place):
    with pytest.raises(UserError) as caught:
        sizes(place, "placement.trainer.ranks=64")
    assert str(caught.value) == (
        "this run needs at least 34 GB of memory, and this machine has 23 GB: 64 x trainer rank of 295 MB, 64 x "
        "controller of 215 MB, 64 x reward worker of 20 MB, 2 x engine of 290 MB, 1 x driver of 450 MB; lower "
        "placement.trainer.ranks=64"
    )
    for key in ("placement.policy.replicas", "controllers"):
        with pytest.raises(UserError, match=f"; lower {key}=128$"):
            sizes(place, f"{key}=128")


def test_processes_that_exceed_the_cores_several_times_are_warned_of(place):
    assert sizes(place) == []
    (said,) = sizes(place, "placement.policy.replicas=64")
    assert said.startswith("66 processes share 2 core(s) (64 x engine of 290 MB,")
    assert said.endswith("lower placement.policy.replicas=64")
    assert sizes(place, "placement.policy.replicas=64", machine=Machine(16, 0, 99_000, 99_000)) == []
    assert sizes(place, "runtime=local", "placement.policy.replicas=64") == []  # one process
    assert sizes(place, machine=Machine(2, 0, 24_000, 1_000)) == [
        "this run needs at least 1.5 GB of memory, and 1.0 GB are free now"
    ]


def test_weights_count_by_the_parameters_and_not_by_the_files(place):
    """A folder in bfloat16 is held in float32 on a CPU, and trained with gradients and two moments."""
    from gcore.config.base import Model

    folder = place / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"\0" * 2 * 2**20)
    for dtype, millions in (("bfloat16", 1.0), ("float32", 0.5)):
        (folder / "config.json").write_text(json.dumps({"dtype": dtype}))
        assert num_parameters(Model(path=str(folder))) == millions * 2**20
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    machine = Machine(2, 0, 24_000, 24_000)
    config = load_config(place / "recipe.yaml", [f"model={{path: {folder}}}", "algorithm.kl_coef=0.1"])
    found = {part.what: part.each_mb for part in parts(config, make_plan(config, machine))}
    assert found["engine"] == 290 + 4 and found["trainer rank"] == 295 + 4 * 5
    assert found["copy for checkpoints"] == 4 + 8 + 4
    overrides = [f"model={{path: {folder}}}", "algorithm.kl_coef=0.1", "placement.trainer.ranks=2"]
    two = load_config(place / "recipe.yaml", overrides)  # two copies of the weights: each rank writes a half
    halves = {part.what: part.each_mb for part in parts(two, make_plan(two, machine))}
    assert (halves["trainer rank"], halves["copy for checkpoints"]) == (295 + 4 * 5, 8)
    found = {part.what: part.each_mb for part in parts(config, make_plan(config, Machine(2, 1)))}
    assert found["engine"] == 290 and found["trainer rank"] == 295 and found["copy for checkpoints"] == 4 + 8 + 2


def test_without_room_for_the_copy_of_a_checkpoint_the_run_is_refused_with_the_key_that_needs_none(place):
    folder = place / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"\0" * 2 * 2**20)
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16"}))
    model, tight = f"model={{path: {folder}}}", Machine(2, 0, memory_mb=1600)
    needed = sum(part.total_mb for part in parts_of(place, model, tight))
    copies = sum(part.total_mb for part in parts_of(place, model, tight) if part.what == "copy for checkpoints")
    tight = Machine(2, 0, memory_mb=needed - copies / 2)
    with pytest.raises(UserError, match=r"; set checkpoint\.asynchronous=false, which needs no copy$"):
        sizes(place, model, machine=tight)
    assert sizes(place, model, "checkpoint.asynchronous=false", machine=tight) == []


def parts_of(place, override, machine):
    config = load_config(place / "recipe.yaml", [override])
    return parts(config, make_plan(config, machine))


# --- starting


def test_the_screen_says_what_a_start_waits_for():
    wanted = {"engine": 8, "trainer": 0, "judge-wise": 2, "controller": 1}
    up = ["engine-0", "engine-1", "engine-2", "judge-wise-0"]
    found = [(s.role, s.stage, s.detail) for s in starting_statuses(wanted, up, ["engine-1"])]
    assert found == [
        ("engine", "starting", "1 of 8 ready, 2 loading"),
        ("judge-wise", "starting", "0 of 2 ready, 1 loading"),
        ("controller", "starting", "0 of 1 ready"),
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["model.build.architecture=qwen33"], "expected a model_type of transformers, such as qwen3"),
        (["model.build.architecture=rwkv"], "a model of type rwkv keeps a recurrent state"),
        (["model.build.architecture=qwen3_5_text", "model.build.config={heads: 4}"], "qwen3_5_text has no key heads"),
        (
            ["model.build.architecture=qwen3_5_text", "model.build.config={layer_types: [some, other]}"],
            "no configuration of qwen3_5_text with these sizes",
        ),
    ],
)
def test_a_model_that_cannot_be_built_is_one_line_before_the_run(capsys, tmp_path, changes, said):
    assert main(["train", "quickstart", f"run.dir={tmp_path}", "--dry-run", *changes]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error and error.count("\n") == 1
