"""Measure the distributed engine on a real federation: `python benchmarks/flower/measure.py NAME`.

Names: equality, overhead, wire, coded, faults, refusals. Results go to results/NAME.json; README.md
says what they show.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
from federation import (
    APP,
    HERE,
    CountingProxy,
    environment,
    exchanges,
    federation,
    lines,
    pid,
    run,
    server_app,
    simfbo,
    wait_for_round,
)

sys.path.insert(0, str(APP))

# Method, whether nodes send sums, rounds; a round of FedNest is ten exchanges.
EQUAL = [
    ("simfbo", False, 5), ("simfbo", True, 5), ("shrofbo", False, 5), ("shrofbo", True, 5),
    ("fednest", False, 2), ("fednest", True, 2),
    ("simfbo", False, 60), ("simfbo", True, 60),
]  # fmt: skip


def equality():
    """Compare x, y, v and the ledger with a simulation of the same deployment."""
    import jax
    from task import deployment

    from simfbo.flower import simulate
    from simfbo.runs import checkpoint

    rows = []
    with federation() as folder:
        for method, partial_sums, rounds in EQUAL:
            config = {"method": method, "partial_sums": partial_sums, "rounds": rounds}
            config |= {"cohort": 4, "timeout": 60.0}
            with run(folder, f"{method}-{partial_sums}-{rounds}", **config) as output:
                pass
            simulated = simulate(deployment(config))
            found = checkpoint.newest(output, lambda found: found)
            wanted = jax.tree.leaves(simulated.method_state)
            here = jax.tree.leaves(checkpoint.restore(found.arrays, simulated.method_state))
            gaps = [float(np.abs(a - b).max()) for a, b in zip(here, wanted, strict=True)]
            sent = [
                {k: v for k, v in line.items() if k.startswith(("comm", "floats", "bytes"))}
                for line in (_last_record(output), simulated.records[-1])
            ]
            rows.append(
                {
                    "method": method,
                    "messages": "sums" if partial_sums else "each",
                    "largest gap": max(gaps),
                    "largest number": max(float(np.abs(a).max()) for a in wanted),
                    "ledgers equal": sent[0] == sent[1],
                    "exchanges": sent[0]["communication_rounds"],
                }
            )
            print(rows[-1], flush=True)
    return rows


def overhead():
    """Time exchanges of 160,000 numbers on three nodes, with quick and with Flower's own nodes."""
    rows = []
    for stock in (False, True):
        with federation(stock=stock) as folder:
            with run(folder, "run", rounds=10, cohort=6, timeout=120.0) as output:
                pass
            taken = exchanges(output)[2:]  # the first two compile
            row = {"nodes": "Flower's own" if stock else "quick", "exchanges": len(taken)}
            for part in ("send", "reach", "load", "compute", "back"):
                row[part] = round(float(np.median([one[part] for one in taken])), 2)
            totals = [sum(one.values()) for one in taken]
            row |= {"median": float(np.median(totals)), "largest": max(totals)}
            rows.append(row)
            print(row, flush=True)
    return rows


