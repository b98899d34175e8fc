"""`fastgen-serve`: an HTTP server for models of Transformers, on the engine of FastGen.

`main` is the command, `app` the application. `api/` holds an interface a module: OpenAI's, vLLM's further paths,
LibreTranslate's. `workers/` holds the process that a model runs in, and the side of the server that talks to it.
`jobs` says what goes between the two, `errors` what a request can fail with.
"""
