"""What every kind of sandbox does, and what programs in it try in vain."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from gcore.config.sandbox import Limits, SandboxSettings
from gcore.sandbox import bubblewrap, transport
from gcore.sandbox.base import SandboxError
from gcore.sandbox.bubblewrap import BubblewrapSandboxes
from gcore.sandbox.containers import ContainerSandboxes
from gcore.sandbox.memory import group_folder
from gcore.sandbox.pool import SandboxPool, make_kind
from gcore.types import UserError

LIMITS = Limits(memory_mb=96, disk_mb=24, processes=24, seconds=20.0, output_kb=8)
PROBLEM = BubblewrapSandboxes(SandboxSettings()).problem()
KINDS = ["bubblewrap", "bubblewrap of a user", "bubblewrap without a cgroup", "containers"]
# GCORE_TEST_CONTAINERS='{"image": "...", "args": {"socket": "..."}, "read_only": ["/usr"]}': with python3, bash and tar
CONTAINERS = json.loads(os.environ.get("GCORE_TEST_CONTAINERS", "null"))


def make(kind: str, monkeypatch, **settings):
    settings = SandboxSettings(**{"limits": LIMITS, **settings})
    if kind == "containers":
        if CONTAINERS is None:
            pytest.skip("GCORE_TEST_CONTAINERS names no image")
        return ContainerSandboxes(SandboxSettings(kind="containers", limits=LIMITS, **CONTAINERS))
    if PROBLEM is not None:
        pytest.skip(PROBLEM)
    if kind == "bubblewrap of a user":  # root builds it without a user namespace; here it builds both
        if os.geteuid() != 0:
            pytest.skip("the same as without this")
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    elif kind == "bubblewrap without a cgroup":
        if group_folder() is None:
            pytest.skip("the same as without this")
        monkeypatch.setattr(bubblewrap, "new_group", lambda size: None)
    return BubblewrapSandboxes(settings)


@pytest.fixture(params=KINDS)
def boxes(request, monkeypatch):
    boxes = make(request.param, monkeypatch)
    boxes.name = request.param
    return boxes


def using(boxes, scenario, folder=None):
    """Runs `scenario(box)` with a new sandbox."""

    async def run():
        pool = boxes.pool = SandboxPool(boxes.settings, boxes)
        async with asyncio.timeout(60):
            try:
                async with pool.one(folder) as box:
                    await scenario(box)
            finally:
                await pool.close()

    return asyncio.run(run())


def alive(marker: str) -> bool:
    """Is there a process of this machine with this argument?"""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"\0{marker}\0" in path.read_text():
                return True
    return False


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


# --- what it does


def test_commands(boxes):
    async def scenario(box):
        first = await box.run(
            "pwd; echo $GREETING; cat; echo error >&2; exit 3", stdin=b"given\n", env={"GREETING": "hi"}
        )
        assert (first.code, first.text, first.cause) == (3, "/sandbox\nhi\ngiven\nerror\n", "")
        assert (await box.run(["printf", "%s|", "a b", "$HOME"])).output == b"a b|$HOME|"
        missing = await box.run(["no-such-program"])
        assert missing.code == 127 and "no-such-program" in missing.text
        assert (await box.run("kill -SEGV $$")).code in (-signal.SIGSEGV, 128 + signal.SIGSEGV)
        many = await box.run("cat", stdin=bytes(1 << 20))
        assert (many.code, len(many.output), many.cut) == (0, 8 << 10, (1 << 20) - (8 << 10))
        ends = (await box.run("seq 100000")).text
        assert ends.startswith("1\n2\n") and ends.endswith("\n100000\n")

    using(boxes, scenario)


def test_files(boxes, tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "a.txt").write_text("from outside")
    (tmp_path / "given" / "run.sh").write_text("#!/bin/sh\necho ran")
    (tmp_path / "given" / "run.sh").chmod(0o755)

    async def scenario(box):
        assert (await box.run("cat given/a.txt; given/run.sh")).text == "from outsideran\n"
        await box.run("echo one > kept; mkfifo pipe; mkdir folder; head -c 3000 /dev/zero > large; echo x > /tmp/x")
        assert (await box.run("cat kept /tmp/x")).text == "one\nx\n"  # files stay
        assert await box.read("kept") == b"one\n" == await box.read("/sandbox/kept")
        data = os.urandom(1 << 20)
        await box.write("deep/er/data", data)
        assert await box.read("deep/er/data") == data
        await box.write("deep/er/data", b"less")
        assert (await box.run("cat deep/er/data")).text == "less"
        for path, error in (("nothing", FileNotFoundError), ("folder", IsADirectoryError), ("pipe", OSError)):
            with pytest.raises(error):
                await box.read(path)
        with pytest.raises(OSError, match="more than 2999 bytes"):
            await box.read("large", most=2999)
        assert len(await box.read("large", most=3000)) == 3000
        for path in ("folder", "pipe", "/usr/new"):
            with pytest.raises(OSError):
                await box.write(path, b"x")
        assert Path(tmp_path, "given", "a.txt").read_text() == "from outside"

    using(boxes, scenario, str(tmp_path))


def test_files_while_a_command_runs(boxes):
    async def scenario(box):
        waits = asyncio.create_task(box.run("until [ -s go ]; do sleep 0.02; done; cat go"))
        await asyncio.sleep(0.1)
        await box.write("go.part", b"now")
        second = asyncio.create_task(box.run("echo after; mv go went"))  # one command at a time
        await box.write("go", await box.read("go.part"))
        assert (await waits).text == "now"
        assert (await second).text == "after\n"

    using(boxes, scenario)


def test_snapshots(boxes):
    async def scenario(box):
        await box.run("mkdir closed; echo 1 > closed/a; ln -s /etc/hosts link; chmod 500 closed; echo t > /tmp/t")
        copy = await box.snapshot()
        await box.run("chmod 700 closed; rm -r closed link /tmp/t; echo new > new; sleep 1000 &")
        await box.restore(copy)
        listing = await box.run("cat closed/a /tmp/t; stat -c %a closed; readlink link; ls; pgrep -fc 'sleep 100[0]'")
        assert listing.text == "1\nt\n500\n/etc/hosts\nclosed\nlink\n0\n"
        async with boxes.pool.one() as other:
            await other.restore(copy)
            assert (await other.run("cat closed/a")).text == "1\n"
        await box.restore(copy)  # it is still there

    using(boxes, scenario)


# --- limits, by name


def test_time(boxes):
    marker = f"70{os.getpid()}{KINDS.index(boxes.name)}"

    async def scenario(box):
        await box.run("echo kept > kept")
        late = await box.run(f"echo begun; setsid sleep {marker} & sleep 1000", seconds=0.5)
        assert (late.code, late.cause, late.output) == (None, "time", b"begun\n")
        assert not alive(marker)
        assert (await box.run("cat kept")).text == "kept\n"
        assert (await box.run("trap '' TERM INT HUP; while :; do :; done", seconds=0.5)).cause == "time"

    using(boxes, scenario)


BOMB = "import time\nx = []\nfor _ in range(300): x.append(bytearray(b'1' * (1 << 20)))\ntime.sleep(9)"


def test_memory(boxes):
    async def scenario(box):
        one = await box.run(["python3", "-c", BOMB])
        if "without" in boxes.name:
            assert one.code == 1 and "MemoryError" in one.text  # of one process
        else:
            assert one.cause == "memory" and one.code in (-signal.SIGKILL, 128 + signal.SIGKILL)
        several = "import os\nfor _ in range(5): os.fork()\n" + BOMB.replace("300", "20")  # 32 x 20 MiB
        assert (await box.run(["python3", "-c", several.replace("range(5)", "range(4)")])).cause == "memory"
        assert (await box.run("echo still here")).text == "still here\n"
        assert (await box.run("head -c 30000000 /dev/zero | tail -c 30000000 | wc -c")).text == "30000000\n"

    using(boxes, scenario)


def test_disk(boxes):
    async def scenario(box):
        assert (await box.run("head -c 90000000 /dev/zero > a")).cause == "disk"  # one file above the limit
        fill = "for i in 1 2 3 4 5; do head -c 20000000 /dev/zero > /tmp/$i || exit 1; done"
        if boxes.name == "containers":  # their sum is watched
            assert (await box.run(f"{fill}; sleep 99")).cause == "disk"
        else:
            full = await box.run(fill)
            assert (full.code, full.cause) == (1, "disk")
            with pytest.raises(OSError, match="No space left"):
                await box.write("b", bytes(1 << 20))
        assert (await box.run("rm a /tmp/*; head -c 20000000 /dev/zero > b && echo fits")).text == "fits\n"
        shared = "for i in 1 2 3 4 5; do head -c 20000000 /dev/zero > /dev/shm/$i; done; rm -f /dev/shm/*"
        assert "No space left" in (await box.run(shared)).text
        assert (await box.run("dd if=/dev/zero of=sparse bs=1 count=1 seek=900M")).code != 0

    using(boxes, scenario)


FORKS = """
import os, time
n = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(999)
        n += 1
