"""Every architecture converts, and is right with a cache, with padding and after saving, or is refused in one line."""

import pytest

from tests.conformance import row
from tests.zoo_architectures import KINDS, architectures

# One of each way of keeping keys, positions and states; the others are in the slow run.
FAST = [
    *("apertus", "bamba", "bart", "bert", "bitnet", "cohere2", "deepseek_v2", "doge", "electra", "falcon", "falcon_h1"),
    *("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4", "gpt_bigcode", "gpt_neo", "gpt_neox"),
    *(
        "gpt_oss",
        "gpt_sw3",
        "granitemoehybrid",
        "helium",
        "internlm3",
        "jamba",
        "kimi_linear",
        "lfm2",
        "llama4",
        "mamba",
    ),
    *(
        "minimax",
        "mistral",
        "mixtral",
        "modernbert_decoder",
        "nemotron_h",
        "olmo3",
        "opt",
        "phi3",
        "qwen2_moe",
        "qwen3",
    ),
    *("qwen3_next", "roberta", "smollm3", "stablelm", "zamba2"),
]
CONVERT = {
    "bamba",
    "deepseek_v2",
    "falcon_h1",
    "gemma3n_text",
    "gemma4_text",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
}
CONVERT |= {"lfm2", "nemotron_h", "qwen3_next", "llama4", "olmo3", "roberta"}
REFUSED = {"doge": "computes something else than softmax", "mamba": "no softmax attention", "minimax": "MiniMaxCache"}


def check(each):
    found = row(each)
    assert not found.faults(), f"{each.class_name}: {found.faults()}"
    if found.refused is not None:
        assert "\n" not in found.refused
        assert each.name not in CONVERT, found.refused
    assert REFUSED.get(each.name, "") in (found.refused or "")
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAST)
def test_a_decoder_converts_or_is_refused(name):
    (each,) = (each for each in architectures("causal") if each.name == name)
    assert check(each).unbuilt is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_converts_or_is_refused(kind):
    rows = [check(each) for each in architectures(kind)]
    if kind == "causal":
        assert sum(row.refused is None and row.unbuilt is None for row in rows) >= 80
