"""Small random models of many families, built from configs, and a tokenizer: nothing is downloaded."""

import string

import torch
import transformers as tf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCABULARY = 96
SIZE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
DECODER = SIZE | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


def llama():
    return tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER))


def qwen():
    return tf.Qwen3ForCausalLM(tf.Qwen3Config(**DECODER, head_dim=8))


def mistral():
    return tf.MistralForCausalLM(tf.MistralConfig(**DECODER, sliding_window=10))


def gpt2():
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=32, n_layer=2, n_head=4))


def bert():
    return tf.BertModel(tf.BertConfig(**SIZE, num_attention_heads=4, max_position_embeddings=256))


def albert():
    return tf.AlbertModel(
        tf.AlbertConfig(**SIZE | {"num_hidden_layers": 3}, num_attention_heads=4, max_position_embeddings=256)
    )


def t5():
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return tf.T5ForConditionalGeneration(tf.T5Config(**sizes, decoder_start_token_id=0))


FAMILIES = {f.__name__: f for f in (llama, qwen, mistral, gpt2, bert, albert, t5)}


def make(family: str) -> tf.PreTrainedModel:
    """The family's model with weights large enough that its heads differ from uniform (T5's are as they come)."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    factor = {"gpt2": 8.0, "bert": 8.0, "albert": 8.0, "t5": 0.7}.get(family, 5.0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                weight.mul_(factor)
    return model


def tokenizer(specials: bool = False) -> tf.PreTrainedTokenizerFast:
    """One token a character; with `specials` it adds [CLS] and [SEP] as BERT's does."""
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
