"""What the pages of a run share: a template with its styles, scripts and data in one file, and a limit on the data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
ENDS = (".css", ".js")


def render(parts: Sequence[str], model: Mapping[str, Any], drawn: Sequence[str]) -> str:
    """The template `parts[0]` (of page_base.html) with the other parts, .css and .js, in it. `drawn`: keys of the model
    that the scripts draw; the template writes the others."""
    from jinja2 import Environment, FileSystemLoader

    css, js = ("".join((FOLDER / part).read_text("utf-8") for part in parts if part.endswith(end)) for end in ENDS)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=FileSystemLoader(FOLDER))
    script, data = f'"use strict";\n(() => {{\n{js}}})();', script_json({key: model[key] for key in drawn})
    return environment.get_template(parts[0]).render(model, css=css, js=script, data=data)


def script_json(value: Any) -> str:
    """JSON that is safe inside a script tag: a text with </script> would end the tag."""
    data = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        data = data.replace(sign, f"\\u{ord(sign):04x}")
    return data


def thinned_steps(sizes: Mapping[int, int], most: int) -> set[int]:
    """Every n-th step, the smallest n with at most `most` in sum; at least one step. `sizes`: by step."""
    steps = sorted(sizes)
    stride = next((n for n in range(1, len(steps)) if sum(sizes[step] for step in steps[::n]) <= most), len(steps))
    return set(steps[:: max(stride, 1)])
