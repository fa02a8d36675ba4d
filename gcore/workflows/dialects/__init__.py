"""The dialects of the endpoint: pure converters between the bodies of an API and one form of requests and turns.

form.py   the form         chat.py   a module per dialect, each with the table of its routes
"""

from gcore.workflows.dialects import chat

ROUTES = {**chat.ROUTES}
