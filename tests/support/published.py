"""What `verify` finds in attention that others published: writes the table of steps/course/verify/README.md.

python -m tests.support.published installs the packages into a temporary folder, beside the torch that is there. Each
function below is called as its package has it; what it has no argument for is not asked.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import types
from functools import partial
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "steps" / "course" / "verify" / "README.md"
MARK = "<!-- table -->"
# Without what they depend on, which is listed, too, as far as these functions need it.
PACKAGES = """
x-transformers==2.31.0 memory-efficient-attention-pytorch==0.1.6 ring-attention-pytorch==0.5.20 local-attention==1.11.2
transformers==5.24.0 keras==3.15.1
einops==0.8.2 einx==0.4.3 frozendict==2.5.1 loguru==0.7.3 torch-einops-utils==0.2.0 hyper-connections==0.4.11
jaxtyping==0.3.11 beartype==0.23.1 huggingface-hub==2.4.0 httpx2==2.16.2 httpcore2==2.16.2 truststore==0.10.5
tokenizers==0.23.3 safetensors==0.8.0 regex==2026.11.19 tqdm==4.70.1 absl-py==2.5.1 ml-dtypes==0.6.0 namex==0.1.0
optree==0.20.0 h5py==3.16.0
""".split()


def torch_sdpa(q, k, v, causal, scale):
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def torch_flex(q, k, v, causal, scale):
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    shift = k.shape[2] - q.shape[2]
    score = (lambda s, b, h, i, j: torch.where(j <= i + shift, s, -math.inf)) if causal else None
    return flex_attention(q, k, v, score_mod=score, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def as_a_layer(q, k, causal):
    """The attributes of a layer that transformers' functions look at."""
    return types.SimpleNamespace(
        num_key_value_groups=q.shape[1] // max(1, k.shape[1]), training=False, is_causal=causal
    )


def transformers_eager(q, k, v, causal, scale):
    from transformers.masking_utils import eager_mask
    from transformers.models.llama.modeling_llama import eager_attention_forward

    shift = k.shape[2] - q.shape[2]
    mask = eager_mask(q.shape[0], q.shape[2], k.shape[2], q_offset=shift, dtype=q.dtype) if causal else None
    return eager_attention_forward(as_a_layer(q, k, causal), q, k, v, mask, scale)[0].transpose(1, 2)


def transformers_sdpa(q, k, v, causal, scale):
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layer = as_a_layer(q, k, causal)
    return sdpa_attention_forward(layer, q, k, v, None, scaling=scale, is_causal=causal)[0].transpose(1, 2)


def x_transformers(q, k, v, causal, scale):
    from x_transformers.attend import Attend

    return Attend(causal=causal, scale=scale)(q, k, v)[0]


def memory_efficient(q, k, v, causal):
    from memory_efficient_attention_pytorch.memory_efficient_attention import memory_efficient_attention

    return memory_efficient_attention(q, k, v, causal=causal, q_bucket_size=32, k_bucket_size=32)


def flash_function(q, k, v, causal):
    from memory_efficient_attention_pytorch.flash_attention import FlashAttentionFunction

    return FlashAttentionFunction.apply(q, k, v, None, causal, 32, 32)


def ring_default(q, k, v, causal):
    from ring_attention_pytorch.ring_attention import default_attention

    return default_attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal).transpose(1, 2)


def ring_flash(q, k, v, causal):
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    return ring_flash_attn(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, bucket_size=32).transpose(1, 2)


def local_attention(q, k, v, causal, scale):
    from local_attention import LocalAttention

    options = dict(use_rotary_pos_emb=False, look_backward=0, look_forward=0)
    return LocalAttention(q.shape[2], causal=causal, scale=scale, **options)(q, k, v)


def keras(q, k, v, causal, scale):
    from keras import ops

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ops.dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(1, 2)


def in_matrix_form(hidden, q, k, v, causal):
    """The textbook's few lines, with a mask of torch.tril."""
    S = q @ k.mT / math.sqrt(q.shape[-1])
    return (S.masked_fill(S.new_ones(S.shape[-2:]).tril() == 0, hidden) if causal else S).softmax(-1) @ v


def nano_gpt(q, k, v, causal):
    return in_matrix_form(-math.inf, q, k, v, causal)


def annotated(q, k, v, causal):
    return in_matrix_form(-1e9, q, k, v, causal)


