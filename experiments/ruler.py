"""Writes long-context tasks of text for launch.harness.

    aamoe ruler --length=1024 --rows=50 --output=runs/ruler
    aamoe harness --checkpoint=runs/quickstart --tasks=runs/ruler

They are in the manner of RULER (Hsieh et al., 2024). `needle`: a number is stored for a name, and asked for.
`multikey`: for several names, one is asked for. `multivalue`: several for one name, all are asked for. `variables`:
names that are set to each other in a chain, all that hold a number are asked for. `common_words`: the words that occur
often. Between them stands filler. A prompt and the room for its answer are as close to --length tokens as whole
sentences allow, and never more. Scored is the share of the answers that the generated text has. Same flags, same rows;
nothing is downloaded.

experiments/tasks.py has such tasks as token ids, to train on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from absl import flags

from aamoe_jax.config import ConfigError
from aamoe_jax.data import load_tokenizer
from aamoe_jax.data.tokenizers import Tokenizer
from experiments.program import start

FLAGS = flags.FLAGS
KEYS, VALUES, CHAIN, COMMON = 4, 4, 4, 3
"""Names of `multikey`, numbers of `multivalue`, variables of a chain, common words."""
REPEATS = 6
"""How often a common word occurs; all others occur once."""
SENTENCES = ("Rain fell on the roof.", "A dog slept by the door.", "Nobody came all day.", "The tea was cold again.")


class Draft(NamedTuple):
    """A row before it is brought to its length."""

    hidden: list[str]
    """Sentences that answer the question, in the order in which they are to stand."""
    filler: Callable[[], str]
    """Another sentence that does not."""
    question: str
    answers: list[str]


class Names:
    """Words and numbers that are drawn once each."""

    def __init__(self, random: np.random.Generator):
        self._random = random
        self._taken: set[str] = set()

    def word(self) -> str:
        """Six letters, of no language."""
        letters = ["bdfgklmnprstvz", "aeiou"] * 3
        return self._new(lambda: "".join(self._random.choice(list(kind)) for kind in letters))

    def number(self) -> str:
        """Five digits."""
        return self._new(lambda: str(self._random.integers(10_000, 100_000)))

    def _new(self, draw: Callable[[], str]) -> str:
        while (drawn := draw()) in self._taken:
            pass
        self._taken.add(drawn)
        return drawn


def needles(random: np.random.Generator, keys: int, values: int) -> Draft:
    """Numbers of several names, one of which is asked for."""
    names = Names(random)
    stored = {names.word(): [names.number() for _ in range(values)] for _ in range(keys)}
    hidden = [f"The number of {key} is {value}." for key, of_key in stored.items() for value in of_key]
    asked = str(random.choice(list(stored)))
    question = f"The number of {asked} is" if values == 1 else f"The {values} numbers of {asked} are"
    hidden = [hidden[index] for index in random.permutation(len(hidden))]
    return Draft(hidden, lambda: str(random.choice(SENTENCES)), question, stored[asked])


def variables(random: np.random.Generator) -> Draft:
    """Two chains of variables, each with a number; the variables of one are asked for."""
    names = Names(random)
    numbers = [names.number() for _ in range(2)]
    chains = [[names.word() for _ in range(CHAIN)] for _ in numbers]
    parts = [
        [f"{name} = {source}." for name, source in zip(chain, [number, *chain], strict=False)]
        for number, chain in zip(numbers, chains, strict=True)
    ]
    turns = random.permutation(np.repeat(np.arange(len(parts)), CHAIN))  # every chain keeps its order
    hidden = [parts[chain].pop(0) for chain in turns]
    question = f"The {CHAIN} variables that are {numbers[0]} are"
    return Draft(hidden, lambda: str(random.choice(SENTENCES)), question, chains[0])


def common_words(random: np.random.Generator) -> Draft:
    """Words, a few of which are repeated."""
    names = Names(random)
    common = [names.word() for _ in range(COMMON)]
    hidden = [str(word) for word in random.permutation(common * REPEATS)]
    return Draft(hidden, names.word, f"The {COMMON} most common words are", common)


TASKS: dict[str, Callable[[np.random.Generator], Draft]] = {
    "needle": lambda random: needles(random, 1, 1),
    "multikey": lambda random: needles(random, KEYS, 1),
    "multivalue": lambda random: needles(random, 1, VALUES),
    "variables": variables,
    "common_words": common_words,
}


def define_flags() -> None:
    """The flags of this program."""
    flags.DEFINE_multi_enum("task", list(TASKS), list(TASKS), "What is written; all if not given. Repeat it.")
    flags.DEFINE_integer("length", None, "Tokens of a prompt and its answer together.", required=True, lower_bound=1)
    flags.DEFINE_integer("rows", 50, "Rows of every task.", lower_bound=1)
    flags.DEFINE_string("tokenizer", "bytes", "As DataConfig.tokenizer: what the tokens of --length are.")
    flags.DEFINE_integer("seed", 0, "Of names, numbers and places.", lower_bound=0, upper_bound=2**32 - 1)
    flags.DEFINE_string("output", None, "Folder for a yaml and a jsonl file of every task.", required=True)


def row(draft: Draft, random: np.random.Generator, tokenizer: Tokenizer, length: int) -> dict[str, Any] | None:
    """The longest prompt that fits with its answer into so many tokens; None where not even one without filler does."""
    target = " " + " ".join(draft.answers) + "."
    room = length - tokens_of(tokenizer, target)
    depths = np.sort(random.random(len(draft.hidden)))
    filler: list[str] = []

    def prompt(sentences: int) -> str:
        while len(filler) < sentences:
            filler.append(draft.filler())
        text = filler[:sentences]
        for depth, hidden in reversed(list(zip(depths, draft.hidden, strict=True))):
            text.insert(int(depth * (sentences + 1)), hidden)
        return f"{' '.join(text)}\n{draft.question}"

    def fits(sentences: int) -> bool:
        return tokens_of(tokenizer, prompt(sentences)) <= room

    if not fits(0):
        return None
    fitting, too_many = 0, 1
    while fits(too_many):
        fitting, too_many = too_many, 2 * too_many
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    return {"prompt": prompt(fitting), "target": target, "answers": draft.answers}


def tokens_of(tokenizer: Tokenizer, text: str) -> int:
    """How many tokens a text is."""
    return len(tokenizer.encode(text.encode()))


def rows_of(task: str, rows: int, tokenizer: Tokenizer, length: int, seed: int) -> list[dict[str, Any]]:
    """Rows of a task, each with `prompt`, `target` and `answers`; the first ones of more rows are the same.

    Raises:
      ConfigError: the task does not fit into so many tokens.
    """
    found = []
    for number in range(rows):
        random = np.random.default_rng([seed, list(TASKS).index(task), number])
        made = row(TASKS[task](random), random, tokenizer, length)
        if made is None:
            raise ConfigError(f"--length={length}: a row of {task!r} does not fit; give more tokens, or leave it out")
        found.append(made)
    return found


def definition(task: str, data: Path, new_tokens: int) -> str:
    """The yaml of a task for lm-eval.

    Args:
      data: its rows, as jsonl.
      new_tokens: most that are generated.
    """
    settings = {
        "task": f"ruler_{task}",
        "tag": "ruler",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "target",
        "target_delimiter": "",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": new_tokens, "do_sample": False},
        "metric_list": [{"metric": "found", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    return yaml.safe_dump(settings, sort_keys=False) + "process_results: !function aamoe_jax.harness.share_found\n"


def main() -> None:
    tokenizer, folder = load_tokenizer(FLAGS.tokenizer), Path(FLAGS.output)
    written = {task: rows_of(task, FLAGS.rows, tokenizer, FLAGS.length, FLAGS.seed) for task in FLAGS.task}
    folder.mkdir(parents=True, exist_ok=True)
    for task, rows in written.items():
        data = folder / f"{task}.jsonl"
        data.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
        longest = max(tokens_of(tokenizer, each["target"]) for each in rows)
        data.with_suffix(".yaml").write_text(definition(task, data, longest), encoding="utf-8")
        sizes = [tokens_of(tokenizer, each["prompt"]) for each in rows]
        print(f"{data}: {len(rows)} rows of {min(sizes)} to {max(sizes)} tokens, {longest} more to answer")


if __name__ == "__main__":
    start(define_flags, main)
