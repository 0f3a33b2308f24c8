"""Options of `outrider serve` that say where its parts come from, and how HTTP is spoken."""

from __future__ import annotations

import json
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from outrider.commands import option

FILES, HTTP, RAY = "Files", "HTTP", "Replicas on Ray"
LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")

_CONFIG_HELP = "YAML with flags; those on the command line count more."
_TEMPLATE_HELP = "Chat template, instead of the model's own: a file, or its text."
_TOKENIZER_HELP = "Tokenizer, instead of the model's own: a directory or a hub id."
_GENERATION_HELP = "Sampling defaults: auto reads the model's generation_config.json, vllm nothing; or a directory."
_OVERRIDE_HELP = "Sampling defaults that count more, in the names of generation_config.json."
_SEED_HELP = "Seeds requests that have no seed, one after another."
_ORIGINS_HELP = 'Pages that may use it, as a JSON list; ["*"]: all.'

ConfigFile = Annotated[str | None, option(FILES, "--config", metavar="FILE", help=_CONFIG_HELP)]
Template = Annotated[str | None, option(FILES, "--chat-template", metavar="FILE", help=_TEMPLATE_HELP)]
TokenizerName = Annotated[str | None, option(FILES, "--tokenizer", metavar="M", help=_TOKENIZER_HELP)]
TokenizerRevision = Annotated[
    str | None, option(FILES, "--tokenizer-revision", metavar="R", help="Of the tokenizer on the hub.")
]
Revision = Annotated[
    str | None, option(FILES, "--revision", metavar="R", help="Branch, tag or commit of the model on the hub.")
]
DownloadDir = Annotated[
    str | None, option(FILES, "--download-dir", metavar="DIR", help="Where files of the hub are kept.")
]
HubToken = Annotated[str | None, option(FILES, "--hf-token", metavar="TOKEN", help="For the hub.")]
GenerationConfig = Annotated[str, option(FILES, "--generation-config", metavar="FROM", help=_GENERATION_HELP)]
Override = Annotated[str | None, option(FILES, "--override-generation-config", metavar="JSON", help=_OVERRIDE_HELP)]
ServerSeed = Annotated[int | None, option(FILES, "--seed", metavar="S", help=_SEED_HELP)]
RootPath = Annotated[str, option(HTTP, "--root-path", metavar="PATH", help="Where a proxy has put the server.")]
LogLevel = Annotated[
    str | None, option(HTTP, "--uvicorn-log-level", metavar="NAME", help="What uvicorn logs: warning, info or debug.")
]
KeyFile = Annotated[str | None, option(HTTP, "--ssl-keyfile", metavar="FILE", help="HTTPS: the private key.")]
CertFile = Annotated[str | None, option(HTTP, "--ssl-certfile", metavar="FILE", help="HTTPS: the certificate.")]
Origins = Annotated[str | None, option(HTTP, "--allowed-origins", metavar="JSON", help=_ORIGINS_HELP)]

_ADDRESS_HELP = "Of a cluster. By default the one that runs here, or a new one; local: a new one."
_REPLICAS_HELP = "Engines; 1:4: as many of those as there are requests for."
_CPUS_HELP = "Processors that Ray sets aside for each."
_TARGET_HELP = "Requests at once that a replica is meant to have, where their number is not fixed."

UseRay = Annotated[bool, option(RAY, "--ray", help="Serve with replicas on a Ray cluster.")]
RayAddress = Annotated[str | None, option(RAY, "--ray-address", metavar="ADDRESS", help=_ADDRESS_HELP)]
NumReplicas = Annotated[str, option(RAY, "--num-replicas", metavar="N", help=_REPLICAS_HELP)]
CpusPerReplica = Annotated[float, option(RAY, "--cpus-per-replica", metavar="X", help=_CPUS_HELP, min=0)]
TargetRequests = Annotated[int, option(RAY, "--target-requests", metavar="N", help=_TARGET_HELP, min=1)]


@dataclass(frozen=True)
class RayOptions:
    """Where replicas run, and how many."""

    ray: UseRay = False
    ray_address: RayAddress = None
    num_replicas: NumReplicas = "1"
    cpus_per_replica: CpusPerReplica = 1.0
    target_requests: TargetRequests = 16

    def checked(self) -> RayOptions:
        fewest, most = self.replicas
        if not 1 <= fewest <= most:
            raise ValueError(f"--num-replicas {self.num_replicas} must be a number, or two of them as in 1:4")
        return self

    @property
    def replicas(self) -> tuple[int, int]:
        """The fewest, and the most."""
        fewest, _, most = self.num_replicas.partition(":")
        given = [fewest, most or fewest]
        return tuple(int(each) if each.isdigit() else 0 for each in given)  # type: ignore[return-value]


@dataclass(frozen=True)
class FileOptions:
    """Where the model's parts are, and what it says of sampling."""

    config: ConfigFile = None
    chat_template: Template = None
    tokenizer: TokenizerName = None
    tokenizer_revision: TokenizerRevision = None
    revision: Revision = None
    download_dir: DownloadDir = None
    hf_token: HubToken = None
    generation_config: GenerationConfig = "auto"
    override_generation_config: Override = None
    seed: ServerSeed = None

    def of_engine(self) -> dict[str, Any]:
        """What the engine's process must know to find everything, in the names of vLLM's LLM."""
        names = ("tokenizer", "tokenizer_revision", "revision", "download_dir", "hf_token")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True)
class HttpOptions:
    root_path: RootPath = ""
    uvicorn_log_level: LogLevel = None
    ssl_keyfile: KeyFile = None
    ssl_certfile: CertFile = None
    allowed_origins: Origins = None

    def checked(self) -> HttpOptions:
        """Before anything is loaded."""
        level = self.uvicorn_log_level
        if level is not None and level not in LOG_LEVELS:
            raise ValueError(f"--uvicorn-log-level {level} is none of {', '.join(LOG_LEVELS)}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ValueError(f"--root-path {self.root_path} must begin with a slash and end without one, as in /llm")
        self._check_ssl()
        return self

    @property
    def is_secure(self) -> bool:
        return self.ssl_certfile is not None

    def origins(self) -> list[str]:
        if self.allowed_origins is None:
            return []
        try:
            found = json.loads(self.allowed_origins)
        except ValueError:
            found = None
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise ValueError("--allowed-origins must be a JSON list of texts, as in '[\"https://example.org\"]'")
        return found

    def of_uvicorn(self) -> dict[str, Any]:
        level = {} if self.uvicorn_log_level is None else {"log_level": self.uvicorn_log_level}
        return level | {"ssl_keyfile": self.ssl_keyfile, "ssl_certfile": self.ssl_certfile}

    def _check_ssl(self) -> None:
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise ValueError("--ssl-keyfile needs --ssl-certfile, the certificate that the key belongs to")
            return
        for file in filter(None, (self.ssl_certfile, self.ssl_keyfile)):
            if not Path(file).is_file():
                raise ValueError(f"{file} does not exist: give the certificate and its key")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except (ssl.SSLError, OSError) as error:
            raise ValueError(f"--ssl-certfile and --ssl-keyfile cannot be used ({error})") from None
