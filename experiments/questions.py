r"""Asks every stack of a study multiple-choice questions out of held-out text (DEC-23).

    aamoe questions --study=main --gin_file=quickstart.gin --variant=AA-MoE --variant=transformer --seeds=0,1,2 \
        --output=experiments/results/main_questions

`line`: which of four lines comes next; the other three are of the same document and about as long. `word`: which of
four words comes next; all of them were last used more than 128 characters ago. A context is as long as a row allows.
The answer is the choice with the largest probability, under causal budgets. Same flags, same questions; `--save` writes
them for launch.choose.

Variants and runs are those of experiments.studies: with the same --work_dir, its runs are not trained again. Writes
OUTPUT.json and OUTPUT.md.
"""

from __future__ import annotations

import bisect
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags

from aamoe_jax.config import ConfigError, DataConfig, ExperimentConfig
from aamoe_jax.data import documents_of, ensure_prepared, load_tokenizer
from aamoe_jax.evaluation.choices import Item, log_probabilities
from aamoe_jax.evaluation.perplexity import causal_budget
from aamoe_jax.markdown import table
from aamoe_jax.model import Skipped, structure
from aamoe_jax.training.checkpoints import Checkpoint
from experiments import studies
from experiments.judge import Difference, difference
from experiments.program import command_line, publish, start
from experiments.runs import Result, comparison, once, seeds_of
from experiments.studies import STUDIES, Study, configs, define_run_flags, define_stack_flags, part_of, planned

FLAGS = flags.FLAGS
CHOICES = 4
LINE = range(12, 121)
"""Characters that the line of a question may have, without the spaces around it."""
CANDIDATES = 32
"""Lines of which the most alike in length are the wrong choices."""
FAR = 128
"""Characters since the words of a question were last used."""
WORD = re.compile(r"[^\W\d]\w{3,31}")
TRIES = 1_000
"""Places of a document that are looked at for one question."""
BATCH_SIZE = 8


class Document(NamedTuple):
    """A held-out document, and where its lines and words start."""

    text: str
    lines: Sequence[str]
    line_starts: Sequence[int]
    words: Sequence[str]
    word_starts: Sequence[int]


class Question(NamedTuple):
    """One question, and the document that it is of."""

    item: Item
    document: int


def document(text: str) -> Document:
    """A document, split into lines and words."""
    lines, words = text.splitlines(keepends=True), list(WORD.finditer(text))
    starts = np.cumsum([0, *map(len, lines)])[:-1].tolist()
    return Document(text, lines, starts, [found.group() for found in words], [found.start() for found in words])


def line(random: np.random.Generator, of: Document, room: int) -> Item | None:
    """Which line comes next; None: no place for it was found.

    Args:
      room: UTF-8 bytes that context and answer may have together.
    """
    fitting = [number for number, text in enumerate(of.lines) if len(text.strip()) in LINE]
    for _ in range(min(TRIES, len(fitting))):
        number = int(random.choice(fitting))
        right = of.lines[number]
        drawn = {of.lines[other] for other in random.choice(fitting, CANDIDATES)}
        drawn = {other for other in drawn - {right} if len(other.encode()) < room}
        # Sorted as text first: a set has no order that another run would have too.
        wrong = sorted(sorted(drawn), key=lambda other: abs(len(other) - len(right)))[: CHOICES - 1]
        context = _context(of.text, of.line_starts[number], room - _longest([right, *wrong]))
        if context and len(wrong) == CHOICES - 1:
            return _item(random, context, right, wrong)
    return None


