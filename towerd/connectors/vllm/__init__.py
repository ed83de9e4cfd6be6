"""The store below vLLM: its KV connector (docs/vllm.md). Importing this imports no vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from towerd.connectors.vllm.connector import TowerdConnector

__all__ = ["TowerdConnector"]


def __getattr__(name: str) -> Any:
    """`TowerdConnector`, imported on first use: nothing else of towerd needs vLLM."""
    if name != "TowerdConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from towerd.connectors.vllm.connector import TowerdConnector

    return TowerdConnector
