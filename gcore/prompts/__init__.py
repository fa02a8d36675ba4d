"""Prompts: datasets and tasks, the tokenizer and its chat template, the global order. Does not import torch."""
