"""The diffusion engine: batched denoising with continuous admission, on CPU or GPU.

    jobs ──admit: start noise, condition──> rows ──step: one denoising step per row──> ended jobs ──decode──> pictures
                                                                      └──latents of all steps──> files

Rows of a batch may be at different steps: a new request joins at the next step, and an aborted one leaves. The network
gets the time of each row. Noise depends on the sample and the step (diffusion/noise.py). The thread and the queue are
in engine_shell.py.

Latents and pictures are written to the engine's folder, one subfolder per weight version; completions carry
references. Subfolders of versions that no sample can be trained with any more are removed.

On CPU a row's result is bitwise the same in any batch: rows are padded to a multiple of 8, as in embedded.py.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gcore.config.denoising import Denoising
from gcore.content import media
from gcore.content.latents import Latents, latents_of
from gcore.content.media import ArrayRef
from gcore.diffusion.denoiser import Condition, Denoiser, stacked, tensors_of
from gcore.diffusion.noise import EVALUATION, START, normals
from gcore.diffusion.samplers import schedule_of, to_device
from gcore.generation.engine_shell import DecodeBackend, Ended, Job, Step
from gcore.generation.sleep import GIB, SleepState
from gcore.models.networks import Adapters, compile_each
from gcore.threads import use_threads
from gcore.types import Completion, Finish, Request, UserError
from gcore.weights.receiver import WeightReceiver, receiver_in_process

ROW_BLOCK = 8
CACHED_PROMPTS = 4096


@dataclass(slots=True, eq=False)
class DenoiseJob(Job):
    """A request of the diffusion engine. `states`: the latents before the first step and after each one."""

    states: list[Tensor] = field(default_factory=list)
    step_logprobs: list[Tensor] = field(default_factory=list)  # on the device: no step waits for them
    condition: Mapping[str, Tensor] = field(default_factory=dict)  # shared by the jobs of a prompt
    condition_refs: tuple[tuple[str, ArrayRef], ...] = ()
    picture: np.ndarray | None = None
    folder: Path = Path()
    keep: int = 1

    @property
    def num_steps(self) -> int:
        return len(self.step_logprobs)

    @property
    def latents(self) -> Latents:
        return latents_of(self.request.content)

    @property
    def step(self) -> int:
        """The next denoising step of the sample."""
        return self.request.position + self.num_steps

    @property
    def is_stochastic(self) -> bool:
        first, after = self.latents.window
        return bool(self.request.params.temperature) and first <= self.step < after

    @property
    def start_noise(self) -> tuple[int, int]:
        """Key and draw."""
        if not self.request.params.temperature:
            return self.request.noise_key, EVALUATION
        shared = self.latents.start_key
        return (self.request.noise_key if shared is None else shared), START

    def completion(self, finish: Finish) -> Completion:
        content, versions_S = Latents(self.latents.prompt, self.latents.tokens, self.latents.window), self.versions_S()
        logprobs_S = np.zeros(0, np.float32)
        if self.num_steps:
            logprobs_S = torch.stack(self.step_logprobs).cpu().numpy()
            folder = _version_folder(self.folder, int(versions_S[-1]), self.keep)
            states = torch.stack(self.states).float().cpu().numpy()
            content = replace(
                content,
                pieces=(media.store(states, folder),),
                last=hashlib.blake2b(states[-1].tobytes(), digest_size=16).digest(),
                picture=None if self.picture is None else media.store(self.picture, folder),
                condition=self.condition_refs,
            )
        return Completion(content, logprobs_S, versions_S, finish)


def _version_folder(folder: Path, version: int, keep: int) -> Path:
    """The folder of a weight version. When it is made, those that are too old, or later and of a run that went back,
    are removed."""
    wanted = folder / f"{version:06d}"
    if not wanted.is_dir():
        wanted.mkdir(parents=True, exist_ok=True)
        for other in folder.glob("[0-9]" * 6):
            if not version - keep <= int(other.name) <= version:
                shutil.rmtree(other, ignore_errors=True)
    return wanted


class DiffusionBackend(DecodeBackend):
    """`folder`: of the latents and pictures; `keep`: weight versions before the current one whose files stay;
    `compiled`: the layers of the network. Compiled code serves all weights: they change in place."""

    make_job = DenoiseJob

    def __init__(
        self,
        denoiser: Denoiser,
        spec: Denoising,
        folder: Path,
        max_concurrent: int,
        keep: int = 1,
        adapters: Adapters | None = None,
        compiled: bool = False,
    ) -> None:
        self._denoiser, self._spec, self._schedule = denoiser, spec, schedule_of(spec)
        self._folder, self.max_concurrent, self._keep = folder, max_concurrent, keep
        self.jobs: list[DenoiseJob] = []
        self._parameters = {name: p for name, p in denoiser.named_parameters() if name.startswith("transformer.")}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in self._parameters.items()}
        self._device = next(iter(self._parameters.values())).device
        self._conditions: dict[str, tuple[Condition, tuple[tuple[str, ArrayRef], ...]]] = {}
        self._host: dict[str, Tensor] = {}  # the weights of an engine that sleeps
        self._frozen = denoiser.frozen()
        self._frozen_host: list[Tensor] = []  # a copy, made when the engine sleeps for the first time
        self._receiver = receiver_in_process(self._parameters, adapters)
        self._launched: torch.cuda.Event | None = None  # the end of the step before
        if compiled:
            compile_each(denoiser.layers)

    def open(self) -> tuple[WeightReceiver, SleepState]:
        use_threads(1)
        return self._receiver, SleepState(("weights",), drops_weights=True)

    def close(self) -> None:
        self.jobs.clear()

    # ---- weights and memory ---------------------------------------------------------------------------------------

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, torch.Tensor], version: int, last: bool) -> None:
        for name, tensor in tensors.items():
            self._parameters[name].copy_(tensor)

    def free(self, level: int) -> float:
        """Level 1 keeps the weights in host memory, level 2 drops them. Text encoders and VAE stay in host memory: the
        trainer does not have them."""
        freed = sum(tensor.nbytes for tensor in (*self._parameters.values(), *self._frozen))
        self._frozen_host = self._frozen_host or [tensor.data.to("cpu", copy=True) for tensor in self._frozen]
        for tensor in self._frozen:
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        for name, parameter in self._parameters.items():
            if level == 1:
                self._host[name] = parameter.data.to("cpu", copy=True)
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the trainer is another process, which cannot use what this one has cached
        return freed / GIB

    def allocate(self, tags: Sequence[str]) -> float:
        for name, parameter in self._parameters.items():
            parameter.data = torch.empty(self._shapes[name], dtype=parameter.dtype, device=self._device)
            if name in self._host:
                parameter.data.copy_(self._host[name])
        self._host = {}
        for tensor, kept in zip(self._frozen, self._frozen_host, strict=True):
            tensor.data = kept.to(self._device, copy=True)
        return sum(tensor.nbytes for tensor in (*self._parameters.values(), *self._frozen)) / GIB

    # ---- requests -------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        latents, end = latents_of(request.content), request.position + request.params.max_tokens
        if end != self._schedule.num_steps:
            raise UserError(
                f"a request ends at denoising step {end}; expected {self._schedule.num_steps} "
                "(key: generation.denoising.steps)"
            )
        if latents.demonstration is not None:
            raise UserError("an engine request has a demonstration; expected a prompt")

    @torch.inference_mode()
    def admit(self, jobs: Sequence[Job]) -> Sequence[Ended]:
        new, refused = list[DenoiseJob](), list[Ended]()
        present = {job.latents.prompt: job.condition for job in self.jobs}
        for job in jobs:
            assert isinstance(job, DenoiseJob)
            prompt = job.latents.prompt
            try:
                condition, job.condition_refs = self._condition(prompt)
            except UserError as error:
                refused.append((job, error))
                continue
            if prompt not in present:
                present[prompt] = tensors_of(condition, self._device)
            job.condition, job.folder, job.keep = present[prompt], self._folder, self._keep
            new.append(job)
        fresh = [job for job in new if not job.states and not job.latents.pieces]
        if fresh:
            keys, draws = zip(*(job.start_noise for job in fresh), strict=True)
            starts = normals(keys, draws, self._denoiser.latent_shape, self._device)
            for job, start in zip(fresh, starts, strict=True):
                job.states = [start]
        for job in new:
            if not job.states:  # it continues: another engine made the steps so far
                job.states = [torch.from_numpy(job.latents.pieces[-1].read()[-1].copy()).to(self._device)]
        self.jobs.extend(new)
        return refused

    def _condition(self, prompt: str) -> tuple[Condition, tuple[tuple[str, ArrayRef], ...]]:
        """Computed once per prompt. The condition of a built model follows from its prompt and is not stored."""
        if prompt not in self._conditions:
            if len(self._conditions) >= CACHED_PROMPTS:
                del self._conditions[next(iter(self._conditions))]
            condition = self._denoiser.encode(prompt, self._denoiser.is_guided(self._spec.guidance_scale))
            large = {name: array for name, array in condition.items() if array.ndim}
            refs = tuple((name, media.store(array, self._folder / "prompts")) for name, array in large.items())
            self._conditions[prompt] = {**condition, **{name: ref.read() for name, ref in refs}}, refs  # mapped files
        return self._conditions[prompt]

    @torch.inference_mode()
    def step(self) -> Step:
        jobs, device = list(self.jobs), self._device
        n = len(jobs)
        padding = [jobs[-1]] * (-n % ROW_BLOCK if device.type == "cpu" else 0)
        rows = [*jobs, *padding]
        latents = torch.stack([job.states[-1] for job in rows])
        steps_B = torch.tensor([job.step for job in rows])
        stochastic_B = torch.tensor([job.is_stochastic for job in rows])
        times_B = to_device(self._schedule.times(steps_B), device)
        condition = stacked([job.condition for job in rows])
        prediction = self._denoiser(latents, times_B, condition, self._spec.guidance_scale)
        transition = self._schedule.step(latents, prediction, steps_B, stochastic_B)
        following = transition.mean
        if stochastic_B.any():
            keys, draws = [job.request.noise_key for job in rows], [job.step + 1 for job in rows]
            noise = normals(keys, draws, self._denoiser.latent_shape, device)
            std = transition.std_B.view(-1, *[1] * (latents.dim() - 1))
            following = following + std * noise
        logprobs_B = transition.logprob(following, self._spec.logprob)
        for job, state, logprob in zip(jobs, following[:n], logprobs_B[:n], strict=True):
            job.states.append(state)
            job.step_logprobs.append(logprob)
        self._wait_for_last_step()
        done = [job for job in jobs if job.num_steps == job.request.params.max_tokens]
        if done:
            pictures = self._denoiser.decode(torch.stack([job.states[-1] for job in done]))
            for job, picture in zip(done, pictures, strict=True):
                job.picture = picture
        self.remove(done)
        return Step(n, [(job, "stop") for job in done])

    def _wait_for_last_step(self) -> None:
        """The host prepares one step while the GPU computes the one before, and no more: requests join and leave
        between steps."""
        if self._device.type == "cuda":
            launched = torch.cuda.Event()
            launched.record()
            if self._launched is not None:
                self._launched.synchronize()
            self._launched = launched

    def remove(self, jobs: Collection[Job]) -> None:
        removed = set(jobs)
        self.jobs = [job for job in self.jobs if job not in removed]
