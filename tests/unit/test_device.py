"""The token clock against arithmetic by hand, and against a device that makes one token after another."""

import math
import random

import pytest

from gcore.cost.replica_speed import ReplicaSpeed
from gcore.emulate.device import Device, DeviceJob, observe
from tests.seeds import seeds


def speed(base=1.0, per=0.0, prefill=0.0, cap=4):
    return ReplicaSpeed(base, per, prefill, cap, 0.0, 0.0, 0.0)


def run_out(device):
    """Run all jobs to their end: [(job, when)]"""
    found = []
    while (when := device.next_s()) < math.inf:
        found += [(job, device.at) for job in device.advance(when)]
    return found


def test_one_alone():
    device, job = Device(speed(base=0.5, per=0.25)), DeviceJob(4, 0)
    device.add([job])
    assert device.next_s() == 4 * 0.75
    assert device.advance(1.5) == [] and device.progress(job) == 2
    assert device.advance(3.0) == [job] and device.next_s() == math.inf
    assert (device.busy_s, device.running, job.made) == (3.0, 0, 4)


def test_others_slow_the_step():
    device, short, long = Device(speed(base=1.0, per=1.0)), DeviceJob(2, 0), DeviceJob(5, 0)
    device.add([short, long])  # steps of 3 s while both run, then of 2 s
    assert run_out(device) == [(short, 6.0), (long, 12.0)]


def test_a_late_arrival():
    device, first, second = Device(speed(base=1.0, per=1.0)), DeviceJob(4, 0), DeviceJob(1, 0)
    device.add([first])
    device.advance(4.0)  # two tokens at 2 s
    device.add([second])
    assert run_out(device) == [(second, 7.0), (first, 9.0)]


def test_prefill_stops_all_decoding_and_is_serial():
    device, first, second, third = (
        Device(speed(base=1.0, prefill=0.1)),
        DeviceJob(3, 10),
        DeviceJob(3, 20),
        DeviceJob(9, 0),
    )
    device.add([first, third])
    device.advance(1.5)  # one second of prefill, half a token
    device.add([second])  # two seconds
    assert device.next_s() == 3.5 + 2.5
    ends = run_out(device)
    assert ends == [(first, 6.0), (second, pytest.approx(6.5)), (third, pytest.approx(12.0))]
    assert device.prefilled == 30


def test_more_than_the_cap_wait_in_the_order_of_priority_then_arrival():
    device = Device(speed(cap=1))
    jobs = [
        DeviceJob(2, 0),
        DeviceJob(2, 0, priority=1.0),
        DeviceJob(2, 0, priority=0.0),
        DeviceJob(2, 0, priority=0.0),
    ]
    device.add(jobs)
    assert (device.running, device.waiting) == (1, 3)
    assert [job for job, _ in run_out(device)] == [jobs[0], jobs[2], jobs[3], jobs[1]]


def test_abort_of_the_running_and_of_the_waiting():
    device = Device(speed(base=1.0, per=1.0, cap=2))
    first, second, third, fourth = (DeviceJob(10, 0) for _ in range(4))
    device.add([first, second, third, fourth])
    device.advance(6.0)  # two tokens of two
    assert device.remove(third) == 0 and device.waiting == 1
    assert device.remove(first) == 2 and (device.running, device.waiting) == (2, 0)  # the fourth begins
    assert device.jobs() == [second, fourth]
    assert device.remove(first) == 2, "a second abort changes nothing"
    assert run_out(device) == [(second, 6.0 + 8 * 3), (fourth, 6.0 + 8 * 3 + 2 * 2)]


def test_observe():
    """Tokens and busy seconds at any time, including tokens made elsewhere; observing changes nothing."""
    device = Device(speed(base=1.0, per=1.0))
    device.add([DeviceJob(10, 0), DeviceJob(10, 0, before=7)])
    assert observe([[device]], 6.0) == ([2], 2, 2 + 2 + 7, 6.0)
    assert observe([[device]], 3.0) == ([2], 2, 1 + 1 + 7, 3.0)
    device.advance(3.0)
    assert observe([[device]], 6.0) == ([2], 2, 2 + 2 + 7, 6.0)
    device.remove(device.jobs()[1])  # the other makes its next token in 2 s
    assert observe([[device]], 5.0) == ([1], 1, 2, 5.0)
    assert observe([[Device(speed())]], 5.0) == ([0], 0, 0.0, 0.0)


