"""`fastgen-serve`: an HTTP server for Transformers models, on FastGen's engine.

`main` is the command, `app` the application. `api/` holds one module per interface: OpenAI's, vLLM's additional paths,
LibreTranslate's. `workers/` holds the process that runs a model, and the server's side of the connection to it.
`jobs` defines the data that crosses this connection, `errors` the errors of requests.
"""
