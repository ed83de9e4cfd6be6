"""What chat templates render, as tokens of a vocabulary that has their control tokens."""

from __future__ import annotations

import re

import numpy as np

from towerd.store.catalog.vocabularies import KeptVocabulary
from towerd.tokens import Ids

RENDERED = {
    "chatml": "‹<|im_start|>›system\nBe brief.‹<|im_end|>›\n‹<|im_start|>›user\nWho?‹<|im_end|>›\n"
    "‹<|im_start|>›assistant\nMe.‹<|im_end|>›\n",
    "llama3": "‹<|begin_of_text|>›‹<|start_header_id|>›system‹<|end_header_id|>›\n\nBe brief.‹<|eot_id|>›"
    "‹<|start_header_id|>›user‹<|end_header_id|>›\n\nWho?‹<|eot_id|>›"
    "‹<|start_header_id|>›assistant‹<|end_header_id|>›\n\nMe.‹<|eot_id|>›",
    "phi": "‹<|system|>›Be brief.‹<|end|>›‹<|user|>›Who?‹<|end|>›‹<|assistant|>›Me.‹<|end|>›",
    "deepseek": "‹<｜begin▁of▁sentence｜>›‹<｜User｜>›Who?‹<｜Assistant｜>›Me.‹<｜end▁of▁sentence｜>›",
    "gemma": "‹<bos>›‹<start_of_turn>›user\nWho?‹<end_of_turn>›\n‹<start_of_turn>›model\nMe.‹<end_of_turn>›\n",
    "mistral": "‹<s>›‹[SYSTEM_PROMPT]›Be brief.‹[/SYSTEM_PROMPT]›‹[INST]›Who?‹[/INST]›Me.‹</s>›",
    "harmony": "‹<|start|>›system‹<|message|>›Be brief.‹<|end|>›‹<|start|>›user‹<|message|>›Who?‹<|end|>›"
    "‹<|start|>›assistant‹<|channel|>›final‹<|message|>›Me.‹<|return|>›",
    "granite": "‹<|start_of_role|>›system‹<|end_of_role|>›Be brief.‹<|end_of_text|>›\n"
    "‹<|start_of_role|>›user‹<|end_of_role|>›Who?‹<|end_of_text|>›\n"
    "‹<|start_of_role|>›assistant‹<|end_of_role|>›Me.‹<|end_of_text|>›\n",
}
"""Control tokens stand in ‹›."""


def tokenized(rendered: str) -> tuple[Ids, KeptVocabulary]:
    """Ids in a vocabulary of the control tokens there are, and all bytes."""
    pieces, names = [bytes([i]) for i in range(256)], [b""] * 256
    ids: list[int] = []
    for part in re.split("(‹.*?›)", rendered):
        if part.startswith("‹"):
            ids.append(len(pieces))
            pieces.append(b"")
            names.append(part[1:-1].encode())
        else:
            ids += part.encode()
    return np.array(ids, np.int32), KeptVocabulary(pieces, names)
