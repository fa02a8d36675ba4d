"""Programs that try to get a reward without solving the task, and what tests can express."""

import os
from pathlib import Path

import pytest

from gcore.rewarding.code import python_tests
from gcore.rewarding.programs import SandboxLimits
from gcore.sandbox import memory
from tests.unit.test_code_reward import needs_bwrap, run, said, score, walls

__all__ = ["walls"]  # a fixture
TESTS = (
    "import math\nassert double(17) == 34\nassert double(2) == math.factorial(3) - 2\nassert double(-4321) == -8642\n"
)
HONEST = "def double(x): return 2 * x"
SECRETS = ("factorial ", "7913868642", "a remark")  # in the tests only

# how a program may look for what is around it; each adds what it sees to `seen`, the text of all that it can reach
LOOK = {
    "frames": """
frame = sys._getframe()
while frame:
    seen.append(repr(frame.f_locals) + repr(list(frame.f_globals.items())))
    frame = frame.f_back
""",
    "objects": """
import gc
for thing in gc.get_objects():
    if isinstance(thing, (dict, list, tuple)) and thing is not seen and len(thing) < 1000:
        seen.append(repr(thing)[:1 << 14])
""",
    "modules": "for module in list(sys.modules.values()): seen.append(repr(vars(module)))",
    "arguments": "seen.append(repr(sys.orig_argv) + repr(dict(os.environ)))",
    "files": """
for fd in range(64):
    try: seen.append(os.pread(fd, 1 << 20, 0).decode('latin-1'))
    except OSError: pass
for place in ('/proc/self/fd', '/proc/self/maps', '/proc/1/environ', f'/proc/{os.getppid()}/mem', '/tmp', '/dev/shm'):
    try: seen.append(open(place, 'rb').read(1 << 20).decode('latin-1'))
    except IsADirectoryError: seen.append(repr(os.listdir(place)))
    except OSError: pass
""",
    "processes": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for pid in range(1, 300):
    if pid != os.getpid() and libc.ptrace(16, pid, 0, 0) == 0:
        seen.append('a remark: attached')
""",
}

# how a program may pretend; each must score 0
FORGERIES = {
    "reports to all descriptors": """
import os
for fd in range(64):
    for data in (b'.' * 100, b'["reply", 34, []]\\n' * 9, b'started\\n.....'):
        try: os.write(fd, data)
        except OSError: pass
""",
    "the names of the judge's frames": """
import sys, os
frame = sys._getframe()
while frame:
    names = frame.f_locals
    if "report" in names:
        os.write(names["report"], names.get("token", b".") * 50)
    frame = frame.f_back
os._exit(0)
""",
    "always equal": """
class Any(int):
    def __eq__(self, other): return True
    __ne__ = __lt__ = __gt__ = lambda self, other: False
    __hash__ = int.__hash__
    def __sub__(self, other): return 0
def double(x): return Any()
""",
    "always equal, from another class": """
class Any:
    def __getattr__(self, name): return lambda *a: True
    def __eq__(self, other): return True
    def __sub__(self, other): return 0
    def __hash__(self): return 34
def double(x): return Any()
""",
    "an always equal object of the library": """
import unittest.mock
double = lambda x: unittest.mock.ANY
""",
    "the library's name for the tested one": """
import sys, types, unittest.mock
class double: pass
double.__module__ = 'unittest.mock'
double = unittest.mock.ANY
""",
    "changed builtins": """
import builtins, json, os, sys, math, unittest, operator
builtins.AssertionError = ValueError
builtins.compile = builtins.exec = builtins.eval = lambda *a, **k: None
json.loads = json.dumps = lambda *a, **k: [[1]]
operator.eq = lambda *a: True
os._exit = sys.exit = lambda *a: None
math.factorial = lambda n: 5
unittest.TestCase.assertEqual = lambda *a: None
def double(x): return 3
""",
    "leaves": "import os\nos._exit(0)",
    "leaves in the call": "def double(x):\n    import os\n    os._exit(0)",
    "leaves with success at the end": """
import atexit, os
atexit.register(lambda: os.write(1, b'.....'))
def double(x): raise SystemExit(0)
""",
    "a child that answers": """
import os, time
if os.fork() == 0:
    for fd in range(64):
        try: os.write(fd, b'...........\\n')
        except OSError: pass
    time.sleep(1)
    os._exit(0)
def double(x): return 3
""",
    "raw answers: an object of the library": """
import os, socket
for fd in range(3, 64):
    try: s = socket.socket(fileno=os.dup(fd))
    except OSError: continue
    for name in ('["standard", "unittest.mock", "ANY"]', '["made", "unittest.mock", "ANY"]', '["object", 1, true]',
                 '["yours", 1]', '["exception", 1, ["double", "AssertionError"]]'):
        for k in range(20):
            s.sendall(b'["reply", [["double", %s], ["assert", 1]], []]\\n' % name.encode())
            s.sendall(b'["reply", %s, []]\\n' % name.encode())
""",
    "raw answers: builtins": """
import os, socket
for fd in range(3, 64):
    try: s = socket.socket(fileno=os.dup(fd))
    except OSError: continue
    s.sendall(b'["reply", [["math", ["standard", "os", ""]], ["double", ["standard", "builtins", "Any"]]], []]\\n')
    s.sendall(b'["request", "call", 1, [], []]\\n["raise", ["SystemExit"], []]\\nnonsense\\n')
""",
}


@pytest.mark.parametrize("way", LOOK)
def test_a_program_does_not_see_the_tests(walls, way):
    """The program looks for three texts of the tests, which it makes up only then; and for one of its own input."""
    program = f"""
import os, sys
def double(x):
    own, seen = [x] * 3, []
    exec({LOOK[way]!r}, {{'seen': seen, 'os': os, 'sys': sys}})
    texts = [bytes(c ^ 1 for c in text).decode() for text in {[bytes(c ^ 1 for c in t.encode()) for t in SECRETS]!r}]
    return [text for text in texts if any(text in place for place in seen)]
"""
    tests = "import math\nassert double(4711) == 'factorial ' + str(7913868642)\n# a remark\nassert double(4711) == []"
    assert score(program, tests, cpu_s=20) == 1 / 2


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_scores_nothing(walls, forgery):
    assert score(FORGERIES[forgery], TESTS) == 0.0
    assert score(HONEST, TESTS) == 1.0  # the test can tell


@needs_bwrap
def test_scores_are_at_most_what_was_asked():
    for tests in (TESTS, "assert double(1) == 2", "def check(f):\n    assert f(1) == 2\ncheck(double)"):
        for forgery in FORGERIES.values():
            assert 0.0 <= score(forgery + "\nprint('.' * 1000)", tests) <= 1.0


@needs_bwrap
def test_a_tolerance_is_no_leak():
    forged = (
        "class E(float):\n    __sub__ = __rsub__ = lambda s, o: 0.0\n    __abs__ = lambda s: 0.0\ndef f(x): return E()"
    )
    for tests in (
        "assert abs(f(1) - 2.5) < 1e-6",
        "import math\nassert math.isclose(f(1), 2.5)",
        "assert 2.5 in [f(1)]",
    ):
        assert score(forged, tests) == 0.0
        assert score(forged.replace("(float)", ""), tests) == 0.0
        assert score("def f(x): return x + 1.5", tests) == 1.0


@needs_bwrap
def test_names_of_python_are_not_the_programs():
    cheat = "def sorted(x): return 1\nset = len = abs = any = all = sorted\ndef f(x): return x"
    assert score(cheat, "assert sorted(f([2, 1])) == sorted([3, 4])\nassert len(f([1])) == 2") == 0.0
    assert score("def sum(a, b): return a + b", "assert sum(10, 15) == 25") == 1.0  # unless they are what is tested
    assert score("def sum(a, b): return a", "def check(f):\n    assert f(10, 15) == 25\ncheck(sum)") == 0.0


# names that the tests do not define: (a forged program, an honest one, tests)
UNBOUND = {
    "a module": (
        "class math: isclose = lambda *a, **k: True\ndef f(x): return 0",
        "def f(x): return 6.25 * x",
        "assert math.isclose(f(2), 12.5, rel_tol=0.01)",
    ),
    "a function of the library": (
        "isclose = lambda *a: True\ndef f(x): return 0",
        "def f(x): return 2.5",
        "assert isclose(f(1), 2.5)",
    ),
    "a class of the library": (
        "class Counter:\n    def __init__(self, x): pass\n    def __eq__(self, o): return True\ndef f(x): return 0",
        "def f(x): return x",
        "assert Counter(f([1, 2])) == Counter([1, 2])",
    ),
    "defined in a branch that is not taken": (
        "close = lambda *a: True\ndef f(x): return 0",
        "def f(x): return 2.5",
        "if f(1):\n    def close(a, b): return abs(a - b) < 1\nassert close(f(1), 2.5)",
    ),
    "a module beside a builtin": (
        "class math: isclose = lambda *a: True\ndef sum(a, b): return 0",
        "def sum(a, b): return a + b",
        "assert math.isclose(sum(1, 2), 3)",
    ),
    "another builtin": (
        "def max(a): return 0\ndef abs(x): return 0",
        "def max(a): return 2.5",
        "tested = max\nassert abs(tested([1.5, 2.5]) - 2.5) < 1e-6",
    ),
    "a builtin beside a function that the tests replace": (
        "def f(x): return 0\ndef len(x): return 0",
        "def f(x): return 1",
        "import functools\nf = functools.cache(f)\nassert f(5) == len('a')",
    ),
}
METHOD = "class S({}):\n    def {}(self, o=0): seen.append(o); return True\nseen = []\ndef f(x): return S(*seen)"


@needs_bwrap
@pytest.mark.parametrize("what", UNBOUND)
def test_a_name_of_the_library_is_not_the_programs(what):
    forged, honest, tests = UNBOUND[what]
    assert (score(forged, tests), score(honest, tests)) == (0.0, 1.0)


@needs_bwrap
def test_a_method_of_a_value_is_not_the_programs():
    startswith = "assert f(1).startswith('hello')\nassert f(1) == 'hello'"
    assert score(METHOD.format("str", "startswith"), startswith) == 0.0
    assert score(METHOD.format("", "startswith").replace("*seen", ""), startswith) == 0.0  # of any class
    assert score(METHOD.format("list", "count"), "assert f(1).count(5)\nassert f(1)[0] == 5") == 0.0
    assert score(METHOD.format("int", "bit_length"), "assert f(1).bit_length()") == 0.0
    honest = "class S(str): pass\nclass L(list):\n    def push(self, x): self.append(x)\ndef f(x): return S('hello')"
    changed = "x = L()\nx.append(1)\nx.push(2)\nassert x.pop() == 2 and x.count(1) == 1\nassert 'ell' in f(1)"
    assert score(honest, f"{startswith}\n{changed}") == 1.0
    cache = "class C(dict):\n    def get(self, k): return dict.get(self, k, -1)"  # a class that is tested
    assert score(cache, "c = C()\nassert c.get(5) == -1\nc[5] = 6\nassert c.get(5) == 6") == 1.0


@pytest.mark.parametrize(
    ("tests", "problem"),
    [
        ("assert abs(max([1.5, 2.5]) - 2.5) < 1e-6", "Python has abs, max; say first which one is the program's"),
        ("assert isclose(sum(1, 2), 3)", "Python has isclose, sum; say first"),
        (
            "import unittest\nclass T(unittest.TestCase): pass\nunittest.main(exit=False)",
            "unittest.main raises nothing",
        ),
        ("from unittest import TestCase, main\nmain()", "from unittest import TestCase, main raises nothing"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)", "call nothing"),
        ("META = {}\ndef check(f): assert f(1) == 2", "they call nothing"),
    ],
)
def test_tests_that_could_not_tell_are_refused(tests, problem):
    with pytest.raises(ValueError, match=problem) as error:
        score("def f(x): return 2", tests, sandbox="rlimits")
    assert "\n" not in str(error.value)


# --- what tests can express

SUPPORTED: dict[str, tuple[str, str]] = {
    "input and output": (
        """
def f():
    print('read', input())
""",
        """
import contextlib, io, sys
sys.stdin = io.StringIO('5\\n6\\n')
with contextlib.redirect_stdout(io.StringIO()) as out:
    f()
assert out.getvalue() == 'read 5\\n'
""",
    ),
    "containers": (
        """
def f(*a): return a
""",
        """
assert f(1, [2.5], {'k': {1: b'x'}}, {3}, None) == (1, [2.5], {'k': {1: b'x'}}, {3}, None)
""",
    ),
    "large and odd numbers": (
        """
def f(x): return x ** 200
""",
        """
import math
assert f(7) == 7 ** 200
assert f(1e-3) == 0.0
assert f(1j) == f(-1j).conjugate()
assert math.isinf(f(math.inf))
""",
    ),
    "types stay": (
        """
def f(x): return tuple(x)
""",
        """
assert f([1]) != [1]
assert isinstance(f([1]), tuple)
assert f((True,))[0] is True
""",
    ),
    "standard types": (
        """
import collections, decimal, fractions, datetime
def f():
    values = [collections.Counter('aab'), collections.deque([1], 3), collections.defaultdict(int, a=1)]
    return values + [decimal.Decimal('0.1'), fractions.Fraction(1, 3), datetime.datetime(2020, 1, 2)]
""",
        """
from collections import Counter, deque
from decimal import Decimal
from fractions import Fraction
from datetime import datetime
assert f() == [Counter('aab'), deque([1]), {'a': 1}, Decimal('0.1'), Fraction(1, 3), datetime(2020, 1, 2)]
""",
    ),
    "a changed argument": (
        """
def f(x): x.sort()
def g(d): d['n'] = d.get('n', 0) + 1
""",
        """
a = [3, 1, 2]
f(a)
assert a == [1, 2, 3]
d = {}
g(d)
g(d)
assert d == {'n': 2}
""",
    ),
    "exceptions": (
        """
class Bad(ValueError): pass
def f(x):
    if x < 0: raise Bad('negative', x)
    return {}[x]
""",
        """
try:
    f(-1)
    ok = False
except Bad as e:
    ok = e.args == ('negative', -1)
assert ok
try:
    f(1)
except KeyError as e:
    ok = str(e)
assert ok == '1'
import unittest
unittest.TestCase().assertRaises(ValueError, f, -1)
assert issubclass(Bad, ValueError)
""",
    ),
    "objects of the program": (
        """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x); return self
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, i): return self.items[i]
""",
        """
