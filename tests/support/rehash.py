"""Gives rows the hash of today's text where only the text of a kernel has changed, and not its machine code.

    python tests/support/rehash.py OLD_TREE     a checkout of the commit in which the rows were fresh

For each row that is fresh there and stale here, its kernel is compiled by both trees at the row's dtype, head_dim and
mask. If the PTX is the same but for names and line numbers, the row gets the new hash. Otherwise it stays stale, and
has to be measured again. It knows stages 02 and 03, and no GPU is needed.
"""

import functools
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
HASHES = """
import json, sys
from steps.course.bench import rows
print(json.dumps([rows.is_stale(json.loads(line)) for line in sys.stdin]))
"""
CUDA = """
import hashlib, json, sys
from steps.course.bench import rows
from steps.step02_fa2_cuda import nvrtc, works
sys.path.insert(0, "{root}")
for line in sys.stdin:
    found = []
    for stem, launches in rows.launches(json.loads(line)).items():
        for launch in launches if stem != "order" else ():
            compiled = nvrtc.compile(works.HERE / (stem + ".cu"), launch[-1], "sm_90a")
            found.append(hashlib.sha256(compiled.cubin).hexdigest())
    print(json.dumps(found))
"""

FEATURES = "flash", "flash_gluon", "decode"  # the kernels of stage 03 that are no rungs


def run(tree, *command, text=None):
    path = os.pathsep.join((str(tree), str(Path(tree) / "tests")))
    environment = os.environ | {"PYTHONPATH": path, "STEPS_ENGINE": "compile", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-P", *command]
    done = subprocess.run(command, cwd=tree, env=environment, input=text, capture_output=True, text=True, check=True)
    return done.stdout


@functools.cache
def machine_code(tree, stage, row):
    """Hashes of what the tree compiles for the row, a line of JSON."""
    if stage == "02_fa2_cuda":
        return run(tree, "-c", CUDA.format(root=tree), text=row + "\n")
    return code_of_stage_03(tree)[row]


@functools.cache
def code_of_stage_03(tree):
    """{a row, as `key_of` it: hashes of the kernels that the tree compiles for it}. All are compiled together."""
    from steps.course.bench import rows

    lines = [line for path in rows.COMMITTED.glob("*.jsonl") for line in path.read_text().splitlines()]
    keys = dict.fromkeys(key_of(row) for row in map(json.loads, lines) if row["stage"] == "03_triton")
    wanted = {key: as_compiled(json.loads(key)) for key in keys}
    found = defaultdict(list)
    for kind in (list, dict):  # of rungs, and of features
        ones = list({json.dumps(one): one for one in wanted.values() if isinstance(one, kind)}.values())
        made = run(tree, str(ROOT / "tests/support/compile_triton.py"), json.dumps(ones))
        for kernel in map(json.loads, made.splitlines()):
            found[json.dumps(ones[kernel["wanted"]])].append(kernel["text"])
    assert len(found) == len({json.dumps(one) for one in wanted.values()})
    return {key: found[json.dumps(one)] for key, one in wanted.items()}


def as_compiled(row):
    """The entry of compile_triton.py for a row. A rung is compiled with both passes."""
    if row["kernel"] in FEATURES:
        return row
    rung = row["kernel"].split("+")[0].split("_", 2)[2]
    dtype = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[row["dtype"]]
    return [rung, 90, dtype, row["D"], row["causal"]]


def key_of(row):
    """What of a row decides which machine code it ran, as a line of JSON."""
    fields = ["stage", "kernel", "dtype", "D", "causal"]
    if row["stage"] == "02_fa2_cuda":
        fields += ["gpu", "B", "H", "Hk", "N", "Nk"]
    if row["kernel"] in FEATURES:
        fields += ["pass", "B", "H", "Hk", "N", "Nk", "options"]
    return json.dumps({name: row[name] for name in fields})


def main(old):
    from steps.course.bench import rows

    for path in sorted(rows.COMMITTED.glob("*.jsonl")):
        lines = path.read_text().splitlines()
        was_stale = json.loads(run(old, "-c", HASHES, text="\n".join(lines)))
        for n, line in enumerate(lines):
            row = json.loads(line)
            if was_stale[n] or not rows.is_stale(row) or row["stage"] == "04_ring":
                continue
            key = key_of(row)
            if machine_code(old, row["stage"], key) == machine_code(str(ROOT), row["stage"], key):
                lines[n] = json.dumps(row | {"source": rows.row_hash(row)})
            else:
                print("changed:", key)
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    main(sys.argv[1])
