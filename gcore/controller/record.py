"""Makes one row of metrics per step, and writes the rows and a few samples to the files of the run.

each controller: Collected ──local_sums──> sums ──all_gather──> rollout_row ──┐
each trainer rank: UpdateStats ──actor_row────────────────────────────────────┴──> row ──> metrics.jsonl, trackers
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gcore.config.environments import EnvironmentSettings
from gcore.config.secrets import hide
from gcore.config.tree import Config
from gcore.controller.prompt_ledger import REWARD_ERROR, Collected
from gcore.generation.pool import EnginePool
from gcore.observe.files import problem
from gcore.observe.histograms import counted
from gcore.observe.links import Link, LinkScope, link_row
from gcore.observe.metrics import MetricsWriter
from gcore.observe.samples import SampleLog
from gcore.observe.values import Row
from gcore.preparation.advantages import overlong_penalty
from gcore.preparation.samples import samples_digest
from gcore.protocols import UpdateStats, add_metrics
from gcore.types import SampleMeta, Scored, UserError

if TYPE_CHECKING:
    from gcore.controller.services import Services


class Recorder:
    """`writer`: for metrics.jsonl, only on controller 0. `samples`: the log of a few groups per step, if enabled."""

    def __init__(
        self, services: Services, writer: MetricsWriter | None = None, samples: SampleLog | None = None
    ) -> None:
        self._services, self._writer, self._samples = services, writer, samples
        self.last_row: Row = {}  # of the last step, with its evaluation

    async def record_step(
        self, step: int, collected: Collected, metas: Sequence[SampleMeta], rank_stats: Sequence[UpdateStats]
    ) -> None:
        """Call at the end of a step. `metas`: of all samples of the step; `rank_stats`: of each trainer rank."""
        services, config, status = self._services, self._services.config, self._services.status
        environment, names = services.agents.environment, ["generation", "rewarding"]
        names += ["environment"] if environment is not None else []
        stages = {stage: collected.stage_s.get(stage, 0.0) for stage in names}
        aborted = services.pool.take_aborted()
        if config.sampling.strict:
            aborted = 0, 0  # aborted prompts come after the last one of the step: they could not have been trained on
        sums = {
            **local_sums(collected, config, step - 1, aborted),
            "counts": services.rewarder.take_counts(),
            "environment": environment.take_counts() if environment is not None else {},
            "links": self._take_links(),
            "media": services.kind.take_media_bytes(),
            "times": {**status.take_all_seconds(), **stages},
        }
        gathered = await services.controllers.all_gather(f"metrics of step {step}", sums)
        times = {name: max(part["times"].get(name, 0.0) for part in gathered) for name in sums["times"]}
        tokens = sum(part["tokens"] for part in gathered)
        self.write(
            {
                "step": step,
                **(offline_row if config.is_offline else rollout_row)(gathered, metas),
                **(self._environment_row(gathered) if environment is not None else {}),
                **actor_row(rank_stats),
                **(services.dispatcher.balance_metrics if rank_stats else {}),
                **services.placement.row(),
                **status.take_metrics(),
                **collected.measured,
                "perf/tokens_per_s": tokens / times["step"],
                **await self._speculation(),
                **link_row(part["links"] for part in gathered),
                "controller/bytes": max(part["links"].total() for part in gathered),
                **media_row([part["media"] for part in gathered]),
                **{f"timing_s/{name}": seconds for name, seconds in times.items()},
            }
        )
        if self._samples is not None:
            self._samples.write(step, {meta.prompt_id for meta in metas}, collected.groups)
        status.tracer.flush()
        if config.environment is not None:
            check_episodes(config.environment, step, _sum_counts(gathered, "environment"))
        if config.checkpoint.on_failure == "stop" and (unwritten := problem(config.run.folder)):
            raise UserError(f"{unwritten}; free some space, then run.resume=auto (checkpoint.on_failure=stop)")
        status.finished(step)

    def _environment_row(self, gathered: Sequence[dict[str, Any]]) -> Row:
        spec = self._services.config.environment
        row = environment_row(_sum_counts(gathered, "environment"))
        return {"environment/source": hide(spec.source), **row} if spec is not None else row

    async def _speculation(self) -> Row:
        """Counters of the policy's engines. Controller 0 asks all of them."""
        services = self._services
        generation = services.config.generation
        if generation.speculation == "off" or not generation.traits.speculates or services.controllers.rank:
            return {}
        proposed, accepted = await services.pool.take_speculated()
        return {"rollout/spec_proposed": proposed, "rollout/spec_accepted": accepted}

    def _take_links(self) -> Counter[tuple[Link, LinkScope]]:
        services = self._services
        pools = [pool for pool in (services.pool, *services.rewarder.pools) if isinstance(pool, EnginePool)]
        return sum((pool.links.take() for pool in pools), services.dispatcher.take_links())

    def record_evaluation(self, step: int, row: Row, groups: Mapping[str, Sequence[Sequence[Scored]]]) -> None:
        """`groups`: by name of the evaluation set."""
        self.write({"step": step, **row})
        if self._samples is not None:
            for name, own in groups.items():
                self._samples.write_eval(step, own, name)

    def write(self, row: Row) -> None:
        self.last_row = {**self.last_row, **row} if row["step"] == self.last_row.get("step") else row
        self._services.status.add_row(row)
        if self._writer is not None:
            self._writer.log(row)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._services.status.tracer.flush()


