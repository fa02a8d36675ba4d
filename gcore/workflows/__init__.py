"""Parts of workflows: tools with parallel calls (tools.py), episodes in an environment (environment.py)."""

from gcore.workflows.environment import play
from gcore.workflows.tools import ToolCall, parse_tool_calls, run_tools, tool_schema, use_tools

__all__ = [
    "ToolCall",
    "parse_tool_calls",
    "play",
    "run_tools",
    "tool_schema",
    "use_tools",
]
