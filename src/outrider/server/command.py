"""`outrider serve`: an OpenAI-compatible server."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.chat_template import template_text
from outrider.commands import option, size
from outrider.console import Consoles, loading, open_consoles, show_memory_table, show_note
from outrider.extras import extra_missing
from outrider.options import ENGINE, EngineOptions, ModelArgument
from outrider.server.address import port_of, taken
from outrider.server.log import log, log_to_stderr
from outrider.server.serve_options import FileOptions, HttpOptions
from outrider.startup import importing

if TYPE_CHECKING:
    from outrider.server.defaults import Defaults
    from outrider.server.engine_host import ProcessHost
    from outrider.server.protocol import Located, Opened
    from outrider.tokenizer import Tokenizer

DEFAULT_NAME = "default"  # of the embedded model

_NAMES, _LIMITS, _ACCESS = "Names and parsers", "Limits", "Access"

_TOOLS_HELP = "Form of calls: hermes, qwen3_coder, llama3, mistral, deepseek, harmony, none; auto: by the template."
_REASONING_HELP = "Form of reasoning: think, mistral, harmony, none; auto: by the template."
_WATCHDOG_HELP = "Rebuild or rest drafting where acceptance has died."
_SEQUENCES_HELP = "Sequences decoded at once. By default 256 on a GPU, else 16."
_ROWS_HELP = "Tokens computed in a pass. By default 8192 on a GPU, else 2048."
_SHARE_HELP = "Share of a GPU's memory to use."
_PREFIX_HELP = "Reuse what prompts have in common."
_SNAPSHOTS_HELP = "Recurrent states kept for reuse. By default a share of memory; 0: none."
_INTERVAL_HELP = "Tokens from one kept recurrent state to the next."
_PACE_HELP = "Milliseconds between frames of streams, all of one size. 0: none."

ServedName = Annotated[
    list[str] | None,
    option(_NAMES, "--served-model-name", metavar="NAME", help="What clients call the model; again for more."),
]
ToolParser = Annotated[str, option(_NAMES, "--tool-call-parser", metavar="NAME", help=_TOOLS_HELP)]
ReasoningParser = Annotated[str, option(_NAMES, "--reasoning-parser", metavar="NAME", help=_REASONING_HELP)]
Watchdog = Annotated[bool, option(ENGINE, "--watchdog/--no-watchdog", help=_WATCHDOG_HELP)]
Host = Annotated[
    str, option(_ACCESS, "--host", metavar="ADDRESS", help="Where to listen; others than this machine need a key.")
]
Port = Annotated[int, option(_ACCESS, "--port", metavar="N", help="Port to listen on; 0: any.", min=0, max=65535)]
ApiKey = Annotated[
    list[str] | None,
    option(
        _ACCESS, "--api-key", metavar="KEY", envvar="OUTRIDER_API_KEY", help="Clients must send it; again for more."
    ),
]
AllowedHost = Annotated[
    list[str] | None, option(_ACCESS, "--allowed-host", metavar="NAME", help="A name that the server goes by.")
]
AllowedOrigin = Annotated[
    list[str] | None, option(_ACCESS, "--allowed-origin", metavar="URL", help="A page that may use it.")
]
MaxBody = Annotated[int, option(_ACCESS, "--max-body", metavar="N", help="Largest request, in MiB.", min=1, max=1024)]
Pace = Annotated[float, option(_ACCESS, "--pace", metavar="X", help=_PACE_HELP, min=0)]
MaxNumSeqs = Annotated[
    int | None, option(_LIMITS, "--max-num-seqs", metavar="N", help=_SEQUENCES_HELP, min=1, max=4096)
]
MaxBatchedTokens = Annotated[
    int | None, option(_LIMITS, "--max-num-batched-tokens", metavar="N", help=_ROWS_HELP, parser=size)
]
MemoryShare = Annotated[
    float, option(_LIMITS, "--gpu-memory-utilization", metavar="X", help=_SHARE_HELP, min=0.01, max=1.0)
]
CacheBytes = Annotated[
    int | None,
    option(_LIMITS, "--kv-cache-memory-bytes", metavar="N", help="Memory for keys and values, as 1G.", parser=size),
]
BlockSize = Annotated[int, option(_LIMITS, "--block-size", metavar="N", help="Tokens in a page of the cache.", min=1)]
PrefixCaching = Annotated[
    bool, option(_LIMITS, "--enable-prefix-caching/--no-enable-prefix-caching", help=_PREFIX_HELP)
]
NumSnapshots = Annotated[int | None, option(_LIMITS, "--num-snapshots", metavar="N", help=_SNAPSHOTS_HELP, min=0)]
SnapshotInterval = Annotated[int, option(_LIMITS, "--snapshot-interval", metavar="N", help=_INTERVAL_HELP, min=1)]
MaxQueue = Annotated[int, option(_LIMITS, "--max-num-queued-reqs", metavar="N", help="Sequences that may wait.", min=0)]
Deadline = Annotated[
    float, option(_LIMITS, "--request-timeout", metavar="X", help="Seconds a request may take.", min=0.1)
]
Stall = Annotated[
    float, option(_LIMITS, "--stall-timeout", metavar="X", help="Seconds without progress: unhealthy.", min=1)
]
ExitOnDeath = Annotated[
    bool,
    option(
        _LIMITS,
        "--exit-on-engine-death/--no-exit-on-engine-death",
        help="End the process (status 1) when the engine has ended.",
    ),
]
Drain = Annotated[
    float, option(_LIMITS, "--shutdown-timeout", metavar="X", help="Seconds to finish in after SIGTERM.", min=0)
]


@dataclass(frozen=True)
class NameOptions:
    served_model_name: ServedName = None
    tool_call_parser: ToolParser = "auto"
    reasoning_parser: ReasoningParser = "auto"


@dataclass(frozen=True)
class AccessOptions:
    """Who may ask, and where."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    api_key: ApiKey = None
    allowed_host: AllowedHost = None
    allowed_origin: AllowedOrigin = None
    max_body: MaxBody = 32
    pace: Pace = 0.0


