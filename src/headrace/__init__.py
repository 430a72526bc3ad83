"""Headrace: train language-model agents online from a stream of single attempts."""

__version__ = "0.1.0"
