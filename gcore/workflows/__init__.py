"""Parts of workflows: tools with parallel calls (tools.py), how models write calls (tool_formats.py), episodes in an
environment (environment.py)."""

from gcore.workflows.environment import play
from gcore.workflows.tool_formats import AssistantTurn, ToolCall
from gcore.workflows.tools import parse_tool_calls, run_tools, tool_schema, use_tools

__all__ = [
    "AssistantTurn",
    "ToolCall",
    "parse_tool_calls",
    "play",
    "run_tools",
    "tool_schema",
    "use_tools",
]