@dataclass(frozen=True)
class LimitOptions:
    """How much is taken in at a time."""

    max_num_seqs: MaxNumSeqs = None
    max_num_batched_tokens: MaxBatchedTokens = None
    gpu_memory_utilization: MemoryShare = 0.9
    kv_cache_memory_bytes: CacheBytes = None
    block_size: BlockSize = 16
    enable_prefix_caching: PrefixCaching = True
    num_snapshots: NumSnapshots = None
    snapshot_interval: SnapshotInterval = 256
    max_queue: MaxQueue = 256
    request_timeout: Deadline = 600.0
    stall_timeout: Stall = 60.0
    shutdown_timeout: Drain = 30.0
    exit_on_engine_death: ExitOnDeath = True

    def of_engine(self) -> dict[str, Any]:
        """Those that are the engine's. What was not given is left out: the device decides."""
        batches = {"max_num_seqs": self.max_num_seqs, "max_num_batched_tokens": self.max_num_batched_tokens}
        return {name: value for name, value in batches.items() if value is not None} | {
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory": self.kv_cache_memory_bytes,
            "page_size": self.block_size,
            "enable_prefix_caching": self.enable_prefix_caching,
            "num_snapshots": self.num_snapshots,
            "snapshot_interval": self.snapshot_interval,
        }


