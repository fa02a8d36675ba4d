"""The command line: `gcore train | eval | sft | plan | simulate | export | report | recipes | schema | doctor`.

Each command is one function that imports what it needs, so `gcore --help` is fast. Exit codes: 0 success, 1 failure,
2 user error, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gcore import __version__
from gcore.types import UserError, writing

OVERRIDES = "key=value pairs that replace keys of the recipe, for example training.lr=1e-5 controllers=4"

PLAN_OPTIONS: tuple[tuple[str, int | float | None, str], ...] = (
    ("prompts", 256, "prompts per step"),
    ("samples", 16, "responses per prompt"),
    ("prompt-length", 512, "tokens per prompt"),
    ("response-length", 2048, "tokens per response, on average"),
    ("max-response-length", None, "maximum tokens per response; default: four times the mean"),
    ("sigma", 0.8, "spread of response lengths (log-normal)"),
    ("acceptance", 1.0, "fraction of groups that dynamic sampling keeps"),
    ("verdict-length", 512, "tokens per verdict of a judge, on average"),
    ("repeats", 1, "verdicts per response and judge"),
    ("logprob-passes", 0, "extra passes of the trainer: 1 for old logprobs (several mini-batches), 1 for a reference"),
    ("images", 0, "images per prompt, for a model with a vision tower; their tokens are part of --prompt-length"),
    ("image-pixels", 200704, "pixels of an image, as the tower gets it"),
    ("max-tokens-per-gpu", 16384, "tokens per micro-batch in training"),
    ("policy-tp", None, "tensor parallel size of the policy, 1, 2, 4 or 8; default: chosen by the planner"),
    ("judge-tp", None, "tensor parallel size of the judges; default: chosen by the planner"),
    ("trainer-tp", 1, "tensor parallel size of the trainer"),
    ("trainer-context", 1, "ranks that share a long sequence, a power of two (training.context_parallel)"),
)


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not burn a shared core
    try:
        return int(args.command(args) or 0)
    except UserError as error:
        from gcore.config.secrets import hide

        print(f"gcore: {hide(str(error))}{_what_comes_first(args)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gcore: interrupted; all processes are stopped", file=sys.stderr)
        return 130
    except Exception as error:
        from gcore.driver.supervise import explain
        from gcore.protocols import RoleDied, RoleError

        if not isinstance(error, RoleError | RoleDied):
            raise
        code = explain(error)
        sys.stderr.flush()
        os._exit(code)  # all processes are stopped; libraries would wait for theirs at a normal exit


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Also accepts overrides after options, which argparse alone does not."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    unknown = [word for word in rest if word.startswith("-") or "=" not in word or not hasattr(args, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_keys_for(unknown)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _keys_for(flags: Sequence[str]) -> str:
    """The keys for the flags of another trainer: `--learning_rate 1e-6` ──> training.lr=..."""
    from gcore.config.load import all_keys
    from gcore.config.names import key_of, own_name

    names = [flag.lstrip("-").partition("=")[0].replace("-", "_") for flag in flags if flag.startswith("--")]
    keys = dict.fromkeys(key_of(own) for name in names if (own := own_name(name, set(all_keys()))))
    return f" (keys are set without dashes: {' '.join(f'{key}=VALUE' for key in keys)})" if keys else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gcore",
        description="Reinforcement learning for language, vision-language and diffusion models.",
    )
    parser.add_argument("--version", action="version", version=f"gcore {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=function)
        return command

    def add_run(name: str, function: Any, text: str, first: str, help: str) -> argparse.ArgumentParser:
        command = add(name, function, text)
        command.add_argument(first, help=help)
        command.add_argument("overrides", nargs="*", default=(), metavar="key=value", help=OVERRIDES)
        return command

    recipe = ("recipe", "YAML file, or the name of one of `gcore recipes`, such as quickstart")
    train = add_run("train", _train, "Train a policy with a recipe.", *recipe)
    train.add_argument("--dry-run", action="store_true", help="only check: show sizes, a prompt and rewards, and exit")
    about_sft = "Supervised training: a recipe with `objective: sft`, or only the warm start of a recipe."
    add_run("sft", _sft, about_sft, *recipe)
    target = "a recipe (its starting model), runs/NAME (its last checkpoint) or runs/NAME/step_N"
    add_run("eval", _eval, "Held-out accuracy of a recipe's model, a run or a checkpoint.", "target", target)
    export = add(
        "export", _export, "Write the policy of a run as a Hugging Face folder, and compare it after reloading."
    )
    export.add_argument("source", help="runs/NAME (its last checkpoint) or runs/NAME/step_N")
    export.add_argument("folder", help="folder to write")
    report = add(
        "report",
        _report,
        "Write an HTML page about one or more runs or simulations: use of the devices over time, and results; of a run "
        "in its folder also a page of its samples.",
    )
    report.add_argument(
        "sources", nargs="+", metavar="RUN|SIMULATION.json", help="runs/NAME, or a file of `gcore simulate`"
    )
    report.add_argument("-o", "--output", metavar="FILE.html", help="default: next to the run or simulation")
    plan = add(
        "plan", _plan, "Before renting GPUs: does the model fit, how long is a step, which placement is fastest."
    )
    plan.usage = "gcore plan (--model MODEL | --denoiser NAME) [--judge JUDGE] --gpus N [--gpu GPU] [options]"
    policy = plan.add_mutually_exclusive_group(required=True)
    policy.add_argument("--model", help="the policy: a size (32B, 30B-A3B), a model folder or a hub id")
    policy.add_argument("--denoiser", help="a diffusion model instead, such as sd3.5-medium or flux")
    plan.add_argument("--denoising-steps", type=int, default=20, help="--denoiser: steps; default %(default)s")
    plan.add_argument("--trained-steps", type=int, help="--denoiser: trained steps; default: all except the last")
    plan.add_argument("--pixels", type=int, default=512, help="--denoiser: height and width; default %(default)s")
    plan.add_argument("--no-guidance", action="store_true", help="--denoiser: one pass per step instead of two")
    plan.add_argument("--judge", action="append", default=[], help="a generative judge, in the same form; repeatable")
    plan.add_argument("--gpus", type=int, required=True, help="number of GPUs")
    plan.add_argument("--gpu", default="h100", help="h100, h200, h20, a100 or b200; default %(default)s")
    for name, default, text in PLAN_OPTIONS:
        shown = text if default is None else f"{text}; default %(default)s"
        plan.add_argument(f"--{name}", type=float if isinstance(default, float) else int, default=default, help=shown)
    plan.add_argument("--kl", action="store_true", help="the trainer has a KL reference")
    plan.add_argument("--critic", action="store_true", help="the trainer has a critic of the policy's size (PPO)")
    plan.add_argument(
        "--checkpointing", choices=("auto", "on", "off"), default="auto", help="activation checkpointing; default auto"
    )
    plan.add_argument(
        "--offload", choices=("auto", "none", "optimizer", "all"), default="auto", help="of the trainer; default auto"
    )
    plan.add_argument("--swap-s", type=float, help="seconds to replace one engine by another; default: estimated")
    plan.add_argument(
        "--staleness", type=int, default=0, metavar="K", help="also simulate steps with sampling.max_staleness=K"
    )
    plan.add_argument("--price", type=float, help="dollars per GPU and hour; default: an assumed price")
    plan.add_argument("--mode", action="append", help="colocated, static, dynamic or disaggregated; default: all")
    plan.add_argument(
        "--memory", action="store_true", help="only memory: of a trainer rank, for each of its tensor parallel sizes"
    )
    plan.add_argument(
        "--backends",
        action="store_true",
        help="compare FSDP2 and Megatron-Core on this number of GPUs, and on 2, 4 and 8 times as many",
    )
    plan.add_argument("--json", metavar="FILE", help="also write the result to this file")
    simulate = add(
        "simulate", _simulate, "Simulate a training run on a cluster, event by event, with several placement rules."
    )
    simulate.add_argument("scenario", help="YAML file, see scenarios/")
    simulate.add_argument(
        "overrides", nargs="*", default=(), metavar="key=value", help="keys of the scenario, slots=128 steps=50"
    )
    simulate.add_argument(
        "--rule",
        "--policy",  # its name before
        action="append",
        metavar="NAME",
        help="placement rule: dynamic, unguarded, colocated, colocated-early, early-swap, static:N (blocks of the "
        "policy), best-static, proportional, paper or oracle; with staleness=K best-disaggregated, elastic, lent:N "
        "and disaggregated:N-M-T; repeatable; default: dynamic, colocated and the best-... ones",
    )
    simulate.add_argument("--oracle", action="store_true", help="also the best of many rules, step by step; slow")
    simulate.add_argument("--json", metavar="FILE", help="write the first run to this file, for `gcore report FILE`")
    recipes = add("recipes", _recipes, "List the recipes of G-Core, print one of them, or copy them all.")
    recipes.add_argument("name", nargs="?", help="print this recipe: gcore recipes quickstart > mine.yaml")
    recipes.add_argument("--copy", metavar="FOLDER", help="copy recipes/, scenarios/ and examples/ into this folder")
    add("schema", _schema, "Print the JSON schema of recipes, with which editors complete and check keys.")
    doctor = add("doctor", _doctor, "Report what is installed, which backends can be used, how to install the others.")
    doctor.add_argument(
        "--cluster", action="store_true", help="instead: compare the nodes of the Ray cluster at RAY_ADDRESS"
    )
    doctor.add_argument(
        "--families",
        nargs="*",
        metavar="NAME",
        help="instead: try small models of these families of transformers, or all",
    )
    doctor.add_argument("--run-dir", default="runs", help="--cluster: is it shared storage? default %(default)s")
    return parser


def _load(command: str, path: str, overrides: Sequence[str]) -> Any:
    """The configuration in a file. A valid file of another command is named as such, not by its unknown keys."""
    from gcore.config.load import load_config
    from gcore.simulate.scenario import load_scenario

    loads: dict[str, Callable[..., Any]] = {"train": load_config, "simulate": load_scenario}
    try:
        return loads[command](path, overrides)
    except UserError:
        for other in loads:
            with contextlib.suppress(UserError):
                loads[other](path)
                break
        else:
            raise
        if other == command:  # the file is valid, an override is not
            raise
    raise UserError(f"{path}: got a file for `gcore {other}`; expected one for `gcore {command}`")


def _train(args: argparse.Namespace) -> int:
    config = _load("train", args.recipe, args.overrides)
    if args.dry_run:
        from gcore.launch.dry_run import dry_run

        dry_run(config)
        return 0
    return _run_and_report(config)


def _sft(args: argparse.Namespace) -> int:
    from gcore.config.load import load_config

    config = load_config(args.recipe, [*args.overrides])
    if config.objective != "sft":
        if config.training.warm_start is None:
            raise UserError(f"{args.recipe}: no supervised part (keys: objective: sft, or training.warm_start)")
        config = load_config(args.recipe, [*args.overrides, "run.steps=0"])
    return _run_and_report(config)


def _run_and_report(config: Any) -> int:
    from gcore.driver.supervise import run
    from gcore.observe.report import summary_text

    run(config)
    print(summary_text(config.run.folder))
    return 0


def _eval(args: argparse.Namespace) -> int:
    from gcore import shipped
    from gcore.api import evaluate

    recipe = shipped.named(args.target, "recipes")
    if recipe.is_file():  # a file of another command is named as such
        _load("train", str(recipe), args.overrides)
    row = evaluate(args.target, *args.overrides)
    wide = max(18, *map(len, row))
    for name, value in row.items():
        shown = f"{value:,}" if isinstance(value, int) else "none could be scored" if value is None else f"{value:.4f}"
        print(f"{name:{wide}} {shown}")
    return 0


def _recipes(args: argparse.Namespace) -> int:
    from gcore import shipped

    if args.copy:
        print(*(f"wrote {folder}" for folder in shipped.copy_to(Path(args.copy))), sep="\n")
    elif args.name:
        path = shipped.named(args.name, "recipes")
        if not path.is_file():
            raise UserError(f"{args.name}: no such recipe; expected one of {', '.join(shipped.names('recipes'))}")
        print(path.read_text(), end="")
    else:
        print(*(f"{name:14} {title}" for name, title in shipped.names("recipes").items()), sep="\n")
    return 0


def _schema(args: argparse.Namespace) -> int:
    from gcore.config.reference import schema

    print(schema(), end="")
    return 0


def _what_comes_first(args: argparse.Namespace) -> str:
    """The commands in the first lines of a recipe of G-Core that need more than itself."""
    from gcore import shipped

    path = shipped.named(name := str(getattr(args, "recipe", "")), "recipes")
    if not path.is_relative_to(shipped.ROOT / "recipes") or Path(name).exists():
        return ""
    own = f"gcore train recipes/{path.name}"
    commands = [line.removeprefix("#   ") for line in path.read_text().splitlines() if line.startswith("#   ")]
    if all(command == own for command in commands):
        return ""
    return f"\n({path.stem} needs: {'; '.join(commands)}; `gcore recipes --copy .` copies the examples)"


def _export(args: argparse.Namespace) -> int:
    from gcore.checkpoint.export import adapter_folder, export
    from gcore.checkpoint.export_pipeline import SAMPLING

    num_tensors = export(Path(args.source), Path(args.folder))
    if (adapters := adapter_folder(Path(args.folder))).is_dir():
        print(f"wrote {adapters}: only the adapters, in the format of PEFT (a diffusion model: of diffusers)")
    if (sampling := Path(args.folder) / SAMPLING).is_file():
        print(f"{sampling}: how to sample as in training; the default sigmas of diffusers may be another schedule")
    print(f"wrote {args.folder}; after reloading, its {num_tensors} tensors equal those of the checkpoint")
    return 0


def _report(args: argparse.Namespace) -> int:
    from gcore.observe.page import page_path, write_pages

    sources = [Path(source) for source in args.sources]
    for page in write_pages(sources, Path(args.output) if args.output else page_path(sources)):
        print(f"wrote {page}")
    return 0


def _plan_denoiser(args: argparse.Namespace) -> int:
    from gcore.cost.costs import gpu_of
    from gcore.cost.denoisers import DenoisingWork, denoiser_of, lines

    work = DenoisingWork(
        prompts=args.prompts,
        samples=args.samples,
        steps=args.denoising_steps,
        trained=args.trained_steps,
        pixels=args.pixels,
        guidance=not args.no_guidance,
        kl=args.kl,
        checkpointing="auto" if args.checkpointing == "auto" else args.checkpointing == "on",
    )
    print("\n".join(lines(denoiser_of(args.denoiser), gpu_of(args.gpu), args.gpus, work)))
    return 0


def _plan(args: argparse.Namespace) -> int:
    import json

    if args.denoiser:
        return _plan_denoiser(args)

    from gcore.cost.costs import gpu_of, shape_of
    from gcore.planner.inputs import Constraints, Workload, modes_of, work_of
    from gcore.planner.plan import memory_by_width, plan
    from gcore.planner.table import show, show_backends, show_memory

    options = {name.replace("-", "_"): getattr(args, name.replace("-", "_")) for name, _, _ in PLAN_OPTIONS}
    names = ("policy_tp", "judge_tp", "trainer_tp", "trainer_context", "max_tokens_per_gpu")
    limits = {name: options.pop(name) for name in names}
    checkpointing = {"auto": "auto", "on": True, "off": False}[args.checkpointing]
    limits |= {"kl": args.kl, "critic": args.critic, "offload": args.offload, "checkpointing": checkpointing}
    inputs = (
        shape_of(args.model),
        [shape_of(judge, "--judge") for judge in args.judge],
        args.gpus,
        gpu_of(args.gpu),
        Workload(**{name: value for name, value in options.items() if value is not None}),
        Constraints(**limits, modes=modes_of(args.mode), swap_s=args.swap_s, price=args.price),
    )
    if args.backends:
        from gcore.cost.backends import compare

        model, _, _, gpu, work, constraints = inputs
        update = work_of(work, constraints)
        show_backends(model, gpu, [compare(model, gpu, factor * args.gpus, update) for factor in (1, 2, 4, 8)])
        return 0
    if args.memory:
        results = memory_by_width(*inputs)
        show_memory(results)
        return 0 if any(not result.problems for result in results) else 1
    answer = plan(*inputs)
    show(answer)
    if args.staleness and answer.best:
        from gcore.planner.asynchronous import asynchronous
        from gcore.simulate import table

        scenario, rules = asynchronous(answer, args.model, args.judge, args.staleness)
        table.show(scenario, table.compare(scenario, rules, table.progress_to(sys.stderr)))
        print("dynamic lends the trainer's GPUs to engines between updates: in the simulator, not yet in runs")
    if args.json:
        with writing(f"--json {args.json}"):
            Path(args.json).write_text(json.dumps(answer.as_json(), indent=2) + "\n")
    return 0 if answer.best else 1


def _simulate(args: argparse.Namespace) -> int:
    from gcore.simulate.table import compare, progress_to, show, usual

    scenario = _load("simulate", args.scenario, args.overrides)
    names = [*(args.rule or usual(scenario)), *(["oracle"] if args.oracle else [])]
    runs = compare(scenario, list(dict.fromkeys(names)), progress_to(sys.stderr))
    show(scenario, runs)
    if args.json:
        first, *_ = runs.values()
        with writing(f"--json {args.json}"):
            first.write(Path(args.json), runs)
        print(f"wrote {args.json}; `gcore report {args.json}` draws it")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    if args.cluster:
        from gcore.launch.node_checks import cluster_doctor

        return cluster_doctor(args.run_dir)
    if args.families is not None:
        from gcore.launch.families import families, report

        return report(args.families or families())
    from gcore.launch.machines import detect_machine
    from gcore.observe.doctor import doctor

    return doctor(detect_machine().gpus)


if __name__ == "__main__":
    sys.exit(main())
