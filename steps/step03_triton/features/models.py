# SPDX-License-Identifier: MIT
"""The stage's attention in models that exist, without a change in their code.

    with use_in_sdpa():                 torch.nn.functional.scaled_dot_product_attention computes with our kernels
        model(x)

    register_with_transformers()        a name for attn_implementation= in Hugging Face's transformers

torch has a registry of flash attention kernels, and `use_in_sdpa` registers ours there. FlashAttention-4, which torch
registers there itself, replaces the operators that compute flash attention on a GPU. They have no mask, and torch calls
them in 16 bits only. We replace the operator above them, aten::scaled_dot_product_attention, in which torch chooses a
kernel: so our function gets a call before torch has chosen, on a CPU and on a GPU. torch computes the calls that our
kernels do not take.

    call of scaled_dot_product_attention                          computed by
    float16, bfloat16, float32; 2 dimensions or more              ours
    attn_mask, bool or added, also with a gradient                ours
    dropout_p < 1; scale > 0; is_causal; enable_gqa; Nq != Nk     ours
    under torch.compile, autocast, inference_mode                 ours
    nn.MultiheadAttention(need_weights=False), nn.Transformer     ours
    head_dim > 256, or that of value is another; float64          torch
    before Ampere float16, bfloat16, and head_dim > 128           torch
    tensors on a device that the kernels do not run on; nested    torch
    dropout_p = 1; a scale of 0, below it, or near float32's ends torch
    attn_mask with is_causal                                      torch
    torch.func (grad, vmap, jvp); forward-mode derivatives        torch
    under sdpa_kernel(...) without FLASH_ATTENTION                torch, with the kernel that was asked for
    nn.MultiheadAttention with need_weights=True                  no call: it computes P as a matrix itself
    in a function that was compiled outside of the context        as compiled

Left out: the mask of T5 in transformers.
"""

import contextlib
import math

import torch
import triton
from torch._functorch import config as compiling
from torch.autograd import forward_ad

from ..functions import attention
from ..rungs import taken_on
from .options import FLOATS
from .sdpa import sdpa_of

NAME = "steps_triton"
OPERATOR = "scaled_dot_product_attention"
sdpa = sdpa_of(attention)


@contextlib.contextmanager
def use_in_sdpa():
    """Within this context torch's scaled_dot_product_attention computes with our kernels, in all threads.

    Afterwards, also after an exception, torch computes as before. A compiled function keeps the kernel with which it
    was compiled: compile it in the context, or call torch.compiler.reset(). Raises RuntimeError if torch is too old.
    """
    check_torch()
    registry, mha = torch.nn.attention, torch.backends.mha
    before, fastpath = registry.current_flash_attention_impl(), mha.get_fastpath_enabled()
    registry.register_flash_attention_impl(NAME, register_fn=Registration)
    registry.activate_flash_attention_impl(NAME)
    mha.set_fastpath_enabled(False)  # In this path nn.MultiheadAttention does not call scaled_dot_product_attention.
    try:
        # torch.compile keeps its results on disk, and does not know that they now depend on the context.
        with compiling.patch(enable_autograd_cache=False):
            yield
    finally:
        mha.set_fastpath_enabled(fastpath)
        registry.restore_flash_attention_impl()
        if before is not None:
            registry.activate_flash_attention_impl(before)


def check_torch():
    """Raises RuntimeError unless torch has its registry of flash attention, and library.get_kernel."""
    has_registry = hasattr(torch.nn.attention, "register_flash_attention_impl")
    if not (has_registry and hasattr(torch.library, "get_kernel")):
        raise RuntimeError(
            f"use_in_sdpa needs torch.nn.attention.register_flash_attention_impl of torch 2.13; this is torch "
            f"{torch.__version__}. Update torch, or call steps.step03_triton.sdpa, which needs no registry."
        )


class Registration:
    """Our kernel in the place of torch's operator, from now on until torch's registry calls `remove`."""

    def __init__(self):
        torchs = torch.library.get_kernel(f"aten::{OPERATOR}", "CPU")  # It is the same for every device.

        def choose(keys, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
                   enable_gqa=False):  # fmt: skip
            arguments = query, key, value, attn_mask, dropout_p, is_causal
            options = {"scale": scale, "enable_gqa": enable_gqa}
            if takes(*arguments, scale):
                return sdpa(*arguments, **options)
            return torchs.call_boxed(keys, *arguments, **options)

        self.library = torch.library.Library("aten", "IMPL")
        self.library.impl(OPERATOR, choose, "CompositeImplicitAutograd", with_keyset=True)

    def remove(self):
        self.library = None  # torch takes a registration back when its library ceases to exist.


