"""Media in the prompts of language models: a module per kind and family. The table is content/families.py."""
