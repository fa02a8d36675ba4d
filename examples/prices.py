r"""A shop whose prices the policy cannot know: it has to ask for each of them, then it adds them.

    gcore train recipes/agent.yaml                                    the class Shop
    gcore train recipes/agent.yaml environment.source='mcp:python examples/prices.py' \
        environment.args.game=examples/prices.py:Shop                 the same, with the tool of an MCP server

    kd+xa=     kd?  ──price──>  4     xa?  ──price──>  7     11

Prices are hashes of the codes. The codes of the held-out prompts are in no training prompt. Of five demonstrations,
four guess the sum without asking: a policy that imitates them is seldom right.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

LETTERS = "abcdefghijklmnop"
CODES = [a + b for a in LETTERS for b in LETTERS]
GUESSES = 0.8  # fraction of demonstrations that do not ask


def price(code: str) -> str:
    """The price of a product."""
    return str(hashlib.sha256(code.encode()).digest()[0] % 10) if code in CODES else "?"


def total(prompt: str) -> str:
    return str(sum(int(price(code)) for code in prompt.rstrip("=").split("+")))


class Shop:
    tools = (price,)

    def rows(self, split: str, size: int | None = None) -> list[dict[str, Any]]:
        shuffled = random.Random(0).sample(CODES, len(CODES))
        codes = shuffled[:32] if split == "eval" else shuffled[32:]
        return [self._row(random.Random(f"{split}/{i}"), codes) for i in range(size or 4000)]

    def _row(self, draw: random.Random, codes: list[str]) -> dict[str, Any]:
        a, b = draw.choice(codes), draw.choice(codes)
        answer = total(f"{a}+{b}=")
        asked = f"{a}?{price(a)}{b}?{price(b)}{answer}"
        guessed = str(draw.randrange(19))
        return {"prompt": f"{a}+{b}=", "answer": answer, "demonstration": guessed if draw.random() < GUESSES else asked}

    def reset(self, row: dict[str, Any]) -> None:
        self.answer = row["answer"]

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", float(action == self.answer), True


if __name__ == "__main__":  # an MCP server
    from mcp.server import MCPServer

    server = MCPServer("prices")
    server.tool()(price)
    server.run()
