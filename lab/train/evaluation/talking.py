"""`python -m lab.train.evaluation.talking DEV MODEL...`: compare small models as chat models.

For each GGUF: bits per byte of assistants' answers to the first message of a chat, in the model's own
chat template, and its greedy answers to twenty ordinary questions, to be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import numpy as np

from lab.texts.chat_records import ChatRecord, read_records
from lab.train.data.manifest import read_manifest
from lab.train.errors import TrainError
from lab.train.objectives.teacher import Teacher, TeacherForm, silence_llama_cpp
from towerd.errors import ConfigError

N_CTX = 512
N_CHATS = 200
SAID_BYTES_MAX = 300
"""Maximum bytes of a question and of an answer, so that both fit into any model's context."""
ANSWER_TOKENS_MAX = 48
KIND = "assistant"
QUESTIONS = (
    "Hello! How are you?",
    "What is your name?",
    "What is the capital of France?",
    "Can you tell me a story about a dog?",
    "What is two plus two?",
    "Why is the sky blue?",
    "How do I make a cup of tea?",
    "What should I eat for dinner tonight?",
    "Who wrote Romeo and Juliet?",
    "Please write a short poem about the sea.",
    "How many days are in a week?",
    "What is the opposite of hot?",
    "I feel sad today.",
    "Name three animals that live on a farm.",
    "How can I learn to play the guitar?",
    "What does a doctor do?",
    "Translate 'thank you' into Spanish.",
    "Is it a good idea to run every day?",
    "What do bees make?",
    "Give me a tip for sleeping better.",
)


@click.command()
@click.argument("dev", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument(
    "models", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
def main(dev: Path, models: tuple[Path, ...]) -> None:
    """Measure and print."""
    silence_llama_cpp()
    try:
        asked = exchanges(read_records(dev))[:N_CHATS]
        for path in models:
            with Teacher(path, N_CTX, n_threads=1) as model:
                bits = bits_per_byte(model, asked)
                click.echo(f"{path.name}: {bits:.2f} bits per byte of {len(asked)} answers")
                for question in QUESTIONS:
                    click.echo(f"  {question}\n    {answer(model, question)!r}")
    except (TrainError, ConfigError) as error:
        raise click.ClickException(str(error)) from error


def exchanges(records: Iterable[ChatRecord]) -> list[tuple[str, str]]:
    """The (question, answer) pairs that begin chats with assistants: short questions and beginnings
    of answers, alternating between sources. TrainError if there are none."""
    kinds = {name: source.kind for name, source in read_manifest().items()}
    found: dict[str, list[tuple[str, str]]] = {}
    for record in records:
        roles = [message.role for message in record.messages[:2]]
        if kinds.get(record.source) != KIND or roles != ["user", "assistant"]:
            continue
        question, said = (message.content for message in record.messages[:2])
        said = said.encode()[:SAID_BYTES_MAX].decode(errors="ignore")
        if said and len(question.encode()) <= SAID_BYTES_MAX:
            found.setdefault(record.source, []).append((question, said))
    if not found:
        raise TrainError("The records have no short question that an assistant answers.")
    longest = max(map(len, found.values()))
    return [each[i] for i in range(longest) for each in found.values() if i < len(each)]


def bits_per_byte(model: Teacher, asked: Sequence[tuple[str, str]]) -> float:
    """Bits per byte of the answers after their questions, without their end tokens. An answer that
    does not fit into the context is cut."""
    form = TeacherForm(model)
    bits = n_bytes = 0.0
    for question, said in asked:
        prompt = form.question(question)
        tokens = model.tokenize(said, special=False)
        ids = np.concatenate([prompt, np.array(tokens, np.uint32)])[:N_CTX]
        expected = model.targets(ids[:-1], model.n_vocab)
        rows = slice(len(prompt) - 1, len(ids) - 1)
        chances = expected.p[rows][expected.ids[rows] == ids[len(prompt) :, None]]
        bits -= float(np.log2(chances).sum())
        n_bytes += len(said.encode()) * (len(ids) - len(prompt)) / len(tokens)
    return bits / n_bytes


def answer(model: Teacher, question: str) -> str:
    """The model's greedy answer."""
    said = model.greedy(TeacherForm(model).question(question), ANSWER_TOKENS_MAX)
    return "".join(model.name(token) for token in said)


if __name__ == "__main__":
    main()
