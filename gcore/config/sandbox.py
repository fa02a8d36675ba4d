"""The section `sandbox`: where workflows run untrusted programs."""

from __future__ import annotations

from gcore.config.base import Arguments, Count, PositiveInt, Seconds, Section


class Limits(Section):
    """Limits of one sandbox."""

    cpus: PositiveInt = 1
    """CPUs."""
    memory_mb: PositiveInt = 1024
    """Memory of all processes together, in MiB."""
    disk_mb: PositiveInt = 256
    """Files, in MiB."""
    processes: PositiveInt = 128
    """Processes and threads at the same time."""
    seconds: Seconds = 60.0
    """Duration of one command, if its caller does not set another."""
    output_kb: PositiveInt = 64
    """Output of one command that is kept, in KiB: its beginning and its end."""


class SandboxSettings(Section):
    kind: str = "bubblewrap"
    """`bubblewrap`, `containers` (Docker or Podman), or your own, `file.py:NAME` or `package.module:NAME`, see
    docs/sandboxes.md."""
    image: str | None = None
    """Image of `containers`, which the daemon has."""
    pool: Count = 0
    """Sandboxes per controller that are started before a workflow needs them."""
    at_once: PositiveInt = 16
    """Sandboxes per controller at the same time; workflows wait for a place."""
    limits: Limits = Limits()
    """Limits of each sandbox."""
    read_only: list[str] = []
    """Folders of this machine that programs in a sandbox may read, at the same path."""
    args: Arguments = {}
    """Further arguments of the kind."""
