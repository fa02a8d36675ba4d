"""The plan of the house: imports point one way, pure files stay pure, the loop fits one screen."""

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gcore"
ROOMS = {  # room or module -> what it may import, beside itself and `types`
    "types": ("content.base",),  # for the type checker
    "protocols": (),
    "clients": ("protocols",),
    "shipped": (),
    "processes": ("observe",),
    "threads": (),
    "task_group": (),
    "config": ("shipped",),
    "user_files": ("config.objects", "shipped"),
    "http_body": (),
    "content": ("config",),
    "observe": ("config", "content.media"),
    "faults": ("config", "observe"),
    "hub": ("config",),
    "media": ("config", "content"),
    "models": ("config", "content", "hub"),
    "diffusion": ("config", "hub", "models"),
    "weights": ("clients", "config", "hub", "models", "protocols"),
    "runtime": ("config.engines", "faults", "observe", "protocols", "task_group", "user_files"),
    "placement": ("clients", "config", "cost.replica_speed", "protocols"),
    "cost": ("config", "hub"),
    "prompts": ("config", "content", "http_body", "hub", "user_files"),
    "preparation": ("config", "content.base", "cost.workload", "protocols"),
    # an engine has a WeightReceiver, a trainer rank a WeightPublisher; a rank saves its shards
    "generation": (
        *("clients", "config", "content", "diffusion", "hub", "models", "observe", "protocols", "threads", "weights"),
    ),
    "training": (
        *("checkpoint.tensors", "checkpoint.writer", "config", "content", "diffusion", "hub", "models", "observe"),
        *("protocols", "threads", "weights"),
    ),
    "sandbox": ("config", "processes", "user_files"),
    "rewarding": (
        *("config", "content", "faults", "http_body", "models", "observe", "processes", "protocols", "sandbox"),
        *("threads", "user_files"),
    ),
    "checkpoint": (
        *("config", "content", "diffusion", "faults", "hub", "modalities", "models", "observe", "prompts", "weights"),
    ),
    "environments": ("config.environments", "observe", "processes", "user_files", "workflows.tools"),
    "workflows": ("config", "content", "environments", "generation", "prompts.answers", "protocols", "sandbox"),
    # what is emulated and simulated is the code of a run
    "emulate": (
        *("checkpoint.store", "config", "content", "cost.replica_speed", "generation.noise", "generation.spec", "hub"),
        "protocols",
    ),
    "simulate": ("config", "cost", "emulate.device", "generation.routing", "observe", "placement", "protocols"),
    "planner": ("cost", "observe", "placement", "simulate"),
    "modalities": (
        *("checkpoint", "config", "content", "cost", "diffusion", "generation", "hub", "models", "prompts"),
        *("protocols", "training", "weights"),
    ),
    "controller": (
        *("checkpoint", "clients", "config", "content", "cost", "faults", "generation", "modalities"),
        *("observe", "placement", "preparation", "prompts", "protocols", "rewarding", "task_group", "weights"),
        "workflows",
    ),
    "launch": (
        *("checkpoint", "clients", "config", "content", "controller", "cost", "emulate", "environments"),
        *("faults", "generation", "hub", "modalities", "models", "observe", "placement", "preparation", "prompts"),
        *("planner", "protocols", "rewarding", "runtime", "sandbox", "training", "user_files", "weights"),
        "workflows",
    ),
    "driver": (
        *("checkpoint", "clients", "config", "launch", "observe", "protocols", "runtime", "task_group", "user_files"),
    ),
    "api": ("checkpoint", "config", "driver", "observe", "protocols", "shipped"),
    "cli": (
        *("api", "checkpoint", "config", "cost", "driver", "launch", "observe", "planner", "protocols", "shipped"),
        "simulate",
    ),
}
PURE = (
    "gcore.types",
    "gcore.protocols",
    "gcore.clients",
    "gcore.config.load",
    "gcore.config.reference",
    "gcore.hub",
    "gcore.prompts.source",
    "gcore.prompts.tasks",
    "gcore.prompts.tokenizer",
    "gcore.launch.pins",
    "gcore.preparation.assignment",
    "gcore.preparation.balance",
    "gcore.preparation.refine",
    "gcore.preparation.step_times",
    "gcore.preparation.advantages",
    "gcore.cost.workload",
    "gcore.launch.machines",
    "gcore.launch.node_checks",
    "gcore.user_files",
    "gcore.launch.plan",
    "gcore.launch.footprint",
    "gcore.launch.gpu_memory",
    "gcore.launch.preflight",
    "gcore.launch.dry_run",
    "gcore.driver.supervise",
    "gcore.controller.loop",
    "gcore.placement.grid",
    "gcore.placement.rules",
    "gcore.placement.baselines",
    "gcore.placement.forecast",
    "gcore.placement.guard",
    "gcore.cost.replica_speed",
    "gcore",
    "gcore.api",
    "gcore.workflows",
    "gcore.simulate.table",
    "gcore.cost.training_memory",
    "gcore.cost.backends",
    "gcore.config.megatron",
)