def media_row(num_bytes: Sequence[int]) -> Row:
    """`num_bytes`: of the images that each controller decoded since the last step."""
    if not any(num_bytes):
        return {}
    return {"controller/media_bytes": max(num_bytes), "controller/media_bytes_all": sum(num_bytes)}


def exact_sum(values: Iterable[float]) -> Fraction:
    """A sum without rounding, so that it does not depend on the number of controllers."""
    return sum(map(Fraction, values), Fraction(0))


def local_sums(collected: Collected, config: Config, version: int, aborted: tuple[int, int]) -> dict[str, Any]:
    """Sums over the samples of one controller. Sums add up over controllers; `max_*` are maxima.

    `version`: the policy that was trained; the age of a sample is relative to it. `aborted`: tokens and number of
    responses that were aborted and could have been trained on.
    """
    scored = [s for group in collected.groups for s in group]
    rewards = [s.reward for s in scored]
    lengths = [s.rollout.length for s in scored]
    parts: dict[str, list[float]] = {}
    for s in scored:
        for name, value in s.parts.items():
            parts.setdefault(name, []).append(value)
    penalties: dict[str, Fraction] = {}
    if (overlong := config.algorithm.overlong).buffer:
        longest = config.generation.max_response_length
        penalties["overlong"] = exact_sum(overlong_penalty(length, overlong, longest) for length in lengths)
    return {
        "samples": len(scored),
        "groups": len(collected.groups),
        "reward": exact_sum(rewards),
        "rewards": np.asarray(rewards),  # for the spread and the histograms: 12 bytes per sample
        "lengths": np.asarray(lengths, np.int32),
        "no_spread": sum(len({s.reward for s in group}) == 1 for group in collected.groups),
        "tokens": sum(lengths),
        "tokens_eligible": collected.tokens_passed + aborted[0],
        "samples_eligible": collected.samples_passed + aborted[1],
        "max_length": max(lengths, default=0),
        "clipped": sum(s.rollout.finish == "length" for s in scored),
        "reward_drawn": exact_sum(collected.rewards),
        "samples_drawn": len(collected.rewards),
        "drawn": collected.drawn,
        "dropped": dict(collected.dropped),
        "tool_calls": dict(collected.tool_calls),
        "pending": collected.pending,
        "age": sum(int((version - r.versions_S[r.shared :]).sum()) for s in scored for r in s.rollout.trajectory),
        "max_age": max((version - s.rollout.version for s in scored), default=0),
        "parts": {name: (exact_sum(values), len(values)) for name, values in parts.items()},
        "peak_rss_mb": peak_rss_mb(),
        **penalties,
    }


def rollout_row(gathered: Sequence[dict[str, Any]], metas: Sequence[SampleMeta]) -> dict[str, Any]:
    def total(name: str) -> float:
        return float(sum(part[name] for part in gathered))

    samples = max(total("samples"), 1.0)
    mean = total("reward") / samples
    rewards = np.sort(np.concatenate([part["rewards"] for part in gathered]))  # the same for any number of controllers
    row: dict[str, Any] = {
        "reward/mean": mean if total("samples") else None,
        "reward/mean_drawn": total("reward_drawn") / max(total("samples_drawn"), 1.0),
        "reward/std": float(rewards.std()) if len(rewards) else 0.0,
        "reward/zero_spread_frac": total("no_spread") / max(total("groups"), 1.0),
        "reward/errors": _sum_counts(gathered, "dropped").get(REWARD_ERROR, 0),
        **{f"reward/{name}": count for name, count in sorted(_sum_counts(gathered, "counts").items())},
        "response_length/mean": total("tokens") / samples,
        "response_length/max": max(part["max_length"] for part in gathered),
        "response_length/clipped_frac": total("clipped") / samples,
        **({"reward/overlong_penalty": total("overlong") / samples} if "overlong" in gathered[0] else {}),
        **_length_bias(total),
        "batch/samples": int(total("samples")),
        "sampling/drawn": int(total("drawn")),
        "sampling/trained": int(total("groups")),
        **{f"sampling/dropped_{why}": count for why, count in sorted(_sum_counts(gathered, "dropped").items())},
        "sampling/pending": int(total("pending")),
        **{f"tools/{name}": count for name, count in sorted(_sum_counts(gathered, "tool_calls").items())},
        "staleness/mean": total("age") / max(total("tokens"), 1.0),
        "staleness/max": max(part["max_age"] for part in gathered),
        "samples_digest": samples_digest(metas),
    }
    for name, column in (("reward", "rewards"), ("response_length", "lengths")):
        row[f"histogram/{name}"] = counted(np.concatenate([part[column] for part in gathered]))
    names = sorted({name for part in gathered for name in part["parts"]})
    for name in names:
        pairs = [part["parts"][name] for part in gathered if name in part["parts"]]
        row[f"reward/{name}"] = float(sum(p[0] for p in pairs) / sum(p[1] for p in pairs))
    row["controller/peak_rss_mb"] = max(part["peak_rss_mb"] for part in gathered)
    return row


