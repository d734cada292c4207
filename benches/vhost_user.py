"""Compares udm's vhost-user-blk server with qemu-storage-daemon, one queue, over null devices.

Each round measures the servers in rotation; the client is `udm bench --vhost-user`. A line has the
medians: requests per second, requests per second of CPU time of the server (the client may be the
slower side), and system calls of the server per request. The floor is a thread that only copies
(`udm bench --floor=vhost-user`).
"""
import json, os, shutil, statistics, subprocess, sys, tempfile, time

udm = sys.argv[1]
rounds, seconds = int((sys.argv[2:3] or [5])[0]), float((sys.argv[3:4] or [2])[0])
folder = tempfile.mkdtemp()
TICKS = os.sysconf("SC_CLK_TCK")
CLIENT, SERVER = (0, 1) if os.cpu_count() > 1 else (0, 0)


def start(*command):
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.sched_setaffinity(server.pid, {SERVER})
    return server


def start_servers():
    return {
        "udm": start(udm, "serve", "--device", "d=null:1G", "--vhost-user", f"d={folder}/udm", "--cores", str(SERVER),
                     "--socket", f"{folder}/control"),
        "qsd": start("qemu-storage-daemon", "--blockdev", "driver=null-co,node-name=n,size=1073741824,read-zeroes=on",
                     "--export", f"type=vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path={folder}/qsd,writable=on,num-queues=1"),
    }


def cpu_seconds(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def system_calls(pid):
    """Starts to count the system calls of a process; returns a function that ends it, or None without perf."""
    if not shutil.which("perf"):
        return None
    counter = subprocess.Popen(["perf", "stat", "-x,", "-e", "raw_syscalls:sys_enter", "-p", str(pid)],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    time.sleep(0.3)

    def end():
        counter.send_signal(2)
        count = counter.communicate()[1].split(",")[0]
        return int(count) if count.isdigit() else None
    return end


def bench(target, rw, depth, words):
    done = subprocess.run([udm, "bench", target, *words, f"--rw={rw}", f"--iodepth={depth}", "--bs=4k", "--norandommap", "--time_based",
                          f"--runtime={round(seconds * 1000)}ms", f"--cpus_allowed={CLIENT}", "--json"],
                          capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{target}: {done.stderr}")
    job = json.loads(done.stdout)["jobs"][0]
    return job["read"]["iops"] + job["write"]["iops"], job["read"]["total_ios"] + job["write"]["total_ios"]


def measure(name, pid, rw, depth, words):
    """Requests per second, per second of CPU time, and system calls per request."""
    if name == "floor":
        return bench("--floor=vhost-user", rw, depth, words)[0], None, None
    end = system_calls(pid)
    before = cpu_seconds(pid)
    iops, total = bench(f"--vhost-user={folder}/{name}", rw, depth, words)
    cpu = cpu_seconds(pid) - before
    calls = end() if end else None
    return iops, total / max(cpu, 1 / TICKS), None if calls is None else calls / total


def main():
    servers = start_servers()
    try:
        time.sleep(1)
        names = ["udm", "qsd", "floor"]
        print(f"{'':34}{'requests/s':>12}{'per CPU s':>12}{'calls/request':>15}")
        for rw in ["randread", "randwrite"]:
            for words in [["--poll"], []]:
                for depth in [1, 32, 128]:
                    results = {name: [] for name in names}
                    for turn in range(rounds):
                        for name in names[turn % 3:] + names[:turn % 3]:
                            pid = servers[name].pid if name in servers else None
                            results[name].append(measure(name, pid, rw, depth, words))
                    line(f"{rw} depth {depth}{' polled' if words else ''}", results)
    finally:
        for server in servers.values():
            server.kill()
        shutil.rmtree(folder)


def line(title, results):
    def median(name, column):
        found = [result[column] for result in results[name] if result[column] is not None]
        return statistics.median(found) if found else None
    for name in results:
        values = [median(name, column) for column in range(3)]
        text = [f"{values[0]:12,.0f}", f"{values[1]:12,.0f}" if values[1] else f"{'':12}", f"{values[2]:15.3f}" if values[2] is not None else ""]
        print(f"{title + ', ' + name:34}{''.join(text)}", flush=True)
    ratios = [[a[column] / b[column] for a, b in zip(results["udm"], results["qsd"])] for column in range(2)]
    print(f"{'':4}udm to qsd: {statistics.median(ratios[0]):.2f}, per CPU time {statistics.median(ratios[1]):.2f}", flush=True)


main()
