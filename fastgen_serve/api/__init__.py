"""The interfaces: a module for each, with its paths, its shapes and its errors."""
