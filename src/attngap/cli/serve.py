"""`attngap serve`: the explorer."""

import errno
import json
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from attngap.cli.placement import DEVICE, DTYPE, Device, Dtype, placed
from attngap.errors import AttngapError


def serve(
    folders: Annotated[list[Path] | None, typer.Argument(help="Where results lie; here if none is given.")] = None,
    model: Annotated[str | None, typer.Option(help="A model to look into, or a converted folder: both models.")] = None,
    dtype: Dtype = DTYPE,
    device: Device = DEVICE,
    host: Annotated[str, typer.Option(help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8777,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Let other machines in.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print {url} as JSON once it listens.")] = False,
) -> None:
    """Explore in the browser: the law under sliders, weights side by side, a model's heads on your sentence, results.

    \b
    Example:
      attngap serve --model smollm2
    """
    from attngap.explorer.app import create
    from attngap.explorer.hosts import LOCAL

    if host not in LOCAL and not allow_remote:
        raise AttngapError(
            f"--host {host} would let other machines read your results and run your model; only {LOCAL[0]} is open to "
            "you alone. Add --allow-remote if that is what you want"
        )
    places = folders or [Path()]
    for place in places:
        if not place.is_dir():
            raise AttngapError(f"'{place}' is not a folder. Give folders that hold results")
    where = placed(dtype, device)
    listening = listen(host, port)
    try:
        app = create(places, _sentences(model, where), host)
        url = f"http://{host}:{listening.getsockname()[1]}/"
        print(json.dumps({"url": url}) if as_json else f"Explorer at {url} (stop it with Ctrl-C)", flush=True)
        _run(app, listening)
    finally:
        listening.close()


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, before anything slow is loaded, so that a port in use is told at once."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            raise AttngapError(f"Port {port} is in use. Choose another: attngap serve --port {port + 1}") from None
        raise AttngapError(f"Cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listening


def _sentences(model: str | None, where: dict[str, Any]):
    if model is None:
        return None
    from attngap.explorer.sentence import Sentences
    from attngap.models.load import load
    from attngap.models.save import load_base, read_record
    from attngap.progress import progress

    folder = Path(model)
    with progress(f"loading {model}", total=1, quiet=False) as advance:
        if (folder / "attngap.json").exists():
            original, tokenizer = load_base(folder, read_record(folder), **where)
            found = Sentences(original, tokenizer, model, load(folder, **where)[0])
        else:
            found = Sentences(*load(model, **where), model)
        advance()
    return found


def _run(app, listening: socket.socket) -> None:
    import uvicorn

    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listening])
