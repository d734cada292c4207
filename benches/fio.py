#!/usr/bin/env python3
"""Multipath beside the bare null device, through fio's own engine. usage: fio.py ENGINE [ROUNDS] [SECONDS]

4 KiB random reads at depth 32, on one job and on two that are pinned apart. Cases take turns within a round, each
is compared with the raw run of its round, and the figures are medians over the rounds; "best" compares the fastest
runs, which on a machine that others use are those that nobody disturbed."""

import json
import os
import statistics
import subprocess
import sys

engine = os.path.abspath(sys.argv[1])
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 9
seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 1

# As udm bench --compare has them: a device that is never short of room.
NULLS = [f"null:size={4 + n}G,submit_queues=1024,hw_queue_depth=10240" for n in range(2)]
ARGUMENTS = {
    "round-robin": (1, "1", "1"),
    "queue-length": (1, "1", "1"),
    "service-time": (2, "1 1", "1 1"),
    "historical-service-time": (0, "", ""),
    "io-affinity": (1, "1", "2"),
}


def table(selector):
    count, first, second = ARGUMENTS[selector]
    return f"dm_mq=0 8388608 multipath 0 0 1 1 {selector} 0 2 {count} {NULLS[0]} {first} {NULLS[1]} {second}"


def run(selector, jobs):
    name = "dm_mq" if selector else NULLS[0].replace(":", "\\:")
    device = [f"--udm_device={table(selector)}"] if selector else []
    line = ["fio", "--output-format=json", f"--ioengine=external:{engine}", *device, "--name=task_dm_mq",
            f"--filename={name}", "--rw=randread", "--bs=4k", "--iodepth=32", f"--numjobs={jobs}", "--cpus_allowed=0-1",
            "--cpus_allowed_policy=split", "--group_reporting", "--time_based", f"--runtime={int(seconds * 1000)}ms",
            "--direct=1", "--norandommap", "--randrepeat=1", "--loops=1", "--invalidate=1", "--exitall", "--size=4G"]
    out = subprocess.run(line, capture_output=True, text=True)
    if out.returncode:
        sys.exit(out.stdout + out.stderr)
    job = json.loads(out.stdout[out.stdout.index("{"):])["jobs"][0]
    ios = job["read"]["total_ios"]
    return {
        "iops": job["read"]["iops"],
        # What all jobs have spent of a CPU, a request.
        "cpu": (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] * 1e6 / ios,
        "ctx": job["ctx"],
    }


for jobs in (1, 2):
    cases = {name: [] for name in [None, *ARGUMENTS]}
    order = list(cases)
    for _ in range(rounds):
        for selector in order:
            cases[selector].append(run(selector, jobs))
        # Nobody is always the first.
        order.append(order.pop(0))
    raw = cases[None]
    print(f"\n{jobs} job{'s' if jobs > 1 else ''}: {rounds} rounds of {seconds} s"
          f"\n{'':24} {'kIOPS':>8} {'of raw':>7} {'best':>7} {'of raw':>7} {'CPU ns':>7} {'of raw':>7} {'switches':>9} {'of raw':>7}")
    best = lambda results: max(one["iops"] for one in results)
    for selector, results in cases.items():
        middle = lambda key: statistics.median(one[key] for one in results)
        ratio = lambda key: statistics.median(one[key] / max(base[key], 1) for one, base in zip(results, raw))
        print(f"{selector or 'raw null':24} {middle('iops') / 1000:8.0f} {ratio('iops'):7.3f} "
              f"{best(results) / 1000:7.0f} {best(results) / best(raw):7.3f} {middle('cpu'):7.1f} "
              f"{ratio('cpu'):7.3f} {middle('ctx'):9.0f} {ratio('ctx'):7.3f}", flush=True)
