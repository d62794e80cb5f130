"""Stage 03 in people's models: which calls of torch's attention reach the kernel, and Hugging Face's transformers."""

import contextlib
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import steps.step03_triton as step03
from steps import engine
from steps.step03_triton.features import models
from steps.step03_triton.replay import Recording

B, H, N, D = 2, 2, 12, 16
NEAR = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    step03.set_deterministic(None)
    torch._dynamo.reset()


@pytest.fixture
def in_sdpa():
    """use_in_sdpa, which leaves nothing behind."""
    if torch.__version__ < (2, 13):
        pytest.skip("needs torch 2.13")
    yield step03.use_in_sdpa
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.nn.attention.current_flash_attention_impl() is None


@pytest.fixture
def arrived(monkeypatch):
    """The names of the launchers that ran, in their order."""
    names, record, replay = [], Recording.record, Recording.replay

    def noted_record(self, function, *given):
        names.append(function.__name__)
        return record(self, function, *given)

    def noted_replay(self, tensors):
        names.append(self.function.__name__)
        return replay(self, tensors)

    monkeypatch.setattr(Recording, "record", noted_record)
    monkeypatch.setattr(Recording, "replay", noted_replay)
    return names


def random(*shape, seed=0, dtype=torch.float32, gradient=True):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x.to(engine.device, dtype).requires_grad_(gradient)


def example(*, query=(B, H, N, D), key=(B, H, N, D), value=None, dtype=torch.float32):
    return [random(*shape, seed=n, dtype=dtype) for n, shape in enumerate((query, key, value or key))]


def result_and_gradients(tensors, **options):
    """What scaled_dot_product_attention gives, and its gradients in q, k, v and in a mask that requires one."""
    out = F.scaled_dot_product_attention(*tensors, **options)
    leaves = [x for x in (*tensors, options.get("attn_mask")) if x is not None and x.requires_grad]
    return out, *torch.autograd.grad(out, leaves, random(*out.shape, seed=9, dtype=out.dtype, gradient=False))