def word(random: np.random.Generator, of: Document, room: int) -> Item | None:
    """Which word comes next, of those last used long ago; None: no place for it was found.

    Args:
      room: UTF-8 bytes that context and answer may have together.
    """
    # Any word of the document and a character after it, so that the context is one and the same for all choices.
    room -= _longest(of.words) + 4
    for _ in range(min(TRIES, len(of.words))):
        number = int(random.integers(len(of.words)))
        at, right = of.word_starts[number], of.words[number]
        context = _context(of.text, at, room)
        first, near = (bisect.bisect_left(of.word_starts, at - back) for back in (len(context), FAR))
        far = set(of.words[first:near]) - set(of.words[near:number])
        if right in far and len(far) >= CHOICES:
            wrong = random.choice(sorted(far - {right}), CHOICES - 1, replace=False)
            # What follows ends the word, so that no choice is the start of another one.
            after = of.text[at + len(right) :][:1] or "\n"
            return _item(random, context, right + after, [str(other) + after for other in wrong])
    return None


KINDS: Mapping[str, Callable[[np.random.Generator, Document, int], Item | None]] = {"line": line, "word": word}


def _longest(texts: Sequence[str]) -> int:
    """UTF-8 bytes of the longest of them."""
    return max((len(text.encode()) for text in texts), default=0)


def _context(text: str, end: int, size: int) -> str:
    """The text before a place, of at most so many UTF-8 bytes."""
    return text[max(end - size, 0) : end].encode()[-size:].decode(errors="ignore") if size > 0 else ""


def _item(random: np.random.Generator, context: str, right: str, wrong: Sequence[str]) -> Item:
    """The choices in a random order."""
    choices = [right, *wrong]
    order = random.permutation(len(choices))
    return Item(context, tuple(choices[place] for place in order), int(np.argmin(order)))


def questions(kind: str, documents: Sequence[Document], count: int, length: int) -> list[Question]:
    """So many questions, of documents drawn by their length; the first of more questions are the same.

    Args:
      length: tokens of a row; no text has more tokens than UTF-8 bytes.

    Raises:
      ConfigError: no document has a place for such a question.
    """
    sizes = np.array([len(each.text) for each in documents], float)
    found = []
    for number in range(count):
        random = np.random.default_rng([list(KINDS).index(kind), number])
        for which in random.choice(len(documents), len(documents), replace=False, p=sizes / sizes.sum()):
            item = KINDS[kind](random, documents[which], length - 1)
            if item is not None:
                found.append(Question(item, int(which)))
                break
        else:
            raise ConfigError(f"--kind={kind}: no held-out document has a place for one in {length} tokens")
    return found


def define_flags() -> None:
    """The flags of this program."""
    define_stack_flags()
    define_run_flags()
    flags.adopt_module_key_flags(studies)
    flags.DEFINE_multi_enum("kind", list(KINDS), list(KINDS), "What is asked; all if not given. Repeat it.")
    flags.DEFINE_integer("questions", 200, "Of every kind.", lower_bound=1)
    flags.DEFINE_string(
        "save", None, "Where the questions are written, as launch.choose reads them; nowhere if not given."
    )


def held_out(config: DataConfig) -> list[Document]:
    """The documents of the test split, as text."""
    ((name, _),) = config.mixture
    texts = (text.decode(errors="ignore") for text in documents_of(config, name, "test"))
    return [document(text) for text in texts if text]


def answer(
    config: ExperimentConfig,
    folder: Path,
    kind: str,
    asked: Sequence[Question],
    skipped: frozenset[Skipped] = frozenset(),
) -> Result:
    """Right answers and questions of every document, by a run that is trained if it has not been.

    Args:
      skipped: layers or mixers to leave out when it answers.

    Raises:
      ConfigError: what lies in `folder` is of another experiment.
      StoppedError: a signal stopped the training.
    """

    def answered(checkpoint: Checkpoint) -> Result:
        log_p = log_probabilities(
            structure(config.model, skipped),
            checkpoint.params,
            [question.item for question in asked],
            load_tokenizer(config.data.tokenizer),
            budget=causal_budget(config.model),
            length=config.data.seq_len,
            batch_size=BATCH_SIZE,
        )
        right = [int(np.argmax(one)) == question.item.answer for one, question in zip(log_p, asked, strict=True)]
        of = [question.document for question in asked]
        return {
            "accuracy": statistics.mean(map(float, right)),
            "documents": np.stack([np.bincount(of, right).astype(int), np.bincount(of)], axis=1).tolist(),
        }

    return once(config, folder, f"questions_{kind}_{len(asked)}", answered, skipped=skipped)