s = Stack()
assert s.push(1).push([2]) is not None
assert len(s) == 2 and s[1] == [2]
assert s.pop() == [2]
assert s.items == [1]
assert isinstance(s, Stack)
s.items = [7]
assert s.pop() == 7
assert not s
""",
    ),
    "plain values of classes": (
        """
import collections, enum
P = collections.namedtuple('P', 'x y')
class C(enum.IntEnum):
    RED = 4
def f(): return P(1, 2)
""",
        """
assert f() == (1, 2)
assert f().x == 1
assert (1, 2) == f()
assert P(3, 4)[1] == 4
assert C.RED == 4
assert C.RED.name == 'RED'
assert C.RED + 1 == 5
""",
    ),
    "operators of a class": (
        """
class V:
    def __init__(self, x): self.x = x
    def __add__(self, o): return V(self.x + o.x)
    def __eq__(self, o): return self.x == o.x
    def __lt__(self, o): return self.x < o.x
""",
        """
assert V(1) + V(2) == V(3)
assert V(1) != V(2)
assert sorted([V(2), V(1)])[0].x == 1
""",
    ),
    "generators": (
        """
def f(n):
    yield from range(n)
def g():
    while True: yield 1
""",
        """
assert list(f(3)) == [0, 1, 2]
assert next(g()) == 1
assert 2 in f(3)
assert 5 not in f(3)
a, b = f(2)
assert b == 1
""",
    ),
    "functions of the tests": (
        """
