"""Rewards of recipes/diffusion.yaml: classifiers of handwritten digits. And the measurement of a finished run.

python examples/digits.py runs/diffusion     # accuracy and diversity before and after, by the deterministic sampler
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np


class Classifier:
    """Probability of the wanted digit, and 1 if it is the most likely one. Trained on one half of scikit-learn's
    digits: `half` 0 or 1. `kind`: `mlp`, or `svc`, whose errors are different ones."""

    def __init__(self, kind: str = "mlp", half: int = 0, value: str = "probability") -> None:
        from sklearn.datasets import load_digits
        from sklearn.neural_network import MLPClassifier
        from sklearn.svm import SVC

        digits = load_digits()
        inputs, labels = digits.data[half::2] / 16, digits.target[half::2]
        if kind == "mlp":
            self.model: Any = MLPClassifier((64,), max_iter=120, alpha=0.01, random_state=0)
        else:
            self.model = SVC(C=10.0, gamma=0.05, decision_function_shape="ovr")
        self.model.fit(inputs, labels)
        self.kind, self.value = kind, value

    def probabilities(self, images: Any) -> np.ndarray:
        inputs = np.stack([image[..., 0].reshape(-1) for image in images]) / 255
        if self.kind == "mlp":
            return np.asarray(self.model.predict_proba(inputs))
        return np.eye(10)[self.model.predict(inputs)]

    def __call__(self, images: Any, prompts: Any, answer: Any, **_: Any) -> Any:
        found, wanted = self.probabilities(images), np.array([int(a) for a in answer])
        right = (found.argmax(1) == wanted).astype(float)
        if self.value == "right":
            return right.tolist()
        return found[np.arange(len(wanted)), wanted].tolist()


def spread(pictures: np.ndarray, labels: np.ndarray) -> float:
    """Root mean square distance of a picture (pixels from 0 to 1) to the mean picture of its digit."""
    inputs = pictures.reshape(len(pictures), -1) / 255
    means = np.stack([inputs[labels == digit].mean(0) for digit in range(10)])
    return float(np.sqrt(((inputs - means[labels]) ** 2).sum(1).mean()))


def sample(checkpoint: Path, per_digit: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of every digit by the deterministic sampler, from noise that training and evaluations did not use."""
    import torch

    from gcore.checkpoint.tensors import read, shapes
    from gcore.config.load import load_config
    from gcore.diffusion.denoiser import stacked, tensors_of
    from gcore.diffusion.noise import normals
    from gcore.diffusion.pipelines import load_denoiser
    from gcore.diffusion.samplers import schedule_of

    config = load_config(checkpoint.parent / "config.yaml")
    denoiser = load_denoiser(config, torch.device("cpu"), torch.float32, encoders=True)
    spec = config.generation.denoising
    assert spec is not None  # the recipe of a diffusion model has it
    denoiser.load_state_dict(read(checkpoint / "weights", shapes(checkpoint / "weights")))
    schedule, labels = schedule_of(spec), np.repeat(np.arange(10), per_digit)
    latents = normals([10**6 + seed] * len(labels), range(len(labels)), denoiser.latent_shape, torch.device("cpu"))
    encoded = [denoiser.encode(str(label), spec.guidance_scale != 1) for label in labels]
    condition = stacked([tensors_of(one, latents.device) for one in encoded])
    with torch.inference_mode():
        for step in range(schedule.num_steps):
            steps = torch.full((len(labels),), step)
            found = denoiser(latents, schedule.times(steps), condition, spec.guidance_scale)
            latents = schedule.step(latents, found, steps, torch.zeros(len(labels), dtype=torch.bool)).mean
    return denoiser.decode(latents), labels


def main(run: Path, per_digit: int = 50, seed: int = 1) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    real = spread(np.round(digits.images * (255 / 16)), digits.target)
    first, second = Classifier(), Classifier("svc", half=1)
    print(f"{'checkpoint':<12}{'right':>8}{'second':>8}{'spread':>8}  of the data's {real:.3f}")
    names = sorted(run.glob("warm_*"), key=_number) + sorted(run.glob("step_*"), key=_number)
    for checkpoint in names:
        pictures, labels = sample(checkpoint, per_digit, seed)
        right = [float((c.probabilities(pictures).argmax(1) == labels).mean()) for c in (first, second)]
        share = spread(pictures[..., 0], labels) / real
        print(f"{checkpoint.name:<12}{right[0]:>8.3f}{right[1]:>8.3f}{share:>8.2f}")


def _number(path: Path) -> int:
    return int(path.name.rpartition("_")[2])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
