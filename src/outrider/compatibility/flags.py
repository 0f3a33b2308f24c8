"""Flags of `vllm serve`: those that work, those without effect, those that are refused."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.compatibility import llm
from outrider.compatibility.rules import NoEffect, Refused, Rules

SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-sc": "--speculative-config",
    "-O": "--optimization-level",
}
# flags of ours that vLLM has too; a test holds this to the command
OWN = {
    "--model": "the same as the first argument: a directory, a .gguf file or a hub id",
    "--config": "a YAML file of flags; those on the command line count more",
    "--served-model-name": "several, too: answers call the model by the first",
    "--host": "127.0.0.1 by default; any other needs an API key",
    "--port": "",
    "--api-key": "several, too: each is a tenant of its own",
    "--root-path": "",
    "--allowed-origins": "a JSON list; --allowed-origin names one",
    "--ssl-keyfile": "",
    "--ssl-certfile": "",
    "--uvicorn-log-level": "of the HTTP server; requests are logged in any case",
    "--chat-template": "a file, or the template itself",
    "--generation-config": "auto, vllm, or a directory",
    "--override-generation-config": "",
    "--tokenizer": "a directory or a hub id with a tokenizer.json",
    "--revision": "of a hub id",
    "--tokenizer-revision": "of a hub id",
    "--download-dir": "",
    "--hf-token": "",
    "--seed": "of requests that have none, one after another; without it, theirs are fresh",
    "--dtype": "auto is float32 on a CPU",
    "--quantization": "fp8 or int4: dense matrices are rounded at load, on a GPU; else checked against the checkpoint",
    "--max-model-len": "auto, or a size such as 4k",
    "--max-num-seqs": "by default 256 on a GPU, 16 on a CPU",
    "--max-num-batched-tokens": "by default 8192 on a GPU, 512 on a CPU",
    "--gpu-memory-utilization": "0.9 by default",
    "--kv-cache-memory-bytes": "a size such as 1G",
    "--kv-cache-dtype": "auto: as the model, float16 for GGUF files on a CPU; fp8 on GPUs; float16, float32 on CPUs",
    "--block-size": "16 by default",
    "--enable-prefix-caching": "the default",
    "--enforce-eager": "",
    "--tensor-parallel-size": "processes that share every layer, over NCCL or gloo; see parallel.md",
    "--pipeline-parallel-size": "stages with some of the layers each; see parallel.md",
    "--speculative-config": "with adaptive, the default, as many tokens as are worth it",
    "--tool-call-parser": "by default read from the chat template",
    "--reasoning-parser": "by default read from the chat template",
    "--max-num-queued-reqs": "",
    "--shutdown-timeout": "",
}
# of those that are not ours: what takes no value
SWITCHES = frozenset(
    f"--{name}"
    for name in (
        *("allow-credentials", "allow-deprecated-quantization", "async-scheduling", "calculate-kv-scales"),
        *("collect-detailed-traces", "data-parallel-external-lb", "data-parallel-hybrid-lb", "disable-access-log"),
        *("disable-async-output-proc", "disable-cascade-attn", "disable-chunked-mm-input", "disable-custom-all-reduce"),
        *("disable-fastapi-docs", "disable-frontend-multiprocessing", "disable-hybrid-kv-cache-manager"),
        *("disable-log-requests", "disable-log-stats", "disable-mm-preprocessor-cache", "disable-sliding-window"),
        *(
            "disable-uvicorn-access-log",
            "enable-auto-tool-choice",
            "enable-chunked-prefill",
            "enable-dbo",
            "enable-eplb",
        ),
        *("enable-expert-parallel", "enable-force-include-usage", "enable-log-outputs", "enable-log-requests"),
        *("enable-lora", "enable-mfu-metrics", "enable-mm-embeds", "enable-offline-docs", "enable-prompt-embeds"),
        *(
            "enable-prompt-tokens-details",
            "enable-reasoning",
            "enable-request-id-headers",
            "enable-return-routed-experts",
        ),
        *("enable-server-load-tracking", "enable-sleep-mode", "enable-ssl-refresh", "enable-tokenizer-info-endpoint"),
        *("exclude-tools-when-tool-choice-none", "fully-sharded-loras", "headless", "interleave-mm-strings"),
        *("kv-cache-metrics", "kv-sharing-fast-prefill", "language-model-only", "log-error-stack", "mm-encoder-only"),
        *("numa-bind", "return-tokens-as-token-ids", "skip-mm-profiling", "skip-tokenizer-init", "tokens-only"),
        *("trust-remote-code", "trust-request-chat-template", "use-tqdm-on-load", "use-v2-block-manager"),
        "disable-nccl-for-dp-synchronization",
    )
)
_HERE = {"reasoning_parser", "max_num_queued_reqs", "shutdown_timeout", "served_model_name"}  # work in the server


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flags(names: Iterable[str]) -> list[str]:
    found = [_flag(name) for name in names if not name.startswith("_")]
    return [flag for flag in found if flag not in OWN and flag not in _SERVERS]


_SERVERS = {"--trust-remote-code", "--skip-tokenizer-init", "--max-logprobs", "--disable-log-requests"}
_NO_CODE = "no code of a model's directory is ever run: leave it out; what can be loaded, `outrider matrix` says"
_PROXY = "put a proxy in front for anything but a key and a certificate"

SERVE = Rules(
    works={},
    no_effect=[
        NoEffect(
            ["--enable-auto-tool-choice", "--exclude-tools-when-tool-choice-none", "--enable-reasoning"],
            "tools and reasoning are told apart wherever the model has a form for them",
        ),
        NoEffect(
            ["--disable-log-requests", "--disable-uvicorn-access-log", "--disable-access-log", "--max-log-len"],
            "one line a request is logged, with nothing of what was said",
        ),
        NoEffect(
            [
                *("--enable-request-id-headers", "--enable-prompt-tokens-details", "--enable-tokenizer-info-endpoint"),
                *("--enable-server-load-tracking", "--enable-force-include-usage"),
            ],
            "it is so in any case, and usage comes with a stream where it is asked for",
        ),
        NoEffect(
            ["--disable-fastapi-docs", "--enable-offline-docs", "--disable-frontend-multiprocessing"],
            "there are no pages but the playground, and two processes",
        ),
        NoEffect(["--allowed-methods", "--allowed-headers"], "an allowed page may use all of them"),
        NoEffect(["--h11-max-incomplete-event-size", "--h11-max-header-count"], "headers have bounds of their own"),
        NoEffect(["--log-error-stack"], "the log has it, and clients get a reference"),
        *[
            NoEffect(found, group.why)
            for group in llm.LLM.no_effect
            if (found := _flags(name for name in group.names if name not in _HERE))
        ],
    ],
    refused=[
        Refused({"--trust-remote-code": (False,)}, _NO_CODE),
        Refused({"--skip-tokenizer-init": (False,)}, "a server answers in text: use LLM(skip_tokenizer_init=True)"),
        Refused(
            {"--max-logprobs": lambda given: isinstance(given, int) and given <= 100},
            "100 are the most that a request may ask for",
        ),
        Refused({"--return-tokens-as-token-ids": (False,)}, "return_token_ids in a request gives the tokens"),
        Refused({"--trust-request-chat-template": (False,)}, "a template is code: give it with --chat-template"),
        Refused({"--chat-template-content-format": ("auto", "string", "openai")}, "templates get text, or parts"),
        Refused({"--response-role": ("assistant",)}, "answers are the assistant's"),
        Refused({"--lora-modules": (), "--prompt-adapters": ()}, "adapters are not supported: merge them"),
        Refused({"--api-server-count": (1,), "--headless": (False,)}, "a server is one front and one engine"),
        Refused({"--uds": ()}, "give --host and --port"),
        Refused({"--calculate-kv-scales": (False,)}, "keys and values are kept as they are computed"),
        Refused(
            {"--ssl-ca-certs": (), "--ssl-cert-reqs": (0,), "--ssl-ciphers": (), "--enable-ssl-refresh": (False,)},
            _PROXY,
        ),
        Refused({"--allow-credentials": (False,)}, "keys come in a header, not in cookies"),
        Refused({"--middleware": (), "--tool-parser-plugin": (), "--tool-server": ()}, "no code but ours is run"),
        Refused({"--enable-log-outputs": (False,)}, "nothing of what was said is ever logged"),
        Refused({"--spec-method": (), "--spec-model": (), "--spec-tokens": ()}, "use --draft and -k"),
        *[
            Refused({_flag(name): taken for name, taken in group.names.items() if _flag(name) not in OWN}, group.why)
            for group in llm.LLM.refused
            if any(_flag(name) not in OWN for name in group.names)
        ],
    ],
)
