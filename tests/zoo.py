"""Small random models of several families, a tokenizer of single characters and mechanisms: nothing is downloaded.

`tests.zoo_architectures` builds every class that transformers has, for the table of what converts.
"""

import copy
import string

import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from attngap import mechanism
from attngap.mechanisms.base import Mechanism
from attngap.models.shapes import layer_shapes

VOCABULARY = 96
SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
GROUPED = SHARED | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": None}
# Larger than the default weights, so that attention is far from uniform and greedy choices far from ties.
SPREAD = {"initializer_range": 0.3}

DECODERS = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**GROUPED, **SPREAD)),
    "mistral": (tf.MistralForCausalLM, tf.MistralConfig(**GROUPED, **SPREAD, sliding_window=None)),
    "qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config(**GROUPED, **SPREAD)),
    "gpt2": (
        tf.GPT2LMHeadModel,
        tf.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=512, **SPREAD,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        ),
    ),
}  # fmt: skip
OTHERS = {
    "sliding": (tf.MistralForCausalLM, tf.MistralConfig(**GROUPED, **SPREAD, sliding_window=10)),
    "bert": (tf.BertModel, tf.BertConfig(**SHARED, **SPREAD, pad_token_id=0)),
    "albert": (
        tf.AlbertModel,
        tf.AlbertConfig(**SHARED | {"num_hidden_layers": 3}, initializer_range=0.15, pad_token_id=0),
    ),
    "t5": (
        tf.T5ForConditionalGeneration,
        tf.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
        ),
    ),
}
FAMILIES = DECODERS | OTHERS


def tiny(name: str = "llama") -> tf.PreTrainedModel:
    """The same weights each time; attention is far from uniform."""
    torch.manual_seed(0)
    build, config = FAMILIES[name]
    return build(copy.deepcopy(config)).eval()  # a model writes into its config


def tokenizer(specials: bool = False) -> tf.PreTrainedTokenizerFast:
    """One token per character; with `specials` it adds [CLS] and [SEP] as BERT's does."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *string.printable.replace("\x0b", "").replace("\x0c", "")]
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words[:VOCABULARY])}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if specials:
        raw.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return tf.PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def inputs(model: tf.PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    found = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    if model.config.is_encoder_decoder:
        found |= {f"decoder_{name}": value for name, value in found.items()}
    return found


def mechanisms(model: tf.PreTrainedModel, name: str = "hybrid", **options) -> dict[int, Mechanism]:
    """One mechanism per layer, randomly perturbed so that no two heads are alike."""
    if name == "hybrid":
        options = {"feature_map": "prototype", "window": 5, "sinks": 2, "relative": False, "gain": "query"} | options
    found = {}
    for shape in layer_shapes(model):
        new = mechanism(
            name, shape.heads, shape.dim, shape.value_dim, kv_heads=shape.kv_heads,
            **({"causal": False} if not shape.causal else {}), **options,
        )  # fmt: skip
        with torch.no_grad():
            for weight in new.parameters():
                weight.add_(0.3 * torch.randn_like(weight))
        found[shape.layer] = new
    return found
