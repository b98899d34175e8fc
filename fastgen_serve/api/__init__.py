"""The interfaces: a module for each, with its paths, its shapes and its errors.

A module has `router`, `write_error(error) -> JSONResponse`, and, where some of its paths are not for the key in the
header, `WITHOUT_HEADER`: those that are for everybody, and those whose key is in the body, which their handler checks
(`fastgen_serve.keys.check(key, request.app.state.settings.api_keys)`). `fastgen_serve.app` puts them together.
"""