def compose(f, g): return lambda x: f(g(x))
def apply(f, xs): return [f(x) for x in xs]
def twice(f):
    def g(*a, **k): return f(f(*a, **k))
    return g
""",
        """
assert compose(lambda x: x + 1, lambda x: x * 2)(3) == 7
assert apply(len, ['ab', '']) == [2, 0]
@twice
def h(x=1): return x + 1
assert h(x=5) == 7
calls = []
apply(calls.append, [0])
assert calls == [0]
apply(lambda x: calls.append(x), [1, 2])
assert calls == [0, 1, 2]
""",
    ),
    "coroutines": (
        """
import asyncio
async def f(x):
    await asyncio.sleep(0)
    return x + 1
""",
        """
import asyncio
assert asyncio.run(f(1)) == 2
""",
    ),
    "modules of the program": (
        """
import math
from math import sqrt
from collections import Counter
from typing import List
def f(x): return sqrt(x)
""",
        """
xs: List[int] = [4]
assert f(4) == math.sqrt(4) == sqrt(4)
assert Counter('a') == {'a': 1}
""",
    ),
    "objects of the tests": (
        """
class Node:
    pass
def total(n): return n.v + (total(n.next) if n.next else 0)
def wrap(n):
    m = Node(); m.v = 0; m.next = n; return m
