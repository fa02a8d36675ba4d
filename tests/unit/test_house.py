"""The plan of the house: imports point one way, pure files stay pure, the loop fits one screen."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gcore"
STAGES = (
    *("prompts", "generation", "rewarding", "preparation", "training", "checkpoint", "observe"),
    "simulate",
    "placement",
)
COMMON = (
    *("gcore.types", "gcore.protocols", "gcore.clients", "gcore.config", "gcore.observe"),
    *("gcore.hub", "gcore.models", "gcore.decoders", "gcore.content", "gcore.faults", "gcore.diffusion"),
    *("gcore.user_files", "gcore.user_functions", "gcore.vision_models"),
)
ALSO = {
    # what is simulated is the code of a run; the emulated trainer writes a file of a checkpoint
    "simulate": (
        *("gcore.placement", "gcore.generation.routing", "gcore.checkpoint.store", "gcore.preparation.workload"),
    ),
    # it holds a WeightPublisher, and saves its shards
    "training": ("gcore.weights", "gcore.checkpoint.tensors", "gcore.checkpoint.writer"),
    "generation": ("gcore.weights",),  # an engine holds a WeightReceiver
}
PURE = (
    "gcore.types",
    "gcore.protocols",
    "gcore.clients",
    "gcore.config",
    "gcore.config.reference",
    "gcore.hub",
    "gcore.prompts",
    "gcore.controller.pins",
    "gcore.preparation.assignment",
    "gcore.preparation.balance",
    "gcore.preparation.baselines",
    "gcore.preparation.refine",
    "gcore.preparation.step_times",
    "gcore.preparation.advantages",
    "gcore.preparation.workload",
    "gcore.controller.machines",
    "gcore.controller.node_checks",
    "gcore.user_files",
    "gcore.controller.plan",
    "gcore.controller.footprint",
    "gcore.controller.gpu_memory",
    "gcore.controller.preflight",
    "gcore.controller.dry_run",
    "gcore.controller.supervise",
    "gcore.controller.loop",
    "gcore.placement.grid",
    "gcore.placement.rules",
    "gcore.placement.baselines",
    "gcore.placement.forecast",
    "gcore.placement.guard",
    "gcore.placement.replica_speed",
    "gcore",
    "gcore.api",
    "gcore.user_functions",
    "gcore.workflows",
    "gcore.simulate.table",
    "gcore.simulate.training_memory",
    "gcore.simulate.backends",
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


@pytest.mark.parametrize("room", STAGES)
def test_stage_rooms_import_common_ground_and_themselves_alone(room):
    assert files(room)
    strangers = {
        (str(path.relative_to(PACKAGE)), name)
        for path in files(room)
        for name in imports(path)
        if not within(name, (*COMMON, f"gcore.{room}", *ALSO.get(room, ())))
    }
    assert strangers == set()


def test_ground_floor():
    """Common modules import no module above them."""
    assert imports(PACKAGE / "types.py") == {"gcore.content.base"}  # for the type checker alone
    assert all(
        within(name, ("gcore.content", "gcore.config", "gcore.types")) for p in files("content") for name in imports(p)
    )
    assert imports(PACKAGE / "protocols.py") == {"gcore.types", "gcore.role_errors"}
    assert imports(PACKAGE / "role_errors.py") == {"gcore.types"}
    assert imports(PACKAGE / "clients.py") == {"gcore.protocols", "gcore.types"}
    for room, allowed in {
        "config": ("gcore.config", "gcore.types"),
        "observe": ("gcore.observe", "gcore.config", "gcore.types", "gcore.content.media"),
        "runtime": (
            *("gcore.runtime", "gcore.observe", "gcore.protocols", "gcore.types", "gcore.faults"),
            *("gcore.user_files", "gcore.__version__"),
        ),
    }.items():
        for path in files(room):
            assert all(within(name, allowed) for name in imports(path)), path
    assert imports(PACKAGE / "decoders.py") == {"gcore.types"}
    assert imports(PACKAGE / "user_files.py") == {"gcore.types"}
    assert imports(PACKAGE / "user_functions.py") == {"gcore.user_files", "gcore.config.objects", "gcore.types"}
    own = ("gcore.workflows", "gcore.protocols", "gcore.types")
    assert all(within(name, own) for path in files("workflows") for name in imports(path))
    assert all(within(name, ("gcore.config", "gcore.types")) for name in imports(PACKAGE / "hub.py"))
    below = ("gcore.config", "gcore.decoders", "gcore.hub", "gcore.types", "gcore.built_models")
    assert imports(PACKAGE / "built_models.py") == {"gcore.config.base"}
    seen = ("gcore.content", "gcore.decoders")
    assert all(within(name, seen) for name in imports(PACKAGE / "vision_models.py"))
    assert all(within(name, below) for name in imports(PACKAGE / "models.py"))


def test_weights_is_a_common_room():
    """Training and generation import it; it imports neither of them, nor any other stage."""
    common = ("gcore.clients", "gcore.config", "gcore.hub", "gcore.models", "gcore.protocols", "gcore.types")
    allowed = ("gcore.weights", *common)
    assert files("weights")
    for path in files("weights"):
        assert all(within(name, allowed) for name in imports(path)), path


def test_tokens_are_handled_by_engines_and_trainers_alone():
    """Other stages pass content on through its interface (content/base.py). The backends of text judges are engines'
    clients with a tokenizer of their own."""
    allowed = ("content", "generation", "training", "simulate/engine.py", "models.py", "vision_models.py")
    allowed += ("rewarding/judge_backend.py",)
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        if not where.startswith(allowed) and where != "types.py":
            assert not re.search(r"\btokens_[A-Z]", path.read_text()), where
    assert not re.search(r"\btokens_[A-Z]", (PACKAGE / "generation" / "pool.py").read_text())


def test_no_module_imports_the_command_line():
    for path in PACKAGE.rglob("*.py"):
        assert not any(within(name, ("gcore.cli",)) for name in imports(path)), path


def test_backends_are_imported_in_build_alone():
    """Elsewhere in the controller no engine, trainer or runtime is named."""
    backends = ("gcore.generation.embedded", "gcore.training", "gcore.runtime")
    for path in files("controller"):
        if path.name not in ("build.py", "build_ranks.py", "build_backend.py", "build_diffusion.py"):
            found = imports(path) - {"gcore.runtime.protocol"}
            assert not any(within(name, backends) for name in found), path


def test_build_imports_backends_locally():
    tree = ast.parse((PACKAGE / "controller" / "build.py").read_text())
    top = {str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom)} - {"gcore.runtime.protocol"}
    assert not any(
        within(name, ("gcore.generation", "gcore.training", "gcore.runtime", "torch", "ray")) for name in top
    )


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


def test_files_stay_small():
    long = {str(p.relative_to(ROOT)): n for p in PACKAGE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 420}
    assert long == {}


def test_the_walks_name_files_and_functions_that_exist():
    rows = re.findall(r"^\| \d+ .*?`([a-z_/]+\.py): ([^|]+)\|", (ROOT / "docs" / "walk.md").read_text(), re.M)
    assert len(rows) > 80
    for name, functions in rows:
        code = (PACKAGE / name).read_text()
        for function in re.findall(r"([A-Za-z_.]+)`", functions):
            for part in function.split("."):
                assert re.search(rf"(def|class) {part}\b", code), f"docs/walk.md: {name} has no {part}"


def test_the_overview_names_every_module_of_the_controller():
    text = (ROOT / "docs" / "overview.md").read_text()
    described = text[text.index("  controller/ ") : text.index("  runtime/ ")]
    named = set(re.findall(r"[a-z_]+", described))
    missing = {path.stem for path in (PACKAGE / "controller").glob("*.py")} - named - {"__init__", "loop"}
    assert not missing
