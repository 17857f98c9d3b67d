"""What works without any extra: `python tools/bare.py FOLDER`, in an environment that has none.

Commands that need an extra must say so in one line with the pip command; all others must run.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ATTNGAP = str(Path(sys.executable).with_name("attngap"))
SMALL = "--context 64 --tokens 512 --steps 2 --joint 1 --rounds 1"
RUNS = (
    "--help",
    "mechanisms",
    "theory law",
    "theory phase -o phase.json --cells 3",
    "theory thresholds --n 128 --mechanisms softmax,linear",
    "diagnose ./model --quick -o quick",
    "diagnose ./model --context 64 --passages 1 --ranks 4 --window 16 -o diagnosis",
    "plan diagnosis --keep 0.5 -o plan.json",
    f"linearize ./short --keep 0.5 --window 16 {SMALL} -o converted",
    "generate converted abc --tokens 4",
)
NEEDS = {
    "serve": "serve",
    "report diagnosis": "report",
    "theory phase -o phase.svg --cells 3": "report",
    "theory law --certified": "rigor",
    "diagnose ./tiny.gguf -o gguf": "demo",
    "eval converted --lm-eval lambada_openai": "eval",
    f"linearize ./short --keep 0.5 --window 16 {SMALL} --lora 2 -o lora": "lora",
    f"linearize ./short --keep 0.5 --window 16 {SMALL} --ray local -o ray": "ray",
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    sys.path.insert(0, str(ROOT))
    from tests import zoo

    # GPT-2 has no positions beyond 256, so that a receipt's speeds, measured up to 16k tokens, take no time.
    for name, family in (("model", "llama"), ("short", "gpt2")):
        model = zoo.tiny(family)
        if name == "model":
            model.config.max_position_embeddings = 4096
        model.save_pretrained(folder / name)
        zoo.tokenizer().save_pretrained(folder / name)
    (folder / "tiny.gguf").write_bytes(b"GGUF")
    for line in RUNS:
        done = run(line, folder)
        if done.returncode:
            sys.exit(f"attngap {line} ended with {done.returncode}:\n{done.stderr}")
    for line, extra in NEEDS.items():
        done = run(line, folder)
        last = done.stderr.strip().splitlines()[-1:]
        told = last and " -m pip install " in last[0] and f"[{extra}]" in last[0]
        if done.returncode != 2 or not told:
            sys.exit(f"attngap {line} does not name the extra {extra} ({done.returncode}):\n{done.stderr}")


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    print(f"attngap {line}", flush=True)
    return subprocess.run([ATTNGAP, *line.split()], cwd=folder, capture_output=True, text=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
