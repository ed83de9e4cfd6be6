"""Workflows: requests of several agents that belong together, named by clients or recognised.

The model's hidden state is not used. llama.cpp gives access to it in two ways, both expensive:
a callback on the graph (`towerd.engine.embedded.context.taps`) is fixed when the context is made and is
asked about every node of every step, 162 times and 0.19 ms a step for 5 layers (a step of the 260K
model takes 0.17 ms without); the embeddings output makes llama.cpp compute the output of every
prompt token, which made a prompt of 128 tokens 2.5 times as slow. Quoted tokens identify the source
of a text exactly, and cost a few milliseconds for 32,000 tokens, after the answer.
"""

from towerd.sessions.workflows.tracker import Tracker, Workflow, WorkflowStep

__all__ = ["WorkflowStep", "Tracker", "Workflow"]
