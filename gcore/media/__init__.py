"""Media in the prompts of language models: families of models, as rows of one table. Start with table.py."""