""",
        """
class Node:
    def __init__(self, v, next=None): self.v, self.next = v, next
assert total(Node(1, Node(2))) == 3
assert wrap(Node(5)).next.v == 5
""",
    ),
    "a check": (
        """
def f(x): return x
""",
        """
METADATA = {}
def check(candidate):
    for i in range(50):
        assert candidate(i) == i, 'message'
check(f)
""",
    ),
    "a method": (
        """
class Solution:
    def twoSum(self, nums, target): return [nums.index(target), 0]
""",
        """
candidate = Solution().twoSum
assert candidate(nums=[2, 7], target=7) == [1, 0]
""",
    ),
}


@needs_bwrap
@pytest.mark.parametrize("what", SUPPORTED)
def test_what_tests_can_express(what):
    program, tests = SUPPORTED[what]
    assert score(program, tests) == 1.0


@needs_bwrap
def test_a_wrong_result_is_wrong_in_each_form():
    assert score("def f(x): return [x]", "assert f(1) == 1\nassert f(1) == (1,)\nassert f(2) == [1]") == 0.0
    assert (
        score(
            "class P:\n    def __eq__(self, o): return True\ndef f(): return P()",
            "assert f() == 1\nassert 1 == f()\nassert f() in [1, 2]\nassert [f()] == [1]\nassert {1: f()} == {1: 2}",
        )
        == 0.0
    )
    assert score("def f(x):\n    yield 1\n    raise KeyError", "assert list(f(1)) == [1]") == 0.0
    deep = "def f():\n    x = []\n    for _ in range(10**5): x = [x]\n    return x"
    assert score(deep, "assert f() == 1\nassert True") == 0.5
    assert score("def f(): return 'x' * (9 << 20)", "assert len(f()) == 9 << 20\nassert True") == 0.5


# --- memory of all processes

MEMORY = {
    "memfd": """