except OSError:
    print(n)
"""


def test_processes(boxes):
    if boxes.name == "bubblewrap of a user" and os.getuid() == 0:
        pytest.skip("the kernel does not limit processes of root")

    async def scenario(box):
        bomb = await box.run(["python3", "-c", FORKS])
        assert 15 <= int(bomb.text) <= 24, bomb
        async with boxes.pool.one() as other:  # another is not affected
            assert (await other.run("echo fine")).text == "fine\n"
        assert (await box.run(["sleep", "999"], seconds=0.2)).cause in ("time", "processes")
        late = FORKS.replace("print(n)", "print(n, flush=True); open('full', 'w').close(); time.sleep(6)")
        waits = asyncio.create_task(box.run(["python3", "-c", late]))
        seen = "none"
        while "limit (processes)" not in seen:  # none is left for a helper
            assert not waits.done(), seen
            with pytest.raises(OSError) as failed:
                await box.read("x")
            seen = str(failed.value)
            await asyncio.sleep(0.3)
        assert (await waits).code == 0
        left = await box.run("ls; ls")  # with those that it left
        assert left.cause == "processes" or "fork" in left.text
        shell = await box.run(["bash", "-c", "f() { f | f & }; f; sleep 999"], seconds=1.0)
        assert shell.cause in ("time", "processes") or shell.code == 254  # of bash, if it cannot fork
        assert (await box.run(["sleep", "999"], seconds=0.2)).cause in ("time", "processes")  # then all have ended
        assert (await box.run("rm full; ls; ls; echo fine")).text == "fine\n"

    using(boxes, scenario)


def test_output(boxes, monkeypatch):
    monkeypatch.setattr(transport, "FLOOD", 8)

    async def scenario(box):
        flood = await box.run("yes")
        assert (flood.code, flood.cause, len(flood.output)) == (None, "output", 8 << 10)
        assert (await box.run("echo fine; exec sleep 999 >/dev/null 2>&1 &")).text == "fine\n"
        left = await box.run("(sleep 999; echo late) & echo fine")  # holds the output open
        assert (left.code, left.text) == (0, "fine\n")

    using(boxes, scenario)


def test_cpus(boxes):
    async def scenario(box):
        if boxes.name == "containers":  # not which, but how much of all
            quota = await box.run("cat /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu/cpu.cfs_quota_us 2>/dev/null")
            assert quota.text.split()[0] == "100000"
            return
        assert (await box.run("nproc")).text == "1\n"
        if os.cpu_count() > 1:
            more = "import os; os.sched_setaffinity(0, range(os.cpu_count()))"
            assert "PermissionError" in (await box.run(["python3", "-c", more])).text
        assert (await box.run("nproc")).text == "1\n"

    using(boxes, scenario)


# --- escapes


def test_no_network_but_what_is_asked_for(boxes):
    connect = "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1])), 2).recv(9))"

    async def scenario(box):
        async def answer(reader, writer):
            writer.write(b"hello")
            await writer.drain()
            writer.close()

        servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(2)]
        ports = [str(server.sockets[0].getsockname()[1]) for server in servers]
        for port in ports:
            assert "ConnectionRefusedError" in (await box.run(["python3", "-c", connect, port])).text
        host, port = await box.reach("127.0.0.1", int(ports[0]))
        assert host == "127.0.0.1"
        assert (await box.run(["python3", "-c", connect, str(port)])).text == "b'hello'\n"
        assert "ConnectionRefusedError" in (await box.run(["python3", "-c", connect, ports[1]])).text
        outside = "import socket; s = socket.socket(); s.settimeout(2); s.connect(('192.0.2.1', 80))"
        assert "Network is unreachable" in (await box.run(["python3", "-c", outside])).text
        with socket.socket(socket.AF_UNIX) as without_file:
            without_file.bind(f"\0gcore-test-{os.getpid()}")
            assert "@gcore-test" in Path("/proc/net/unix").read_text()
            assert "@" not in (await box.run("cat /proc/net/unix")).text
        assert (await box.run("cat /proc/net/dev | grep -v lo: | wc -l")).text == "2\n"  # two lines of titles
        await box.restore(await box.snapshot())
        assert (await box.run(["python3", "-c", connect, str(port)])).text == "b'hello'\n"
        for server in servers:
            server.close()

    using(boxes, scenario)


def test_no_files_outside(boxes, tmp_path, monkeypatch):
    (tmp_path / "secret").write_text("secret")
    monkeypatch.setenv("SECRET_TOKEN", "secret")

    async def scenario(box):
        places = [str(tmp_path / "secret"), __file__, "/etc/shadow", "/var/log"]
        places += ["/proc/1/root"] if boxes.name != "containers" else []  # that of the container
        for place in places:
            assert (await box.run(["ls", place])).code != 0, place
        for place in ("/usr/x", "/etc/x", "/x", "/dev/x", "/proc/x"):
            written = await box.run(["sh", "-c", f"echo x > {place}"])
            assert written.code != 0 or (boxes.name == "containers" and not place.startswith("/usr")), place
            assert not Path(place).exists()
        for place in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/irq/default_smp_affinity"):
            opened = await box.run(["sh", "-c", f"[ ! -e {place} ] || : >> {place}"])  # nothing is written
            assert opened.code == (0 if not Path(place).exists() else 2), place
        assert "SECRET" not in (await box.run("env")).text
        assert (await box.run("ls -l /proc/self/fd | grep -c /")).text == "1\n"  # the folder that is listed
        if boxes.name != "containers":  # its first process is of the sandbox, and knows nothing
            assert "Permission" in (await box.run("cat /proc/1/environ")).text

    using(boxes, scenario)


def test_links_that_a_program_made_lead_to_nothing_outside(boxes, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")

    async def scenario(box):
        await box.run(
            f"ln -s {secret} link; ln -s {tmp_path} folder; ln -s ../../../../../../..{secret} up; ln -s link two"
        )
        for path in ("link", "folder/secret", "up", "two", f"../../../../..{secret}"):
            with pytest.raises(FileNotFoundError):
                await box.read(path)
        for path in ("link", "folder/secret", "folder/new", "up", "two", str(secret), str(tmp_path / "new")):
            with contextlib.suppress(OSError):
                await box.write(path, b"changed")
        await box.restore(await box.snapshot())
        assert secret.read_text() == "secret"
        assert os.listdir(tmp_path) == ["secret"]
        swap = f"while :; do ln -sfn {secret} s; ln -sfn /sandbox/mine s; done"  # between a check and an opening
        await box.write("mine", b"mine")
        turns = asyncio.create_task(box.run(swap, seconds=1.0))
        while not turns.done():
            with contextlib.suppress(OSError):
                assert await box.read("s") != b"secret"
            with contextlib.suppress(OSError):
                await box.write("s", b"mine")
        assert secret.read_text() == "secret"

    using(boxes, scenario)


def test_no_process_outside(boxes):
    marker = f"60{os.getpid()}{KINDS.index(boxes.name)}"

    async def scenario(box):
        outside = subprocess.Popen(["sleep", marker])
        try:
            await until(lambda: alive(marker))
            assert marker not in (await box.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).text
            await box.run(f"kill -9 {outside.pid} {os.getpid()} {os.getppid()}")
            await box.run("kill -9 1; kill -INT 1; kill -STOP 1; kill -TERM 1; kill -CHLD 1; kill -SEGV 1")
            await box.run("kill -9 -1")
            assert outside.poll() is None
            assert (await box.run("echo fine")).text == "fine\n"
            for call in ("unshare -r true", "unshare -n true", "mount -t tmpfs none /sandbox", "nsenter -t 1 -m true"):
                assert (await box.run(call)).code != 0, call
            if boxes.name != "containers":
                memory = "open('/proc/1/mem', 'r+b')"
                assert "PermissionError" in (await box.run(["python3", "-c", memory])).text
        finally:
            outside.kill()
            outside.wait()

    using(boxes, scenario)


def test_nothing_is_left_after_the_stop(boxes):
    marker = f"50{os.getpid()}{KINDS.index(boxes.name)}"

    async def scenario(box):
        # processes that have left their session, their parent and their output
        await box.run(
            f"for i in 1 2 3; do setsid sh -c 'trap \"\" TERM HUP; sleep {marker} & sleep {marker}' & done >/dev/null"
        )
        await until(lambda: alive(marker))
        await box.stop()
        assert not alive(marker)
        for call in (box.run("true"), box.read("a"), box.write("a", b""), box.snapshot()):
            with pytest.raises(SandboxError, match="killed: it has ended"):
                await call
        await box.stop()  # a second time does nothing

    using(boxes, scenario)


def test_a_cancelled_command_ends(boxes):
    marker = f"40{os.getpid()}{KINDS.index(boxes.name)}"

    async def scenario(box):
        task = asyncio.create_task(box.run(f"setsid sleep {marker} & sleep {marker}"))
        await until(lambda: alive(marker))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not alive(marker)
        assert (await box.run("echo fine")).text == "fine\n"

    using(boxes, scenario)


# --- kinds of their own


def test_a_sandbox_that_dies_during_a_command_is_named(monkeypatch):
    boxes = make("bubblewrap", monkeypatch)

    async def scenario(box):
        task = asyncio.create_task(box.run("sleep 999"))
        await asyncio.sleep(0.2)
        signal.pidfd_send_signal(box._process.first, signal.SIGKILL)
        result = await task
        assert (result.code, result.cause) == (None, "killed")
        with pytest.raises(SandboxError, match="killed"):
            await box.run("true")

    using(boxes, scenario)


def test_a_pool_starts_sandboxes_before_they_are_needed(monkeypatch):
    boxes = make("bubblewrap", monkeypatch, pool=2)

    async def scenario(box):
        waiting = boxes.pool._waiting
        await until(lambda: len(waiting) == 2)
        first, second = waiting
        signal.pidfd_send_signal(first._process.first, signal.SIGKILL)
        await until(lambda: not first.alive)
        async with boxes.pool.one() as given:
            assert given is second  # the dead one is not given away
        assert not second.alive
        await until(lambda: len(waiting) == 2)
        async with boxes.pool.one() as given:
            assert (await given.run("ls")).text == ""

    using(boxes, scenario)  # which closes the pool while it starts another one
    if (folder := group_folder()) is not None:
        assert not list(folder.glob(f"gcore-sandbox-{os.getpid()}-*"))


def test_a_sandbox_that_does_not_start_says_why(monkeypatch, tmp_path):
    boxes = make("bubblewrap", monkeypatch)
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "start: bwrap: No permissions to create new namespace" in boxes.problem()
    with pytest.raises(SandboxError, match="No permissions"):
        using(boxes, None)
    with pytest.raises(UserError, match=r"sandbox\.kind=bubblewrap does not work on this machine: .*No permissions"):
        make_kind(boxes.settings)
    wrong = make("bubblewrap", monkeypatch, read_only=["/tmp/site"])
    assert "read_only has /tmp/site; expected absolute paths outside of" in wrong.problem()


def test_places(monkeypatch):
    boxes = make("bubblewrap", monkeypatch, at_once=1)

    async def scenario(box):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), boxes.pool.one():
                pass

    using(boxes, scenario)


OWN_KIND = """
class Own:
    def __init__(self, settings):
        self.settings = settings

    def problem(self):
        return self.settings.args.get("problem")

    async def start(self):
        return self