SEEN = torch.arange(N, device=engine.device) < torch.tensor([[7], [N]], device=engine.device)
CALLS = {  # {name: (shapes and dtype of the tensors, arguments)}
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "scale": ({}, {"scale": 0.5}),
    "bool mask": ({}, {"attn_mask": SEEN[:, None, None]}),
    "added mask": ({}, {"attn_mask": random(H, N, N, seed=5, gradient=False)}),
    "mask with gradient": ({}, {"attn_mask": random(1, H, N, N, seed=5)}),
    "GQA": ({"query": (1, 4, N, D), "key": (1, 2, N, D)}, {"enable_gqa": True}),
    "3-D": ({"query": (H, N, D), "key": (H, N, D)}, {}),
    "2-D": ({"query": (N, D), "key": (N, D)}, {}),
    "5-D": ({"query": (1, B, H, N, D), "key": (1, B, H, N, D)}, {}),
    "Nq < Nk causal": ({"query": (B, H, 7, D)}, {"is_causal": True}),
    "Nq > Nk causal": ({"query": (B, H, 20, D)}, {"is_causal": True}),
    "float16": ({"dtype": torch.float16}, {"is_causal": True}),
}
HEADS_OF_20 = {"query": (B, H, N, D), "key": (B, H, N, D), "value": (B, H, N, 20)}
LEFT_TO_TORCH = {
    "float64": ({"dtype": torch.float64}, {}),
    "head_dim 264": ({"query": (1, 1, N, 264), "key": (1, 1, N, 264)}, {}),
    "head_dim of value": (HEADS_OF_20, {}),
    "all dropped": ({}, {"dropout_p": 1.0}),
    "mask and causal": ({}, {"attn_mask": SEEN[:, None, None], "is_causal": True}),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_arrive_are_what_torch_computes(call, in_sdpa, arrived):
    shapes, options = CALLS[call]
    tensors = example(**shapes)
    expected = result_and_gradients(tensors, **options)
    with in_sdpa():
        found = result_and_gradients(tensors, **options)
    assert arrived == ["forward", "backward"]
    near = {"rtol": 5e-3, "atol": 5e-3} if tensors[0].dtype == torch.float16 else NEAR
    torch.testing.assert_close(found, expected, **near)


@pytest.mark.parametrize("call", LEFT_TO_TORCH)
def test_calls_that_are_left_to_torch(call, in_sdpa, arrived):
    shapes, options = LEFT_TO_TORCH[call]
    tensors = example(**shapes)
    try:
        expected = F.scaled_dot_product_attention(*tensors, **options)
    except RuntimeError as e:  # torch 2.15 refuses a mask beside is_causal, older ones on some devices
        with in_sdpa(), pytest.raises(RuntimeError, match=re.escape(str(e))):
            F.scaled_dot_product_attention(*tensors, **options)
        assert arrived == []
        return
    with in_sdpa():
        found = F.scaled_dot_product_attention(*tensors, **options)
    assert arrived == []
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [None, 0.3, 1e-30, 1e-40, 0.0, -0.0, -0.3, 3e38, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dropout_p", [0.0, 1.0, 1.5, -0.5, math.nan])
def test_numbers_and_combinations_are_torchs(scale, dropout_p, in_sdpa):
    """What torch computes is computed, and what torch refuses is refused, whichever of the two kernels it is."""
    q, k, v = (x.detach() for x in example())
    masks = None, SEEN[:, None, None], random(H, N, N, seed=5, gradient=False), torch.ones(N, N, dtype=torch.int64)
    for mask, is_causal, enable_gqa in itertools.product(masks, (False, True), (False, True)):
        options = dict(attn_mask=mask, is_causal=is_causal, enable_gqa=enable_gqa, scale=scale, dropout_p=dropout_p)
        try:
            expected = F.scaled_dot_product_attention(q, k, v, **options)
        except RuntimeError:
            with in_sdpa(), pytest.raises(RuntimeError):
                F.scaled_dot_product_attention(q, k, v, **options)
            continue
        with in_sdpa():
            found = F.scaled_dot_product_attention(q, k, v, **options)
        torch.testing.assert_close(found, expected, equal_nan=True, **NEAR)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_transforms_and_other_kernels_are_left_to_torch(in_sdpa, arrived):
    q, k, v = example()

    def loss(q):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum()

    expected = torch.func.grad(loss)(q)
    with in_sdpa():
        torch.testing.assert_close(torch.func.grad(loss)(q), expected)
        torch.vmap(F.scaled_dot_product_attention)(q, k, v)
        with sdpa_kernel(SDPBackend.MATH):
            torch.autograd.functional.hvp(loss, q, q)  # Only this kernel of torch has second derivatives.
            slope = torch.func.jvp(loss, (q,), (q,))[1]
        with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward AD"):
            F.scaled_dot_product_attention(torch.autograd.forward_ad.make_dual(q, q), k, v)
    torch.testing.assert_close(slope, (expected * q).sum(), **NEAR)
    nested = torch.nested.nested_tensor([random(H, n, D, gradient=False) for n in (5, 9)])
    expected = F.scaled_dot_product_attention(nested, nested, nested)
    with in_sdpa():
        found = F.scaled_dot_product_attention(nested, nested, nested)
    torch.testing.assert_close(found.unbind(), expected.unbind(), rtol=0, atol=0)
    assert arrived == []


@pytest.fixture
def taken(monkeypatch):
    """The queries that arrive."""
    queries = []
    monkeypatch.setattr(models, "sdpa", lambda query, *others, **options: queries.append(query) or query)
    return queries


def test_before_ampere_16_bits_and_large_head_dims_are_left_to_torch(taken, in_sdpa, monkeypatch):
    monkeypatch.setattr(models.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with in_sdpa(), FakeTensorMode():
        for D, dtype in ((64, torch.float16), (128, torch.float32), (136, torch.float32), (32, torch.bfloat16)):
            q, k, v = torch.empty(3, 1, H, N, D, device="cuda", dtype=dtype)
            F.scaled_dot_product_attention(q, k, v)
    assert [x.shape[-1] for x in taken] == [128]


@pytest.mark.parametrize("interpreted", [True, False])
def test_on_every_device_the_call_arrives_before_torch_chooses(interpreted, taken, in_sdpa, monkeypatch):
    """The kernels run on a CPU in the interpreter, and compiled on a GPU. The tensors have no memory: no GPU needed."""
    monkeypatch.setattr(models.triton.knobs.runtime, "interpret", interpreted)
    with in_sdpa(), FakeTensorMode():
        for device, dtype in itertools.product(("cpu", "cuda"), (torch.float16, torch.float32)):
            q, k, v, mask = torch.empty(4, H, N, N, device=device, dtype=dtype)
            F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1)
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert [x.device.type for x in taken] == ["cpu" if interpreted else "cuda"] * 4


def test_dropout_is_drawn_by_torchs_generator(in_sdpa, arrived):
    tensors = example()
    with in_sdpa():
        torch.manual_seed(3)
        first = result_and_gradients(tensors, dropout_p=0.3)
        other = F.scaled_dot_product_attention(*tensors, dropout_p=0.3)
        torch.manual_seed(3)
        again = result_and_gradients(tensors, dropout_p=0.3)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    assert not torch.equal(other, first[0])
    assert arrived == ["forward", "backward", "forward", "forward", "backward"]
    torch.manual_seed(3)
    torch.testing.assert_close(step03.sdpa(*tensors, dropout_p=0.3), first[0], rtol=0, atol=0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("training", [True, False])
def test_multihead_attention(mode, training, autocast, in_sdpa, arrived):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(H * D, H, batch_first=True, device=engine.device).train(training)
    x = random(B, N, H * D, gradient=False)
    with mode(), torch.autocast(engine.device, torch.float16, enabled=autocast):
        expected, _ = layer(x, x, x, key_padding_mask=~SEEN, need_weights=False)
        with in_sdpa():
            found, weights = layer(x, x, x, key_padding_mask=~SEEN, need_weights=False)
            assert arrived == ["forward"] and weights is None
            layer(x, x, x)  # It asks for the matrix P.
    assert arrived == ["forward"]
    torch.testing.assert_close(found, expected, **({"rtol": 2e-2, "atol": 2e-2} if autocast else NEAR))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_compiled_without_a_break(mode, in_sdpa, arrived):
    def layer(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sin()

    tensors = *example(), random(1, H, N, N, seed=5)
    with mode(), in_sdpa():
        expected, found = layer(*tensors), torch.compile(layer, fullgraph=True, backend="aot_eager")(*tensors)
        assert arrived == ["forward"] * 2
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        if mode is torch.enable_grad:
            ours, theirs = (torch.autograd.grad(x.sum(), tensors) for x in (found, expected))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
            assert arrived[2:] == ["backward"] * 2


def test_what_torch_compile_keeps_on_disk_never_crosses_the_context(in_sdpa, arrived):
    """The same graph is compiled outside, inside and outside; between that, torch forgets what is in memory."""
    tensors = [x.detach() for x in example()]
    with torch._inductor.utils.fresh_cache():
        for inside in (False, True, False):
            torch._dynamo.reset()
            arrived.clear()
            with in_sdpa() if inside else contextlib.nullcontext():
                torch.compile(F.scaled_dot_product_attention, fullgraph=True)(*tensors)
            assert arrived == ["forward"] * inside


def test_leaving_restores_torch(in_sdpa, arrived):
    q, k, v = example()
    with pytest.raises(KeyError), in_sdpa():
        assert torch.nn.attention.current_flash_attention_impl() == models.NAME
        with in_sdpa():
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
        assert arrived == ["forward"] * 2
        raise KeyError
    assert "ScaledDotProduct" in F.scaled_dot_product_attention(q, k, v).grad_fn.name()
    assert arrived == ["forward"] * 2


@pytest.mark.parametrize("on", [True, False])
def test_switches_come_back_as_they_were(on):
    if torch.__version__ < (2, 13):
        pytest.skip("needs torch 2.13")
    config, before = torch._functorch.config, torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(on)
    try:
        with config.patch(enable_autograd_cache=on):
            with step03.use_in_sdpa():
                assert not torch.backends.mha.get_fastpath_enabled() and not config.enable_autograd_cache
            assert torch.backends.mha.get_fastpath_enabled() == config.enable_autograd_cache == on
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_another_kernel_of_the_registry_comes_back(in_sdpa):
    entered = []

    class Other:
        def __init__(self):
            entered.append("other")

        def remove(self):
            entered.append("removed")

    torch.nn.attention.register_flash_attention_impl("other", register_fn=Other)
    torch.nn.attention.activate_flash_attention_impl("other")
    with in_sdpa():
        assert torch.nn.attention.current_flash_attention_impl() == models.NAME
    assert torch.nn.attention.current_flash_attention_impl() == "other" and entered == ["other", "removed", "other"]
    torch.nn.attention.restore_flash_attention_impl()


@pytest.mark.parametrize("place, name", [(torch.nn.attention, "register_flash_attention_impl"),
                                         (torch.library, "get_kernel")])  # fmt: skip
def test_an_older_torch_is_named(place, name, monkeypatch):
    monkeypatch.delattr(place, name, raising=False)
    with pytest.raises(RuntimeError, match=rf"torch 2\.13; this is torch {torch.__version__[:4]}.*sdpa"):
        with step03.use_in_sdpa():
            pass


# ---- transformers ----------------------------------------------------------------------------------------------------


MODELS = {  # Gemma 2 and its relatives have a soft-cap, and a window in every other layer; gpt-oss has sinks.
    "Llama": {},
    "Gemma2": {"attn_logit_softcapping": 0.05, "sliding_window": 5, "head_dim": 16, "query_pre_attn_scalar": 16},
    "VaultGemma": {"attn_logit_softcapping": 0.05, "sliding_window": 5, "head_dim": 16, "query_pre_attn_scalar": 16},
    "T5Gemma": {"attn_logit_softcapping": 0.05, "sliding_window": 5, "head_dim": 16, "query_pre_attn_scalar": 16},
    "GptOss": {"sliding_window": 5, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1},
}
every_model = pytest.mark.parametrize("name", MODELS)


def small_model(name, implementation):
    """The same small random model on any implementation of attention."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    given, ids = sizes | heads | MODELS[name], {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{name}Config")
    if name == "T5Gemma":
        given = {"encoder": given | ids, "decoder": given | ids, "vocab_size": 50}
    torch.manual_seed(0)
    kind = "ForConditionalGeneration" if name == "T5Gemma" else "ForCausalLM"
    model = getattr(transformers, name + kind)(config(**given, **ids, attn_implementation=implementation))
    return model.to(engine.device)


def tokens():
    """A batch of two sequences, and its mask: the first sequence has three tokens of padding on its left."""
    ids = torch.randint(3, 50, (B, N), generator=torch.Generator().manual_seed(1)).to(engine.device)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return ids * mask, mask


def logits_and_gradients(model, ids, mask=None):
    """Those of tokens that are no padding: of a row without a key the eager kernel makes a mean, and ours makes 0."""
    seen = torch.ones_like(ids) if mask is None else mask
    labels = ids.where(seen.cumsum(1) > 1, -100)  # The token before, which is padding for the first, is to say it.
    result = model(input_ids=ids, attention_mask=mask, labels=labels)
    result.loss.backward()
    return result.logits[seen == 1], {name: x.grad for name, x in model.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize("padded", [False, True])
@every_model
def test_a_model_computes_and_learns_the_same(name, padded, arrived):
    ids, mask = tokens()
    inputs = (ids, mask) if padded else (ids,)
    expected = logits_and_gradients(small_model(name, "eager").eval(), *inputs)
    assert arrived == []
    found = logits_and_gradients(small_model(name, step03.register_with_transformers()).eval(), *inputs)
    layers = 6 if name == "T5Gemma" else 2  # two of the encoder, two of the decoder, two from one to the other
    assert arrived == ["forward"] * layers + ["backward"] * layers
    torch.testing.assert_close(found, expected, **NEAR)


@pytest.mark.long
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("cache", [None, "static"])
@every_model
def test_a_model_generates_the_same(name, cache, padded, arrived):
    ids, mask = tokens()
    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": cache, "output_logits": True}
    options |= {"return_dict_in_generate": True, "attention_mask": mask if padded else torch.ones_like(mask)}
    ours = step03.register_with_transformers()
    expected, found = (small_model(name, x).eval().generate(ids, **options) for x in ("eager", ours))
    assert len(arrived) >= 2 * len(found.logits) and {*arrived} == {"forward"}
    assert found.sequences.equal(expected.sequences)
    torch.testing.assert_close(found.logits, expected.logits, **NEAR)


@pytest.mark.long
@every_model
def test_a_model_continues_from_a_cache_with_several_tokens(name, arrived):
    """A prompt in two parts, of which the second has several queries behind the keys of the first."""
    if name == "T5Gemma":
        pytest.skip("its decoder begins after the whole prompt")
    ids, mask = tokens()
    results = []
    for implementation in ("eager", step03.register_with_transformers()):
        model = small_model(name, implementation).eval()
        with torch.no_grad():
            first = model(ids[:, :7], attention_mask=mask[:, :7], use_cache=True)
            rest = model(ids[:, 7:], attention_mask=mask, past_key_values=first.past_key_values)
            whole = model(ids, attention_mask=mask).logits
        results.append(rest.logits)
        torch.testing.assert_close(rest.logits, whole[:, 7:], **NEAR)
    torch.testing.assert_close(*results, **NEAR)


@pytest.mark.long
def test_a_compiled_model():
    ids, mask = tokens()
    model = small_model("Gemma2", step03.register_with_transformers()).eval()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        found = torch.compile(model, backend="aot_eager")(ids, attention_mask=mask).logits
    torch.testing.assert_close(found, expected, **NEAR)


@pytest.mark.long
def test_without_the_mask_function_padding_would_be_seen(monkeypatch):
    """What happens to those who register the attention alone."""
    ids, mask = tokens()
    name = step03.register_with_transformers("without_masks")
    transformers = pytest.importorskip("transformers")
    monkeypatch.delitem(transformers.AttentionMaskInterface._global_mapping, name)
    with torch.no_grad():
        found, expected = (small_model("Llama", x)(input_ids=ids, attention_mask=mask).logits for x in (name, "sdpa"))
    torch.testing.assert_close(found[1], expected[1], **NEAR)
    assert (found[0] - expected[0])[3:].abs().max() > 0.01


@pytest.mark.long
def test_a_model_that_does_not_call_other_kernels_is_refused():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "n_layer": 1, "n_head": 4, "vocab_size": 50}
    config = transformers.BloomConfig(**sizes, attn_implementation=step03.register_with_transformers())
    model = transformers.BloomForCausalLM(config)
    for padded in (False, True):
        ids, mask = tokens()
        with pytest.raises(ValueError, match="BloomConfig compute attention themselves"):
            model(ids, **({"attention_mask": mask} if padded else {}))


@pytest.mark.long
def test_a_model_whose_values_have_another_head_dim_is_refused():
    transformers = pytest.importorskip("transformers")
    given = OF_TEXT | {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
    given |= {"first_k_dense_replace": 2}  # so many layers without experts
    words = ("v of a model with this DeepseekV3Config has head_dim D_v = 16, q and k have D = 24, and stage 03 needs "
             "D_v = D. Use attn_implementation='eager'.")  # fmt: skip
    ids, mask = tokens()
    for D_v in (16, 24):
        config = transformers.DeepseekV3Config(**given, v_head_dim=D_v)
        config._attn_implementation = step03.register_with_transformers()
        model = transformers.DeepseekV3Model(config)
        if D_v == 24:
            assert model(ids, attention_mask=mask)[0].isfinite().all()
            continue
        for padded in ({}, {"attention_mask": mask}):
            with pytest.raises(ValueError) as refused:
                model(ids, **padded)
            assert str(refused.value) == words


# {what works unchanged: (its class in transformers, its configuration)}; it is in the table of the stage's README.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_TEXT = SIZES | {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
OF_DECODER = OF_TEXT | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 5}
OF_IMAGES = SIZES | {"image_size": 16, "patch_size": 4}
WHISPER = {"d_model": 64, "num_mel_bins": 8, "max_source_positions": N, "max_target_positions": 20, "vocab_size": 50,
           "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
           "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "pad_token_id": 0, "decoder_start_token_id": 1}  # fmt: skip
IN_TRANSFORMERS = {
    "BERT": ("Bert", OF_TEXT),
    "ModernBERT": ("ModernBert", OF_TEXT | {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}),
    "ViT": ("ViT", OF_IMAGES),
    "Whisper": ("Whisper", WHISPER),
    "CLIP": ("CLIP", {"text_config": OF_TEXT, "vision_config": OF_IMAGES, "projection_dim": 32}),
    "GPT-2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 50, "eos_token_id": 2}),
    "Gemma 3": ("Gemma3Text", OF_DECODER | {"query_pre_attn_scalar": 16}),
    "Qwen 3": ("Qwen3", OF_DECODER | {"use_sliding_window": True, "max_window_layers": 1}),
    "Cohere 2": ("Cohere2", OF_DECODER),
    "Mixtral": ("Mixtral", OF_DECODER | {"num_local_experts": 2}),
    "Llama": ("Llama", OF_DECODER),
    "T5": ("T5", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 50,
                  "decoder_start_token_id": 0}),
}  # fmt: skip


def inputs_of(name):
    ids, mask = tokens()
    text, images = {"input_ids": ids, "attention_mask": mask}, {"pixel_values": random(B, 3, 16, 16, gradient=False)}
    if name == "Whisper":
        return {"input_features": random(B, 8, 2 * N, gradient=False), "decoder_input_ids": ids}
    if name == "T5":
        return text | {"decoder_input_ids": ids[:, :7]}
    return images if name == "ViT" else text | images if name == "CLIP" else text


def outputs_and_gradients(model, seen, **inputs):
    """The first result at the tokens that are no padding, and the gradients of a random sum of it."""
    out = model(**inputs)
    out = out if isinstance(out, torch.Tensor) else out[0]
    out = out[seen == 1] if seen is not None and out.shape[:2] == seen.shape else out
    (out * random(*out.shape, seed=7, gradient=False)).sum().backward()
    return out.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def compare(expected, found):
    """Gradients within rounding of the largest one: some are 0 but for rounding, such as that of a key's bias."""
    torch.testing.assert_close(found[0], expected[0], **NEAR)
    largest = max(x.abs().max().item() for x in expected[1].values())
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6 * largest)


@pytest.mark.long
@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_what_works_unchanged_in_transformers(name, arrived):
    transformers = pytest.importorskip("transformers")
    kind, given = IN_TRANSFORMERS[name]
    inputs, results = inputs_of(name), []
    seen = inputs.get("attention_mask") if name not in ("CLIP", "T5") else None
    for implementation in ("eager", step03.register_with_transformers()):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**given, attn_implementation=implementation)
        model = getattr(transformers, f"{kind}Model")(config).to(engine.device).eval()
        assert arrived == []
        results.append(outputs_and_gradients(model, seen, **inputs))
    compare(*results)
    assert arrived.count("forward") == arrived.count("backward") >= 2
    if name == "T5":
        bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        assert results[1][1][bias].abs().max() > 0.01


def encoder():
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
    inputs = {"src": random(B, N, 64, gradient=False), "src_key_padding_mask": ~SEEN}
    return torch.nn.TransformerEncoder(layer, 2), inputs


def multihead():
    x = random(B, N, 64, gradient=False)
    return torch.nn.MultiheadAttention(64, 4, batch_first=True), dict(query=x, key=x, value=x, need_weights=False)


def unet():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=1,
        norm_num_groups=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32, attention_head_dim=2,
    )  # fmt: skip
    text = random(B, 7, 32, seed=1, gradient=False)
    inputs = {"sample": random(B, 4, 8, 8, gradient=False), "timestep": torch.tensor(5), "encoder_hidden_states": text}
    return model, inputs | {"return_dict": False}


def flux():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=8, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(7, 3)}
    inputs |= {"hidden_states": random(1, 16, 8, gradient=False)}
    inputs |= {"encoder_hidden_states": random(1, 7, 32, seed=1, gradient=False), "timestep": torch.tensor([0.5])}
    return model, inputs | {"pooled_projections": random(1, 32, seed=2, gradient=False), "return_dict": False}