fds = []
for i in range(56):
    fd = os.memfd_create(str(i)); os.write(fd, bytes(16 << 20)); fds.append(fd)
""",
    "children": """
for _ in range(6):
    if os.fork() == 0:
        x = bytearray(b'x') * (150 << 20)
        time.sleep(5)
time.sleep(5)
""",
    "shared mapping": """
import mmap
keep = []
for _ in range(5):
    m = mmap.mmap(-1, 200 << 20); m.write(bytes(200 << 20)); keep.append(m)
""",
    "shared memory of System V": """
import ctypes
c = ctypes.CDLL(None)
c.shmat.restype = ctypes.c_void_p
for i in range(9):
    n = c.shmget(0, 100 << 20, 0o1600)
    assert n >= 0
    p = c.shmat(n, None, 0)
    ctypes.memset(p, 1, 100 << 20)
    c.shmdt(ctypes.c_void_p(p))
""",
    "semaphores of System V": """
import ctypes
c = ctypes.CDLL(None)
for _ in range(400): assert c.semget(0, 32000, 0o1600) >= 0
time.sleep(1)
""",
    "messages of System V": """
import ctypes
c = ctypes.CDLL(None)
message = (ctypes.c_long * 1025)(1)
for _ in range(32000):
    queue = c.msgget(0, 0o1600)
    assert queue >= 0
    for _ in range(2): c.msgsnd(queue, message, 8192, 0o4000)
