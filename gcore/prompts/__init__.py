"""Prompts: datasets and tasks, the tokenizer and its chat template, the global order. Does not import torch."""

from gcore.prompts.files import Rows
from gcore.prompts.rows import answer_of, load_rows, prompt_of
from gcore.prompts.source import Measured, PromptSource, Templater, measure
from gcore.prompts.tasks import make_task
from gcore.prompts.tokenizer import build_char_tokenizer, load_tokenizer

__all__ = [
    "Measured",
    "PromptSource",
    "Rows",
    "Templater",
    "answer_of",
    "build_char_tokenizer",
    "load_rows",
    "load_tokenizer",
    "make_task",
    "measure",
    "prompt_of",
]
