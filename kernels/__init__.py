"""Numeric primitives of towerd: a reference in numpy, the same in C++, one chooser.

Imports nothing on purpose; use `towerd.kernels.dispatch`.
"""

__version__ = "0.1.0"