def serve_command(
    options: EngineOptions,
    names: NameOptions,
    access_options: AccessOptions,
    limit_options: LimitOptions,
    files: FileOptions,
    http: HttpOptions,
    target: ModelArgument = None,
    watchdog: Watchdog = True,
) -> None:
    """Serve a model over HTTP, as OpenAI does.

    The first SIGTERM or Ctrl-C lets running requests finish; the second ends them.

    \b
    Examples:
      outrider serve
      outrider serve org/name --draft org/name-eagle3 -k 4
      outrider serve org/name \\
        --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'
      OUTRIDER_API_KEY=... outrider serve org/name --host 0.0.0.0
      outrider serve org/name --config flags.yaml --max-model-len 4k
    """
    options = options.named(target)
    with importing():
        try:
            from outrider.server.app import Application
            from outrider.server.engine_client import EngineClient, Limits
            from outrider.server.engine_host import Opening, ProcessHost
            from outrider.server.parsers import ParserNames, choose
            from outrider.server.security import access_for
            from outrider.server.serving import Server
        except ImportError as error:
            raise extra_missing("outrider serve", "serve", error) from error
    asked = ParserNames(names.tool_call_parser, names.reasoning_parser)
    choose(asked, None)  # an unknown one is refused before anything is loaded
    given = access_options
    origins = [*(given.allowed_origin or []), *http.checked().origins()]
    template = template_text(files.chat_template)
    allowed = (given.api_key or [], given.allowed_host or [], origins)
    access = replace(access_for(given.host, *allowed, given.max_body * 2**20), pace=given.pace / 1000)
    called = list(dict.fromkeys(names.served_model_name or [name_of(options.model)]))
    served, consoles = called[0], open_consoles()
    shows = consoles.about.is_terminal
    opening = Opening(options, limit_options.of_engine(), watchdog, served, shows, files.of_engine())
    with taken(given.host, given.port) as sockets, ProcessHost(opening) as host:
        model, tokenizer, defaults = _opened(host, consoles, files)
        if template is not None and tokenizer is not None:
            tokenizer.use_template(template)
        limits = Limits(
            limit_options.max_queue, deadline=limit_options.request_timeout, stall=limit_options.stall_timeout
        )
        log_to_stderr(*(["uvicorn"] if http.uvicorn_log_level is not None else []))
        tools, reasoning = choose(asked, tokenizer)
        reasons = {"tools": tools.reason, "reasoning": reasoning.reason}
        log("parsers", tools=tools.name, reasoning=reasoning.name, because=reasons)
        log("memory", **model.memory)
        with suppress(OSError):  # standard error may be full, as on a disk that is; that is no reason to end
            show_memory_table(consoles.about, model.memory_rows)
        engine = EngineClient(host.link, model, served, limits, host.why_ended)
        application = Application(
            engine,
            tokenizer,
            served,
            access,
            ParserNames(tools.name, reasoning.name),
            other_names=called[1:],
            defaults=defaults,
            root_path=http.root_path,
        )
        port = port_of(sockets)
        host_name = f"[{given.host}]" if ":" in given.host else given.host
        url = f"{'https' if http.is_secure else 'http'}://{host_name}:{port}"

        def on_listening() -> None:
            log("listening", host=given.host, port=port, model=served, max_model_len=model.max_model_len)
            with suppress(OSError):
                show_note(consoles.about, f"{served} at {url}/v1, playground at {url}/")

        exits, drain = limit_options.exit_on_engine_death, limit_options.shutdown_timeout
        settings = {"exit_on_death": exits, "on_listening": on_listening, **http.of_uvicorn()}
        Server(application, given.host, port, drain, **settings).run(sockets=sockets)
        host.close()
        log("ended")
        if engine.is_dead:
            raise SystemExit(1)


def _opened(host: ProcessHost, consoles: Consoles, files: FileOptions) -> tuple[Opened, Tokenizer | None, Defaults]:
    """What the front needs: the tokenizer is read here while the weights are read there."""
    from outrider.checkpoints.gguf_tokenizer import tokenizer_at
    from outrider.server.defaults import chosen_defaults

    found: list[tuple[Tokenizer | None, Defaults]] = []

    def read(files_are: Located) -> None:
        path = Path(files_are.path)
        defaults = chosen_defaults(files.generation_config, path, files.override_generation_config, files.seed)
        found.append((tokenizer_at(Path(files_are.tokenizer or path)), defaults))

    with loading(consoles.about) as progress:
        model = host.opened(progress, read)
    return model, *found[0]


def name_of(model: str | None) -> str:
    """A hub id is its own name; of a path, clients see the last part only."""
    if model is None:
        return DEFAULT_NAME
    return Path(model).resolve().name if Path(model).expanduser().exists() else model
