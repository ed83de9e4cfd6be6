"""Vocabularies and codecs to test with."""

from vocabularies import codec, small, vocabulary

__all__ = ["codec", "small", "vocabulary"]