time.sleep(1)
""",
    "buffers of sockets": """
import socket
for _ in range(14):
    if os.fork() == 0: break
pairs = [socket.socketpair() for _ in range(28)]
for one in sum(pairs, ()):
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
    one.setblocking(False)
    try:
        while True: one.send(bytes(1 << 16))
    except BlockingIOError: pass
time.sleep(2)
""",
    "another file system": """
import ctypes
c = ctypes.CDLL(None)
assert c.unshare(0x10020000) == 0
assert c.mount(b'none', b'/tmp', b'tmpfs', 0, b'size=2g') == 0
for i in range(60): open(f'/tmp/{i}', 'wb').write(bytes(15 << 20))
""",
}


@pytest.mark.parametrize("guard", ["a cgroup", "a watch"])
@pytest.mark.parametrize("way", MEMORY)
def test_memory_is_limited_for_all_processes_together(walls, way, guard, monkeypatch):
    if guard == "a watch":
        monkeypatch.setattr(memory, "group_folder", lambda: None)
    elif memory.group_folder() is None:
        pytest.skip("this process may not make memory cgroups")
    if way == "children" and walls == "of a user" and os.getuid() == 0:
        pass  # root has no limit on processes, which is not needed here
    ran = run(f"import os, time\n{MEMORY[way]}\nprint('done', flush=True)", wall_s=20.0)
    assert b"done" not in ran.output
    assert ran.code != 0
    assert said("x = bytearray(b'x') * (300 << 20)\nprint('done')") == "done"  # the test can tell


@needs_bwrap
def test_no_group_is_left():
    score(HONEST, TESTS)
    if (folder := memory.group_folder()) is not None:
        assert not list(folder.glob(f"gcore-sandbox-{os.getpid()}-*"))


@pytest.mark.skipif(memory.group_folder() is None, reason="this process may not make memory cgroups")
def test_groups_of_killed_workers_are_removed():
    folder = memory.group_folder()
    assert folder is not None
    left, ours = folder / "gcore-sandbox-999999999-1", folder / f"gcore-sandbox-{os.getpid()}-0-test"
    left.mkdir()
    ours.mkdir()
    try:
        memory.remove_stale_groups(folder)
        assert not left.exists() and ours.exists()
    finally:
        ours.rmdir()


def test_a_process_and_its_children_are_summed():
    import subprocess
    import sys

    child = "x = bytearray(b'x') * (40 << 20); print('ready', flush=True); input()"
    program = f"import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=0)\np.wait()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        assert memory.memory_of(process.pid, 1 << 40) > 40 << 20
        assert 40 << 20 < memory.memory_of(process.pid, 0) < 100 << 20
        assert memory.resident_bytes(process.pid) < 40 << 20
        process.communicate(b"\n")
    assert Path("/proc").exists() and SandboxLimits("bwrap", 1, 1.0, 3).memory_bytes == 3 << 20


def test_python_tests_clamps():
    assert python_tests(None, [""], ["assert f() == 1"], sandbox="rlimits") == [0.0]