def test_observe_blocks():
    """Requests per block, including waiting ones; the other values over all devices, including idle ones."""
    full, idle, busy = (Device(speed(base=1.0, cap=2)) for _ in range(3))
    full.add([DeviceJob(10, 0), DeviceJob(10, 0), DeviceJob(10, 0)])
    idle.add([DeviceJob(3, 0)])
    idle.advance(3.0)
    busy.add([DeviceJob(10, 0)])
    assert observe([[full, idle], [busy], []], 5.0) == ([3, 1, 0], 3, 3 * 5.0, 5.0 + 3.0 + 5.0)
    assert (full.at, idle.at, busy.at) == (0.0, 3.0, 0.0)


def test_jobs_in_the_order_of_their_beginning_then_of_their_priority():
    device = Device(speed(cap=2))
    jobs = [DeviceJob(9, 0), DeviceJob(1, 0), DeviceJob(1, 0, priority=1.0), DeviceJob(7, 0)]
    device.add(jobs)
    assert device.jobs() == [jobs[0], jobs[1], jobs[3], jobs[2]]
    device.advance(1.0)  # the second ends, and the fourth comes before the third
    assert device.jobs() == [jobs[0], jobs[3], jobs[2]]


def brute_force(p, arrivals, aborts):
    """Token by token. arrivals: [(at, tokens, prompt)], aborts: {index: at}. Returns the ends; None: aborted.

    Time advances to the next arrival, abort, or whole token of any request; the progress of each is a float.
    """
    now, prefill_until, waiting, made, ends = 0.0, 0.0, [], {}, {}
    pending = sorted(range(len(arrivals)), key=lambda i: arrivals[i][0])
    while pending or waiting or made:
        step = p.base_s + p.per_sequence_s * len(made)
        events = [arrivals[pending[0]][0]] if pending else []
        events += [at for i, at in aborts.items() if at > now and i not in ends]
        if made:
            rest = min(math.floor(m + 1e-9) + 1 - m for m in made.values())  # to the next whole token of any request
            events.append(max(now, prefill_until) + rest * step)
        then = min(events)
        moved = max(0.0, then - max(now, prefill_until)) / step
        made, now = {i: m + moved for i, m in made.items()}, then
        for i in [i for i, m in made.items() if m >= arrivals[i][1] - 1e-6]:
            ends[i] = now
            del made[i]
        while pending and arrivals[pending[0]][0] <= now:
            waiting.append(pending.pop(0))
        for i, at in aborts.items():
            if at <= now and i not in ends and (i in made or i in waiting):
                ends[i] = None
                made.pop(i, None)
                waiting = [w for w in waiting if w != i]
        while waiting and len(made) < p.max_concurrent:
            i = waiting.pop(0)
            made[i] = 0.0
            if arrivals[i][2] and p.prefill_s_per_token:
                prefill_until = max(prefill_until, now) + p.prefill_s_per_token * arrivals[i][2]
    return ends


@seeds(30, 300)
def test_against_token_by_token(seed):
    rng = random.Random(seed)
    p = speed(rng.uniform(0.5, 2), rng.uniform(0, 0.7), rng.choice([0.0, 0.13]), rng.randint(1, 4))
    arrivals = [(rng.uniform(0, 30), rng.randint(1, 12), rng.choice([0, rng.randint(1, 40)])) for _ in range(12)]
    aborts = {i: arrivals[i][0] + rng.uniform(0.1, 20) for i in rng.sample(range(12), 3)}
    expected = brute_force(p, arrivals, aborts)

    device, jobs, ends = (
        Device(p),
        [DeviceJob(tokens, prompt, tag=i) for i, (_, tokens, prompt) in enumerate(arrivals)],
        {},
    )
    changes = [(at, 0, i) for i, (at, _, _) in enumerate(arrivals)] + [(at, 1, i) for i, at in aborts.items()]
    for at, abort, i in [*sorted(changes), (math.inf, 0, 0)]:
        while (when := device.next_s()) <= at and when < math.inf:
            ends |= {job.tag: device.at for job in device.advance(when)}
        if at == math.inf:
            break
        device.advance(at)
        if not abort:
            device.add([jobs[i]])
        elif i not in ends:
            device.remove(jobs[i])
            ends[i] = None
    assert ends == {i: end if end is None else pytest.approx(end, rel=1e-6) for i, end in expected.items()}
    assert (device.running, device.waiting, device.jobs()) == (0, 0, [])
