"""A small llama in torch that may drop keys per head or per position: what evaluation runs on.

Needs the extra `train` (torch). Import the modules, not this package.
"""
