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
from outrider.processes import freeze_heap
from outrider.server.address import port_of, taken
from outrider.server.log import log, log_to_stderr
from outrider.server.serve_options import FileOptions, HttpOptions, RayOptions
from outrider.startup import importing

if TYPE_CHECKING:
    from outrider.server.app import Application
    from outrider.server.defaults import ServerDefaults
    from outrider.server.engine_host import Opening, ProcessHost
    from outrider.server.parsers import ParserNames
    from outrider.server.protocol import Located, Opened
    from outrider.server.security import Access
    from outrider.tokenizer import Tokenizer

DEFAULT_NAME = "default"  # of the embedded model

_NAMES, _LIMITS, _ACCESS = "Names and parsers", "QueueLimits", "Access"

_TOOLS_HELP = "Form of calls: hermes, qwen3_coder, llama3, mistral, deepseek, harmony, none; auto: by the template."
_REASONING_HELP = "Form of reasoning: think, mistral, harmony, none; auto: by the template."
_WATCHDOG_HELP = "Rebuild or pause drafting where acceptance has died."
_LEARN_HELP = "The drafter learns from answers to requests that allow it, when idle; its versions go here."
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
Learn = Annotated[str | None, option(ENGINE, "--learn", metavar="DIR", help=_LEARN_HELP)]
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


@dataclass(frozen=True)
class Plan:
    """A server as it was asked for, settled as far as it can be before anything is loaded."""

    options: EngineOptions
    names: NameOptions
    limits: LimitOptions
    files: FileOptions
    access: Access
    watchdog: bool = True
    template: str | None = None  # the text of a chat template, instead of the model's own
    root_path: str = ""
    learn: str | None = None  # where versions of a drafter go that learns from what is said

    @property
    def called(self) -> list[str]:
        """All names of the model; answers have the first."""
        return list(dict.fromkeys(self.names.served_model_name or [name_of(self.options.model)]))

    @property
    def parsers(self) -> ParserNames:
        from outrider.server.parsers import ParserNames

        return ParserNames(self.names.tool_call_parser, self.names.reasoning_parser)

    def opening(self, *, shows_progress: bool = False) -> Opening:
        from outrider.server.engine_host import Opening

        settings, files = self.limits.of_engine(), self.files.of_engine()
        return Opening(self.options, settings, self.watchdog, self.called[0], shows_progress, files, self.learn)


def serve_command(
    options: EngineOptions,
    names: NameOptions,
    access_options: AccessOptions,
    limit_options: LimitOptions,
    files: FileOptions,
    http: HttpOptions,
    ray: RayOptions,
    target: ModelArgument = None,
    watchdog: Watchdog = True,
    learn: Learn = None,
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
      outrider serve org/name --ray --num-replicas 4
    """
    with importing():
        try:
            import outrider.server.app
            import outrider.server.serving  # noqa: F401
            from outrider.server.parsers import choose
        except ImportError as error:
            raise extra_missing("outrider serve", "serve", error) from error
    given, template = access_options, template_text(files.chat_template)
    access = settled_access(given, http)
    chosen = (options.named(target), names, limit_options, files, access, watchdog, template, http.root_path)
    if ray.ray and learn is not None:
        raise ValueError("a drafter learns in one server: leave out --learn, or --ray")
    plan = Plan(*chosen, learn=learn)
    choose(plan.parsers, None)  # an unknown one is refused before anything is loaded
    if ray.ray:
        from outrider.server.router.command import serve_on_ray

        serve_on_ray(plan, ray, given, http)
    else:
        _serve_here(plan, given, http)


def _serve_here(plan: Plan, given: AccessOptions, http: HttpOptions) -> None:
    from outrider.server.engine_host import ProcessHost
    from outrider.server.serving import Server

    consoles = open_consoles()
    opening = plan.opening(shows_progress=consoles.about.is_terminal)
    with taken(given.host, given.port) as sockets, ProcessHost(opening) as host:
        application = assembled(plan, host, consoles, *(["uvicorn"] if http.uvicorn_log_level is not None else []))
        engine, served = application.engine, plan.called[0]
        port = port_of(sockets)
        url = url_of(given, http, port)

        def on_listening() -> None:
            log("listening", host=given.host, port=port, model=served, max_model_len=engine.model.max_model_len)
            with suppress(OSError):
                show_note(consoles.about, f"{served} at {url}/v1, playground at {url}/")

        exits, drain = plan.limits.exit_on_engine_death, plan.limits.shutdown_timeout
        settings = {"exit_on_death": exits, "on_listening": on_listening, **http.of_uvicorn()}
        Server(application, given.host, port, drain, **settings).run(sockets=sockets)
        host.close()
        log("ended")
        if engine.is_dead:
            raise SystemExit(1)


def settled_access(given: AccessOptions, http: HttpOptions) -> Access:
    from outrider.server.security import access_for

    origins = [*(given.allowed_origin or []), *http.checked().origins()]
    allowed = (given.api_key or [], given.allowed_host or [], origins)
    return replace(access_for(given.host, *allowed, given.max_body * 2**20), pace=given.pace / 1000)


def url_of(given: AccessOptions, http: HttpOptions, port: int) -> str:
    host = f"[{given.host}]" if ":" in given.host else given.host
    return f"{'https' if http.is_secure else 'http'}://{host}:{port}"


def assembled(plan: Plan, host: ProcessHost, consoles: Consoles, *loggers: str) -> Application:
    """The application in front of an engine, once that is ready. `loggers`: whose messages are logged too."""
    from outrider.server.app import Application
    from outrider.server.engine_client import EngineClient, QueueLimits
    from outrider.server.parsers import ParserNames, choose

    model, tokenizer, defaults = _opened(host, consoles, plan.files)
    if plan.template is not None and tokenizer is not None:
        tokenizer.use_template(plan.template)
    given, served = plan.limits, plan.called
    limits = QueueLimits(given.max_queue, deadline=given.request_timeout, stall=given.stall_timeout)
    log_to_stderr(*loggers)
    tools, reasoning = choose(plan.parsers, tokenizer)
    reasons = {"tools": tools.reason, "reasoning": reasoning.reason}
    log("parsers", tools=tools.name, reasoning=reasoning.name, because=reasons)
    log("memory", **model.memory)
    with suppress(OSError):  # standard error may be full, as on a disk that is; that is no reason to end
        show_memory_table(consoles.about, model.memory_rows)
    engine = EngineClient(host.link, model, served[0], limits, host.why_ended)
    parsers = ParserNames(tools.name, reasoning.name)
    settings: dict[str, Any] = {"other_names": served[1:], "defaults": defaults, "root_path": plan.root_path}
    application = Application(engine, tokenizer, served[0], plan.access, parsers, **settings)
    freeze_heap()
    return application


def _opened(
    host: ProcessHost, consoles: Consoles, files: FileOptions
) -> tuple[Opened, Tokenizer | None, ServerDefaults]:
    """What the front needs: the tokenizer is read here while the weights are read there."""
    from outrider.checkpoints.gguf_tokenizer import tokenizer_at
    from outrider.server.defaults import chosen_defaults

    found: list[tuple[Tokenizer | None, ServerDefaults]] = []

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
