"""Compares udm's NBD server with other servers, over Unix sockets.

Each round measures the servers in rotation. The result is the median of the rounds' ratios. The
client of all servers is `udm bench --nbd`; in lines that begin with fio or nbdcopy, it is that
program. A ratio above 1 means that udm is better: more requests per second, less time, or a lower
latency.
"""
import json, os, shutil, statistics, subprocess, sys, tempfile, time

udm = sys.argv[1]
rounds, seconds = int((sys.argv[2:3] or [5])[0]), float((sys.argv[3:4] or [2])[0])
older = sys.argv[4] if len(sys.argv) > 4 else None
folder = tempfile.mkdtemp()
# A file system in memory. If there is none, the temporary folder is used.
memory = tempfile.mkdtemp(dir="/dev/shm") if os.access("/dev/shm", os.W_OK) else folder
servers = []


def start(name, *command):
    log = open(f"{folder}/{name}.log", "w")
    servers.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))


def disk(name, where):
    path = f"{where}/{name}.img"
    with open(path, "wb") as file:
        file.truncate(1 << 30)
    return path


def start_udm(name, binary):
    devices = ["null=null:size=2G", "mem=mem:1G", f"file={disk(name, folder)}", f"tmpfs={disk(name, memory)}"]
    words = [word for device in devices for word in ("--device", device)]
    start(name, binary, "serve", *words, "--unix", f"{folder}/{name}", "--socket", f"{folder}/{name}.control")


def start_peers():
    qemu = "driver=null-co,node-name=null,size=2147483648,read-zeroes=off"
    for name, plugin in {
        "nbdkit-null": ["null", "2G"],
        "nbdkit-mem": ["memory", "1G"],
        "nbdkit-file": ["file", disk("nbdkit", folder)],
        "nbdkit-tmpfs": ["file", disk("nbdkit", memory)],
    }.items():
        start(name, "nbdkit", "-f", "-U", f"{folder}/{name}", *plugin)
    start("qsd-null", "qemu-storage-daemon", "--blockdev", qemu, "--nbd-server", f"addr.type=unix,addr.path={folder}/qsd-null",
          "--export", "type=nbd,id=e,node-name=null,name=,writable=on")


def uri(server, device):
    """The URI of `device` on `server`."""
    if server in ("udm", "older"):
        return f"nbd+unix:///{device}?socket={folder}/{server}"
    return f"nbd+unix:///?socket={folder}/{server}-{device}"


def command(target, rw, depth, bs, time=None, jobs=1):
    return [udm, "bench", *target, f"--rw={rw}", f"--iodepth={depth}", f"--bs={bs}", f"--numjobs={jobs}", "--group_reporting",
            "--norandommap", "--time_based", f"--runtime={round((time or seconds) * 1000)}ms", "--json"]


def job(text):
    return json.loads(text[text.index("{\n"):])["jobs"][0]


def iops(target, *load, jobs=1):
    found = job(subprocess.run(command(target, *load, jobs=jobs), check=True, capture_output=True, text=True).stdout)
    return found["read"]["iops"] + found["write"]["iops"]


def bench(rw, depth, bs, jobs=1):
    return lambda server, device: iops(["--nbd", uri(server, device)], rw, depth, bs, jobs=jobs)


def fio(rw, depth, bs, jobs=1):
    def run(server, device):
        out = subprocess.run(
            ["fio", "--name=t", "--ioengine=nbd", f"--uri={uri(server, device)}", f"--rw={rw}", f"--iodepth={depth}", f"--bs={bs}",
             f"--numjobs={jobs}", "--size=900M", "--norandommap", "--time_based", f"--runtime={max(1, round(seconds))}",
             "--group_reporting", "--output-format=json"], check=True, capture_output=True, text=True).stdout
        return job(out)["read"]["iops"] + job(out)["write"]["iops"]
    return run


def copy(server, device):
    """Copies per second of 1 GiB without holes."""
    begin = time.monotonic()
    subprocess.run(["nbdcopy", f"{folder}/source", uri(server, device)], check=True, capture_output=True)
    return 1 / (time.monotonic() - begin)


def beside(depth, bs):
    """The inverse of the 99th percentile in seconds, for a client at depth 1 while another one floods the server."""
    def run(server, device):
        target = ["--nbd", uri(server, device)]
        flood = subprocess.Popen(command(target, "randread", depth, bs, seconds + 1), stdout=subprocess.DEVNULL)
        time.sleep(0.5)
        out = subprocess.run(command(target, "randread", 1, "4k"), check=True, capture_output=True, text=True).stdout
        assert flood.wait() == 0
        return 1e9 / job(out)["read"]["clat_ns"]["percentile"]["99.000000"]
    return run


