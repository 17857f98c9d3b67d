"""Completion as a shell asks for it: a fresh bash that knows nothing but what `--show-completion` printed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
source <(attngap --show-completion bash)
[[ $(complete -p attngap) == *_attngap_completion* ]] || exit 3
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_attngap_completion attngap
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["attngap", "mechanisms", "hed"], {"hedgehog"}),
        (["attngap", "probe", "run", "mq"], {"mqar"}),
        (["attngap", "probe", "run", "mqar", "--mechanism", "elu,gated"], {"elu,gated-delta"}),
        (["attngap", "linearize", "smollm2", "--mechanism", "proto"], {"prototype"}),
        (["attngap", "lin"], {"linearize"}),
        (["attngap", "mechanisms", "nothing-like-it"], {""}),
    ],
)
def test_a_fresh_bash_completes_verbs_mechanisms_and_tasks(tmp_path, words, offered):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": paths, "HOME": str(tmp_path), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    run = [bash, "--noprofile", "--norc", "-c", SCRIPT, "bash", *words]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == offered
