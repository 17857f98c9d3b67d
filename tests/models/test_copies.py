"""A converted folder is loaded without ever holding its weights twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import attngap
from tests.conversion.small import TEXT
from tests.zoo import VOCABULARY, tokenizer

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process's memory is read as Linux tells it"
)
# Everything that is imported or compiled is there before the clock of memory starts: a small folder was loaded.
LOADING = """
import json, sys
from pathlib import Path
from transformers import AutoModelForCausalLM
import attngap

def status(name):
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name))
    return 1024 * int(line.split()[1])

warm, folder, way, dtype = sys.argv[1:]
options = {} if dtype == "own" else {"dtype": dtype}

def load(place):
    if way == "auto":
        return AutoModelForCausalLM.from_pretrained(place, **options)
    return attngap.load(place, **options)[0]

load(warm)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
model = load(folder)
weights = sum(x.nbytes for x in model.parameters())
grown = status("VmHWM") - before
twice = [x.clone() for x in model.parameters()] if way == "load" else []
print(json.dumps({"weights": weights, "grown": grown, "copied": status("VmHWM") - before, "copies": len(twice)}))
"""


def folder(place: Path, width: int) -> Path:
    """A converted model and its base, in folders of their own."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(place / f"base-{width}")
    few = {"context": 32, "tokens": 64, "steps": 1, "joint": 0, "rounds": 0, "window": 8, "keep": 0.5}
    converted = place / f"converted-{width}"
    name = str(place / f"base-{width}")
    attngap.linearize(model, tokenizer(), None, TEXT, measured=False, directory=converted, name=name, **few)
    return converted


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("copies")
    return folder(place, 32), folder(place, 640)


@pytest.mark.parametrize(("way", "dtype"), [("load", "own"), ("load", "bfloat16"), ("auto", "own")])
def test_a_folder_is_loaded_without_a_second_copy(folders, way, dtype):
    words = [sys.executable, "-c", LOADING, *map(str, folders), way, dtype]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    # In half precision the base, whose values are single, is cast from its file, whose pages come in and can go.
    file = 2 * found["weights"] if dtype == "bfloat16" else 0
    assert found["weights"] > 30e6
    assert found["grown"] < file + 1.3 * found["weights"]
    if (way, dtype) == ("load", "own"):  # the measure sees a second copy where there is one
        assert found["copied"] > found["grown"] + 0.5 * found["weights"]