"""


def test_a_kind_of_your_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN_KIND)
    kind = make_kind(SandboxSettings(kind=f"{tmp_path}/own.py:Own", args={"a": 1}))
    assert kind.settings.args == {"a": 1}
    with pytest.raises(UserError, match=r"sandbox\.kind=.*own.py:Own does not work on this machine: no key"):
        make_kind(SandboxSettings(kind=f"{tmp_path}/own.py:Own", args={"problem": "no key"}))
    with pytest.raises(UserError, match=r"sandbox\.kind=bwrap; expected one of bubblewrap.*, or your own class"):
        make_kind(SandboxSettings(kind="bwrap"))


def test_folders_to_read(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as outside:  # not below /tmp, which a sandbox has for itself
        Path(outside).chmod(0o755)  # the programs are another user's
        (Path(outside) / "data").write_text("7")

        async def reads(box):
            assert (await box.run(["cat", f"{outside}/data"])).text == "7"
            with pytest.raises(OSError, match="Read-only"):
                await box.write(f"{outside}/new", b"x")

        async def does_not(box):
            assert "No such file" in (await box.run(["cat", f"{outside}/data"])).text

        using(make("bubblewrap", monkeypatch, read_only=[outside]), reads)
        using(make("bubblewrap", monkeypatch), does_not)


def test_sandboxes_end_with_the_process_that_started_them(monkeypatch):
    make("bubblewrap", monkeypatch)
    marker = f"30{os.getpid()}"
    code = f"""
import asyncio
from gcore.config.sandbox import SandboxSettings
from gcore.sandbox.bubblewrap import BubblewrapSandboxes

async def main():
    box = await BubblewrapSandboxes(SandboxSettings()).start()
    await box.run("setsid sleep {marker} & sleep {marker}")

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 30
    while not alive(marker):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    while alive(marker):
        assert time.monotonic() < deadline
        time.sleep(0.02)
