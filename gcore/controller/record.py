"""Sums from all controllers and ranks -> one row of metrics."""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from gcore.config.tree import Config
from gcore.controller.collect import Collected
from gcore.controller.step_ledger import REWARD_ERROR
from gcore.preparation.samples import overlong, samples_digest
from gcore.protocols import UpdateStats
from gcore.types import SampleMeta


def exact(values: Iterable[float]) -> Fraction:
    """A sum without rounding, so that it does not depend on how the values are shared out."""
    return sum(map(Fraction, values), Fraction(0))


def local_sums(collected: Collected, version: int, aborted: tuple[int, int]) -> dict[str, Any]:
    """What one controller knows of its share; everything in it adds up over controllers (or is a maximum: `max_*`).

    `version` is the policy that was trained, the measure of how old samples are. `aborted`: tokens and number of
    responses that were thrown away unfinished, and that might have been trained on.
    """
    tokens_passed, samples_passed = collected.passed
    scored = [s for group in collected.groups for s in group]
    rewards = [s.reward for s in scored]
    lengths = [len(s.rollout.tokens_S) for s in scored]
    parts: dict[str, list[float]] = {}
    for s in scored:
        for name, value in s.parts.items():
            parts.setdefault(name, []).append(value)
    return {
        "samples": len(scored),
        "groups": len(collected.groups),
        "reward": exact(rewards),
        "reward_squares": exact(r * r for r in rewards),
        "no_spread": sum(len({s.reward for s in group}) == 1 for group in collected.groups),
        "tokens": sum(lengths),
        "tokens_eligible": tokens_passed + aborted[0],
        "samples_eligible": samples_passed + aborted[1],
        "prompt_tokens": sum(len(s.rollout.prompt.tokens_P) for s in scored),
        "max_length": max(lengths, default=0),
        "clipped": sum(s.rollout.finish == "length" for s in scored),
        "reward_drawn": exact(collected.rewards),
        "samples_drawn": len(collected.rewards),
        "drawn": collected.drawn,
        "dropped": dict(collected.dropped),
        "pending": collected.pending,
        "age": sum(int((version - s.rollout.versions_S).sum()) for s in scored),
        "max_age": max((version - s.rollout.version for s in scored), default=0),
        "parts": {name: (exact(values), len(values)) for name, values in parts.items()},
        "stage_s": collected.stage_s,
        "peak_rss_mb": peak_rss_mb(),
    }


def overlong_sum(collected: Collected, config: Config) -> dict[str, Fraction]:
    """What responses lost by their length, where algorithm.overlong_buffer is set."""
    if not config.algorithm.overlong_buffer:
        return {}
    longest = config.generation.max_response_length
    scored = [s for group in collected.groups for s in group]
    return {"overlong": exact(overlong(s.rollout, config.algorithm, longest) for s in scored)}


def rollout_row(gathered: Sequence[dict[str, Any]], metas: Sequence[SampleMeta]) -> dict[str, Any]:
    def total(name: str) -> float:
        return float(sum(part[name] for part in gathered))

    samples = max(total("samples"), 1.0)
    mean = total("reward") / samples
    row: dict[str, Any] = {
        "reward/mean": mean if total("samples") else None,
        "reward/mean_drawn": total("reward_drawn") / max(total("samples_drawn"), 1.0),
        "reward/std": float(np.sqrt(max(total("reward_squares") / samples - mean**2, 0.0))),
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
        "staleness/mean": total("age") / max(total("tokens"), 1.0),
        "staleness/max": max(part["max_age"] for part in gathered),
        "samples_digest": samples_digest(metas),
    }
    names = sorted({name for part in gathered for name in part["parts"]})
    for name in names:
        pairs = [part["parts"][name] for part in gathered if name in part["parts"]]
        row[f"reward/{name}"] = float(sum(p[0] for p in pairs) / sum(p[1] for p in pairs))
    row["controller/peak_rss_mb"] = max(part["peak_rss_mb"] for part in gathered)
    return row


def _length_bias(total: Callable[[str], float]) -> dict[str, float]:
    """Mean trained length over that of all responses that could have been trained on: those that passed the filter, and
    those that were aborted, as far as they came. 1 is unbiased; single steps vary."""
    if not total("tokens") or not total("tokens_eligible"):
        return {}
    eligible = total("tokens_eligible") / total("samples_eligible")
    return {"rollout/length_bias": total("tokens") / total("samples") / eligible}


def _sum_counts(gathered: Sequence[dict[str, Any]], name: str) -> Counter[str]:
    return sum((Counter(part[name]) for part in gathered), Counter[str]())


def actor_row(ranks: Sequence[UpdateStats]) -> dict[str, float]:
    """The ranks' sums as means over steps; gradient norm and learning rate are the same on every rank."""
    if not ranks:  # there was nothing to train on
        return {}

    def total(name: str) -> float:
        return sum(rank.sums.get(name, 0.0) for rank in ranks)

    updates, actions = max(ranks[0].updates, 1), max(total("actions"), 1.0)
    row = {
        "actor/loss": total("loss") / updates,
        "actor/pg_loss": total("pg_loss") / updates,
        "actor/entropy": total("entropy") / actions,
        "actor/clip_frac": total("clipped") / actions,
        "actor/approx_kl": total("approx_kl") / actions,
        "actor/grad_norm": ranks[0].grad_norm / updates,
        "actor/lr": ranks[0].lr / updates,
        "actor/skipped_updates": float(ranks[0].skipped),
        "rollout/logprob_diff_mean": total("logprob_diff") / actions,
        "rollout/importance_mean": total("importance") / actions,
        "rollout/importance_capped_frac": total("importance_capped") / actions,
        "rollout/importance_floored_frac": total("importance_floored") / actions,
    }
    if any("kl" in rank.sums for rank in ranks):
        row["actor/kl"] = total("kl") / actions
    return row


def skipped_line(step: int, ranks: Sequence[UpdateStats], folder: Path) -> str | None:
    """For the user, where gradients were NaN or infinite."""
    if not ranks or not ranks[0].skipped:
        return None
    return (
        f"step {step}: {ranks[0].skipped} of {ranks[0].updates} update(s) skipped, NaN or infinite "
        f"gradients; the samples are in {folder / 'bad_batches'}"
    )


def peak_rss_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 if sys.platform != "darwin" else 2**20)
