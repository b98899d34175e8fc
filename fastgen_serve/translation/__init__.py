"""Translates texts and files: models' languages, sentences, markup, file formats, language detection.

`translator` is the interface.
"""
