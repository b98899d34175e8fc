"""Texts and files in, translations out: languages of models, sentences, markup, files, the detector of languages.

`translator` is what an interface calls.
"""
