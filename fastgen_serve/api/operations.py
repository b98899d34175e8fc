"""Paths for operators: health, readiness and metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from fastgen_serve import metrics
from fastgen_serve.errors import ServeError
from fastgen_serve.models import Models

router = APIRouter(tags=["operations"])
# Health checkers have no key.
WITHOUT_HEADER = frozenset({"/health", "/ready"})


def write_error(error: ServeError) -> JSONResponse:
    """Returns an error of this interface."""
    return JSONResponse({"error": error.message, "code": error.code}, error.status)


@router.get("/health")
async def health() -> dict[str, str]:
    """The server is there. Models may be loading still."""
    return {"status": "ok"}


@router.get("/ready", responses={503: {"description": "A model is loading, or the server is about to stop."}})
async def ready(request: Request) -> JSONResponse:
    """Whether all models are loaded and warmed up, and the server takes requests."""
    models: Models = request.app.state.models
    is_ready = models.are_ready and not request.app.state.traffic.is_draining
    states = {model.name: model.is_ready for model in models}
    return JSONResponse({"ready": is_ready, "models": states}, 200 if is_ready else 503)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def read_metrics(request: Request) -> Response:
    """What the server and the processes of the models have done, as Prometheus reads it."""
    models = list(request.app.state.models)
    stats = await asyncio.gather(*(model.stats() for model in models))
    metrics.ENGINES.latest = {model.name: found for model, found in zip(models, stats, strict=True)}
    return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
