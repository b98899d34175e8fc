"""The interfaces: one module for each, with its paths, its schemas and its errors.

A module has `router` and `write_error(error) -> JSONResponse`. If some of its paths do not need the API key in the
header, it also has `WITHOUT_HEADER`: the public paths, and those whose key is in the body, which their handler checks
(`fastgen_serve.keys.check(key, request.app.state.settings.api_keys)`). `fastgen_serve.app` combines the modules.
"""