def conduct(
    study: Study,
    experiments: Mapping[str, ExperimentConfig],
    asked: Mapping[str, Sequence[Question]],
    seeds: Sequence[int],
    work_dir: Path,
) -> dict[str, dict[str, list[Result]]]:
    """What every variant answers, one result per seed, by kind.

    Raises:
      ConfigError: what lies in `work_dir` is of another experiment.
      StoppedError: a signal stopped a training.
    """
    found: dict[str, dict[str, list[Result]]] = {kind: {name: [] for name in study.variants} for kind in asked}
    for name, config, folder in planned(study, experiments, seeds, work_dir):
        for kind, each in asked.items():
            found[kind][name].append(answer(config, folder, kind, each, study.variants[name].without))
    return found


def more_answered(first: Sequence[Result], other: Sequence[Result]) -> Difference:
    """How much larger the share of right answers of `other` is than that of `first`."""
    of_first, of_other = (np.asarray([result["documents"] for result in results], float) for results in (first, other))
    asked = of_first[0, :, 1] > 0
    return difference(of_first[:, asked, 0], of_other[:, asked, 0], of_first[0, asked, 1])


def report(found: Mapping[str, Mapping[str, Sequence[Result]]], command: str) -> str:
    """Every variant's share of right answers, kind by kind, as Markdown."""
    parts = ["# Multiple-choice questions out of held-out text", f"    {command}"]
    for kind, results in found.items():
        first_name, first = next(iter(results.items()))
        config, documents = first[0]["config"], first[0]["documents"]
        asked = sum(size for _, size in documents)
        rows = []
        for name, runs in results.items():
            mean, low, high = (100 * share for share in more_answered(first, runs)[:3])
            shares = [f"{run['accuracy']:.1%}" for run in runs]
            apart = "" if name == first_name else f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
            rows.append([name, f"{statistics.mean(run['accuracy'] for run in runs):.1%}", *shares, apart])
        parts += [
            f"## Which {kind} comes next",
            f"{asked} questions with {CHOICES} choices, of {sum(size > 0 for _, size in documents)} documents of the "
            f"test split, in rows of {config['data']['seq_len']} tokens; guessing answers {1 / CHOICES:.0%}. Intervals "
            f"are 95 % of a paired bootstrap over seeds and documents. Corpus {first[0]['corpus_digest'][:16]}, "
            f"JAX {first[0]['versions']['jax']}.",
            table(
                ["variant", "right", *(f"seed {run['seed']}" for run in first), f"points more than {first_name}"], rows
            ),
        ]
    return "\n\n".join(parts) + "\n"


def save(asked: Sequence[Question], path: str | Path) -> None:
    """The questions as launch.choose reads them."""
    items = ({name: getattr(item, name) for name in ("context", "choices", "answer")} for item, _ in asked)
    Path(path).write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")


@comparison
def main() -> None:
    """Asks what the flags describe."""
    seeds, work_dir = seeds_of(FLAGS.seeds), Path(FLAGS.work_dir) / FLAGS.study
    study = part_of(STUDIES[FLAGS.study], FLAGS.variant)
    experiments = configs(study, FLAGS.gin_file, FLAGS.gin_param, FLAGS.steps, FLAGS.equal)
    data = next(iter(experiments.values())).data
    ensure_prepared(data)
    documents = held_out(data)
    asked = {kind: questions(kind, documents, FLAGS.questions, data.seq_len) for kind in FLAGS.kind}
    if FLAGS.save:
        save([question for each in asked.values() for question in each], FLAGS.save)
    found = conduct(study, experiments, asked, seeds, work_dir)
    command = command_line("experiments.questions")
    publish({"command": command, "results": found}, report(found, command), f"{FLAGS.output}.json", indent=None)


if __name__ == "__main__":
    start(define_flags, main)