def imports(path: Path) -> set[str]:
    """Every gcore module that a file imports, anywhere in it; `from gcore import x` counts as gcore.x."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"gcore.{a.name}" for a in node.names} if node.module == "gcore" else {str(node.module)}
    return {name for name in found if name.split(".")[0] == "gcore"}


def within(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


def files(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else path.stem


def test_every_module_is_in_a_room():
    assert {room_of(path) for path in PACKAGE.rglob("*.py")} == {*ROOMS, "__init__", "__main__"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_the_plan_says(room):
    paths = files(room) or [PACKAGE / f"{room}.py"]
    allowed = tuple(f"gcore.{name}" for name in (room, "types", "__version__", *ROOMS[room]))
    assert {
        (path.name, name) for path in paths for name in imports(path) if name != "gcore" and not within(name, allowed)
    } == set()


def test_the_plan_allows_nothing_that_is_not_used():
    unused = {
        (room, name)
        for room, names in ROOMS.items()
        for name in names
        if not any(
            within(imported, (f"gcore.{name}",))
            for path in files(room) or [PACKAGE / f"{room}.py"]
            for imported in imports(path)
        )
    }
    assert unused == set()


def import_table() -> str:
    """For docs/overview.md."""
    rows = [f"| `{room}` | {', '.join(f'`{name}`' for name in names)} |" for room, names in ROOMS.items() if names]
    return "\n".join(["| module or package | may import itself, `types` and |", "|---|---|", *rows])


def test_the_overview_has_the_table_of_imports():
    assert import_table() in (ROOT / "docs" / "overview.md").read_text()


def test_tokens_are_handled_by_engines_and_trainers_alone():
    """Other stages pass content on through its interface (content/base.py). The backends of text judges are engines'
    clients with a tokenizer of their own."""
    allowed = ("content", "generation", "training", "emulate/engine.py", "models/networks.py", "models/towers.py")
    allowed += ("rewarding/judge_backend.py", "launch/families.py")  # that one tries small engines and networks
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        if not where.startswith(allowed) and where != "types.py":
            assert not re.search(r"\btokens_[A-Z]", path.read_text()), where
    assert not re.search(r"\btokens_[A-Z]", (PACKAGE / "generation" / "pool.py").read_text())


def test_a_kind_of_policy_is_named_in_its_own_modules():
    """Others ask modalities.table.kind_of."""
    own = ("config/denoising.py", "config/tree.py", "content/latents.py", "prompts/conditions.py", "diffusion/")
    own += ("modalities/table.py", "modalities/diffusion.py", "checkpoint/export_pipeline.py")
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        if not where.startswith(own):
            assert not re.search(r"\.denoising is|if \S*\.denoising\b|else \S*\.denoising\b", path.read_text()), where


def test_no_module_imports_the_command_line():
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "__main__.py"}:
        assert not any(within(name, ("gcore.cli",)) for name in imports(path)), path


def test_backends_are_imported_locally():
    """A run needs only the packages of the backends that it uses."""
    heavy = ("gcore.generation.embedded", "gcore.training", "gcore.runtime", "torch", "ray")
    for path in (*files("controller"), *files("driver"), *files("launch")):
        body = ast.parse(path.read_text()).body
        top = {str(node.module) for node in body if isinstance(node, ast.ImportFrom)} - {"gcore.runtime.protocol"}
        assert not any(within(name, heavy) for name in top), path


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_neither_torch_nor_ray(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_a_reward_worker_starts_without_the_tree_of_the_configuration():
    code = "import sys, gcore.rewarding.worker; print([m for m in ('gcore.config.tree', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_loop_fits_one_screen():
    assert len((PACKAGE / "controller" / "loop.py").read_text().splitlines()) <= 120


def walks() -> dict[str, tuple[str, list[tuple[str, str, bool]]]]:
    """The walks of docs/walk.md by title: the text, and file, functions and `(again)` of each row."""
    sections = re.split(r"^## ", (ROOT / "docs" / "walk.md").read_text(), flags=re.M)[1:]
    row = re.compile(r"^\| (\d+) .*?`([a-z_0-9/]+\.py): ([^|]+?)`( \(again\))? \|", re.M)
    found = {}
    for section in sections:
        rows = row.findall(section)
        assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1)), section.partition("\n")[0]
        found[section.partition("\n")[0]] = section, [(file, named, bool(again)) for _, file, named, again in rows]
    return found


def test_the_walks_name_files_and_functions_that_exist():
    assert walks().keys() >= {"A sample", "A weight update", "A save", "A resume", "An image", "A latent"}
    for title, (_, rows) in walks().items():
        assert len(rows) >= 5, title
        for name, functions, _ in rows:
            code = (PACKAGE / name).read_text()
            for function in re.findall(r"[A-Za-z_0-9.]+", functions):
                for part in function.split("."):
                    assert re.search(rf"(def|class) {part}\b", code), f"docs/walk.md: {name} has no {part}"


def test_the_walks_count_their_hops():
    """The numbers below each table are those of its rows."""
    for title, (text, rows) in walks().items():
        files = [file for file, *_ in rows]
        assert [again for *_, again in rows] == [file in files[:i] for i, file in enumerate(files)], title
        same = [a for a, b in itertools.pairwise(files) if a == b]
        assert not same, f"docs/walk.md: {title}: two rows after one another are in {same}"
        assert f"{len(rows)} hops in {len(set(files))} files" in text, (title, len(rows), len(set(files)))
        if title == "A sample":
            steps = itertools.pairwise(file.partition("/")[0] for file in files)
            returns = sum(a != "controller" and b == "controller" for a, b in steps)
            assert f"with {returns} returns into `controller/`" in text, returns


@pytest.mark.parametrize("room", ["controller", "launch", "driver"])
def test_the_overview_names_every_module(room):
    text = (ROOT / "docs" / "overview.md").read_text()
    described = re.search(rf"^  {room}/ .*?(?=^  \w+/ )", text, re.M | re.S)
    assert described is not None
    named = set(re.findall(r"[a-z_]+", described.group()))
    assert {path.stem for path in (PACKAGE / room).glob("*.py")} - named - {"__init__", "loop"} == set()
