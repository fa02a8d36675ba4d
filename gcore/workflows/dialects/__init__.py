"""The dialects of the endpoint: pure converters between the bodies of an API and one form of requests and turns.

form.py   the form        chat.py, responses.py, anthropic.py   a module per dialect, each with a table of its routes
"""

from gcore.workflows.dialects import anthropic, chat, responses

ROUTES = {**chat.ROUTES, **responses.ROUTES, **anthropic.ROUTES}  # by the path after /v1/
