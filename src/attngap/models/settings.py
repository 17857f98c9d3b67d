"""What a config says that changes what a model computes: weights alone do not tell, say, the epsilon of a norm."""

import json
import re
from typing import Any

from transformers import PretrainedConfig

# Where it came from, in what it is kept, what generation or training does with it: the same weights compute the same.
BOOKKEEPING = re.compile(
    r"_.*|architectures|auto_map|transformers_version|name_or_path|(torch_)?dtype|use_cache|return_dict|output_\w+"
    r"|(\w+_)?token_ids?|(\w+_)?token_index|id2label|label2id|problem_type|tokenizer_class|chunk_size_feed_forward"
    r"|\w*(dropout|pdrop|drop_rate)\w*|(initializer|init)_\w+|gradient_checkpointing|attn_implementation|quantization_config"
)


def settings(config: PretrainedConfig) -> dict[str, Any]:
    """By name, parts of a config in place; only what reads back as itself, so that a saved model is not refused."""
    written = _plain(config)
    try:
        again = _plain(type(config).from_dict(json.loads(config.to_json_string(use_diff=False))))
    except Exception:  # of transformers: a config that cannot be read from what it writes says nothing reliable
        return {}
    return _common(written, again)


def changed(recorded: dict[str, Any], config: PretrainedConfig) -> str | None:
    """The first setting that is another now, in words; names that a release added or dropped do not count."""
    return _difference(recorded, _plain(config), "")


def _plain(config: PretrainedConfig) -> dict[str, Any]:
    return _kept(json.loads(config.to_json_string(use_diff=False)))


def _kept(found: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _kept(value) if isinstance(value, dict) else value
        for key, value in sorted(found.items())
        if not BOOKKEEPING.fullmatch(key)
    }


def _common(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for key in one.keys() & other.keys():
        if isinstance(one[key], dict) and isinstance(other[key], dict):
            found[key] = _common(one[key], other[key])
        elif one[key] == other[key]:
            found[key] = one[key]
    return dict(sorted(found.items()))


def _difference(recorded: dict[str, Any], now: dict[str, Any], where: str) -> str | None:
    for key, was in recorded.items():
        found = now.get(key)
        if isinstance(was, dict) and isinstance(found, dict):
            if inside := _difference(was, found, f"{where}{key}."):
                return inside
        elif key in now and found != was:
            return f"{where}{key} was {was!r}, is {found!r}"
    return None
