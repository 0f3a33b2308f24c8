"""`outrider serve`: an OpenAI-compatible server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.bench.options import (
    Device,
    Draft,
    Dtype,
    Eager,
    Exact,
    MaxModelLen,
    NumSpeculativeTokens,
    SpeculativeJson,
    speculative_from,
)
from outrider.console import loading, open_consoles, show_note
from outrider.extras import extra_missing
from outrider.llm import LLM
from outrider.server.log import log, log_to_stderr

DEFAULT_NAME = "default"  # of the embedded model

_LIMITS, _ACCESS = "Limits", "Access"

_TOOLS_HELP = "Form of calls: hermes, qwen3_coder, llama3, mistral, deepseek, harmony, none; auto: by the template."
_REASONING_HELP = "Form of reasoning: think, mistral, harmony, none; auto: by the template."


def _option(panel: str | None, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **settings)


ModelName = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="A directory, a .gguf file or a hub id. Default: the embedded model."),
]
ServedName = Annotated[str | None, _option(None, "--served-model-name", help="What clients call the model.")]
ToolParser = Annotated[str, _option(None, "--tool-call-parser", help=_TOOLS_HELP, metavar="NAME")]
ReasoningParser = Annotated[str, _option(None, "--reasoning-parser", help=_REASONING_HELP, metavar="NAME")]
NoDraft = Annotated[bool, _option(None, "--no-draft", help="Decode plainly, without a drafter.")]
Watchdog = Annotated[
    bool,
    _option(None, "--watchdog/--no-watchdog", help="Rebuild or rest drafting where acceptance has died."),
]
Host = Annotated[str, _option(_ACCESS, "--host", help="Address to listen on; others than this machine need a key.")]
Port = Annotated[int, _option(_ACCESS, "--port", help="Port to listen on.", min=0, max=65535)]
ApiKey = Annotated[
    list[str] | None,
    _option(_ACCESS, "--api-key", envvar="OUTRIDER_API_KEY", help="Clients must send it; again for more keys."),
]
AllowedHost = Annotated[list[str] | None, _option(_ACCESS, "--allowed-host", help="A name that the server goes by.")]
AllowedOrigin = Annotated[list[str] | None, _option(_ACCESS, "--allowed-origin", help="A page that may use it.")]
MaxBody = Annotated[int, _option(_ACCESS, "--max-body", help="Largest request, in MiB.", min=1, max=1024)]
Pace = Annotated[
    float, _option(_ACCESS, "--pace", help="Milliseconds between frames of streams, all of one size. 0: none.", min=0)
]
MaxNumSeqs = Annotated[int, _option(_LIMITS, "--max-num-seqs", help="Sequences decoded at once.", min=1, max=4096)]
CacheBytes = Annotated[
    int | None, _option(_LIMITS, "--kv-cache-memory-bytes", help="Memory for keys and values.", min=1, metavar="N")
]
PrefixCaching = Annotated[
    bool,
    _option(_LIMITS, "--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse what prompts have in common."),
]
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
    tool_call_parser: ToolParser = "auto",
    reasoning_parser: ReasoningParser = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    exact: Exact = False,
    enforce_eager: Eager = False,
    watchdog: Watchdog = True,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    api_key: ApiKey = None,
    allowed_host: AllowedHost = None,
    allowed_origin: AllowedOrigin = None,
    max_body: MaxBody = 32,
    pace: Pace = 0.0,
    max_num_seqs: MaxNumSeqs = 16,
    kv_cache_memory_bytes: CacheBytes = None,
    enable_prefix_caching: PrefixCaching = True,
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
        from outrider.server.parsers import ParserNames, choose
        from outrider.server.security import access_for
        from outrider.server.serving import Server
    except ImportError as error:
        raise extra_missing("outrider serve", "serve", error) from error
    asked = ParserNames(tool_call_parser, reasoning_parser)
    choose(asked, None)  # an unknown one is refused before anything is loaded
    access = access_for(host, api_key or [], allowed_host or [], allowed_origin or [], max_body * 2**20)
    access = replace(access, pace=pace / 1000)
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
            exact=exact,
            enforce_eager=enforce_eager,
            kv_cache_memory=kv_cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            watchdog=watchdog,
            progress=progress,
        )
    with llm:
        llm.warm_up()
        served = served_model_name or name_of(model)
        limits = Limits(max_queue=max_queue, deadline=request_timeout, stall=stall_timeout)
        log_to_stderr()
        tools, reasoning = choose(asked, llm.tokenizer)
        reasons = {"tools": tools.reason, "reasoning": reasoning.reason}
        log("parsers", tools=tools.name, reasoning=reasoning.name, because=reasons)
        parsers = ParserNames(tools.name, reasoning.name)
        log("listening", host=host, port=port, model=served, max_model_len=llm.max_model_len)
        show_note(consoles.about, f"{served} at http://{host}:{port}/v1, playground at http://{host}:{port}/")
        Server(Application(llm, served, limits, access, parsers), host, port, shutdown_timeout).run()
        log("ended")


def name_of(model: str | None) -> str:
    """A hub id is its own name; of a path, clients see the last part only."""
    if model is None:
        return DEFAULT_NAME
    return Path(model).resolve().name if Path(model).expanduser().exists() else model