def environment_row(counts: Counter[str]) -> Row:
    """Of all episodes that ended or began since the last row, also those of prompts that were dropped."""
    episodes = max(counts["episodes"], 1)
    row: Row = {"environment/episodes": counts["episodes"]}
    row |= {f"environment/{name}": counts[name] / episodes for name in ("turns", "tool_calls", "tool_errors")}
    row |= {f"environment/{name}": counts[name] for name in ("retried", "restarts", "evicted")}
    return row | {
        f"environment/{name}": count for name, count in sorted(counts.items()) if name.startswith(("cause_", "failed_"))
    }


def check_episodes(spec: EnvironmentSettings, step: int, counts: Counter[str]) -> None:
    """Ends the run if too many episodes still failed after their retries."""
    failed = {name.removeprefix("failed_"): n for name, n in sorted(counts.items()) if name.startswith("failed_")}
    total = sum(failed.values())
    if total > spec.max_failed_frac * counts["episodes"]:
        causes = ", ".join(f"{name} {count}" for name, count in failed.items())
        raise UserError(
            f"step {step}: {total} of {counts['episodes']} episodes of environment.source={spec.source} failed "
            f"({causes}; environment.max_failed_frac={spec.max_failed_frac})"
        )


def offline_row(gathered: Sequence[dict[str, Any]], metas: Sequence[SampleMeta]) -> dict[str, Any]:
    """Of answers of the dataset: nothing was sampled or scored."""
    row = rollout_row(gathered, metas)
    kept = ("response_length/", "batch/", "sampling/", "controller/", "samples_digest")
    return {name: value for name, value in row.items() if name.startswith(kept)}


def _length_bias(total: Callable[[str], float]) -> dict[str, float]:
    """Mean length of trained responses / mean length of all responses that could have been trained on: those that
    passed the filter, and aborted ones with their length so far. 1 is unbiased; single steps vary."""
    if not total("tokens") or not total("tokens_eligible"):
        return {}
    eligible = total("tokens_eligible") / total("samples_eligible")
    return {"rollout/length_bias": total("tokens") / total("samples") / eligible}


def _sum_counts(gathered: Sequence[dict[str, Any]], name: str) -> Counter[str]:
    return sum((Counter(part[name]) for part in gathered), Counter[str]())


def actor_row(ranks: Sequence[UpdateStats]) -> dict[str, float]:
    """The metrics of training/objective.py, over all ranks. Gradient norm and learning rate are equal on all ranks."""
    if not ranks:  # the step had no samples
        return {}

    first, updates = ranks[0], max(ranks[0].updates, 1)
    return {
        "actor/grad_norm": first.grad_norm / updates,
        "actor/lr": first.lr / updates,
        "actor/skipped_updates": float(first.skipped),
        **values_of(ranks),
    }


def values_of(ranks: Sequence[UpdateStats]) -> dict[str, float]:
    """The metrics of all ranks together."""
    return {name: metric.value for name, metric in add_metrics(*(rank.metrics for rank in ranks)).items()}


def skipped_line(step: int, ranks: Sequence[UpdateStats], folder: Path) -> str | None:
    """Message for the user if updates were skipped because gradients were NaN or infinite."""
    if not ranks or not ranks[0].skipped:
        return None
    return (
        f"step {step}: {ranks[0].skipped} of {ranks[0].updates} update(s) skipped, NaN or infinite "
        f"gradients; the samples are in {folder / 'bad_batches'}"
    )


def peak_rss_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 if sys.platform != "darwin" else 2**20)
