"""llama.cpp's sequence state: parse it, hold its rows, compose it again.

`rows` is the value everything else passes around; `blob` and `slotfile` are its two encodings.
"""
