"""The command line: `gcore train | eval | sft | train-rm | export | doctor`. Exit code 2: the user's to mend."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gcore import __version__
from gcore.types import UserError

OVERRIDES = "key=value pairs that replace keys of the recipe, for example training.lr=1e-5 controllers=4"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    try:
        return int(args.command(args) or 0)
    except UserError as error:
        print(f"gcore: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gcore: interrupted; every process has been ended", file=sys.stderr)
        return 130
    except Exception as error:
        from gcore.controller.supervise import exit_code, explain
        from gcore.protocols import RoleDied, RoleError

        if not isinstance(error, RoleError | RoleDied):
            raise
        explain(error)
        sys.stderr.flush()
        os._exit(exit_code(error))  # the processes are ended; libraries that lost theirs would only wait at exit


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may also stand behind options, which argparse alone does not allow."""
    parser = _parser()
    args, rest = parser.parse_known_args(argv)
    strangers = [word for word in rest if word.startswith("-") or "=" not in word or not hasattr(args, "overrides")]
    if strangers:
        parser.error(f"unrecognized arguments: {' '.join(strangers)}")
    if rest:
        args.overrides += rest
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gcore", description="Reinforcement learning for language models, with parallel controllers."
    )
    parser.add_argument("--version", action="version", version=f"gcore {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=function)
        return command

    train = add("train", _train, "Train as a recipe says.")
    train.add_argument("recipe", help="YAML file, see recipes/")
    train.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    train.add_argument("--dry-run", action="store_true", help="check everything, print sizes and processes, and exit")
    sft = add(
        "sft", _sft, "Only the supervised warm start of a recipe; ends with a checkpoint that `gcore export` takes."
    )
    sft.add_argument("recipe")
    sft.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    reward_model = add("train-rm", _train_rm, "Train a scalar reward model on pairs of answers, for `rewards.models`.")
    reward_model.add_argument("recipe", help="YAML file, see recipes/reward_model.yaml")
    reward_model.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    evaluate = add("eval", _eval, "Held-out accuracy of a recipe's model, a run or a checkpoint.")
    evaluate.add_argument(
        "target", help="a recipe (its starting model), runs/NAME (its last checkpoint) or runs/NAME/step_N"
    )
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    export = add(
        "export", _export, "Write a run's policy as a Hugging Face folder, and check that it reloads to equal logits."
    )
    export.add_argument("source", help="runs/NAME (its last checkpoint) or runs/NAME/step_N")
    export.add_argument("folder", help="where to write")
    add("doctor", _doctor, "What is installed, which backends are usable, and how to get the rest.")
    return parser


def _train(args: argparse.Namespace) -> int:
    from gcore.config import load_config

    config = load_config(args.recipe, args.overrides)
    if args.dry_run:
        from gcore.controller.plan import make_plan, see_machine
        from gcore.controller.preflight import model_megabytes, preflight

        plan = make_plan(config, see_machine(), model_megabytes(config))
        preflight(config, plan)
        print("\n".join(plan.lines(config)))
        return 0
    return _run_and_report(config)


def _sft(args: argparse.Namespace) -> int:
    from gcore.config import load_config

    config = load_config(args.recipe, [*args.overrides, "run.steps=0"])
    if config.training.warm_start is None:
        raise UserError(f"{args.recipe}: no supervised part (key: training.warm_start)")
    return _run_and_report(config)


def _train_rm(args: argparse.Namespace) -> int:
    from gcore.config import load_config
    from gcore.config.reward_model import RewardModelConfig
    from gcore.controller.train_rm import train_rm

    config = load_config(args.recipe, args.overrides, into=RewardModelConfig)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not burn a shared core
    from gcore.training.reward_model import PairTrainer

    train_rm(config, PairTrainer, lambda line: print(line, flush=True))
    return 0


def _run_and_report(config: Any) -> int:
    from gcore.controller.supervise import run
    from gcore.observe.report import summary_text

    run(config)
    print(summary_text(config.run.folder))
    return 0


def _eval(args: argparse.Namespace) -> int:
    from gcore.config import load_config
    from gcore.controller.supervise import run

    target = Path(args.target)
    if target.is_dir():
        from gcore.controller.export import locate

        folder, checkpoint = locate(target)
        config = load_config(folder / "config.yaml", [f"run.resume={checkpoint}", *args.overrides])
    else:
        config = load_config(target, args.overrides)
    if config.data.eval is None:
        raise UserError(f"{target}: nothing to evaluate on (key: data.eval)")
    for name, value in run(config, "eval").items():
        print(f"{name:18} {value:.4f}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from gcore.controller.export import export

    difference = export(Path(args.source), Path(args.folder))
    print(f"wrote {args.folder}; reloaded, logits differ by at most {difference:.1e}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from gcore.observe.doctor import doctor

    return doctor()


if __name__ == "__main__":
    sys.exit(main())
