"""`python -m steps.course.hub FOLDER`: flash and decode of stage 03 as a folder for Hugging Face's kernels hub.

    build.toml, torch-ext/<name>/    the sources, as kernel-builder takes them
    build/torch-<backend>/           the same files with metadata, as `kernels.get_local_kernel(FOLDER)` takes them
    README.md, build/CARD.md         the card

The files are those that steps/README.md names under "Files to copy out", and with them the torch.autograd.Function
of that page. Nothing is compiled ahead, so this is the whole build. Torch's CPU build loads torch-cpu, for Triton's
interpreter. Whoever publishes the folder names the repository: `kernel-builder upload FOLDER --repo-id ...`.
"""

import base64
import hashlib
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Annotated

import typer

from steps.course.bench import report
from steps.course.bench import rows as results
from steps.places import ROOT, require_clone

PAGE = ROOT / "steps" / "README.md"
CALLS = "flash.forward(", "decode.forward("  # of the rows of the page's table
# The edition here is that of this file's format.
BUILD = """[general]
name = "%(name)s"
version = %(version)s
edition = 5
license = "%(license)s"
backends = ["cpu", "cuda"]
%(hub)s
[torch-noarch]
"""
INIT = '''# SPDX-License-Identifier: %(license)s
"""Attention in Triton: forward, backward, and decoding. Edition %(edition)s of "FlashAttention, step by step"."""

import torch

from .features.decode import forward as decode
from .features.flash import backward, forward

__all__ = ["attention", "forward", "backward", "decode"]


%(attention)s

def attention(q, k, v, *, causal=False, scale=None, window=None, **options):
    """out like q (B, H, Nq, D); k and v (B, Hk, Nk, D), H a multiple of Hk. Differentiable in q, k and v.

    With causal the last query sees every key. window=(left, right): how many keys a query sees before and behind its
    own position. scale=None is 1/sqrt(D). options: those of `forward`, but for out and lse.
    """
    for name, x in options.items():
        if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"attention gives {name} no gradient: detach it, or call forward and backward.")
    options.update(causal=causal, scale=scale, window=window)
    return Attention.apply(q, k, v, forward, backward, options)
'''
CARD = """---
library_name: kernels
license: %(license_id)s
tags:
- kernel
- attention
- triton
---

# Attention in Triton, with masks, windows, packed sequences and decoding

The kernels `flash` and `decode` of edition %(edition)s of the course "FlashAttention, step by step". They are
written to be read, and each result is compared with a float64 reference in the course's tests.

```python
from kernels import get_kernel

kernel = get_kernel(REPO, version=%(version)s, trust_remote_code=True)  # REPO: this repository's name
out = kernel.attention(q, k, v, causal=True, window=(4095, 0))  # differentiable in q, k and v
out, lse = kernel.forward(q, k, v, causal=True)
dq, dk, dv = kernel.backward(dout, q, k, v, out, lse, causal=True)
out, lse = kernel.decode(q, k, v, lengths_k=lengths)  # few queries, many keys; for inference
```

**Shapes.** q, out and dout are (B, H, Nq, D), k and v (B, Hk, Nk, D), lse (B, H, Nq). H is a multiple of Hk. Any Nq and
Nk, also 0; any strides, if D is contiguous. float32, float16 or bfloat16, D at most 256. A query that sees no key gets
0, and lse -inf.

**Options** of the first three: causal (the last query sees every key), scale, window, softcap, mask (bool or added),
alibi_slopes, sinks, dropout_p with seed, packed sequences. `help(kernel.forward)` has their shapes.

**Limits.** mask and sinks have gradients in `backward` only. K and V in pages, fp8 and rotary embedding are left out.
Run and measured on the GPUs below; other NVIDIA GPUs are untried. On a CPU Triton's interpreter runs the kernels,
slowly: start Python with `TRITON_INTERPRET=1`, with Triton installed.

**Licence**: %(license)s.

## Speed

%(speeds)s
"""
MEASURED = "none", "causal", "decode"  # the features whose rows the card shows


