"""Kinds of policies: what a run does differently for a language model and for a diffusion model. Start with base.py."""
