"""Gives rows the hash of today's text where only the text of a kernel has changed, and not its machine code.

    python tests/support/rehash.py OLD_TREE     a checkout of the commit in which the rows were fresh

For each row that is fresh there and stale here, its kernel is compiled by both trees at the row's dtype, head_dim and
mask. If the PTX is the same but for names and line numbers, the row gets the new hash. Otherwise it stays stale, and
has to be measured again. It knows the rungs of stages 02 and 03, and no GPU is needed.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
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


def run(tree, *command, text=None):
    path = os.pathsep.join((str(tree), str(Path(tree) / "tests")))
    environment = os.environ | {"PYTHONPATH": path, "STEPS_ENGINE": "compile", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-P", *command]
    done = subprocess.run(command, cwd=tree, env=environment, input=text, capture_output=True, text=True, check=True)
    return done.stdout


@functools.cache
def machine_code(tree, stage, row):
    """A hash of what the tree compiles for the row, a line of JSON."""
    one = json.loads(row)
    if stage == "02_fa2_cuda":
        return run(tree, "-c", CUDA.format(root=tree), text=row + "\n")
    dtype = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[one["dtype"]]
    words = {"fwd_0_fused": "fused", "fwd_1_tma": "tma", "fwd_2_roles": "roles", "fwd_3_gluon": "gluon"}
    rung = words[one["kernel"].split("+")[0].split(":")[0]]
    wanted = json.dumps([[rung, 90, dtype, one["D"], one["causal"]]])
    made = run(tree, str(ROOT / "tests/support/compile_triton.py"), wanted)
    return hashlib.sha256("".join(sorted(json.loads(line)["text"] for line in made.splitlines())).encode()).hexdigest()


def main(old):
    from steps.course.bench import rows

    for path in sorted(rows.COMMITTED.glob("*.jsonl")):
        lines = path.read_text().splitlines()
        was_stale = json.loads(run(old, "-c", HASHES, text="\n".join(lines)))
        for n, line in enumerate(lines):
            row = json.loads(line)
            if was_stale[n] or not rows.is_stale(row) or row["stage"] == "04_ring":
                continue
            fields = "stage", "kernel", "gpu", "dtype", "B", "H", "Hk", "N", "Nk", "D", "causal"
            sizes = fields if row["stage"] == "02_fa2_cuda" else ("stage", "kernel", "dtype", "D", "causal")
            key = json.dumps({name: row[name] for name in sizes})
            if machine_code(old, row["stage"], key) == machine_code(str(ROOT), row["stage"], key):
                lines[n] = json.dumps(row | {"source": rows.row_hash(row)})
            else:
                print("changed:", key)
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    main(sys.argv[1])
