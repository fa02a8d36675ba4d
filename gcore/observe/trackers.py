"""Trackers that receive copies of the metrics: TensorBoard, Weights & Biases, MLflow. Imported only if enabled. And the
page that Prometheus reads."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gcore.config.leaves import leaves_of
from gcore.observe.files import RecordFile, replacing
from gcore.types import UserError

if TYPE_CHECKING:
    from gcore.config.run import Observe

_numbers = itertools.count()  # of event files of this process
IDS = "trackers.json"  # ids of the remote runs, so that a resumed run continues the same one
PARAMS_AT_ONCE = 100  # MLflow's limit per request
PARAM_LENGTH = 500  # MLflow's limit per value, on old servers


def check_trackers(observe: Observe) -> None:
    """Raises UserError at the start of a run if an enabled tracker is not installed."""
    for name in observe.trackers:
        if not _installed(name):
            raise UserError(
                f"observe.trackers: {name} needs the package {name}, which is not installed: run `pip install {name}` "
                "or remove it from observe.trackers"
            )


def open_trackers(
    folder: Path, observe: Observe, run_name: str, config: dict[str, Any], last_step: int | None
) -> list[Tracker]:
    """`last_step` is the newest logged step if a run resumes, None for a new run."""
    check_trackers(observe)
    make: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(folder / "tensorboard", last_step),
        "wandb": lambda: Wandb(folder, run_name, config),
        "mlflow": lambda: MLflow(folder, run_name, config),
    }
    trackers = [make[name]() for name in observe.trackers]
    return trackers + ([Prometheus(observe.prometheus, run_name)] if observe.prometheus is not None else [])


class TensorBoard:
    """Event files of TensorBoard's own records: torch's writer would import torch in the driver, and the one of
    TensorBoard writes in a thread, which a full disk ends with a traceback."""

    name = "TensorBoard"

    def __init__(self, folder: Path, last_step: int | None):
        self._folder = folder
        self._writers: dict[bool, RecordFile] = {}
        writer = self._writer(warm_start=False)
        if last_step is not None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            # Makes TensorBoard hide points from this step on in older files: the resume undid them.
            start = SessionLog(status=SessionLog.START)
            _write(writer, Event(step=last_step + 1, wall_time=time.time(), session_log=start))

    def _writer(self, warm_start: bool) -> RecordFile:
        """The warm start has its own step count, so it is a separate run."""
        if warm_start not in self._writers:
            from tensorboard.compat.proto.event_pb2 import Event

            folder = self._folder / "warm_start" if warm_start else self._folder
            place = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
            self._writers[warm_start] = file = RecordFile(folder / f"events.out.tfevents.{int(time.time())}.{place}")
            _write(file, Event(wall_time=time.time(), file_version="brain.Event:2"))
        return self._writers[warm_start]

    def log(self, step: int, scalars: Mapping[str, float], warm_start: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        _write(self._writer(warm_start), Event(step=step, wall_time=time.time(), summary=Summary(value=values)))

    def close(self) -> None:
        for writer in self._writers.values():
            writer.append([])  # what still waits


class Wandb:
    """Our `step` is the x-axis, not W&B's own counter, which cannot go back after a resume."""

    name = "W&B"

    def __init__(self, folder: Path, run_name: str, config: dict[str, Any]):
        import wandb

        project, known = os.environ.get("WANDB_PROJECT", "gcore"), _known_ids(folder).get("wandb")
        self._run: Any = wandb.init(
            project=project, name=run_name, config=config, dir=str(folder), id=known, resume="allow"
        )
        _keep_id(folder, "wandb", self._run.id)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, scalars: Mapping[str, float], warm_start: bool) -> None:
        self._run.log({"step": step, **scalars})

    def close(self) -> None:
        self._run.finish(exit_code=0)


class MLflow:
    """The server is configured by MLflow's own variables: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

    name = "MLflow"

    def __init__(self, folder: Path, run_name: str, config: dict[str, Any]):
        import mlflow

        self._mlflow: Any = mlflow
        known = _known_ids(folder).get("mlflow")
        run = self._mlflow.start_run(run_id=known) if known else self._mlflow.start_run(run_name=run_name)
        _keep_id(folder, "mlflow", run.info.run_id)
        if known is None:  # parameters of an existing run cannot be changed
            params = ((key, str(value)[:PARAM_LENGTH]) for key, value in leaves_of(config))
            while some := dict(itertools.islice(params, PARAMS_AT_ONCE)):
                self._mlflow.log_params(some)

    def log(self, step: int, scalars: Mapping[str, float], warm_start: bool) -> None:
        self._mlflow.log_metrics(dict(scalars), step=step)

    def close(self) -> None:
        self._mlflow.end_run(status="FINISHED")


class Prometheus:
    """A page with the latest values: `gcore_reward_mean{run="quickstart"} 0.43`."""

    name = "Prometheus"

    def __init__(self, address: str | int, run_name: str):
        host, _, port = f"{address}".rpartition(":")
        self._label = json.dumps(run_name)
        self._page = ""
        try:
            self._server = ThreadingHTTPServer((host or "127.0.0.1", int(port)), self._handler())
        except (OSError, OverflowError, ValueError) as error:
            raise UserError(
                f"observe.prometheus={address}: {error}; expected a port that is free, or HOST:PORT of this machine"
            ) from None
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        tracker = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10  # of a client that sends nothing

            def do_GET(self) -> None:
                found = self.path == "/metrics"
                body = tracker._page.encode() if found else b"expected /metrics\n"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def log(self, step: int, scalars: Mapping[str, float], warm_start: bool) -> None:
        values = {"warm_start_step" if warm_start else "step": step, **scalars, "logged_timestamp_seconds": time.time()}
        lines = (f"gcore_{re.sub('[^a-zA-Z0-9_]', '_', n)}{{run={self._label}}} {v}\n" for n, v in values.items())
        self._page = "".join(lines)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


Tracker = TensorBoard | Wandb | MLflow | Prometheus


def _write(file: RecordFile, event: Any) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    framed = io.BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    file.write(framed.getvalue())


def _installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None


def _known_ids(folder: Path) -> dict[str, str]:
    """Empty if the file is damaged: the run continues as a new one there."""
    try:
        return dict(json.loads((folder / IDS).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _keep_id(folder: Path, name: str, run_id: str) -> None:
    path = folder / IDS
    ids = {**_known_ids(folder), name: run_id}
    with replacing(path) as file:
        file.write(json.dumps(ids).encode())