IN_SDPA = {"torch.nn.TransformerEncoder": encoder, "torch.nn.MultiheadAttention": multihead,
           "UNet2DConditionModel": unet, "FluxTransformer2DModel": flux}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", IN_SDPA)
def test_what_works_unchanged_in_sdpa(name, in_sdpa, arrived):
    results = []
    for context in (contextlib.nullcontext, in_sdpa):
        torch.manual_seed(0)
        model, inputs = IN_SDPA[name]()
        inputs = {name: x.to(engine.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
        model = model.to(engine.device).eval()
        assert arrived == []
        with context():
            results.append(outputs_and_gradients(model, None, **inputs))
    compare(*results)
    assert arrived.count("forward") == arrived.count("backward") >= 1


def test_the_page_names_what_was_run_unchanged():
    page = (Path(step03.__file__).parent / "README.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `register_with") or line.startswith("| `use_in")]
    named = [name.strip(" `") for row in rows for name in row.split("|")[2].split(",")]
    assert named == [*IN_TRANSFORMERS, *IN_SDPA]


@pytest.mark.parametrize("says", [True, False, None])
def test_a_call_that_does_not_say_whether_it_is_causal_asks_the_module(says):
    tensors, module = example(), torch.nn.Module()
    if says is not None:
        module.is_causal = says
    out, _ = models.attend(module, *tensors, None, is_causal=None)
    expected = step03.attention(*tensors, causal=says is not False)
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=0)