# (function, how the page names it, its package, what it has no argument for or does not claim)
FUNCTIONS = (
    (torch_sdpa, "`scaled_dot_product_attention`", "torch", ()),
    (torch_flex, "`flex_attention`, with the course's mask", "torch", ()),
    (transformers_eager, "`eager_attention_forward` of Llama, with `eager_mask`", "transformers", ()),
    (transformers_sdpa, "`sdpa_attention_forward`, with `is_causal`", "transformers", ()),
    (keras, "`ops.dot_product_attention` on torch", "keras", ()),
    (x_transformers, "`Attend`", "x-transformers", ()),
    (memory_efficient, "`memory_efficient_attention`", "memory-efficient-attention-pytorch", ("scale", "gqa")),
    (flash_function, "`FlashAttentionFunction`", "memory-efficient-attention-pytorch", ("scale", "gqa")),
    (ring_default, "`default_attention`", "ring-attention-pytorch", ("scale",)),
    (ring_flash, "`ring_flash_attn`, one rank", "ring-attention-pytorch", ("scale",)),
    (local_attention, "`LocalAttention`, a window of N", "local-attention", ("gqa", "nq-ne-nk")),
    (nano_gpt, "as in nanoGPT: `tril`, -inf", "", ("scale", "gqa")),
    (annotated, "as in the annotated transformer: `tril`, -1e9", "", ("scale", "gqa")),
)


def main():
    """Prints the table's rows as JSON. The packages are on sys.path."""
    import torch

    from steps.course.verify import anybody, verdict

    torch.set_num_threads(1)
    rows = []
    for function, name, package, lacks in FUNCTIONS:
        takes = {each.replace("-", "_"): False for each in lacks}
        claims, kept = anybody.Claims((torch.float32,), (32, 64, 40), 32, **takes), []
        judged = list(verdict.judge(partial(function), claims, kept))
        named = verdict.mistakes(kept, 32)
        told = {says.strip() for where, _ in named for says in where.split(";")}
        wrong = [row for row in judged if row["wrong"] and row["name"] != "backward"]
        everything = [says for says, equal in named if not says]
        rest = [] if everything else [row for row in wrong if row["errors"] and row["says"] not in told]
        version = f"{package} {metadata.version(package)}".split("+")[0] if package else ""
        rows.append({
            "function": name, "package": version, "lacks": list(lacks),
            "backward": all(row["name"] != "backward" for row in judged),
            "held": sum(not row["wrong"] for row in judged), "asked": len(judged),
            "named": [" or ".join(m.says for m in equal) for _, equal in named],
            "differs": [short(row) for row in rest],
            "refused": [short(row) for row in wrong if not row["errors"]],
        })  # fmt: skip
    print(json.dumps(rows))


def short(row):
    """A case by the beginning of what it says."""
    return row["says"].removesuffix(", float32").split(":")[0].split(", and")[0]


def judged(folder):
    """The rows, from a process that has the packages in this folder. Raises OSError if they cannot be installed."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--retries",
        "1",
        "--no-deps",
        "--target",
        str(folder),
        *PACKAGES,
    ]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.stderr.strip().splitlines()[-1])
    run = "import sys; sys.path[:0] = sys.argv[1:]; from tests.support import published; published.main()"
    environment = os.environ | {"KERAS_BACKEND": "torch", "STEPS_ENGINE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", run, str(ROOT), str(folder)],
        capture_output=True, text=True, env=environment, cwd=folder,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def table(rows):
    """The rows as Markdown."""
    lines = ["| function | properties | what differs | not taken |", "|---|---|---|---|"]
    for row in rows:
        differs = row["named"] + [f"other results in: {'; '.join(row['differs'])}"] * bool(row["differs"])
        not_taken = [*row["lacks"], *row["refused"]] + ["backward on a CPU"] * (not row["backward"])
        cells = (
            f"{row['function']}<br>{row['package']}".removesuffix("<br>"),
            f"{row['held']} of {row['asked']}",
            "<br>".join(differs) or "nothing",
            "; ".join(not_taken) or "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(text, rows):
    """The page with the table of these rows."""
    before, _, after = text.split(MARK)
    return f"{before}{MARK}\n{table(rows)}\n{MARK}{after}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(filled(PAGE.read_text(), judged(folder)))
