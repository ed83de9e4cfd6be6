"""Numeric primitives of towerd: a numpy reference, the same in C++, and a dispatcher.

Imports nothing on purpose; use `towerd.kernels.dispatch`.
"""

__version__ = "0.1.0"