def takes(query, key, value, attn_mask, dropout_p, is_causal, scale):
    """Whether our kernels compute this call: the table above."""
    tensors, float32 = (query, key, value), torch.finfo(torch.float32)
    device = "cpu" if triton.knobs.runtime.interpret else "cuda"
    dtypes, head_dims = taken_on(query.device)
    return (
        not any(x.is_nested for x in tensors)
        and query.dtype in dtypes
        and all(x.dtype == query.dtype and x.device.type == device and x.ndim >= 2 for x in tensors)
        and query.shape[-1] == key.shape[-1] == value.shape[-1]
        and query.shape[-1] in head_dims
        and 0 <= dropout_p < 1
        and (scale is None or float32.tiny <= scale <= float32.max * math.log(2))  # Kernels multiply it by log2(e).
        and (attn_mask is None or not is_causal and takes_mask(attn_mask, query))
        and torch.backends.cuda.flash_sdp_enabled()  # sdpa_kernel(...) without FLASH_ATTENTION switches it off.
        and torch._C._functorch.peek_interpreter_stack() is None  # Otherwise this is a call within torch.func.
        and all(forward_ad.unpack_dual(x).tangent is None for x in tensors)
    )


def takes_mask(mask, query):
    dense = not mask.is_nested and mask.layout is torch.strided
    return dense and mask.dtype in (torch.bool, *FLOATS) and mask.device == query.device


def register_with_transformers(name=NAME):
    """Makes our kernels known to Hugging Face's transformers (tested with 5.23), and returns the name.

        model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=register_with_transformers())

    A name with "sdpa" in it would exclude models with a soft-cap, such as Gemma 2, because torch's function has none.
    With another name transformers accepts any model. But a model that always uses its own kernel, such as BLOOM, would
    add our boolean mask to its scores: such a model gets a ValueError when it asks for its mask. So does a model whose
    values have another head_dim than its keys, such as DeepSeek-V3. A row that sees no key, as left padding has, gets 0
    here, and a mean of all values in transformers' own "eager": loss and gradients differ unless the labels of the
    padding are -100. Raises ImportError without transformers.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    check = torch.compiler.assume_constant_result(check_model)  # torch.compile must not trace it.

    def mask(*args, config=None, **options):
        check(config)
        return sdpa_mask(*args, config=config, **options)

    AttentionInterface.register(name, attend)
    # Without a mask function under the same name transformers makes no mask, and padding would be seen.
    AttentionMaskInterface.register(name, mask)
    return name


def check_model(config):
    """Raises ValueError unless the models of this configuration call the kernel that it names, with D_v = D."""
    from transformers import PreTrainedModel

    known, waiting = set(), [PreTrainedModel]
    while waiting:
        known.update(more := waiting.pop().__subclasses__())
        waiting += more
    kind = type(config)
    # A part of a larger model may have a configuration of its own, as the decoder of T5Gemma.
    own = [x for x in known if x.config_class is kind] or [x for x in known if package(x) == package(kind)]
    if not any(x._supports_attention_backend or x._supports_sdpa for x in own):
        raise ValueError(
            f"models with a {kind.__name__} compute attention themselves, and call no kernel of stage 03. "
            "Use attn_implementation='eager'."
        )
    D, D_v = head_dims(config)
    if D != D_v:
        raise ValueError(
            f"v of a model with this {kind.__name__} has head_dim D_v = {D_v}, q and k have D = {D}, and stage 03 "
            "needs D_v = D. Use attn_implementation='eager'."
        )


def head_dims(config):
    """(that of q and k, that of v) where a configuration says both, as those of multi-head latent attention do."""
    D_v = getattr(config, "v_head_dim", None)
    parts = [getattr(config, f"qk_{part}_head_dim", None) for part in ("nope", "rope")]
    return (D_v, D_v) if D_v is None or None in parts else (sum(parts), D_v)


def package(kind):
    return kind.__module__.rpartition(".")[0]


def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, softcap=None,
           s_aux=None, position_bias=None, **more):  # fmt: skip
    """(out (B, Nq, H, D), None) as transformers asks for it; query (B, H, Nq, D), key and value (B, Hk, Nk, D).

    Without a mask a decoder's queries see the keys as with torch's is_causal, aligned at the top left: in a cache that
    was allocated longer, the keys after the queries are still empty. One query sees all keys. s_aux: the sinks of
    gpt-oss. position_bias: T5's, which is added to the scores, and has a gradient.
    """
    for name in ("sinks", "cache", "indices", "block_indices"):
        if more.get(name) is not None:
            raise NotImplementedError(f"stage 03 takes no {name} of a model. Use attn_implementation='eager'.")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = is_causal and attention_mask is None and query.shape[2] > 1
    first_query = 0 if causal and query.shape[2] != key.shape[2] else None
    out = attention(
        query, key, value, causal=causal, scale=scaling, mask=with_bias(attention_mask, position_bias),
        dropout_p=dropout, softcap=softcap, sinks=s_aux, first_query=first_query,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def with_bias(mask, bias):
    """The mask with a bias that is added to the scores; each may be None. Both together take memory like the scores."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return bias.where(mask, -math.inf) if mask.dtype == torch.bool else bias + mask
