"""Numeric primitives of towerd: in C++ and Metal, and a dispatcher.

Imports nothing on purpose; use `towerd.kernels.dispatch`.
"""

__version__ = "0.1.0"
