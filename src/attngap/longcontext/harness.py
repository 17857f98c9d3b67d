"""The tasks as files for lm-evaluation-harness, so that they run on whatever it runs on."""

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from attngap.errors import AttngapError
from attngap.longcontext.suite import make
from attngap.longcontext.tasks import TASKS, task
from attngap.longcontext.writing import Example

# `acc` of a log-likelihood task is the share of examples whose answer is what the model would write greedily.
YAML = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
metadata:
  version: 1
"""


def export_tasks(
    directory: Path,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    length: int,
    tasks: Sequence[str] = (),
    examples: int = 32,
    seed: int = 0,
) -> list[Path]:
    """One .yaml and its .jsonl for each task, the yaml files returned: `lm_eval --include_path DIRECTORY --tasks NAME`.

    Lengths are counted with `tokenizer`; another model may count them a little differently.
    """
    chosen = [task(name) for name in tasks] or list(TASKS)
    written = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for each in chosen:
            name = f"attngap_{each.name}_{length}"
            made = (make(each, tokenizer, text, length, f"{seed}/{each.name}/{length}/{i}") for i in range(examples))
            rows = [row for example in made for row in _rows(tokenizer, example)]
            data = directory / f"{name}.jsonl"
            data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            path = directory / f"{name}.yaml"
            path.write_text(YAML.format(name=name, data=json.dumps(str(data.resolve()))), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise AttngapError(f"Cannot write tasks to '{directory}': {error}. Choose another folder") from error
    return written


def _rows(tokenizer: PreTrainedTokenizerBase, example: Example) -> list[dict[str, str]]:
    context = tokenizer.decode(example.context[0], skip_special_tokens=True)
    return [
        {
            "context": f"{context}{tokenizer.decode(list(question.ask))}",
            "answer": str(tokenizer.decode(list(question.answer))),
        }
        for question in example.questions
    ]
