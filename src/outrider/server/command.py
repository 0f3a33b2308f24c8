"""`outrider serve`: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.bench.options import (
    Device,
    Draft,
    Dtype,
    MaxModelLen,
    NumSpeculativeTokens,
    SpeculativeJson,
    speculative_from,
)
from outrider.console import loading, open_consoles, show_note
from outrider.llm import LLM
from outrider.server.log import log, log_to_stderr

EXTRA = "outrider serve needs the serve extra: pip install 'outrider[serve]'"
DEFAULT_NAME = "default"  # of the embedded model

_LIMITS, _ACCESS = "Limits", "Access"

_TOOLS_HELP = "How the model writes tool calls: hermes, llama3, mistral or deepseek."
_REASONING_HELP = "How the model marks its reasoning: think or mistral."


def _option(panel: str | None, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **settings)


ModelName = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A directory, a .gguf file or a hub id. Default: the embedded model."),
]
ServedName = Annotated[str | None, _option(None, "--served-model-name", help="What clients call the model.")]
ToolParser = Annotated[str | None, _option(None, "--tool-call-parser", help=_TOOLS_HELP, metavar="NAME")]
ReasoningParser = Annotated[str | None, _option(None, "--reasoning-parser", help=_REASONING_HELP, metavar="NAME")]
NoDraft = Annotated[bool, _option(None, "--no-draft", help="Decode plainly, without a drafter.")]
Host = Annotated[str, _option(_ACCESS, "--host", help="Address to listen on; others than this machine need a key.")]
Port = Annotated[int, _option(_ACCESS, "--port", help="Port to listen on.", min=0, max=65535)]
ApiKey = Annotated[
    list[str] | None,
    _option(_ACCESS, "--api-key", envvar="OUTRIDER_API_KEY", help="Clients must send it; again for more keys."),
]
AllowedHost = Annotated[list[str] | None, _option(_ACCESS, "--allowed-host", help="A name that the server goes by.")]
AllowedOrigin = Annotated[list[str] | None, _option(_ACCESS, "--allowed-origin", help="A page that may use it.")]
MaxBody = Annotated[int, _option(_ACCESS, "--max-body", help="Largest request, in MiB.", min=1, max=1024)]
MaxNumSeqs = Annotated[int, _option(_LIMITS, "--max-num-seqs", help="Sequences decoded at once.", min=1, max=4096)]
MaxQueue = Annotated[int, _option(_LIMITS, "--max-num-queued-reqs", help="Sequences that may wait.", min=0)]
Deadline = Annotated[float, _option(_LIMITS, "--request-timeout", help="Seconds a request may take.", min=0.1)]
Stall = Annotated[float, _option(_LIMITS, "--stall-timeout", help="Seconds without progress: unhealthy.", min=1)]
Drain = Annotated[float, _option(_LIMITS, "--shutdown-timeout", help="Seconds to finish in after SIGTERM.", min=0)]


def serve_command(
    model: ModelName = None,
    draft: Draft = None,
    no_draft: NoDraft = False,
    speculative_config: SpeculativeJson = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    served_model_name: ServedName = None,
    tool_call_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    allowed_host: AllowedHost = None,
    allowed_origin: AllowedOrigin = None,
    max_body: MaxBody = 32,
    max_num_seqs: MaxNumSeqs = 16,
    max_queue: MaxQueue = 256,
    request_timeout: Deadline = 600.0,
    stall_timeout: Stall = 60.0,
    shutdown_timeout: Drain = 30.0,
) -> None:
    """Serve a model over HTTP, as OpenAI does.

    The first SIGTERM or Ctrl-C lets running requests finish; the second ends them.

    \b
    Examples:
      outrider serve
      outrider serve org/name --draft org/name-eagle3 -k 4
      outrider serve org/name --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'
      OUTRIDER_API_KEY=... outrider serve org/name --host 0.0.0.0
    """
    try:
        from outrider.server.app import Application
        from outrider.server.engine_thread import Limits
        from outrider.server.parsers import ParserNames, reasoning_parsers, tool_parsers
        from outrider.server.security import access_for
        from outrider.server.serving import Server
    except ModuleNotFoundError as error:
        raise ValueError(EXTRA) from error
    for name, known in ((tool_call_parser, tool_parsers), (reasoning_parser, reasoning_parsers)):
        if name is not None:
            known[name]  # an unknown one is refused before anything is loaded
    parsers = ParserNames(tool_call_parser, reasoning_parser)
    access = access_for(host, api_key or [], allowed_host or [], allowed_origin or [], max_body * 2**20)
    if no_draft and (draft is not None or speculative_config is not None):
        raise ValueError("--no-draft contradicts --draft and --speculative-config: give one of them")
    speculative = None if no_draft else speculative_from(model, draft, speculative_config, num_speculative_tokens)
    consoles = open_consoles()
    with loading(consoles.about) as progress:
        llm = LLM(
            model,
            speculative,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            progress=progress,
        )
    with llm:
        served = served_model_name or name_of(model)
        limits = Limits(max_queue=max_queue, deadline=request_timeout, stall=stall_timeout)
        log_to_stderr()
        log("listening", host=host, port=port, model=served, max_model_len=llm.max_model_len)
        show_note(consoles.about, f"{served} at http://{host}:{port}/v1")
        Server(Application(llm, served, limits, access, parsers), host, port, shutdown_timeout).run()
        log("ended")


def name_of(model: str | None) -> str:
    """A hub id is its own name; of a path, clients see the last part only."""
    if model is None:
        return DEFAULT_NAME
    return Path(model).resolve().name if Path(model).expanduser().exists() else model
