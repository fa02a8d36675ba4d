"""Parts of workflows: tools with parallel calls (tools.py), environments in the style of verifiers (environment.py)."""

from gcore.workflows.environment import environment_rows, environment_workflow
from gcore.workflows.tools import ToolCall, parse_tool_calls, run_tools, tool_schema, use_tools

__all__ = [
    "ToolCall",
    "environment_rows",
    "environment_workflow",
    "parse_tool_calls",
    "run_tools",
    "tool_schema",
    "use_tools",
]