CHUNK, KEYS = 3, 8  # Three queries stand behind five cached keys.
BEHIND = torch.ones(CHUNK, KEYS, dtype=torch.bool, device=engine.device).tril(KEYS - CHUNK)
SINKS = random(H, seed=3)
ASKED = {  # what a model asks for, and the same for `attention`
    "mask": ({"attention_mask": BEHIND}, {"mask": BEHIND}),
    "added mask": ({"attention_mask": BEHIND.float().log()}, {"mask": BEHIND}),
    "window": ({"attention_mask": BEHIND & torch.ones_like(BEHIND).triu(3)}, {"window": (2, 0)}),
    "softcap": ({"attention_mask": BEHIND, "softcap": 0.5}, {"mask": BEHIND, "softcap": 0.5}),
    "sinks": ({"attention_mask": BEHIND, "s_aux": SINKS}, {"mask": BEHIND, "sinks": SINKS}),
    "scaling": ({"attention_mask": BEHIND, "scaling": 0.7}, {"mask": BEHIND, "scale": 0.7}),
    "dropout": ({"attention_mask": BEHIND, "dropout": 0.4}, {"mask": BEHIND, "dropout_p": 0.4, "seed": 5 << 32}),
    "no mask, not causal": ({"attention_mask": None, "is_causal": False}, {}),
    "no mask": ({"attention_mask": None}, {"causal": True, "first_query": 0}),  # The keys behind it are still empty.
}  # fmt: skip


@pytest.mark.parametrize("name", ASKED)
def test_a_chunk_of_queries_behind_a_cache(name):
    """A mask says all that is seen: is_causal, which torch aligns at the top left, must not be added to it."""
    asked, given = ASKED[name]
    q, k, v = example(query=(1, 2, CHUNK, D), key=(1, 2, KEYS, D))
    module = torch.nn.Module()
    module.is_causal = True
    step03.set_deterministic(5)
    out, _ = models.attend(module, q, k, v, **asked)
    with torch.no_grad():
        expected, _ = step03.forward(q, k, v, **given)
    torch.testing.assert_close(out.transpose(1, 2), expected, **NEAR)


def test_one_query_behind_a_cache_sees_every_key():
    q, k, v = example(query=(1, 2, 1, D), key=(1, 2, KEYS, D))
    out, _ = models.attend(torch.nn.Module(), q, k, v, None)
    torch.testing.assert_close(out.transpose(1, 2), step03.attention(q, k, v), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["sinks", "cache", "indices", "block_indices"])
def test_what_a_model_asks_for_in_vain(name):
    with pytest.raises(NotImplementedError, match=name):
        models.attend(torch.nn.Module(), *example(), None, **{name: torch.zeros(H)})