def files():
    """{place in the package: file of steps/}, as the page's table names them for CALLS."""
    found = {}
    for call in CALLS:
        (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and f"`{call}" in line]
        folder = ROOT / "steps"
        for name in re.findall(r"`([^`]+)`", line.split("|")[2]):
            if name.endswith("/"):
                folder = ROOT / "steps" / name
            else:
                found[name] = folder / name
    return found


def speeds():
    """The card's table: milliseconds of each kernel and of the fastest peer in the same run."""
    rows = report.comparable(results.fresh(results.read()))
    lines = [["GPU", "kernel", "pass", "causal", "B", "H", "Hk", "queries", "keys", "D", "ms", "fastest peer, ms"]]
    shown = [row for row in rows if row["kernel"] in ("flash", "decode") and row["options"].get("feature") in MEASURED]
    shown.sort(key=lambda row: (row["gpu"], row["kernel"] == "decode", row["pass"] == "bwd", -row["D"], row["B"]))
    for row in shown:
        where = row["run"], results.setting(row)
        peers = [other for other in rows if other["peer"] and (other["run"], results.setting(other)) == where]
        peer = min(peers, key=lambda other: other["ms_median"], default=None)
        sizes = [row["gpu"], row["kernel"], row["pass"], "yes" if row["causal"] else "no"]
        sizes += [str(row[name]) for name in ("B", "H", "Hk", "N", "Nk", "D")]
        fastest = f"{peer['ms_median']:.3g}, {peer['peer']}" if peer else "–"
        lines.append([*sizes, f"{row['ms_median']:.3g}", fastest])
    if not shown:  # A kernel that has changed is measured anew first.
        return report.EMPTY.strip()
    return f"{report.piped(lines, 4)}\nMedians of interleaved calls, bfloat16. {report.machines(shown)}."


def write(folder, repo_id=None):
    """Writes all of it into an empty folder. repo_id: for build.toml, the name of the repository on the hub."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, license, version = project["name"], project["license"], int(project["version"].partition(".")[0])
    text = {"name": name, "license": license, "version": version, "edition": project["version"], "speeds": speeds()}
    text["license_id"] = license.lower()  # as the hub spells it
    text["attention"] = re.search(r"^class Attention.*?(?=```)", PAGE.read_text(), re.S | re.M)[0]
    text["hub"] = f'\n[general.hub]\nrepo-id = "{repo_id}"\n' if repo_id else ""
    package = folder / "torch-ext" / name.replace("-", "_")
    for place, file in files().items():
        (package / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, package / place)
    (package / "__init__.py").write_text(INIT % text)
    digests = {str(file.relative_to(package)): hashlib.sha256(file.read_bytes()) for file in package.rglob("*.py")}
    known = {file: base64.b64encode(digest.digest()).decode() for file, digest in sorted(digests.items())}
    unique = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:7]  # so that two versions can be imported together
    for backend in ("cpu", "cuda"):
        metadata = {
            "name": name, "id": f"_{package.name}_{backend}_{unique}", "version": version, "license": license,
            "python-depends": [], "backend": {"type": backend}, "digest": {"algorithm": "sha256", "files": known},
        }  # fmt: skip
        variant = shutil.copytree(package, folder / "build" / f"torch-{backend}")
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    (folder / "build.toml").write_text(BUILD % text)
    for card in ("README.md", "build/CARD.md"):
        (folder / card).write_text(CARD % text)
    shutil.copy(ROOT / "LICENSE", folder)


def main(
    folder: Annotated[Path, typer.Argument(help="An empty folder, or a new one.")],
    repo_id: Annotated[str | None, typer.Option(help="The repository on the hub, for build.toml.")] = None,
):
    """Writes stage 03's flash and decode as a folder for Hugging Face's kernels hub."""
    require_clone("steps.course.hub")
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty.")
    write(folder, repo_id)


if __name__ == "__main__":
    typer.run(main)
