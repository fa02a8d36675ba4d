"""run.on_step: a function of the user, called after each training step with its metrics. It may end the run.

    controller 0: metrics of the step ──finished_step──> driver: on_step(metrics), in a thread
    all controllers: wait before the checkpoint of the step <──go_on(stop)──┘

The function runs in the process that started the run: it is called once per step, it needs not be pickled, and it can
change what belongs to the program or the notebook that calls `gcore.train`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path

from gcore.clients import ControllerClient
from gcore.config.tree import Config
from gcore.launch.user_code import OnStep, load_on_step
from gcore.observe.values import Row, step_of
from gcore.types import UserError
from gcore.user_files import one_line

KEY = "run.on_step"


def open_on_step(config: Config) -> tuple[Config, OnStep | None]:
    """The function, and the configuration with its name only, which can be sent to other processes."""
    path = config.run.on_step
    if path is None:
        return config, None
    return config.changed("run", on_step=str.__str__(path)), load_on_step(path)


async def call_after_steps(controllers: Sequence[ControllerClient], on_step: OnStep) -> None:
    """In the driver, until the run ends. UserError if the function raises."""
    while True:
        row = await controllers[0].finished_step()
        done: Future[bool] = Future()
        # A daemon, so that a function that hangs does not keep an interrupted run alive.
        threading.Thread(target=_call_into, args=(done, on_step, row), name="on_step", daemon=True).start()
        stop = await asyncio.wrap_future(done)
        await asyncio.gather(*(controller.go_on(stop) for controller in controllers))


def _call_into(done: Future[bool], on_step: OnStep, row: Row) -> None:
    with contextlib.suppress(InvalidStateError):  # the run has ended
        try:
            done.set_result(call(on_step, row))
        except UserError as error:
            done.set_exception(error)


def call(on_step: OnStep, row: Row) -> bool:
    """Whether the run ends."""
    step = step_of(row)
    try:
        answer = on_step(row)
    except BaseException as error:  # sys.exit too: the run must not end without a word
        where = _line_of(error) or getattr(on_step, "__name__", type(on_step).__name__)
        raise UserError(f"{KEY}: {where}: {one_line(error)} (after step {step})") from error
    stop = getattr(answer, "item", lambda: answer)()  # a number of NumPy
    if stop is not None and not isinstance(stop, bool):
        raise UserError(
            f"{KEY} returned {answer!r:.80} after step {step}; expected True to end the run, or nothing (None, False)"
        )
    return bool(stop)


def _line_of(error: BaseException) -> str:
    """The last line of the user's file, as `mine.py:12 in on_step`. The first frame is of this module."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else ""