def floor(depth, bs):
    """As `bench`, but also measures `--floor`, a loop that no server over such a socket can exceed."""
    def run(server, device):
        return iops(["--floor"] if server == "floor" else ["--nbd", uri(server, device)], "randread", depth, bs)
    return run


# The lines: name, measurement, device, and servers besides udm.
LINES = [
    ("fio null 4k read depth 1", fio("randread", 1, "4k"), "null", ["older", "qsd", "nbdkit"]),
    ("fio null 4k read depth 32", fio("randread", 32, "4k"), "null", ["older", "qsd", "nbdkit"]),
    ("fio mem 4k read 4 jobs depth 32", fio("randread", 32, "4k", 4), "mem", ["older", "nbdkit"]),
    ("null 4k read depth 1", bench("randread", 1, "4k"), "null", ["older", "qsd", "nbdkit"]),
    ("null 4k write depth 1", bench("randwrite", 1, "4k"), "null", ["older", "qsd", "nbdkit"]),
    ("null 4k read depth 32", bench("randread", 32, "4k"), "null", ["older", "qsd", "nbdkit"]),
    ("null 512 read depth 256, and the floor", floor(256, "512"), "null", ["floor", "older"]),
    ("null 4k read depth 256, and the floor", floor(256, "4k"), "null", ["floor", "older"]),
    ("mem 64k read depth 32", bench("randread", 32, "64k"), "mem", ["older", "nbdkit"]),
    ("mem 64k write depth 32", bench("randwrite", 32, "64k"), "mem", ["older", "nbdkit"]),
    ("file 4k read depth 32", bench("randread", 32, "4k"), "file", ["older", "nbdkit"]),
    ("file 4k write depth 1", bench("randwrite", 1, "4k"), "file", ["older", "nbdkit"]),
    ("file 4k write depth 32", bench("randwrite", 32, "4k"), "file", ["older", "nbdkit"]),
    ("nbdcopy to null", copy, "null", ["older", "nbdkit"]),
    ("nbdcopy to tmpfs", copy, "tmpfs", ["older", "nbdkit"]),
    ("1/p99 beside 1m reads", beside(16, "1m"), "mem", ["older", "nbdkit"]),
    ("1/p99 beside 4k reads", beside(256, "4k"), "null", ["older", "qsd", "nbdkit"]),
]


def main():
    start_udm("udm", udm)
    if older:
        start_udm("older", older)
    start_peers()
    with open(f"{folder}/source", "wb") as source:
        for _ in range(1024):
            source.write(os.urandom(1 << 20))
    for name in ["udm", "nbdkit-mem", "nbdkit-file", "nbdkit-tmpfs", "qsd-null"] + ["older"] * bool(older):
        begin = time.monotonic()
        while not os.path.exists(f"{folder}/{name}"):
            assert time.monotonic() < begin + 10, open(f"{folder}/{name}.log").read()
            time.sleep(0.05)
    # Allocates all memory and all blocks before the measurements.
    for server in ["udm", "nbdkit"] + ["older"] * bool(older):
        for device in ["mem", "file", "tmpfs"]:
            subprocess.run(["nbdcopy", f"{folder}/source", uri(server, device)], check=True, capture_output=True)
    only = os.environ.get("LINES", "")
    lines = [line for line in LINES if only in line[0]]
    found = {name: {} for name, *_ in lines}
    for turn in range(rounds):
        for name, measure, device, others in lines:
            for server in ["udm"] + [other for other in others if other != "older" or older]:
                found[name].setdefault(server, []).append(measure(server, device))
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
    for name, *_ in lines:
        own = found[name]["udm"]
        print(f"{name:40} udm {statistics.median(own):12.1f}")
        for server, theirs in found[name].items():
            if server != "udm":
                ratios = [a / b for a, b in zip(own, theirs)]
                print(f"{'':40} {server:8} {statistics.median(theirs):10.1f}   udm is {statistics.median(ratios):.2f} times that"
                      f"   ({' '.join(f'{ratio:.2f}' for ratio in ratios)})")


try:
    main()
finally:
    for server in servers:
        server.terminate()
    for server in servers:
        server.wait()
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(memory, ignore_errors=True)
