"""The gallery's numbers, from the rows of measured speeds. A picture shows one run: speeds of two do not compare.

Only the standard library is used, because the site is built where no torch is.
"""

import json
from collections import defaultdict

PLAIN = {"n_gpus": 1, "dtype": "bf16", "options": {}, "timing": "interleaved"}
STAGES = {"02_fa2_cuda": "02, CUDA C++", "03_triton": "03, Triton"}


def read(folder):
    """The rows of a folder's files, of stages 02 and 03 and their peers."""
    rows = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    plain = [row for row in rows if all(row[name] == value for name, value in PLAIN.items())]
    plain = [row for row in plain if ":" not in (row["kernel"] or "")]  # a kernel with one of its switches turned
    return [row for row in plain if row["pass"] in ("fwd", "bwd") and row["stage"] in (None, *STAGES)]


def charts(rows, suffix=""):
    """[{gpu, stage, pass, head_dim, mask, date, ours, versions, speeds: {name: {N: TFLOP/s}}}], of one run each.

    Of the runs that measured a stage in a pass, the one with most of its rows counts, and of equal ones the last.
    """
    runs = defaultdict(list)
    for row in rows:
        runs[row["run"], row["gpu"], row["pass"], row["D"], row["causal"]].append(row)
    last = {}
    for (_, gpu, pass_, D, causal), found in sorted(runs.items()):
        for stage in STAGES:
            where = gpu, stage, pass_, D, causal
            own = [row for row in found if row["stage"] == stage]
            before = [row for row in last.get(where, ()) if row["stage"] == stage]
            if len({row["N"] for row in own}) >= 3 and len(own) >= len(before):
                last[where] = own + [row for row in found if row["peer"]]
    return [chart(*where, found, suffix) for where, found in sorted(last.items())]


def chart(gpu, stage, pass_, D, causal, found, suffix):
    speeds = defaultdict(dict)
    for row in found:
        speeds[row["peer"] or row["kernel"]][row["N"]] = round(row["tflops"], 1)
    ours = sorted({row["kernel"] for row in found if row["kernel"]})
    versions = sorted({row["peer_version"] for row in found if row.get("peer_version")})
    first = found[0]
    return {
        "gpu": gpu.removeprefix("NVIDIA ") + suffix,
        "stage": STAGES[stage],
        "pass": {"fwd": "forward", "bwd": "backward"}[pass_],
        "head_dim": D,
        "mask": "causal" if causal else "full",
        "date": first["date"][:10],
        "versions": ", ".join([f"torch {first['torch']}", f"triton {first['triton']}", *versions]),
        "ours": ours,
        "speeds": speeds,
    }


def page(committed, own):
    """The rest of the gallery's page: its data, and the script that draws them."""
    data = json.dumps(charts(committed) + charts(own, ", yours"), separators=(",", ":"))
    script = "<script src='../../_static/gallery.js' defer></script>"
    return f"\n\n<div id='gallery'></div>\n<script>window.CHARTS = {data}</script>\n{script}\n"
