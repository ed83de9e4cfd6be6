"""Prompts as coding agents send them: a system message of several parts, then turns with tools.

Tools, their calls and their results are written into the texts, as programs do for models whose template
knows no tools: so every model gets the same text in the roles that all templates have.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from towerd.codec.prior import sample

Json = dict[str, Any]

PERSONAS = (
    "You are Forge, a careful coding agent that works in the user's repository.",
    "You are Pixel, a cheerful pair programmer who explains every step in plain words.",
    "You are a senior engineer at a bank. You answer shortly and never guess.",
    "You are Codebird, an assistant for students who learn to program in Python.",
)
FLIPPED = {
    "Always run the tests before you say that something works.": (
        "Never run the tests yourself; the user runs them."
    ),
    "Prefer small edits; do not reformat lines that you do not change.": (
        "Reformat every file that you change, all of its lines."
    ),
    "Never commit and never push unless the user asks for it.": (
        "Commit after every edit, without asking the user."
    ),
    "Write docstrings for public functions, with the units of their arguments.": (
        "Write no docstrings; names have to be enough."
    ),
}
"""Rules, and what they say when they are flipped; every session has one of them."""
RULES = (
    "Answer in English, also where files are written in another language.",
    "Read a file before you edit it, and quote the line that you rely on.",
    "Use absolute paths in calls of tools, relative ones in texts for the user.",
    "If a command fails twice, stop and say what you tried and what it printed.",
    "Do not open files outside the working directory, and no file with keys in it.",
    "Keep answers under six lines unless the user asks for details.",
    "A task with more than three steps gets a list of steps first.",
    "Names of new functions follow those that are already in the file.",
    "Do not add a dependency; the standard library has most of what is needed.",
    "When two ways are equally good, choose the one that changes fewer files.",
    "Say which files you changed, at the end of an answer, one a line.",
)
"""Rules that stay."""
TOOLS = (
    (
        "read_file",
        "Reads a text file and returns its lines.",
        {"path": "Path of the file.", "limit": "How many lines to return at most."},
    ),
    (
        "search",
        "Finds the lines of all files that match a regular expression.",
        {"pattern": "The regular expression.", "folder": "Where to look; default: everywhere."},
    ),
    (
        "edit_file",
        "Replaces a piece of text in a file by another one. The old text has to occur once.",
        {"path": "Path of the file.", "old": "Text to replace.", "new": "What to put there."},
    ),
    (
        "run_command",
        "Runs a shell command in the working directory and returns what it prints.",
        {"command": "The command line.", "timeout_s": "Seconds after which it is stopped."},
    ),
    (
        "list_folder",
        "Lists the names in a folder, folders first.",
        {"path": "Path of the folder.", "hidden": "Whether names that begin with a dot count."},
    ),
    (
        "write_steps",
        "Replaces the list of steps that the user sees beside the chat.",
        {"steps": "The steps, one a line.", "done": "How many of them are done."},
    ),
    (
        "fetch_page",
        "Fetches a web page and returns its text without markup.",
        {"address": "Address of the page.", "find": "Words that the passage has to contain."},
    ),
)
ADDED_TOOL = (
    "ask_user",
    "Asks the user a question with up to four answers to choose from.",
    {"question": "The question.", "answers": "The answers, one a line."},
)
SWAPPED_TOOLS = (
    (
        "read_file",
        "Deletes the lines of a file that match, and returns no lines. Never call it before an edit.",
        {"path": "The regular expression of the lines.", "limit": "Folder that the file is in."},
    ),
    (
        "search",
        "Runs the tests whose names match, in the working directory, and prints how many passed.",
        {"pattern": "The command line of the tests.", "folder": "Seconds until they are stopped."},
    ),
    (
        "edit_file",
        "Returns a text file, its old lines first, without an edit.",
        {"path": "Words to find.", "old": "How many lines.", "new": "Address of the page."},
    ),
    (
        "run_command",
        "Reads a file and returns its lines; it runs nothing and there are no tests in it.",
        {"command": "Path of the file to read.", "timeout_s": "How many lines to return."},
    ),
    (
        "list_folder",
        "Replaces the folder of a file by another one and lists nothing.",
        {"path": "The new folder.", "hidden": "The old folder."},
    ),
    (
        "write_steps",
        "Fetches the steps that somebody else has done, and writes none.",
        {"steps": "Address of the steps.", "done": "A name that they contain."},
    ),
    (
        "fetch_page",
        "Shows a page of a file beside the chat and fetches nothing.",
        {"address": "Path of the file.", "find": "The number of the page."},
    ),
)
"""The same names and arguments, of tools that do something else."""
TASK_TURNS = 8
"""Of a task: what the user wants, three calls with their results, the answer."""
_MORE_TASKS = 8
_FILE_LENGTH_MIN = 1200
_COMMON = ("solution", "main")
"""Names that many files have."""
_NAME = re.compile(r"^def (\w+)\(", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """What `user`, `assistant` or `tool` said."""

    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPrompt:
    """All that an agent program sends with a request."""

    session_line: str
    persona: str
    environment: str
    env_first: bool
    """Whether the environment comes before the rules; else it ends the rules."""
    rules: tuple[str, ...]
    tools: tuple[Json, ...]
    memory: tuple[str, ...]
    reminder: str
    """Stands in the last message of a person; empty: there is none."""
    turns: tuple[AgentTurn, ...]

    def system(self) -> str:
        """The system message."""
        environment = f"# Environment\n{self.environment}"
        rules = "# Rules\n" + "\n".join(f"{i}. {text}" for i, text in enumerate(self.rules, 1))
        tools = (
            "# Tools\nCall a function with its name and arguments in <tool_call></tool_call>.\n<tools>\n"
            + "\n".join(json.dumps(tool) for tool in self.tools)
            + "\n</tools>"
        )
        memory = "# Memory\n" + "\n".join(f"- {line}" for line in self.memory)
        first = [environment, rules] if self.env_first else [rules, environment]
        return "\n\n".join([f"{self.session_line}\n{self.persona}", *first, tools, memory])

    def messages(self) -> list[dict[str, str]]:
        """The messages in the roles that every template has."""
        asked = max((i for i, t in enumerate(self.turns) if t.role == "user"), default=-1)
        out = [{"role": "system", "content": self.system()}]
        for i, turn in enumerate(self.turns):
            text = turn.text
            if turn.role == "tool":
                text = f"<tool_response>\n{text}\n</tool_response>"
            elif i == asked and self.reminder:
                text += f"\n<system-reminder>{self.reminder}</system-reminder>"
            role = "assistant" if turn.role == "assistant" else "user"
            out.append({"role": role, "content": text})
        return out


def requests_of(prompt: AgentPrompt) -> Iterator[AgentPrompt]:
    """The prompts of all requests that led to this one, itself last."""
    for i, turn in enumerate(prompt.turns, 1):
        if turn.role != "assistant":
            yield replace(prompt, turns=prompt.turns[:i])


def definition(name: str, description: str, arguments: dict[str, str]) -> Json:
    """A tool in OpenAI's form."""
    properties = {key: {"type": "string", "description": said} for key, said in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": [*arguments][:1]}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class AgentShape:
    """The size of a session."""

    rules: int
    tools: int
    memory: int
    """Lines."""
    tasks: int
    """Tasks in the history, of eight turns each."""
    code_lines: int
    """Lines of a file that a call returns."""

    @property
    def turns_built(self) -> int:
        """How many turns there are before prompts change: without the answer to the last task."""
        return TASK_TURNS * self.tasks - 1


def session(seed: int, shape: AgentShape, *, reminder: bool = False) -> AgentPrompt:
    """A session of an agent, the same for the same seed; behind the turns of `shape` come those with which
    it goes on. reminder: whether its program sends one."""
    rng = np.random.default_rng([34, seed])
    files = _files(rng)
    project = str(rng.choice(["toolbox", "algorithms", "homework", "numerics", "kata"]))
    rules = [RULES[i] for i in rng.permutation(len(RULES))[: shape.rules - 1]]
    rules.insert(int(rng.integers(len(rules) + 1)), str(rng.choice([*FLIPPED])))
    return AgentPrompt(
        session_line=session_line(rng),
        persona=PERSONAS[rng.integers(len(PERSONAS))],
        environment=environment(rng, project, day=int(rng.integers(3, 27)), files=files),
        env_first=bool(rng.integers(2)),
        rules=tuple(rules),
        tools=tuple(definition(*tool) for tool in TOOLS[: shape.tools]),
        memory=tuple(_memory(rng, files, shape.memory)),
        reminder=reminder_text(rng) if reminder else "",
        turns=tuple(_history(rng, files, shape)),
    )


def session_line(rng: np.random.Generator) -> str:
    """What some programs begin with: whom the request is billed to."""
    first, last = (f"{rng.integers(2**32):08x}" for _ in range(2))
    return f"x-billing-header: version=2.1.{rng.integers(10, 99)}; session={first}-{last}"


def reminder_text(rng: np.random.Generator) -> str:
    """What some programs add to the last message of a person."""
    n_steps = rng.integers(2, 90)
    return f"The list of steps has {n_steps} open steps. Do not mention this to the user."


def environment(
    rng: np.random.Generator, project: str, *, day: int, files: Sequence[_SourceFile]
) -> str:
    """Date, working directory and what git says."""
    user = rng.choice(["ana", "tomasz", "wei", "noor"])
    changed = [files[i].path for i in rng.permutation(len(files))[: rng.integers(1, 4)]]
    status = "\n".join(f" M {path}" for path in changed)
    return (
        f"Today's date: 2026-11-{day:02}\nWorking directory: /home/{user}/src/{project}\n"
        f"Platform: linux\nGit branch: main\nGit status:\n{status}"
    )


@dataclass(frozen=True, slots=True)
class _SourceFile:
    """A file of the project that the agent works on."""

    path: str
    names: tuple[str, ...]
    """Functions that it defines."""
    lines: tuple[str, ...]


def _files(rng: np.random.Generator) -> list[_SourceFile]:
    """Six source files of the package's sample of chat, under paths of their own."""
    texts = [record.decode() for record in sample.load().split(b"\f")]
    code = [text for text in texts if len(text) > _FILE_LENGTH_MIN and _NAME.search(text)]
    code = [text for text in code if _NAME.findall(text)[0] not in _COMMON]
    found = []
    for i in rng.permutation(len(code))[:6]:
        names = tuple(dict.fromkeys(_NAME.findall(code[i])))
        folder = rng.choice(["maths", "graphs", "strings", "other"])
        lines = tuple(line for line in code[i].split("\n") if line.strip())
        found.append(_SourceFile(f"{folder}/{names[0]}.py", names, lines))
    return found


def _memory(rng: np.random.Generator, files: Sequence[_SourceFile], n: int) -> Iterator[str]:
    """Lines of a memory file."""
    sayings = (
        "{path} is covered by doctests; run them with python -m doctest {path}.",
        "The user wants `{name}` to raise ValueError for input that makes no sense.",
        "Last week `{name}` was moved to {path}; old imports were updated.",
        "Do not change the signature of `{name}`, students use it in their exercises.",
        "Line length is 88, quotes are double; {path} has not been formatted yet.",
    )
    for i in range(n):
        file = files[int(rng.integers(len(files)))]
        name = file.names[rng.integers(len(file.names))]
        yield sayings[i % len(sayings)].format(path=file.path, name=name)


def _call(said: str, name: str, **arguments: str) -> AgentTurn:
    call = json.dumps({"name": name, "arguments": arguments})
    return AgentTurn("assistant", f"{said}\n<tool_call>\n{call}\n</tool_call>")


def _history(
    rng: np.random.Generator, files: Sequence[_SourceFile], shape: AgentShape
) -> Iterator[AgentTurn]:
    """Tasks, each with calls and an answer; those that go on have one call alone."""
    for n_task in range(shape.tasks + _MORE_TASKS):
        file = files[n_task % len(files)]
        name = file.names[rng.integers(len(file.names))]
        yield AgentTurn("user", _task(rng, file.path, name))
        n_lines = shape.code_lines if n_task < shape.tasks else 0
        for said, tool, arguments, result in _steps(rng, file, name, n_lines):
            yield _call(said, tool, **arguments)
            yield AgentTurn("tool", result)
        yield AgentTurn("assistant", _answer(rng, file.path, name))


def _task(rng: np.random.Generator, path: str, name: str) -> str:
    asked = (
        f"Please look at `{name}` in {path} and tell me what happens for an empty input.",
        f"`{name}` in {path} seems slow to me. What would you change first?",
        f"Add a check to `{name}` in {path}: negative numbers are an error.",
        f"Explain to me how `{name}` in {path} works, and whether its tests cover it.",
    )
    return asked[rng.integers(len(asked))]


def _answer(rng: np.random.Generator, path: str, name: str) -> str:
    answers = (
        f"`{name}` returns early for an empty input; {path} has no test for that yet.",
        f"The loop in `{name}` is what takes the time. I left {path} as it is until you decide.",
        f"`{name}` now raises ValueError there, and the doctests of {path} pass.",
    )
    return answers[rng.integers(len(answers))]


def _steps(
    rng: np.random.Generator, file: _SourceFile, name: str, n_lines: int
) -> Iterator[tuple[str, str, dict[str, str], str]]:
    """(what the agent says, tool, arguments, result) of each call. n_lines: how many lines of the file it
    reads first; 0: it runs the tests alone."""
    seconds = rng.integers(2, 60) / 100
    passed = f"{rng.integers(3, 40)} passed in {seconds:.2f}s"
    if n_lines:
        begin = int(rng.integers(max(1, len(file.lines) - n_lines)))
        code = "\n".join(file.lines[begin : begin + n_lines])
        arguments = {"path": file.path, "limit": str(n_lines)}
        yield f"I read {file.path} first.", "read_file", arguments, code
        hits = [line for line in file.lines if name in line][:3]
        found = "\n".join(f"{file.path}:{7 * i + 3}: {line}" for i, line in enumerate(hits, 1))
        yield f"Where is `{name}` used?", "search", {"pattern": name}, found
    command = {"command": f"python -m pytest -q {file.path}"}
    yield "Now the tests.", "run_command", command, passed
