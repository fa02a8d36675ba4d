"""The environment of processes with torch: caches, and messages of libraries that are switched off."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from pathlib import Path


def cache_folder() -> Path:
    """Files that later runs of the same user can reuse."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "gcore"


def quiet() -> None:
    """The environment of processes with torch. Switches off the messages that libraries print at import."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # compiled code of earlier runs; PyTorch's default is a folder in /tmp. vLLM has its own, VLLM_CACHE_ROOT.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torchinductor"))
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    logging_of_transformers = importlib.import_module("transformers").logging
    logging_of_transformers.set_verbosity_error()
    logging_of_transformers.disable_progress_bar()