def coded():
    """Measure bytes on the wire, seconds and the gap to a simulation, with and without codecs."""
    rows = []
    for port, name in enumerate(("none", "dithered", "small"), 9420):
        outputs = []
        down, up = wire(codecs=name, keep=outputs, port=port)
        taken = [sum(one.values()) for one in outputs[-1]["exchanges"][2:]]
        rows.append(
            {
                "codecs": name, "ledger down": down["ledger"], "wire down": down["wire"],
                "ledger up": up["ledger"], "wire up": up["wire"],
                "seconds": float(np.median(taken)), "largest gap": outputs[-1]["gap"],
            }
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def _last_record(output):
    """Return the last evaluation of a run."""
    return [line for line in lines(output) if line["kind"] == "record"][-1]


def _gap(output, config):
    """Return the largest difference between a run and its simulation."""
    import jax
    from task import deployment

    from simfbo.flower import simulate
    from simfbo.runs import checkpoint

    simulated = simulate(deployment({"method": "simfbo", "partial_sums": False, **config}))
    found = checkpoint.newest(output, lambda found: found)
    here = jax.tree.leaves(checkpoint.restore(found.arrays, simulated.method_state))
    pairs = zip(here, jax.tree.leaves(simulated.method_state), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def wire(codecs="none", keep=None, port=9420):
    """Count the bytes between nodes and SuperLink, TLS included, and compare with the ledger."""
    import tempfile

    root = Path(tempfile.mkdtemp(prefix="simfbo-wire-"))
    link, proxy = root / "link", None
    faults = f"faults='{root / 'none'}'"
    places = [root / f"machine-{k}" for k in (1, 2, 3)]
    try:
        simfbo(link, "certs", "--nodes", 3)
        simfbo(link, "up", "--nodes", 0, "--port", 9400)
        proxy = CountingProxy(port, 9400)
        for k, place in enumerate(places, 1):
            for part in ("certificates/ca.crt", f"keys/node-{k}"):
                (place / part).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(link / part, place / part)
            simfbo(place, "up", "--join", f"127.0.0.1:{port}", "--node", k, "--parts", 3,
                   "--node-config", faults)  # fmt: skip
        counts = []
        for rounds in (4, 14):
            before = proxy.down, proxy.up
            config = {"rounds": rounds, "cohort": 6, "timeout": 60.0, "codecs": codecs}
            with run(link, f"rounds-{rounds}", **config) as output:
                pass
            if keep is not None:
                keep.append({"exchanges": exchanges(output), "gap": _gap(output, config)})
            record = _last_record(output)
            wired = proxy.down - before[0], proxy.up - before[1]
            counts.append((*wired, record["bytes_down"], record["bytes_up"]))
            print(counts[-1], flush=True)
        down, up, ledger_down, ledger_up = (
            (b - a) / 10 for a, b in zip(counts[0], counts[1], strict=True)
        )
        return [
            {
                "per exchange": "down", "wire": down, "ledger": ledger_down,
                "note": "the ledger counts the payload once per client, the wire once per node",
            },
            {"per exchange": "up", "wire": up, "ledger": ledger_up, "note": ""},
        ]  # fmt: skip
    finally:
        for place in (*places, link):
            if place.exists():
                simfbo(place, "down", check=False)
        if proxy is not None:
            proxy.close()
        shutil.rmtree(root, ignore_errors=True)


FAULTS = {
    "client raises": lambda folder: _ask(folder, "raise-1"),
    "client process killed": lambda folder: _ask(folder, "die-1"),
    "client too slow": lambda folder: _ask(folder, "sleep-1"),
    "SuperNode killed": lambda folder: os.kill(pid(folder, "node-2"), signal.SIGKILL),
    "SuperLink killed": lambda folder: os.kill(pid(folder, "superlink"), signal.SIGKILL),
    "ServerApp killed": lambda folder: os.kill(server_app(folder), signal.SIGKILL),
}


def _ask(folder, fault):
    (folder.parent / "faults" / fault).touch()


def faults():
    """Disturb a run in its third round, in six ways, and see how it ends."""
    rows = []
    with federation() as folder:
        for number, (name, disturb) in enumerate(FAULTS.items()):
            rounds = 40 if "Super" in name else 12
            begin = time.monotonic()
            with run(folder, f"fault-{number}", rounds=rounds, cohort=6, timeout=15.0) as output:
                wait_for_round(output, 3)
                disturb(folder)
                hit = time.monotonic()
            found = lines(output)
            refusals = [line for line in found if line["kind"] == "refusal"]
            last = [line for line in found if line["kind"] == "record"][-1]
            reasons = sorted({line["text"] for line in refusals})
            rows.append(
                {
                    "fault": name,
                    "status": found[-1].get("status", "cut off"),
                    "rounds": f"{last['round']} of {rounds}",
                    "rounds with refusals": sorted({line["round"] for line in refusals}),
                    "clients": sorted({line["client"] for line in refusals}),
                    "reasons": reasons,
                    "seconds before": round(hit - begin),
                    "seconds after": round(time.monotonic() - hit),
                }
            )
            print(rows[-1], flush=True)
    return rows


def refusals():
    """Try to join without the right papers, and note what is said."""
    rows = []
    with federation(nodes=1) as folder:
        for name, prepare in (
            ("no certificate", _without_certificate),
            ("wrong CA", _with_other_authority),
            ("unregistered key", _with_other_key),
            ("plain HTTP to a TLS port", _in_the_clear),
        ):
            place = folder.parent / name.replace(" ", "-")
            flags = prepare(folder, place)
            begin = time.monotonic()
            answer = simfbo(place, "up", "--join", "127.0.0.1:9400", "--node", 2, "--parts", 2,
                            *flags, check=False)  # fmt: skip
            said = " ".join((answer.stdout + answer.stderr).split())
            said = said.replace(str(folder.parent), "DIR")
            row = {"attempt": name, "exit code": answer.returncode, "said": said}
            rows.append(row | {"seconds": round(time.monotonic() - begin)})
            print(rows[-1], flush=True)
            simfbo(place, "down", check=False)
    return rows


def _copy(folder, place, *parts):
    for part in parts:
        (place / part).parent.mkdir(parents=True, exist_ok=True)
        if (folder / part).exists():
            shutil.copy(folder / part, place / part)


def _without_certificate(folder, place):
    simfbo(place, "certs", "--nodes", 2)
    (place / "certificates" / "ca.crt").unlink()
    return []


def _with_other_authority(folder, place):
    simfbo(place, "certs", "--nodes", 2)
    return []


def _with_other_key(folder, place):
    simfbo(place, "certs", "--nodes", 2)
    _copy(folder, place, "certificates/ca.crt")
    return []


def _in_the_clear(folder, place):
    return ["--insecure"]


def main(names):
    results = HERE / "results"
    results.mkdir(exist_ok=True)
    for name in names:
        measure = {"equality": equality, "overhead": overhead, "wire": wire, "coded": coded,
                   "faults": faults, "refusals": refusals}[name]  # fmt: skip
        rows = measure()
        text = json.dumps({"environment": environment(), "rows": rows}, indent=1)
        (results / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
