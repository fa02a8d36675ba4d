"""Parts of workflows: tools with parallel calls (tools.py), how models write calls (tool_formats.py), environments in
the style of verifiers (environment.py)."""

from gcore.workflows.environment import environment_rows, environment_workflow
from gcore.workflows.tool_formats import AssistantTurn, ToolCall
from gcore.workflows.tools import parse_tool_calls, run_tools, tool_schema, use_tools

__all__ = [
    "AssistantTurn",
    "ToolCall",
    "environment_rows",
    "environment_workflow",
    "parse_tool_calls",
    "run_tools",
    "tool_schema",
    "use_tools",
]
