"""A vLLM engine as a process of its own, in an environment that has vLLM: one JSON object a line each way.

The first line has the arguments of `vllm.LLM`; each later one is a request: `prompt` (token ids), `max_tokens`,
`logprobs` and `salt`. The end of its input stops it."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Serve the requests of standard input."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints
    from vllm import LLM, SamplingParams

    llm = LLM(**json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(llm, SamplingParams, json.loads(line))), file=replies, flush=True)
    llm.llm_engine.engine_core.shutdown(timeout=60)


def _answer(llm: Any, params: Any, request: dict[str, Any]) -> dict[str, Any]:
    sampling = params(
        temperature=0,
        max_tokens=request.get("max_tokens", 1),
        logprobs=request.get("logprobs"),
        ignore_eos=True,
        detokenize=False,
    )
    prompt: dict[str, Any] = {"prompt_token_ids": request["prompt"]}
    if request.get("salt"):
        prompt["cache_salt"] = request["salt"]
    began = time.perf_counter()
    found = llm.generate([prompt], sampling, use_tqdm=False)[0]
    seconds = time.perf_counter() - began
    said = found.outputs[0]
    steps = [{int(id): each.logprob for id, each in step.items()} for step in said.logprobs or ()]
    return {
        "tokens": list(said.token_ids),
        "logprobs": steps,
        "cached": found.num_cached_tokens,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
