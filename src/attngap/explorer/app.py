"""The explorer's server: one page and a few JSON answers, for this machine only."""

from pathlib import Path
from typing import Annotated, Any

from attngap.errors import AttngapError, missing_extra
from attngap.explorer import choice, law, page, weights
from attngap.explorer.chat import Chat
from attngap.explorer.hosts import LOCAL, HostCheck
from attngap.explorer.sentence import Sentences
from attngap.explorer.shelf import Shelf


def create(folders: list[Path], sentences: Sentences | None = None, open_to: str = LOCAL[0]):
    """The FastAPI application, for requests that call it by a name of the address it is `open_to`."""
    try:
        import uvicorn  # noqa: F401 - what runs the application; told here if it is missing
        from fastapi import Body, Depends, FastAPI, Query, Request
        from fastapi.exceptions import RequestValidationError
        from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
    except ImportError:
        raise missing_extra("The explorer needs", "serve") from None

    app = FastAPI(title="attngap explorer", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HostCheck, open_to=open_to)
    shelf = Shelf(folders)
    plan = shelf.plan(None if sentences is None else sentences.model.config)
    html = page.explorer(sentences, plan)
    chat = Chat(sentences) if sentences is not None and page.writes(sentences) else None

    @app.exception_handler(AttngapError)
    def mistake(request: Request, error: AttngapError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=422)

    @app.exception_handler(RequestValidationError)
    def wrong_request(request: Request, error: RequestValidationError) -> JSONResponse:
        """In a line, without what came in: fastapi's own answer repeats it, and fails where it is no text."""
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        return JSONResponse({"error": f"{place}: {first['msg']}"}, status_code=422)

    @app.get("/", response_class=HTMLResponse)
    def index() -> str:
        return html

    def place(
        log10_n: float = Query(ge=1, le=12),
        d: int = Query(ge=4, le=4098),
        needle: float = Query(ge=0.1, le=1.5),
        a0: float = Query(ge=0, lt=0.1),
        b: float = Query(ge=0.1, le=0.9),
        scale: float = Query(ge=0.1, le=4),
        m: int = Query(ge=1, le=1000),
        degree: int = Query(ge=1, le=64),
    ) -> law.Place:
        return law.Place(log10_n, d, needle, a0, b, scale, m, degree)

    @app.get("/api/law")
    def law_here(where: Annotated[law.Place, Depends(place)]) -> dict[str, Any]:
        return law.answer(where)

    @app.get("/api/law/curve")
    def law_curve(where: Annotated[law.Place, Depends(place)]) -> list[dict[str, Any]]:
        return law.curve(where)

    @app.get("/api/weights")
    def weights_here(name: str, tokens: int, sharpness: float, data: str, seed: int) -> dict[str, Any]:
        return weights.answer(name=name, tokens=tokens, sharpness=sharpness, data=data, seed=seed)

    @app.get("/api/sentence")
    def heads_here(text: str = Query(max_length=page.MOST_CHARACTERS)) -> dict[str, Any]:
        found = _loaded(sentences)
        return found.heads(text) | {"verdicts": shelf.verdicts(found.model.config)}

    @app.get("/api/sentence/{layer}/{head}")
    def head_here(layer: int, head: int, text: str = Query(max_length=page.MOST_CHARACTERS)) -> dict[str, Any]:
        return _loaded(sentences).pattern(text, layer, head)

    @app.get("/api/choice")
    def choice_here(kept: int) -> dict[str, Any]:
        if plan is None:
            raise AttngapError(
                "No plan with predictions lies in these folders. Make one: attngap plan DIR -o plan.json"
            )
        return choice.answer(plan, kept)

    @app.post("/api/chat")
    def chat_here(histories: Annotated[dict[str, list[dict[str, str]]], Body()], tokens: int = 128):
        _loaded(sentences)
        if chat is None:
            raise AttngapError("This model writes no text")
        return StreamingResponse(chat.lines(histories, tokens), media_type="application/x-ndjson")

    @app.get("/api/results")
    def results() -> dict[str, Any]:
        return {"results": shelf.listing(), "sweeps": shelf.sweeps()}

    @app.get("/report/{number}", response_class=HTMLResponse)
    def report(number: int) -> str:
        return shelf.report(number)

    return app


def _loaded(sentences: Sentences | None) -> Sentences:
    if sentences is None:
        raise AttngapError("No model is loaded. Start again with one: attngap serve --model smollm2")
    return sentences
